"""What a cache in CUDA memory puts on a stream, told by one that only takes notes."""

from __future__ import annotations

import numpy as np
import pytest

import kvbm_kernels as kk
from kv_places import FakeCuda
from kv_support import BS, HD, NH, NL


@pytest.fixture
def fake():
    made = FakeCuda()
    yield made
    made.close()


def int8_pool(fake):
    return kk.BlockPool(600, BS, NL, NH, HD, kv_dtype=kk.KvInt8, arrays=fake)


def test_a_decode_step_of_one(fake, rng):
    """An append and the length; where a block begins, its entry of the table before that."""
    cache = kk.KvCache.paged(int8_pool(fake))
    k, v = (fake.put(rng.random((NL, 1, NH, HD), np.float32)) for _ in range(2))
    for n in range(9):
        fake.reset()
        cache.append(k, v)
        assert fake.launched == {"append": 1, "store": 1 + (n % BS == 0)}
        assert [len(words) for words in fake.stored] == [1] * fake.launched["store"]
        assert list(fake.stored[-1].values()) == [n + 1]


def test_a_decode_step_of_many(fake, rng):
    """One append for all, and one launch for all tables: a word of each cache's own, and one of the batch's."""
    pool = int8_pool(fake)
    batch = kk.KvBatch([kk.KvCache.paged(pool, max_blocks=9) for _ in range(64)])
    k, v = (fake.put(rng.random((NL, 64, NH, HD), np.float32)) for _ in range(2))
    for n in range(2 * BS):
        fake.reset()
        batch.append(k, v)
        assert fake.launched == {"append": 1, "store": 1 + (n % BS == 0)}
        assert [len(words) for words in fake.stored] == [128] * fake.launched["store"]
    for n in range(2 * BS):
        fake.reset()
        batch.reserve()
        batch.write(k, v)
        batch.advance()
        assert fake.launched == {"append": 1, "store": 1 + (n % BS == 0)}
        assert [len(words) for words in fake.stored] == [128] * fake.launched["store"]
    fake.reset()
    batch.advance(0)
    batch.reserve(0)
    assert not fake.launched


def test_only_changes_are_published(fake):
    """Words that stay what they are, or are again what they were, are not stored."""
    pool = int8_pool(fake)
    cache = kk.KvCache.paged(pool)
    cache.reserve(7 * BS)
    fake.reset()
    cache.reserve(7 * BS)
    cache.truncate(0)
    assert [len(words) for words in fake.stored] == [7]
    cache.truncate(0)
    cache.release()
    assert fake.launched == {"store": 1}
    batch = kk.KvBatch([None, None], pool=pool)
    first, second = kk.KvCache.paged(pool), kk.KvCache.paged(pool)
    second.reserve(1)
    fake.reset()
    batch.replace(0, first)
    assert not fake.launched
    batch.replace(1, second)
    assert [len(words) for words in fake.stored] == [1]


@pytest.mark.parametrize("what", ["append", "copy_blocks"])
def test_a_launch_that_fails(fake, rng, what):
    """Blocks that were taken, or copied, for a call that fails are given back, and the tables say so."""
    cache = kk.KvCache.paged(int8_pool(fake))
    k, v = (fake.put(rng.random((NL, 6, NH, HD), np.float32)) for _ in range(2))
    cache.append(k, v)
    fork = cache.fork()
    if what == "copy_blocks":
        fork.truncate(3)
    batch = kk.KvBatch([fork])
    before = [fake.get(a).tolist() for a in (fork.block_table, fork.context_lens, batch.block_table)]
    references = [cache.pool.allocator.refcount(i) for i in range(9)]
    fake.fails = what
    for call in (lambda: fork.append(k, v), lambda: batch.append(k, v)):
        with pytest.raises(MemoryError, match="was told to fail"):
            call()
        after = [fake.get(a).tolist() for a in (fork.block_table, fork.context_lens, batch.block_table)]
        assert after == before
        assert [cache.pool.allocator.refcount(i) for i in range(9)] == references


def test_the_stream_given_is_that_of_all_launches(fake, rng):
    """Every call that has work for the device takes it to the stream it was given."""
    pool = int8_pool(fake)
    k, v = (fake.put(rng.random((NL, 6, NH, HD), np.float32)) for _ in range(2))
    cache = kk.KvCache.paged(pool, max_blocks=9, stream=5)
    flat = kk.KvCache.contiguous(
        num_layers=NL,
        num_kv_heads=NH,
        head_dim=HD,
        capacity=40,
        initial_capacity=3,
        arrays=fake,
        kv_dtype=kk.KvFp8,
        stream=5,
    )
    saved = kk.UniversalBlocks(fake.put(np.zeros((2, NH, NL, 2, BS, HD + 4), np.int8)), pool.block_shape)
    calls = {
        "append": lambda: cache.append(k, v, stream=5),
        "grow": lambda: flat.append(k, v, stream=5),
        "layer": lambda: flat.layer(0).append(k[0], v[0], stream=5),
        "gather": lambda: (cache.gather(stream=5), flat.layer(1).gather(stream=5)),
        "reserve": lambda: cache.reserve(9, stream=5),
        "write": lambda: cache.write(k, v, stream=5),
        "advance": lambda: cache.advance(6, stream=5),
        "fork": lambda: cache.fork(stream=5).truncate(2, stream=5),
        "batch": lambda: kk.KvBatch([cache], stream=5).append(k, v, stream=5),
        "steps": lambda: (
            (batch := kk.KvBatch([cache], stream=5)).reserve(6, stream=5),
            batch.write(k, v, stream=5),
            batch.advance(6, stream=5),
            batch.replace(0, None, stream=5),
            batch.replace(0, cache, stream=5),
        ),
        "restore": lambda: kk.KvCache.paged(pool).restore(saved, 7, stream=5),
        "prefix": lambda: (
            cache.register_prefix(range(8)),
            kk.KvCache.paged(pool).attach_prefix(range(9), stream=5),
        ),
        "release": lambda: cache.release(stream=5),
    }
    for name, call in calls.items():
        fake.reset()
        call()
        assert fake.streams, name
        assert set(fake.streams) == {5}, name
    fake.reset()
    kk.KvCache.paged(pool).append(k, v)
    assert set(fake.streams) == {None}


def test_pageable_rows_are_refused(fake, rng):
    """And leave no trace."""
    cache = kk.KvCache.paged(int8_pool(fake))
    rows = rng.random((NL, 6, NH, HD), np.float32)
    with pytest.raises(kk.KvbmValueError, match="k and v is in pageable host memory"):
        cache.append(rows, rows)
    assert fake.get(cache.block_table).tolist() == [600] * 600
    assert cache.pool.num_free == 600
