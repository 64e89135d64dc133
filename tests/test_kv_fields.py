"""The fields of a cache are those of the documented object, and say where every row lies."""

from __future__ import annotations

import numpy as np
import pytest

import kvbm_kernels as kk
import reference
from kv_support import BS, HD, NH, NL, check, contiguous, new_pool, pair, some


@pytest.fixture
def pool():
    return new_pool()


def test_one_layer_needs_no_dimension_for_it(rng):
    """Where the cache has one layer, K and V go without it, in and out, and k and v are as documented."""
    k, v = some(rng, 6)[0], some(rng, 6)[0]
    paged, flat = kk.KvCache.paged(new_pool(num_layers=1)), contiguous(num_layers=1, initial_capacity=None)
    for cache in (paged, flat):
        cache.append(k, v)
        reference.assert_same_bytes(cache.gather()[0], k)
        reference.assert_same_bytes(cache.layer(0).gather()[1], v)
        assert cache.layer(0).k.shape == cache.k.shape
    assert paged.k.shape == paged.v.shape == (12, NH, BS, HD)
    assert flat.k.shape == flat.v.shape == (NH, 40, HD)
    reference.assert_same_bytes(flat.k[:, :6], k.swapaxes(0, 1))
    reference.assert_same_bytes(paged.k[1, :, :2], k[4:].swapaxes(0, 1))


def test_the_documented_fields_of_a_contiguous_cache():
    """block_size is 0, there are no tables, and k and v are [num_kv_heads, capacity, head_dim]."""
    cache = kk.KvCache.contiguous(num_kv_heads=8, head_dim=16, capacity=512, kv_dtype=kk.KvFp16)
    assert (cache.len, cache.capacity, cache.num_kv_heads, cache.head_dim, cache.block_size) == (0, 512, 8, 16, 0)
    assert (cache.block_table, cache.context_lens, cache.paged_block_indices) == (None, None, [])
    assert cache.kv_dtype is kk.KvFp16
    assert cache.k.shape == cache.v.shape == (8, 512, 16)
    layer = cache.layer(0)
    assert (layer.len, layer.capacity, layer.num_kv_heads, layer.head_dim, layer.block_size) == (0, 512, 8, 16, 0)
    assert (layer.block_table, layer.context_lens, layer.paged_block_indices) == (None, None, [])
    assert (layer.kv_dtype, layer.v_head_dim) == (kk.KvFp16, 16)


def test_the_documented_fields_of_a_paged_cache(pool, rng):
    """The fields of a layer are those of the document; all layers have one table."""
    cache = kk.KvCache.paged(pool, max_blocks=5)
    cache.append(*pair(rng, 6))
    for each in (cache, cache.layer(1)):
        assert (each.len, each.capacity, each.num_kv_heads, each.head_dim, each.block_size) == (6, 20, NH, HD, BS)
        assert each.block_table.tolist() == [0, 1, 12, 12, 12]
        assert each.context_lens.tolist() == [6]
        assert each.paged_block_indices == [0, 1]
        assert each.kv_dtype is kk.KvFp16
    assert cache.layer(2).k.shape == (12, NH, BS, HD)
    assert np.shares_memory(cache.layer(2).v, pool.v)
    assert cache.k.shape == (NL, 12, NH, BS, HD)


def test_tables_stay_where_they_are(pool, rng):
    """A kernel may keep the addresses of a cache's tables: they are the same arrays for all its life."""
    cache = kk.KvCache.paged(pool)
    table, lens, layer_lens = cache.block_table, cache.context_lens, cache.layer(1).context_lens
    cache.append(*pair(rng, 9))
    cache.truncate(7)
    assert table[:3].tolist() == [0, 1, 12]
    assert (lens.tolist(), layer_lens.tolist()) == ([7], [7])
    assert cache.block_table is table
    cache.release()
    assert set(table.tolist()) == {12}
    assert lens.tolist() == [0]


