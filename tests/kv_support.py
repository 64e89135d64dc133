"""Small pools and caches, and what has to hold of them."""

from __future__ import annotations

import numpy as np

import kvbm_kernels as kk
import reference

NL, NH, HD, BS = 3, 2, 8, 4


def new_pool(**changes) -> kk.BlockPool:
    """12 blocks of 4 tokens, 3 layers."""
    sizes = dict(num_blocks=12, block_size=BS, num_layers=NL, num_kv_heads=NH, head_dim=HD)
    return kk.BlockPool(**{**sizes, **changes})


def contiguous(**changes) -> kk.ContiguousKvCache:
    """A cache that starts with 3 tokens and grows to 40."""
    sizes = dict(num_layers=NL, num_kv_heads=NH, head_dim=HD, capacity=40, initial_capacity=3)
    return kk.KvCache.contiguous(**{**sizes, **changes})


def some(rng, n, hd=HD, dtype=np.float16, nl=NL) -> np.ndarray:
    """Random bits as K or V of n tokens."""
    return reference.random_kv(rng, (nl, n, NH, hd), dtype)


def pair(rng, n) -> tuple[np.ndarray, np.ndarray]:
    """K and V of n tokens."""
    return some(rng, n), some(rng, n)


def state(cache) -> tuple:
    """All that a failing call must not change."""
    k, v = cache.gather() if not cache.is_released else (np.empty(0), np.empty(0))
    lens = [layer.len for layer in map(cache.layer, range(cache.num_layers))]
    if cache.block_size == 0:
        return k.tobytes(), v.tobytes(), lens, cache.capacity
    references = [cache.pool.allocator.refcount(block) for block in range(cache.pool.num_blocks)]
    table = cache.block_table.tolist(), cache.context_lens.tolist(), cache.paged_block_indices
    return k.tobytes(), v.tobytes(), lens, references, *table, cache.pool.allocator.usage()[:4]


def check(cache, k, v) -> None:
    """The cache holds these rows, and its tables say so."""
    for order, axes in (("NHD", (0, 1, 2, 3)), ("HND", (0, 2, 1, 3))):
        actual_k, actual_v = cache.gather(order=order)
        reference.assert_same_bytes(actual_k, k.transpose(axes))
        reference.assert_same_bytes(actual_v, v.transpose(axes))
    for i in range(cache.num_layers):
        reference.assert_same_bytes(cache.gather(i)[0], k[i])
        reference.assert_same_bytes(cache.layer(i).gather()[1], v[i])
    assert len(cache) == cache.len == k.shape[1]
    if cache.block_size:
        check_tables(cache)


def check_tables(cache) -> None:
    """Table, length and the host's list of blocks agree, and what is not there is the null block."""
    blocks = cache.paged_block_indices
    table = cache.block_table
    assert table.dtype == cache.context_lens.dtype == np.uint32
    assert table.tolist() == blocks + [cache.pool.null_block] * (cache.max_blocks - len(blocks))
    assert cache.context_lens.tolist() == [len(cache)]
    assert len(blocks) >= -(-len(cache) // cache.block_size)
    cache.pool.allocator.check()
