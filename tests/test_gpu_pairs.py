"""vectorized_copy and memcpy_batch on the GPU."""

from __future__ import annotations

import numpy as np
import pytest

import reference
from gpu_support import (
    ASYNC,
    AUTO,
    BATCH,
    LEGACY,
    PER_THREAD,
    Memory,
    Stream,
    call,
    check,
    device_table,
    library,
    synchronize,
    table,
)

pytestmark = pytest.mark.gpu

PLACES = [("device", "device"), ("pinned", "device"), ("device", "pinned"), ("pinned", "pinned")]


def scattered(sizes: np.ndarray, rng: np.random.Generator, gap: int, align: int) -> tuple[np.ndarray, int]:
    """Offsets of pieces of these sizes in random order with gaps between them, and the bytes all of them take."""
    offsets = np.empty(len(sizes), np.int64)
    order = rng.permutation(len(sizes))
    steps = (sizes[order] + gap + align - 1) // align * align
    ends = np.cumsum(steps)
    offsets[order] = ends - steps + gap // 2
    return offsets, int(ends[-1]) + gap


class Pieces:
    """Pieces scattered over two allocations, and what the destination has to hold after the copy."""

    def __init__(
        self,
        sizes: np.ndarray,
        places: tuple[str, str],
        src_shift: np.ndarray | int = 0,
        dst_shift: np.ndarray | int = 0,
        gap: int = 64,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        src_at, src_nbytes = scattered(sizes, rng, gap, 16)
        dst_at, dst_nbytes = scattered(sizes, rng, gap, 16)
        src_at, dst_at = src_at + src_shift, dst_at + dst_shift
        image = rng.integers(0, 256, src_nbytes + 16, np.uint8)
        self.expected = rng.integers(0, 256, dst_nbytes + 16, np.uint8)
        self.src = Memory(image.size, places[0]).write(image)
        self.dst = Memory(self.expected.size, places[1]).write(self.expected)
        for n, s, d in zip(sizes, src_at, dst_at, strict=True):
            self.expected[d : d + n] = image[s : s + n]
        self.src_table, self.dst_table = table(self.src.address + src_at), table(self.dst.address + dst_at)
        self.count = len(sizes)
        synchronize()

    def assert_copied(self) -> None:
        synchronize()
        reference.assert_same_bytes(self.dst.read(), self.expected)

    def by_kernel(self, nbytes: int, stream: int = 0) -> None:
        src, dst = device_table(self.src_table), device_table(self.dst_table)
        synchronize()
        check("launch_vectorized_copy", src.address, dst.address, nbytes, self.count, stream)
        self.assert_copied()

    def by_batch(self, nbytes: int, mode: int = AUTO, stream: int = 0) -> None:
        check("memcpy_batch", self.src_table.ctypes.data, self.dst_table.ctypes.data, nbytes, self.count, mode, stream)


SIZES = [*range(1, 68), 132, 511, 512, 513, 576, 584, 656, 1032, 4096, 4100, 37440]


@pytest.mark.parametrize("nbytes", SIZES)
def test_mixed_alignments(nbytes: int) -> None:
    """Every pair of misalignments in one call: the width belongs to the pair."""
    src_shift, dst_shift = np.divmod(np.arange(256), 16)
    for by in ("kernel", "batch"):
        pieces = Pieces(np.full(256, nbytes), ("device", "device"), src_shift, dst_shift)
        pieces.by_kernel(nbytes) if by == "kernel" else pieces.by_batch(nbytes)
        pieces.assert_copied()


@pytest.mark.parametrize("places", PLACES, ids=str)
@pytest.mark.parametrize("nbytes", [12, 512, 4096, 32768, 5 << 20])
def test_places(places: tuple[str, str], nbytes: int) -> None:
    """Device and pinned host memory on either side."""
    for count in (1, 3, 37) if nbytes < 1 << 20 else (1, 2):
        Pieces(np.full(count, nbytes), places).by_kernel(nbytes)
        for mode in (AUTO, ASYNC):
            pieces = Pieces(np.full(count, nbytes), places)
            pieces.by_batch(nbytes, mode)
            pieces.assert_copied()


def test_many_pieces() -> None:
    """100,000 pairs in one call."""
    Pieces(np.full(100_000, 48), ("device", "device"), gap=16).by_kernel(48)
    for places in PLACES:
        pieces = Pieces(np.full(100_000, 48), places, gap=16)
        pieces.by_batch(48)
        pieces.assert_copied()


@pytest.mark.parametrize("places", PLACES, ids=str)
@pytest.mark.parametrize("nbytes", [16, 1000, 4096, 1 << 20])
def test_adjacent_pieces(places: tuple[str, str], nbytes: int) -> None:
    """Runs of pieces that follow each other on both sides, on one, and on none."""
    count = 24
    rng = np.random.default_rng(11)
    image = rng.integers(0, 256, count * nbytes, np.uint8)
    src = Memory(image.size, places[0]).write(image)
    dst = Memory(image.size, places[1]).fill(0)
    src_order = np.arange(count)
    src_order[9:12] = src_order[9:12][::-1]
    dst_order = np.arange(count)
    dst_order[9:15] = np.roll(dst_order[9:15], 2)
    expected = np.empty_like(image).reshape(count, nbytes)
    expected[dst_order] = image.reshape(count, nbytes)[src_order]
    synchronize()
    src_table, dst_table = table(src.address + src_order * nbytes), table(dst.address + dst_order * nbytes)
    check("memcpy_batch", src_table.ctypes.data, dst_table.ctypes.data, nbytes, count, AUTO, 0)
    synchronize()
    reference.assert_same_bytes(dst.read(), expected.reshape(-1))


@pytest.mark.parametrize("mode", [AUTO, ASYNC])
@pytest.mark.parametrize("places", [("pageable", "device"), ("device", "pageable")], ids=str)
def test_pageable_memory(mode: int, places: tuple[str, str]) -> None:
    """Ordinary host memory is right in the modes that promise it."""
    pieces = Pieces(np.full(20, 5000), places)
    pieces.by_batch(5000, mode)
    pieces.assert_copied()


@pytest.mark.parametrize("stream", [0, LEGACY, PER_THREAD])
def test_default_streams(stream: int) -> None:
    """The NULL, legacy and per-thread streams work in modes 0 and 1, and mode 2 works or is not supported."""
    for mode in (AUTO, ASYNC, BATCH):
        for nbytes in (16, 1 << 20):
            pieces = Pieces(np.full(4, nbytes), ("pinned", "device"))
            before = pieces.dst.read()
            status = call(
                "memcpy_batch", pieces.src_table.ctypes.data, pieces.dst_table.ctypes.data, nbytes, 4, mode, stream
            )
            if mode == BATCH and status == 801:
                synchronize()
                reference.assert_same_bytes(pieces.dst.read(), before)
            else:
                assert status == 0
                pieces.assert_copied()


@pytest.mark.parametrize("places", PLACES[:3], ids=str)
def test_batch_entry(places: tuple[str, str]) -> None:
    """Mode 2 on a stream of its own, where the driver has the entry."""
    stream = Stream()
    pieces = Pieces(np.full(600, 4096), places)
    status = call(
        "memcpy_batch", pieces.src_table.ctypes.data, pieces.dst_table.ctypes.data, 4096, 600, BATCH, stream.handle
    )
    if library().kvbm_kernels_has_memcpy_batch_async():
        assert status == 0
        pieces.assert_copied()
    else:
        assert status == 801
