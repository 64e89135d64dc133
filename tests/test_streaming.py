"""Copies larger than the cache: whichever stores move them, every byte is right and no other is touched."""

from __future__ import annotations

import numpy as np
import pytest

import kvbm_kernels as kk
import reference

GUARD = 128


@pytest.mark.parametrize("offset", [0, 1, 8, 16])
@pytest.mark.parametrize("row", [96, 128, 656, 2304])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_rows_of_every_alignment(rng, layout: str, row: int, offset: int) -> None:
    """To universal blocks at an offset from a cache line, and back to chunks at it."""
    nl, no, nh, nt = 2, 2, 4, 16
    shape = kk.BlockShape(nl, no, nh, nt, row, "uint8")
    # More than half of the last-level cache that most cores have, from where on the host engine streams.
    nb = 20_000_000 // shape.block_nbytes + 1
    pool = rng.integers(0, 256, (nb, nl, no, nt, nh, row), np.uint8)
    chunks = pool if layout == "NHD" else np.ascontiguousarray(pool.swapaxes(3, 4))
    axes = "blothd" if layout == "NHD" else "blohtd"
    source = kk.BlockStack.from_layers(chunks, shape, axes=axes)

    def guarded() -> tuple[np.ndarray, np.ndarray]:
        memory = np.full(pool.nbytes + 2 * GUARD, 0xA5, np.uint8)
        start = (-memory.ctypes.data) % 64 + offset
        return memory, memory[start : start + pool.nbytes]

    memory, inside = guarded()
    universal = kk.UniversalBlocks(inside.reshape(nb, nh, nl, no, nt, row), shape)
    kk.copy_blocks(universal, source)
    reference.assert_same_bytes(inside.reshape(nb, nh, nl, no, nt, row), reference.universal(pool))
    assert (memory == 0xA5).sum() - (inside == 0xA5).sum() == 2 * GUARD

    memory, inside = guarded()
    kk.copy_blocks(kk.BlockStack.from_layers(inside.reshape(chunks.shape), shape, axes=axes), universal)
    reference.assert_same_bytes(inside.reshape(chunks.shape), chunks)
    assert (memory == 0xA5).sum() - (inside == 0xA5).sum() == 2 * GUARD


@pytest.mark.parametrize("size", [64, 100, 127, 4096])
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_pieces_of_every_alignment(rng, size: int, offset: int) -> None:
    """A batch of scattered pieces, some of which follow each other on both sides."""
    count = 20_000_000 // size
    source = rng.integers(0, 256, count * size, np.uint8)
    memory = np.full(count * size + 2 * GUARD, 0xA5, np.uint8)
    start = (-memory.ctypes.data) % 64 + offset
    inside = memory[start : start + count * size]
    order = rng.permutation(count // 4 * 4).reshape(-1, 4)
    order.sort(axis=1)
    places = np.concatenate([order.reshape(-1), np.arange(order.size, count)])
    step = max(1, count // 5000)
    kk.memcpy_batch(
        [inside[i * size : (i + 1) * size] for i in places[::step]],
        [source[i * size : (i + 1) * size] for i in places[::step]],
    )
    expected = np.full_like(source, 0xA5).reshape(count, size)
    expected[places[::step]] = source.reshape(count, size)[places[::step]]
    reference.assert_same_bytes(inside, expected.reshape(-1))
    assert (memory == 0xA5).sum() - (inside == 0xA5).sum() == 2 * GUARD
