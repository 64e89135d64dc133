"""Sequences that share blocks: forks, registered prefixes, and blocks that leave the pool and come back."""

from __future__ import annotations

import numpy as np
import pytest

import kvbm_kernels as kk
from kv_support import BS, HD, NH, NL, check, new_pool, pair, some, state


@pytest.fixture
def pool():
    return new_pool()


def filled(pool, rng, n):
    cache = kk.KvCache.paged(pool)
    k, v = pair(rng, n)
    cache.append(k, v)
    return cache, k, v


def joined(a, b):
    return np.concatenate([a, b], 1)


@pytest.mark.parametrize("n", range(3 * BS + 1))
def test_a_fork_shares_full_blocks_and_copies_the_rest(pool, rng, n):
    """Both go on by themselves; the fork costs one block where the last is not full, and none where it is."""
    cache, k, v = filled(pool, rng, n)
    free = pool.num_free
    fork = cache.fork()
    full = n // BS
    assert free - pool.num_free == (n % BS > 0)
    assert fork.paged_block_indices[:full] == cache.paged_block_indices[:full]
    assert not set(fork.paged_block_indices[full:]) & set(cache.paged_block_indices)
    check(fork, k, v)
    (k1, v1), (k2, v2) = pair(rng, 3), pair(rng, 6)
    cache.append(k1, v1)
    fork.append(k2, v2)
    check(cache, joined(k, k1), joined(v, v1))
    check(fork, joined(k, k2), joined(v, v2))
    cache.release()
    check(fork, joined(k, k2), joined(v, v2))
    fork.release()
    assert pool.num_free == pool.num_blocks
    pool.allocator.check()


def test_a_fork_without_a_block_for_its_tail_changes_nothing(rng):
    """The pool may be too full even for one block."""
    pool = new_pool(num_blocks=2)
    cache, _, _ = filled(pool, rng, 5)
    before = state(cache)
    with pytest.raises(kk.OutOfBlocks, match="1 block is needed and 0 are free"):
        cache.fork()
    assert state(cache) == before


def test_the_reserve_stays_with_the_parent(pool, rng):
    """A fork has the tokens, not the room that was reserved behind them."""
    cache, k, v = filled(pool, rng, 5)
    cache.reserve(10)
    fork = cache.fork()
    assert len(fork.paged_block_indices) == 2
    check(fork, k, v)


def test_a_shared_block_is_copied_before_it_is_written(pool, rng):
    """Cut back into a block that another sequence has too, a cache copies that block, and only that, to go on."""
    cache, k, v = filled(pool, rng, 9)
    fork = cache.fork()
    fork.truncate(6)
    assert fork.paged_block_indices == cache.paged_block_indices[:2]
    free = pool.num_free
    more = pair(rng, 1)
    fork.append(*more)
    assert free - pool.num_free == 1
    check(fork, joined(k[:, :6], more[0]), joined(v[:, :6], more[1]))
    check(cache, k, v)
    fork.release()
    assert [pool.allocator.refcount(block) for block in cache.paged_block_indices] == [1, 1, 1]
    cache.truncate(2)
    free = pool.num_free
    cache.append(*more)
    assert pool.num_free == free
    check(cache, joined(k[:, :2], more[0]), joined(v[:, :2], more[1]))


def test_a_copy_that_finds_no_block_changes_nothing(rng):
    """The block for the copy is part of what an append needs, all or nothing; so it is for reserve."""
    pool = new_pool(num_blocks=4)
    cache, _, _ = filled(pool, rng, 8)
    fork = cache.fork()
    fork.truncate(6)
    k, v = pair(rng, 9)
    before = state(fork), state(cache)
    for call in (lambda: fork.append(k, v), lambda: fork.reserve(9)):
        with pytest.raises(kk.OutOfBlocks) as raised:
            call()
        assert (raised.value.needed, raised.value.free) == (3, 2)
        assert (state(fork), state(cache)) == before
    fork.reserve(0)
    assert pool.num_free == 2
    fork.reserve(1)
    assert pool.num_free == 1
    fork.append(k[:, :1], v[:, :1])
    assert pool.num_free == 1


