"""What a call has to wait for, and what has to wait for it.

A kernel that lets the next one on its stream start early, and writes late, goes before every call. One that did not
wait for it would read what was there before.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from gpu_support import AUTO, PER_THREAD, Shape, check, copy_blocks, device_table, make_view, table

pytestmark = pytest.mark.gpu

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
PIECES, PIECE = 9000, 4096
Call = Callable[[int], None]


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
        self.tables = [device_table(addresses) for addresses in self.addresses]
        self.write(0)
        self.look(0)
        self.bad.zero_()
        torch.cuda.synchronize()

    def calls(self) -> dict[str, Call]:
        src, dst = self.addresses
        src_table, dst_table = (t.address for t in self.tables)
        lists = [make_view(a, None, PIECES, (1, 0, 0), token=PIECE // 8, head=64) for a in (src, dst)]

        def pieces(nbytes: int) -> Call:
            more = [
                device_table(side.data_ptr() + np.arange(PIECES * PIECE // nbytes) * nbytes)
                for side in (self.src, self.dst)
            ]
            self.tables += more
            count = PIECES * PIECE // nbytes
            return lambda stream: check(
                "launch_vectorized_copy", more[0].address, more[1].address, nbytes, count, stream
            )

        return {
            "a tile a CTA": lambda stream: check("launch_vectorized_copy", src_table, dst_table, PIECE, PIECES, stream),
            "short pieces": pieces(512),
            "rows of two bytes": lambda stream: check(
                "launch_universal_from_block", dst_table, src_table, PIECES, 8, 1, 1, PIECE // 16, 1, 0, 0, stream
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

        with torch.cuda.stream(torch.cuda.ExternalStream(stream)), cupy.cuda.ExternalStream(stream):
            self.value += 1
            self.write_late((16,), (512,), (self.src.data_ptr(), self.src.numel(), self.value.data_ptr()))

    def look(self, stream: int) -> None:
        """On the stream: count what is not that value at the target, and spoil the source."""
        import torch

        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
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
    call = moved.calls()[name]
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

    call = moved.calls()[name]
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
