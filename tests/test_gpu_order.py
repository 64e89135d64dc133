"""What a call has to wait for, and what has to wait for it.

A kernel that lets the next one on its stream start early, and writes late, goes before every call. One that did not
wait for it would read what was there before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gpu_support import AUTO, PER_THREAD, Shape, check, copy_blocks, device_table, make_view, table

# CuPy 14 has another way, which CuPy 13 does not.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:ExternalStream is deprecated")]

SOURCE = r"""
extern "C" __global__ void write_late(unsigned *data, long long count, const unsigned *value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  const unsigned long long started = clock64();
  while (clock64() - started < 40000) {
  }
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    data[i] = (*value % 100 + 1) * 0x01010101u;
  }
}
"""
PIECES, PIECE, SHORT = 9000, 4096, 512
Call = Callable[[int], None]


def torch_stream(handle: int) -> Any:
    import torch

    # An external stream of handle 0 would be a new one.
    return torch.cuda.ExternalStream(handle) if handle else torch.cuda.default_stream()


class Moved:
    """Bytes of one value on one side, and calls that take all of them to the other."""

    def __init__(self) -> None:
        import cupy
        import torch

        self.src = torch.zeros(PIECES * PIECE // 4, dtype=torch.int32, device="cuda")
        self.dst = torch.zeros_like(self.src)
        self.value = torch.zeros((), dtype=torch.int32, device="cuda")
        self.bad = torch.zeros((), dtype=torch.int64, device="cuda")
        self.write_late = cupy.RawKernel(SOURCE, "write_late")
        order = np.random.default_rng(16).permutation(PIECES)
        self.addresses = [table(side.data_ptr() + order * PIECE) for side in (self.src, self.dst)]
        self.calls = self.make_calls()
        self.write(0)
        self.look(0)
        self.bad.zero_()
        torch.cuda.synchronize()

    def make_calls(self) -> dict[str, Call]:
        src, dst = self.addresses
        lists = [make_view(a, None, PIECES, (1, 0, 0), token=PIECE // 8, head=64) for a in (src, dst)]
        in_order = [
            table(side.data_ptr() + np.arange(PIECES * PIECE // SHORT) * SHORT) for side in (self.src, self.dst)
        ]
        # The closures keep the tables.
        src_table, dst_table = map(device_table, (src, dst))
        src_short, dst_short = map(device_table, in_order)

        return {
            "a tile a CTA": lambda stream: check(
                "launch_vectorized_copy", src_table.address, dst_table.address, PIECE, PIECES, stream
            ),
            "short pieces": lambda stream: check(
                "launch_vectorized_copy", src_short.address, dst_short.address, SHORT, len(in_order[0]), stream
            ),
            "rows of two bytes": lambda stream: check(
                "launch_universal_from_block",
                dst_table.address,
                src_table.address,
                PIECES,
                8,
                1,
                1,
                PIECE // 16,
                1,
                0,
                0,
                stream,
            ),
            "several launches": lambda stream: copy_blocks(lists[1], lists[0], Shape(1, 1, 8, 8, 64), PIECES, stream),
            "few multiprocessors": lambda stream: copy_blocks(
                lists[1], lists[0], Shape(1, 1, 8, 8, 64), PIECES, stream, 4
            ),
            "a batch": lambda stream: check(
                "memcpy_batch", src.ctypes.data, dst.ctypes.data, PIECE, PIECES, AUTO, stream
            ),
        }

    def write(self, stream: int) -> None:
        """On the stream: the next value to the source, late."""
        import cupy
        import torch

        with torch.cuda.stream(torch_stream(stream)), cupy.cuda.ExternalStream(stream):
            self.value += 1
            self.write_late((16,), (512,), (self.src.data_ptr(), self.src.numel(), self.value.data_ptr()))

    def look(self, stream: int) -> None:
        """On the stream: count what is not that value at the target, and spoil the source."""
        import torch

        with torch.cuda.stream(torch_stream(stream)):
            self.src.zero_()
            self.bad += (self.dst != (self.value % 100 + 1) * 0x01010101).sum()


@pytest.fixture(scope="module")
def moved() -> Moved:
    pytest.importorskip("cupy")
    return Moved()


CALLS = ("a tile a CTA", "short pieces", "rows of two bytes", "several launches", "few multiprocessors", "a batch")


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("stream", ["own", "NULL", "per thread"])
def test_a_call_comes_after_what_was_there(moved: Moved, name: str, stream: str) -> None:
    """A call reads what the kernel before it writes last, and writes before the kernel after it reads."""
    import torch

    own = torch.cuda.Stream()
    handle = {"own": own.cuda_stream, "NULL": 0, "per thread": PER_THREAD}[stream]
    call = moved.calls[name]
    moved.bad.zero_()
    for _ in range(100):
        moved.write(handle)
        call(handle)
        moved.look(handle)
    torch.cuda.synchronize()
    assert int(moved.bad) == 0


@pytest.mark.parametrize("name", CALLS)
def test_a_captured_call_comes_after_what_was_there(moved: Moved, name: str) -> None:
    """So does a captured call, after a kernel, a copy, and what another stream has done."""
    import torch

    call = moved.calls[name]
    graph, other = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    moved.bad.zero_()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        here = torch.cuda.current_stream()
        moved.write(here.cuda_stream)
        call(here.cuda_stream)
        moved.look(here.cuda_stream)
        other.wait_stream(here)
        moved.write(other.cuda_stream)
        here.wait_stream(other)
        call(here.cuda_stream)
        moved.src.copy_(moved.dst)
        moved.dst.zero_()
        call(here.cuda_stream)
        moved.look(here.cuda_stream)
    for _ in range(50):
        graph.replay()
    torch.cuda.synchronize()
    assert int(moved.bad) == 0