@pytest.mark.parametrize("by_layer", [False, True])
def test_an_append_that_fails_late_gives_the_copy_back(pool, rng, by_layer):
    """A failure after the blocks were found undoes all of it: the copy, the new blocks, and what was forgotten."""
    cache, _, v = filled(pool, rng, 8)
    cache.register_prefix(range(8))
    fork = cache.fork()
    fork.truncate(6)
    # The blocks that the append is about to take are also what it would read.
    (next_block,) = pool.allocator.allocate()
    pool.allocator.free([next_block])
    stale = pool.k[:, next_block].swapaxes(1, 2)[:, :3]
    assert stale.shape == (NL, 3, NH, HD)
    layer = 0 if by_layer else None
    source = stale[0] if by_layer else stale
    for victim in (fork, cache):
        before = state(fork), state(cache)
        with pytest.raises(kk.KvbmValueError, match="overlap"):
            victim.append(source, source, layer=layer)
        assert (state(fork), state(cache)) == before
    fork.release()
    cache.truncate(7)
    before = state(cache)
    with pytest.raises(kk.KvbmValueError, match="overlap"):
        cache.append(pool.k[:, 1].swapaxes(1, 2), v[:, :4])
    assert state(cache) == before
    assert pool.allocator.digest_of(cache.paged_block_indices[1]) is not None


@pytest.mark.parametrize("how", ["all", "layer", "batch"])
def test_rows_under_the_copy_of_a_shared_block_are_refused(pool, rng, how):
    """The copy takes a free block, in whatever layer and token of which the rows to append lie."""
    cache, k, v = filled(pool, rng, 8)
    cache.register_prefix(range(8))
    fork = cache.fork()
    fork.truncate(6)
    (next_block,) = pool.allocator.allocate()
    pool.allocator.free([next_block])
    # The first token of the block, whose next one is the third: only the copy is in the way.
    k_inside, v_inside = (array[:, next_block].swapaxes(1, 2)[:, :1] for array in (pool.k, pool.v))
    before = state(fork), state(cache)
    call = {
        "all": lambda: fork.append(k_inside, v[:, :1]),
        "layer": lambda: fork.append(k_inside[1], v_inside[1], layer=0),
        "batch": lambda: kk.KvBatch([fork]).append(k_inside, v_inside),
    }[how]
    with pytest.raises(kk.KvbmValueError, match="overlap: a shared block is copied to where"):
        call()
    assert (state(fork), state(cache)) == before
    # Rows of a block that somebody has are read as they are.
    fork.append(*(array[:, cache.paged_block_indices[0]].swapaxes(1, 2)[:, :1] for array in (pool.k, pool.v)))
    check(fork, joined(k[:, :6], k[:, :1]), joined(v[:, :6], v[:, :1]))


def test_freeing_a_forks_block_goes_by_references(pool, rng):
    """A shared block can be freed once for each that has it; once more is an error that changes nothing."""
    cache, _, _ = filled(pool, rng, 4)
    fork = cache.fork()
    (block,) = fork.paged_block_indices
    fork.release()
    assert pool.allocator.refcount(block) == 1
    with pytest.raises(ValueError, match="block 0 is named 2 times and has 1 references"):
        pool.allocator.free([block, block])
    cache.release()
    with pytest.raises(ValueError, match="block 0 is named once and has 0 references"):
        pool.allocator.free([block])
    pool.allocator.check()


def test_many_cycles_lose_no_block(rng):
    """1,000 times append and release, with forks among them: every block is free in the end."""
    pool = new_pool(num_blocks=4)
    k, v = pair(rng, 8)
    for i in range(1000):
        with kk.KvCache.paged(pool) as cache:
            cache.append(k[:, : i % 9], v[:, : i % 9])
            if i % 3 == 0 and i % 9 <= 6:
                cache.fork().release()
    assert pool.num_free == 4
    pool.allocator.check()


def test_a_registered_prefix_is_found(pool, rng):
    """Blocks filled by one sequence begin another with the same tokens, while the first lives and after."""
    tokens = list(range(100, 111))
    cache, k, v = filled(pool, rng, 11)
    assert cache.register_prefix(tokens) == 2
    assert cache.register_prefix(tokens) == 0
    for alive in (True, False):
        other = kk.KvCache.paged(pool)
        assert other.attach_prefix([*tokens, 5, 6]) == 8
        assert other.paged_block_indices == [0, 1]
        check(other, k[:, :8], v[:, :8])
        more = pair(rng, 5)
        other.append(*more)
        check(other, joined(k[:, :8], more[0]), joined(v[:, :8], more[1]))
        other.release()
        if alive:
            check(cache, k, v)
            cache.release()
    assert pool.num_free == pool.num_blocks
    assert pool.allocator.usage().hits == 4


def test_the_last_token_is_never_found(pool, rng):
    """Of a prompt that is all there, the last block is computed again: someone needs its logits."""
    cache, _, _ = filled(pool, rng, 8)
    cache.register_prefix(range(8))
    for n, expected in ((8, 4), (9, 8), (7, 4), (4, 0), (5, 4), (0, 0)):
        with kk.KvCache.paged(pool) as other:
            assert other.attach_prefix(range(n)) == expected
            assert len(other) == expected


