"""The batch with a size for each piece on the GPU: what it moves, which way it went, and which piece was refused."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_int, c_size_t, c_void_p

import numpy as np
import pytest

import reference
from gpu_support import ASYNC, AUTO, BATCH, Memory, Stream, is_emulated, library, synchronize, table

pytestmark = pytest.mark.gpu

KERNEL_ROUTE, ASYNC_ROUTE, BATCH_ROUTE = 1, 2, 4
INVALID_VALUE = 1


def batch(src, dst, sizes, mode: int = AUTO, stream: int = 0) -> tuple[int, int]:
    """The status, and the index of the piece that was refused."""
    function = library().kvbm_kernels_memcpy_batch_sized
    function.argtypes = [c_void_p, c_void_p, c_void_p, c_size_t, c_int, c_void_p, POINTER(c_size_t)]
    src, dst, sizes = table(src), table(dst), np.asarray(sizes, np.uint64)
    failed = c_size_t(99)
    status = function(src.ctypes.data, dst.ctypes.data, sizes.ctypes.data, len(sizes), mode, stream, byref(failed))
    return status, failed.value


def routes() -> int:
    return library().kvbm_kernels_last_batch_routes()


@pytest.mark.parametrize("mode", [AUTO, ASYNC])
@pytest.mark.parametrize("places", [("device", "device"), ("pinned", "device"), ("device", "pinned")])
def test_pieces_of_all_sizes(places, mode, rng) -> None:
    """Empty ones among them, at any alignment; what lies between the pieces stays as it was."""
    sizes = np.array([0, 1, 2, 3, 15, 16, 17, 31, 100, 512, 513, 4096, 40_000, 0, 65_536, 3 << 20, 7])
    starts = np.cumsum(sizes + 32) - sizes - 16 + rng.integers(0, 8, len(sizes))
    total = int((sizes + 40).sum())
    image, expected = rng.integers(0, 256, (2, total), np.uint8)
    src, dst = Memory(total, places[0]).write(image), Memory(total, places[1]).write(expected)
    order = rng.permutation(len(sizes))
    synchronize()
    assert batch(src.address + starts[order], dst.address + starts[order], sizes[order], mode) == (0, len(sizes))
    synchronize()
    for start, size in zip(starts, sizes, strict=True):
        expected[start : start + size] = image[start : start + size]
    reference.assert_same_bytes(dst.read(), expected)


def test_the_route_that_ran_can_be_asked() -> None:
    stream = Stream()
    piece, count = 4096, 64
    device, other = Memory(2 * piece * count), Memory(2 * piece * count)
    pageable = Memory(piece, "pageable")
    every_other = 2 * piece * np.arange(count)
    synchronize()

    def went(src, dst, sizes, mode: int = AUTO) -> int:
        assert batch(src, dst, sizes, mode, stream.handle)[0] == 0
        stream.synchronize()
        return routes()

    scattered = (device.address + every_other, other.address + every_other, [piece] * count)
    assert went(*scattered) == KERNEL_ROUTE
    assert went(*scattered, ASYNC) == ASYNC_ROUTE
    assert went([device.address], [other.address], [piece]) == ASYNC_ROUTE
    assert went([pageable.address], [other.address], [piece]) == ASYNC_ROUTE
    both = ([*scattered[0][1:], pageable.address], [*scattered[1][1:], other.address], [piece] * count)
    assert went(*both) == KERNEL_ROUTE | ASYNC_ROUTE
    if library().kvbm_kernels_has_memcpy_batch_async():
        assert went(*scattered, BATCH) == BATCH_ROUTE
        long, pinned = 4 << 20, Memory(32 << 20, "pinned")
        target = Memory(32 << 20)
        starts = 2 * long * np.arange(4)
        assert went(pinned.address + starts, target.address + starts, [long] * 4) == BATCH_ROUTE


@pytest.mark.parametrize("mode", [AUTO, ASYNC])
def test_a_freed_piece_is_told(mode) -> None:
    """Entry 5 of 8 lies in freed memory: the error names it, and CUDA works on."""
    import torch

    freed = Memory(64 << 20)
    gone = freed.address
    del freed
    if not is_emulated():
        torch.cuda.empty_cache()
    memory, target = Memory(8 * 1024).fill(1), Memory(8 * 1024).fill(2)
    synchronize()
    dst = target.address + 1024 * np.arange(8)
    dst[5] = gone
    assert batch(memory.address + 1024 * np.arange(8), dst, [1000] * 8, mode) == (INVALID_VALUE, 5)
    assert b"piece 5" in ctypes.c_char_p(library().kvbm_kernels_last_error_message()).value
    assert batch([memory.address], [target.address], [1000], mode) == (0, 1)
    synchronize()
    assert target.read()[:1000].tolist() == [1] * 1000


def test_memory_is_told_apart() -> None:
    function = library().kvbm_kernels_get_memory_kind
    function.argtypes = [c_void_p, POINTER(c_int), POINTER(c_int)]
    for number, where in enumerate(["pageable", "pinned", "device"]):
        memory = Memory(100, where)
        kind, device = c_int(77), c_int(77)
        assert function(memory.address + 50, byref(kind), byref(device)) == 0
        assert (kind.value, device.value) == (number, 0 if where == "device" else -1)