def test_contiguous_caches_grow_by_doubling(rng):
    """The arrays double as often as it takes, up to the capacity, and keep every row."""
    cache = contiguous()
    k, v = pair(rng, 40)
    seen = []
    for i in range(40):
        cache.append(k[:, i : i + 1], v[:, i : i + 1])
        seen.append(cache.capacity)
        assert cache.k.shape == (NL, NH, cache.capacity, HD)
    assert sorted(set(seen)) == [3, 6, 12, 24, 40]
    assert cache.max_capacity == 40
    check(cache, k, v)
    for wrong in (dict(initial_capacity=41), dict(capacity=0), dict(initial_capacity=0)):
        with pytest.raises(kk.KvbmValueError, match="capacity"):
            contiguous(**wrong)


def test_rows_written_by_someone_else(pool, rng):
    """reserve, a kernel's own writes at slot_mapping, advance: the same as append."""
    cache = kk.KvCache.paged(pool)
    k, v = pair(rng, 6)
    cache.append(k[:, :3], v[:, :3])
    cache.reserve(3)
    slots = cache.slot_mapping(3, 3)
    assert slots.dtype == np.int64
    assert slots.tolist() == [3, 4, 5]
    pool.k[:, slots // BS, :, slots % BS] = k[:, 3:].swapaxes(0, 1)
    pool.v[:, slots // BS, :, slots % BS] = v[:, 3:].swapaxes(0, 1)
    with pytest.raises(kk.KvbmValueError, match="n is 6, expected at most 5"):
        cache.advance(6)
    cache.advance(3)
    check(cache, k, v)


def test_slots_are_where_the_rows_lie(pool, rng):
    """Slot is block times block_size plus place; a slot the cache has no block for is an IndexError."""
    other = kk.KvCache.paged(pool)
    other.append(*pair(rng, 5))
    cache = kk.KvCache.paged(pool)
    k, v = pair(rng, 7)
    cache.append(k, v)
    other.release()
    cache.append(k[:, :2], v[:, :2])
    slots = cache.slot_mapping(0, 9)
    assert slots.tolist() == [cache.paged_block_indices[i // BS] * BS + i % BS for i in range(9)]
    assert cache.slot_mapping(5, 3).tolist() == slots[5:8].tolist()
    assert cache.slot_mapping(12, 0).tolist() == []
    with pytest.raises(kk.KvbmIndexError, match=r"slot_mapping\(5, 8\) ends at 13, expected at most 12"):
        cache.slot_mapping(5, 8)


def test_views_copy_nothing(rng):
    """A contiguous cache, a block, and NHD blocks in a row are seen as they lie; what is in pieces is refused."""
    k, v = pair(rng, 11)
    for cache in (contiguous(), kk.KvCache.paged(new_pool(layout="NHD")), kk.KvCache.paged(new_pool(block_size=16))):
        reference.assert_same_bytes(cache.view()[0], k[:, :0])
        cache.append(k, v)
        for layer, expected in ((None, (k, v)), (1, (k[1], v[1]))):
            seen = cache.view(layer)
            for actual, rows, whole in zip(seen, expected, (cache.k, cache.v), strict=True):
                reference.assert_same_bytes(actual, rows)
                assert np.shares_memory(actual, whole)
        reference.assert_same_bytes(cache.layer(2).view()[1], v[2])
    cache = kk.KvCache.paged(new_pool())
    cache.append(k, v)
    with pytest.raises(kk.KvbmValueError, match="view: the tokens lie in blocks 0, 1 and so on"):
        cache.view()


def test_not_a_pool():
    """Only a pool has blocks to give."""
    with pytest.raises(kk.KvbmTypeError, match="pool is an int, expected a BlockPool"):
        kk.KvCache.paged(3)
    with pytest.raises(kk.KvbmValueError, match="max_blocks is 0"):
        kk.KvCache.paged(new_pool(), max_blocks=0)