def test_another_prefix_is_not_found(pool, rng):
    """Other tokens anywhere before, or another ``extra``, are another prefix."""
    cache, _, _ = filled(pool, rng, 8)
    cache.register_prefix(range(8), extra=b"adapter")
    other = kk.KvCache.paged(pool)
    assert other.attach_prefix(range(9)) == 0
    assert other.attach_prefix([0, 1, 2, 9, 4, 5, 6, 7, 8], extra=b"adapter") == 0
    assert other.attach_prefix([0, 1, 2, 3, 4, 5, 6, 9, 8], extra=b"adapter") == 4


def test_what_changes_is_no_longer_found(pool, rng):
    """A registered block that is cut into and written again is not found under what it held."""
    cache, k, v = filled(pool, rng, 8)
    cache.register_prefix(range(8))
    cache.truncate(6)
    other = kk.KvCache.paged(pool)
    assert other.attach_prefix(range(9)) == 8
    cache.append(*pair(rng, 2))
    check(other, k, v)
    other.release()
    cache.release()
    second = kk.KvCache.paged(pool)
    assert second.attach_prefix(range(9)) == 8
    second.truncate(6)
    second.append(*pair(rng, 2))
    assert kk.KvCache.paged(pool).attach_prefix(range(9)) == 4


def test_cached_blocks_are_given_up_when_they_are_needed(rng):
    """A pool full of registered prefixes has all its blocks to give, and the beginning of a prefix goes last."""
    pool = new_pool(num_blocks=4)
    cache, k, v = filled(pool, rng, 12)
    cache.register_prefix(range(12))
    cache.release()
    assert pool.num_free == 4
    assert pool.allocator.usage().cached == 3
    with kk.KvCache.paged(pool) as big:
        big.append(*pair(rng, 8))
    with kk.KvCache.paged(pool) as again:
        assert again.attach_prefix(range(13)) == 8
        check(again, k[:, :8], v[:, :8])


def test_prefixes_need_an_empty_cache(pool, rng):
    """A prefix is where a sequence begins."""
    cache, _, _ = filled(pool, rng, 5)
    before = state(cache)
    for call in (lambda: cache.attach_prefix(range(9)), lambda: cache.restore(pool.blocks([0]), 3)):
        with pytest.raises(kk.KvbmValueError, match="the cache has 5 tokens and 2 blocks, expected an empty one"):
            call()
    with pytest.raises(kk.KvbmTypeError, match="tokens have dtype float64"):
        cache.register_prefix([0.5])
    assert state(cache) == before


