"""Quantised rows that are as long as others, of another head dimension or scale, are not taken for them."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import kvbm_kernels as kk
import reference
from kv_quant_definition import MARKERS, expected, rows, same
from kv_support import BS, NH, NL, new_pool, state

# Rows of 8 bytes in all: 4 elements with an fp32 scale, 3 with a byte of padding, or 5 or 6 with an fp16 scale.
ALIKE = [(4, "fp32"), (3, "fp32"), (6, "fp16"), (5, "fp16")]


@pytest.mark.parametrize("marker", MARKERS)
@pytest.mark.parametrize("dst", ALIKE)
@pytest.mark.parametrize("src", ALIKE)
def test_rows_as_long_with_other_contents_are_not_taken_for_each_others(rng, marker, dst, src):
    """By whatever way they come: the pool's own, other layouts, parts, one of K and V. Nothing is changed."""
    a, b = (new_pool(head_dim=hd, kv_dtype=marker, scale_dtype=scale) for hd, scale in (dst, src))
    x = rows(rng, 6, hd=src[0])
    cache, other = kk.KvCache.paged(a), kk.KvCache.paged(b)
    other.append(x, x)
    assert a.block_shape == b.block_shape
    saved = kk.UniversalBlocks(np.zeros((12, NH, NL, 2, BS, 8), np.uint8), b.block_shape)
    kk.copy_blocks(saved, b.blocks())
    pairs = [
        (a.blocks(), b.blocks()),
        (a.blocks(), saved),
        (a.blocks(of="v"), b.blocks(of="k")),
        (a.blocks([3, 1]).heads(0, 1).layers(1, 2).tokens(0, 2), saved[[0, 1]].shard(1, 2).layers(1, 2).tokens(2, 4)),
    ]
    if dst == src:
        for pair in pairs:
            kk.copy_blocks(*pair)
        cache.restore(saved[[0, 1]], 6)
        reference.assert_same_bytes(cache.gather()[0], other.gather()[0])
        return
    before = a.rows.k.tobytes(), a.rows.v.tobytes(), state(cache)
    named = " .*".join(f"head_dim = {hd} with {scale.replace('fp', 'f')} scales" for hd, scale in (dst, src))
    for pair in pairs:
        with pytest.raises(kk.KvbmValueError, match=f"^dst has quantised rows of {named}, expected the same"):
            kk.copy_blocks(*pair)
    with pytest.raises(kk.KvbmValueError, match="expected the same"):
        cache.restore(saved[[0, 1]], 6)
    assert before == (a.rows.k.tobytes(), a.rows.v.tobytes(), state(cache))
    # Of memory that someone else describes nothing more is known than how long its rows are.
    shape = kk.BlockShape(NL, 2, NH, BS, 8, a.block_shape.dtype)
    bytes_ = kk.UniversalBlocks(np.zeros((12, NH, NL, 2, BS, 8), np.uint8), shape)
    kk.copy_blocks(bytes_, b.blocks())
    kk.copy_blocks(a.blocks(), bytes_)


@pytest.mark.parametrize(("hd", "v_hd", "scale"), [(126, 128, "fp32"), (3, 4, "fp32"), (5, 6, "fp16")])
def test_keys_and_values_as_long_with_other_contents_are_no_blocks_of_both(rng, hd, v_hd, scale):
    """Rows of K and of V are not each other's, even where they take as many bytes."""
    pool = new_pool(head_dim=hd, v_head_dim=v_hd, kv_dtype=kk.KvInt8, scale_dtype=scale)
    k, v = pool.blocks(of="k"), pool.blocks(of="v")
    assert k.shape == v.shape
    for both in (lambda: pool.block_shape, pool.blocks):
        with pytest.raises(kk.KvbmValueError, match=f"rows of K have {hd} elements and rows of V {v_hd}"):
            both()
    with pytest.raises(kk.KvbmValueError, match=f"quantised rows of head_dim = {hd} .* of head_dim = {v_hd} "):
        kk.copy_blocks(k[[0]], v[[1]])
    cache = kk.KvCache.paged(pool)
    given = rows(rng, 6, hd=hd), rows(rng, 6, hd=v_hd)
    cache.append(*given)
    same(cache.fork().gather()[0], expected(given[0], kk.KvInt8, scale)[2])
    same(cache.gather()[1], expected(given[1], kk.KvInt8, scale)[2])


def test_a_shape_remembers_what_its_rows_are():
    """Also when it is saved and read back, as it is with the blocks."""
    shape = new_pool(head_dim=4, kv_dtype=kk.KvInt8).block_shape
    pool = new_pool(head_dim=3, kv_dtype=kk.KvInt8)
    for kept in (copy.copy(shape), copy.deepcopy(shape), pickle.loads(pickle.dumps(shape))):
        assert (kept, repr(kept), hash(kept)) == (shape, repr(pool.block_shape), hash(pool.block_shape))
        saved = kk.UniversalBlocks(np.zeros((12, NH, NL, 2, BS, 8), np.uint8), kept)
        with pytest.raises(kk.KvbmValueError, match="head_dim = 3 .* head_dim = 4 "):
            kk.copy_blocks(pool.blocks(), saved)
