"""A step of several sequences: one table, one append, all or nothing."""

from __future__ import annotations

import numpy as np
import pytest

import kvbm_kernels as kk
from kv_support import BS, NL, check, new_pool, pair, some, state

LENGTHS = (5, 0, 8, 3)


def joined(a, b):
    return np.concatenate([a, b], 1)


def batch(pool, rng, lengths=LENGTHS):
    """Caches of these lengths, and what they hold."""
    made = []
    for n in lengths:
        cache = kk.KvCache.paged(pool)
        k, v = pair(rng, n)
        cache.append(k, v)
        made.append((cache, k, v))
    return kk.KvBatch([cache for cache, _, _ in made]), made


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("sizes", [{}, {"v_head_dim": 5}, {"block_size": 1}, {"num_kv_heads": 1}])
def test_a_step_is_the_same_as_one_append_each(rng, layout, sizes):
    """Every cache gets its token at its own place, at once or layer by layer."""
    pool = new_pool(**{"layout": layout, "num_blocks": 60, **sizes})
    heads, v_hd = pool.num_kv_heads, pool.v_head_dim
    caches = [kk.KvCache.paged(pool) for _ in LENGTHS]
    held = []
    for cache, n in zip(caches, LENGTHS, strict=True):
        k, v = some(rng, n)[:, :, :heads], some(rng, n, v_hd)[:, :, :heads]
        cache.append(k, v)
        held.append((k, v))
    steps = kk.KvBatch(caches)
    for step in range(2 * BS):
        k, v = some(rng, len(LENGTHS))[:, :, :heads], some(rng, len(LENGTHS), v_hd)[:, :, :heads]
        if step % 2:
            steps.append(k, v)
        else:
            for i in range(NL):
                steps.append(k[i], v[i], layer=i)
        held = [(joined(a, k[:, i : i + 1]), joined(b, v[:, i : i + 1])) for i, (a, b) in enumerate(held)]
        for cache, (a, b) in zip(caches, held, strict=True):
            check(cache, a, b)


def test_tables(rng):
    """One row for each sequence, padded with the null block, and the lengths; both u32."""
    steps, made = batch(new_pool(), rng)
    tables = steps.tables()
    assert tables.block_table.dtype == tables.context_lens.dtype == np.uint32
    assert tables.block_table.tolist() == [[0, 1], [12, 12], [2, 3], [4, 12]]
    assert tables.context_lens.tolist() == list(LENGTHS)
    assert steps.tables(3).block_table.shape == (4, 3)
    assert kk.KvBatch([made[1][0]]).tables().block_table.tolist() == [[12]]
    with pytest.raises(kk.KvbmValueError, match="max_blocks is 1, expected at least 2"):
        steps.tables(1)
    assert len(steps) == 4


def test_a_step_is_all_or_nothing(rng):
    """If the pool has too few blocks for all, none moves, and the error counts the blocks of all."""
    pool = new_pool(num_blocks=7)
    steps, made = batch(pool, rng, (4, 8, 3, 4))
    before = [state(cache) for cache, _, _ in made]
    with pytest.raises(kk.OutOfBlocks) as raised:
        steps.append(*pair(rng, 4))
    assert (raised.value.needed, raised.value.free) == (3, 2)
    assert [state(cache) for cache, _, _ in made] == before
    made[0][0].release()
    steps = kk.KvBatch([cache for cache, _, _ in made[1:]])
    steps.append(*pair(rng, 3))
    assert [len(cache) for cache, _, _ in made] == [0, 9, 4, 5]


def test_a_step_past_the_end_of_one_table_moves_none(rng):
    """The capacity of each cache counts."""
    pool = new_pool()
    short, long = kk.KvCache.paged(pool, max_blocks=1), kk.KvCache.paged(pool)
    for cache in (short, long):
        cache.append(*pair(rng, 4))
    before = state(short), state(long)
    for caches in ([short, long], [long, short]):
        with pytest.raises(kk.CapacityError, match="5 tokens are needed and the capacity is 4"):
            kk.KvBatch(caches).append(*pair(rng, 2))
        assert (state(short), state(long)) == before


def test_shared_blocks_are_copied_first(rng):
    """Forks cut back into a block they share each get their own before the step writes."""
    pool = new_pool()
    parent = kk.KvCache.paged(pool)
    k, v = pair(rng, 8)
    parent.append(k, v)
    forks = [parent.fork() for _ in range(3)]
    for fork in forks:
        fork.truncate(6)
    more_k, more_v = pair(rng, 3)
    kk.KvBatch(forks).append(more_k, more_v)
    check(parent, k, v)
    for i, fork in enumerate(forks):
        check(fork, joined(k[:, :6], more_k[:, i : i + 1]), joined(v[:, :6], more_v[:, i : i + 1]))
    for cache in (*forks, parent):
        cache.release()
    assert pool.num_free == pool.num_blocks


def test_a_failed_step_takes_everything_back(rng):
    """A step that would read what it writes moves no cache and keeps no block."""
    pool = new_pool()
    steps, made = batch(pool, rng, (4, 8))
    before = [state(cache) for cache, _, _ in made]
    (free,) = pool.allocator.allocate()
    pool.allocator.free([free])
    inside = pool.k[:, free].swapaxes(1, 2)[:, :2]
    with pytest.raises(kk.KvbmValueError, match="overlap"):
        steps.append(inside, inside)
    assert [state(cache) for cache, _, _ in made] == before


def test_wrong_batches(rng):
    """A batch is different caches of one pool, and a step has rows for each."""
    pool = new_pool()
    steps, made = batch(pool, rng)
    first = made[0][0]
    flat = kk.KvCache.contiguous(num_kv_heads=2, head_dim=8, capacity=4)
    for caches, error, message in (
        ([], ValueError, "caches has no entries"),
        ([first, first], ValueError, "the same cache twice"),
        ([first, kk.KvCache.paged(new_pool())], ValueError, r"caches\[1\] is of another pool"),
        ([flat], TypeError, r"caches\[0\] is a ContiguousKvCache, expected a paged KvCache"),
    ):
        with pytest.raises(error, match=message):
            kk.KvBatch(caches)
    with pytest.raises(kk.KvbmValueError, match="k has rows for 3 tokens, expected a multiple of 4 slots"):
        steps.append(*pair(rng, 3))
    first.release()
    with pytest.raises(kk.KvbmValueError, match="the cache in slot 0 was released"):
        steps.append(*pair(rng, 4))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("block_size", [1, 2, 5])
def test_a_pool_of_one_block(rng, layout, block_size):
    """A single block has no stride."""
    pool = new_pool(num_blocks=1, block_size=block_size, layout=layout)
    cache = kk.KvCache.paged(pool)
    k, v = pair(rng, block_size)
    for i in range(block_size):
        kk.KvBatch([cache]).append(k[:, i : i + 1], v[:, i : i + 1])
    check(cache, k, v)