def test_a_prefix_longer_than_the_table_is_cut(pool, rng):
    """A cache attaches no more blocks than its table holds."""
    cache, _, _ = filled(pool, rng, 12)
    cache.register_prefix(range(12))
    assert kk.KvCache.paged(pool, max_blocks=2).attach_prefix(range(13)) == 8


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("n", [1, 4, 11])
def test_offload_free_restore(rng, layout, n):
    """Saved as universal blocks, freed, and restored into other blocks: bit-equal, and appending goes on."""
    pool = new_pool(layout=layout)
    cache, k, v = filled(pool, rng, n)
    num_blocks = len(cache.blocks())
    assert num_blocks == -(-n // BS)
    saved = np.zeros((num_blocks, NH, NL, 2, BS, HD), np.float16)
    universal = kk.UniversalBlocks(saved, pool.block_shape)
    kk.copy_blocks(universal, cache.blocks())
    old = cache.paged_block_indices
    cache.release()
    stranger, *_ = filled(pool, rng, 6)
    back = kk.KvCache.paged(pool)
    back.restore(universal, n)
    assert back.paged_block_indices != old
    check(back, k, v)
    more = pair(rng, 3)
    back.append(*more)
    check(back, joined(k, more[0]), joined(v, more[1]))
    assert len(stranger) == 6


def test_restore_of_keys_and_values_apart(rng):
    """With different head dimensions, K and V travel as two views."""
    pool = new_pool(v_head_dim=5)
    cache = kk.KvCache.paged(pool)
    k, v = some(rng, 6), some(rng, 6, 5)
    cache.append(k, v)
    saved = {}
    for of in ("k", "v"):
        shape = cache.blocks(of=of).shape
        saved[of] = kk.UniversalBlocks(np.zeros((2, NH, NL, 1, BS, shape.hd), np.float16), shape)
        kk.copy_blocks(saved[of], cache.blocks(of=of))
    cache.truncate(0)
    with pytest.raises(kk.KvbmValueError, match='expected "k" or "v"'):
        cache.restore(saved["k"], 6)
    cache.restore((saved["k"], saved["v"]), 6)
    check(cache, k, v)


def test_a_wrong_restore_changes_nothing(pool, rng):
    """Too few blocks, another shape, no view, or a pool too full: the cache stays empty, and no block is lost."""
    cache = kk.KvCache.paged(pool)
    good = kk.BlockShape(NL, 2, NH, BS, HD, "fp16")
    bad = kk.BlockShape(NL, 2, NH, BS, HD, "bf16")
    make = lambda shape, n: kk.UniversalBlocks(np.zeros((n, NH, NL, 2, BS, HD), np.uint16), shape)  # noqa: E731
    before = state(cache)
    for src, n, error, message in (
        (make(good, 1), 5, ValueError, "the cache has 2 blocks and src 1, expected the same number"),
        (make(bad, 2), 5, TypeError, "the cache has dtype f16 and src bf16"),
        (3, 5, TypeError, "src is an int, expected a view"),
        (make(good, 13), 50, kk.CapacityError, "50 tokens are needed"),
    ):
        with pytest.raises(error, match=message):
            cache.restore(src, n)
        assert state(cache) == before


def test_blocks_of_a_cache_are_its_own(pool, rng):
    """blocks(ids) names blocks of the pool that the cache holds, and no others."""
    other, *_ = filled(pool, rng, 5)
    cache, _, _ = filled(pool, rng, 5)
    cache.reserve(8)
    assert cache.blocks().geometry.ids.tolist() == [2, 3]
    assert cache.blocks([4, 2]).geometry.ids.tolist() == [4, 2]
    assert cache.blocks(np.array([3], np.uint32), of="v").shape.no == 1
    with pytest.raises(kk.KvbmIndexError, match="block id 0 is not among the 4 blocks of the cache"):
        cache.blocks([2, 0])
    with pytest.raises(kk.KvbmIndexError, match="block id 12"):
        cache.blocks([12])
    assert len(other) == 5


def test_csr(pool, rng):
    """FlashInfer's tables: where each sequence's pages begin, the pages, and how full the last one is; int32."""
    caches = [filled(pool, rng, n)[0] for n in (5, 0, 8, 1)]
    csr = kk.KvBatch(caches).csr()
    assert [a.dtype for a in csr] == [np.int32] * 3
    assert csr.indptr.tolist() == [0, 2, 2, 4, 5]
    assert csr.indices.tolist() == [block for cache in caches for block in cache.paged_block_indices]
    assert csr.last_page_len.tolist() == [1, 0, 4, 1]
    caches[0].reserve(8)
    one = caches[0].csr()
    assert (one.indptr.tolist(), one.indices.tolist(), one.last_page_len.tolist()) == ([0, 2], [0, 1], [1])


@pytest.mark.parametrize("how", ["fork", "register_prefix"])
def test_slots_to_write_are_of_blocks_of_this_cache_alone(pool, rng, how):
    """What others see is not handed out for writing before reserve has made room elsewhere; reading stays possible."""
    cache, k, v = filled(pool, rng, 2 * BS)
    fork = cache.fork() if how == "fork" else None
    if fork is None:
        cache.register_prefix(list(range(2 * BS)))
    cache.truncate(BS + 2)
    before = state(cache)
    why = "others have too" if fork else "is registered"
    for call in (
        lambda: cache.slot_mapping(BS + 2, 1),
        lambda: cache.slot_mapping(0, BS + 3),
        lambda: cache.slot_mapping(BS + 3, 1),
        lambda: cache.advance(1),
    ):
        with pytest.raises(kk.KvbmValueError, match=rf"would be written to block 1, which {why}: reserve comes first"):
            call()
    assert state(cache) == before
    cache.advance(0)
    assert cache.slot_mapping(0, BS + 2).tolist() == list(range(BS + 2))
    cache.reserve(1)
    (slot,) = cache.slot_mapping(BS + 2, 1)
    more_k, more_v = pair(rng, 1)
    for array, rows in ((pool.k, more_k), (pool.v, more_v)):
        array[:, slot // BS, :, slot % BS] = rows[:, 0]
    cache.advance(1)
    check(cache, joined(k[:, : BS + 2], more_k), joined(v[:, : BS + 2], more_v))
    if fork:
        check(fork, k, v)
    else:
        other = kk.KvCache.paged(pool)
        assert other.attach_prefix(list(range(3 * BS))) == BS
