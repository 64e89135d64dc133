"""Caches wherever their arrays are: NumPy's, arrays that say they are in CUDA memory, on a GPU PyTorch's and CuPy's.

Contents and tables are compared with plain NumPy bit for bit; quantised rows with the definition in reference.py.
"""

from __future__ import annotations

import gc

import ml_dtypes
import numpy as np
import pytest

import kvbm_kernels as kk
import reference
from kv_places import ON_GPU, PLACES, FakeCuda
from kv_support import BS, HD, NH, NL, contiguous, new_pool, some

MARKERS = [kk.KvFp32, kk.KvFp16, kk.KvBf16, kk.KvInt8, kk.KvFp8]
FLOATS = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}


@pytest.fixture(params=["numpy", "fake cuda", *ON_GPU])
def place(request):
    made = PLACES[request.param]()
    yield made
    made.close()


@pytest.fixture
def fake():
    made = FakeCuda()
    yield made
    made.close()


class Held:
    """A cache and what it has to hold, as the rows that were given."""

    def __init__(self, place, cache, scale=np.float32) -> None:
        self.place, self.cache, self.scale = place, cache, scale
        self.rows = [
            np.empty((NL, 0, cache.num_kv_heads, dim), np.float32) for dim in (cache.head_dim, cache.v_head_dim)
        ]

    def given(self, rng, n, dtype=None):
        """K and V of n more tokens, now to be held: bits of any kind, or numbers if they are to be quantised."""
        marker = self.cache.kv_dtype
        made = []
        for old in self.rows:
            shape = (NL, n, *old.shape[2:])
            if marker.IS_QUANTISED:
                new = (rng.standard_normal(shape) * 10.0 ** rng.integers(-4, 4, (NL, n, 1, 1))).astype(np.float32)
                new[rng.random(shape) < 0.02] = np.nan
                made.append(new.astype(dtype or np.float32))
            else:
                made.append(reference.random_kv(rng, shape, FLOATS[marker.NAME]))
        self.hold(*made)
        return made

    def hold(self, *new):
        self.rows = [np.concatenate([old.astype(a.dtype), a], 1) for old, a in zip(self.rows, new, strict=True)]

    def stored(self):
        marker = self.cache.kv_dtype
        if not marker.IS_QUANTISED:
            return self.rows
        return [
            reference.dequantised(
                reference.quantised(a.astype(np.float32), marker.NAME, self.scale), a.shape[-1], marker.NAME, self.scale
            )
            for a in self.rows
        ]

    def check(self):
        get, cache = self.place.get, self.cache
        for i, expected in enumerate(self.stored()):
            reference.assert_same_bytes(get(cache.gather()[i]), expected)
            reference.assert_same_bytes(get(cache.gather(order="HND")[i]), expected.swapaxes(1, 2))
            reference.assert_same_bytes(get(cache.gather(1)[i]), expected[1])
        assert len(cache) == self.rows[0].shape[1]
        if cache.block_size:
            blocks = cache.paged_block_indices
            null = [cache.pool.null_block] * (cache.max_blocks - len(blocks))
            assert get(cache.block_table).tolist() == blocks + null
            assert get(cache.context_lens).tolist() == [len(cache)]
            cache.pool.allocator.check()


@pytest.mark.parametrize("marker", MARKERS)
@pytest.mark.parametrize("layout", ["HND", "NHD", "contiguous"])
@pytest.mark.parametrize("dims", [(8, 8), (8, 5)])
def test_rows_come_back(place, rng, marker, layout, dims):
    """Prefill, decode, heads first, layer by layer, K laid out otherwise than V, and a contiguous cache that grows."""
    options = dict(head_dim=dims[0], v_head_dim=dims[1], kv_dtype=marker, **place.options)
    if layout == "contiguous":
        cache = contiguous(**options)
    else:
        cache = kk.KvCache.paged(new_pool(layout=layout, **options), max_blocks=10)
    held = Held(place, cache)
    put = place.put
    for n in (5, 1, 0, 1, 10):
        cache.append(*map(put, held.given(rng, n)))
        held.check()
    k, v = held.given(rng, 3)
    cache.append(put(k.swapaxes(1, 2)), put(v.swapaxes(1, 2)), order="HND")
    k, v = held.given(rng, 2)
    for i in (2, 0, 1):
        assert len(cache) == held.rows[0].shape[1] - 2
        cache.append(put(k[i]), put(v[i]), layer=i)
        if cache.block_size:
            assert place.get(cache.layer(i).context_lens).tolist() == [held.rows[0].shape[1]]
    k, v = held.given(rng, 6)
    cache.append(put(k), put(v.swapaxes(1, 2)).swapaxes(1, 2))
    held.check()


@pytest.mark.parametrize("marker", [kk.KvInt8, kk.KvFp8])
@pytest.mark.parametrize("scale", ["fp32", "fp16"])
@pytest.mark.parametrize("given", FLOATS)
@pytest.mark.parametrize("head_dim", [8, 13])
def test_quantised_rows(place, rng, marker, scale, given, head_dim):
    """Every input, every kind of scale, and every output: the bits of the definition, broken rows among them."""
    options = dict(head_dim=head_dim, kv_dtype=marker, scale_dtype=scale, **place.options)
    for cache in (kk.KvCache.paged(new_pool(**options)), contiguous(**options)):
        held = Held(place, cache, FLOATS[scale])
        if given == "bf16" and not place.has_bfloat16:
            pytest.skip("integers with the bits of bfloat16 are not to be told from others")
        cache.append(*map(place.put, held.given(rng, 9, FLOATS[given])))
        cache.append(*map(place.put, held.given(rng, 1, FLOATS[given])))
        held.check()
        for dtype in FLOATS:
            found = place.get(cache.gather(dtype=dtype)[0])
            wanted = reference.bits_of(held.stored()[0], {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}[dtype])
            numbers = ~np.isnan(held.stored()[0])
            reference.assert_same_bytes(found.view(wanted.dtype)[numbers], wanted[numbers])
            assert np.isnan(reference.numbers_of(found.view(wanted.dtype), dtype.replace("fp", "f"))[~numbers]).all()


@pytest.mark.parametrize("scale", ["fp32", "fp16"])
def test_values_and_scales_in_place(place, rng, scale):
    """k, v and their scales are views of the pool, wherever it is."""
    pool = new_pool(kv_dtype=kk.KvInt8, scale_dtype=scale, layout="NHD", **place.options)
    held = Held(place, kk.KvCache.paged(pool), FLOATS[scale])
    k, _ = held.given(rng, 6)
    held.cache.append(place.put(k), place.put(k))
    stored = reference.quantised(k, "int8", FLOATS[scale])
    for values, scales in ((pool.k, pool.k_scales), (held.cache.v, held.cache.v_scales)):
        rows = place.get(values).reshape(NL, -1, NH, HD)[:, :6]
        reference.assert_same_bytes(rows, stored[..., :HD].view(np.int8))
        rows = place.get(scales).reshape(NL, -1, NH)[:, :6]
        reference.assert_same_bytes(rows, stored[..., HD:].copy().view(FLOATS[scale])[..., 0])


def test_a_layer_twice_ahead(place, rng):
    """A layer that goes on before the others have followed begins where it is, not where the cache is."""
    cache = kk.KvCache.paged(new_pool(**place.options))
    held = Held(place, cache)
    cache.append(*map(place.put, held.given(rng, 3)))
    k, v = held.given(rng, 5)
    for i in range(NL):
        for part in (slice(0, 2), slice(2, 5)):
            cache.append(place.put(k[i, part]), place.put(v[i, part]), layer=i)
            assert place.get(cache.layer(i).context_lens).tolist() == [3 + part.stop]
    held.check()
    batch = kk.KvBatch([None, cache], pool=cache.pool)
    k, v = held.given(rng, 2)
    for i in range(NL):
        for token in range(2):
            rows = [np.stack([a[i, token], a[i, token]]) for a in (k, v)]
            batch.append(*map(place.put, rows), layer=i)
    held.check()


@pytest.mark.parametrize("marker", [kk.KvFp16, kk.KvInt8])
def test_sharing_and_giving_back(place, rng, marker):
    """Forks, blocks copied before they are written, prefixes, truncation and release, all with their tables."""
    pool = new_pool(kv_dtype=marker, **place.options)
    parent = Held(place, kk.KvCache.paged(pool))
    parent.cache.append(*map(place.put, parent.given(rng, 10)))
    fork = Held(place, parent.cache.fork())
    fork.hold(*parent.rows)
    fork.cache.truncate(6)
    fork.rows = [a[:, :6] for a in fork.rows]
    for held in (fork, parent):
        held.cache.append(*map(place.put, held.given(rng, 3)))
        held.check()
    fork.check()
    parent.cache.register_prefix(range(13))
    other = Held(place, kk.KvCache.paged(pool))
    assert other.cache.attach_prefix(range(12)) == 8
    other.hold(*[a[:, :8] for a in parent.rows])
    other.check()
    parent.cache.release()
    assert place.get(parent.cache.block_table).tolist() == [12] * 12
    assert place.get(parent.cache.context_lens).tolist() == [0]
    other.cache.append(*map(place.put, other.given(rng, 5)))
    other.check()
    fork.check()


@pytest.mark.parametrize("marker", [kk.KvBf16, kk.KvFp8])
def test_offload_free_restore(place, rng, marker):
    """Saved as universal blocks, freed, written over, restored into other blocks, and on: bit-equal."""
    pool = new_pool(kv_dtype=marker, **place.options)
    held = Held(place, kk.KvCache.paged(pool))
    held.cache.append(*map(place.put, held.given(rng, 11)))
    shape = pool.block_shape
    saved = place.put(np.zeros((3, NH, NL, 2, BS, shape.hd), f"i{shape.dtype.itemsize}"))
    universal = kk.UniversalBlocks(saved, shape)
    kk.copy_blocks(universal, held.cache.blocks())
    old = held.cache.paged_block_indices
    held.cache.release()
    stranger = Held(place, kk.KvCache.paged(pool))
    stranger.cache.append(*map(place.put, stranger.given(rng, 12)))
    held.cache = kk.KvCache.paged(pool)
    held.cache.restore(universal, 11)
    assert not set(held.cache.paged_block_indices) & set(old)
    held.check()
    held.cache.append(*map(place.put, held.given(rng, 2)))
    held.check()
    stranger.check()


@pytest.mark.parametrize("marker", [kk.KvFp16, kk.KvFp8])
@pytest.mark.parametrize("dims", [(8, 8), (8, 5)])
@pytest.mark.parametrize("how", ["append", "all layers", "each layer", "heads first"])
def test_a_batch_decodes(place, rng, marker, dims, how):
    """Steps of sequences that come, grow over block boundaries, and go, an empty slot among them."""
    sizes = dict(num_blocks=40, head_dim=dims[0], v_head_dim=dims[1], kv_dtype=marker)
    pool = new_pool(**sizes, **place.options)
    batch = kk.KvBatch([None] * 4, pool=pool, max_blocks=7)
    table, lens = batch.block_table, batch.context_lens
    slots: list[Held | None] = [None] * 4

    def enter(slot, n):
        held = Held(place, kk.KvCache.paged(pool, max_blocks=7))
        held.cache.append(*map(place.put, held.given(rng, n)))
        old = batch.replace(slot, held.cache)
        if old is not None:
            old.release()
        slots[slot] = held

    enter(0, 3)
    enter(2, 8)
    for step in range(2 * BS):
        if step == 3:
            enter(3, 0)
        if step == 5:
            enter(0, 6)
        if step == 6:
            batch.replace(2, None).release()
            slots[2] = None
        n = 1 + step % 2
        junk = Held(place, slots[0].cache)
        new = [junk.given(rng, n) if held is None else held.given(rng, n) for held in slots]
        k, v = (np.concatenate([each[i] for each in new], 1) for i in (0, 1))
        if how == "append":
            batch.append(place.put(k), place.put(v))
        else:
            batch.reserve(n)
            if how == "each layer":
                for i in (1, 0, 2):
                    batch.write(place.put(k[i]), place.put(v[i]), layer=i)
            elif how == "heads first":
                batch.write(place.put(k.swapaxes(1, 2)), place.put(v.swapaxes(1, 2)), order="HND")
            else:
                batch.write(place.put(k), place.put(v))
            batch.advance(n)
        for held, blocks, length in zip(slots, place.get(table), place.get(lens), strict=True):
            ids = [] if held is None else held.cache.paged_block_indices
            assert blocks.tolist() == ids + [pool.null_block] * (7 - len(ids))
            assert length == (0 if held is None else len(held.cache))
            if held is not None:
                held.check()
    assert batch.block_table is table
    assert batch.context_lens is lens


def test_caches_on_their_own_stay_in_their_batches(place, rng):
    """What a cache does by itself shows in the tables of every batch that it is in, while the batch lives."""
    pool = new_pool(**place.options)
    held = Held(place, kk.KvCache.paged(pool, max_blocks=6))
    other = kk.KvCache.paged(pool, max_blocks=5)
    first, second = kk.KvBatch([held.cache, other]), kk.KvBatch([other, None, held.cache], max_blocks=8)

    tables = [first.block_table[0], second.block_table[2]]

    def rows_of():
        return [place.get(table).tolist() for table in tables]

    held.cache.append(*map(place.put, held.given(rng, 6)))
    assert rows_of() == [[0, 1] + [12] * 4, [0, 1] + [12] * 6]
    assert place.get(second.context_lens).tolist() == [0, 0, 6]
    held.cache.reserve(6)
    assert rows_of()[1] == [0, 1, 2] + [12] * 5
    held.cache.truncate(3)
    assert rows_of() == [[0] + [12] * 5, [0] + [12] * 7]
    del first
    gc.collect()
    assert second.replace(2, None) is held.cache
    held.cache.release()
    assert set(place.get(second.block_table).ravel().tolist()) == {12}


def test_a_batch_is_all_or_nothing(place, rng):
    """A step that cannot be made leaves every table and every block as it was, on the device too."""
    pool = new_pool(num_blocks=7, **place.options)
    caches = []
    for n in (4, 8, 3, 4):
        held = Held(place, kk.KvCache.paged(pool))
        held.cache.append(*map(place.put, held.given(rng, n)))
        caches.append(held)
    batch = kk.KvBatch([held.cache for held in caches])
    before = place.get(batch.block_table), place.get(batch.context_lens)
    rows = [place.put(some(rng, 4)) for _ in range(2)]
    for call in (lambda: batch.append(*rows), batch.reserve):
        with pytest.raises(kk.OutOfBlocks) as raised:
            call()
        assert (raised.value.needed, raised.value.free) == (3, 2)
    with pytest.raises(kk.KvbmValueError, match="n is 1, expected at most 0: reserve comes first"):
        batch.advance()
    for now, then in zip((batch.block_table, batch.context_lens), before, strict=True):
        assert np.array_equal(place.get(now), then)
    for held in caches:
        held.check()


def test_a_write_without_room_is_skipped(place, rng):
    """Tokens for which there is no block go nowhere, and are not counted."""
    pool = new_pool(**place.options)
    held = Held(place, kk.KvCache.paged(pool, max_blocks=2))
    held.cache.append(*map(place.put, held.given(rng, 4)))
    batch = kk.KvBatch([held.cache])
    rows = [place.put(some(rng, 1)) for _ in range(2)]
    batch.write(*rows)
    held.cache.write(*rows)
    for array in (pool.k, pool.v):
        assert not place.get(array)[:, 1:].any()
    held.check()
    with pytest.raises(kk.KvbmValueError, match="expected at most 0: reserve comes first"):
        held.cache.advance(1)


def test_rows_inside_the_pool_are_not_written(place, rng):
    """Where only kernels know what is written, nothing of the pool may be read."""
    pool = new_pool(**place.options)
    cache = kk.KvCache.paged(pool)
    cache.append(*[place.put(some(rng, 3)) for _ in range(2)])
    cache.reserve(4)
    inside = pool.k[:, 9].swapaxes(1, 2)
    for call in (cache.write, kk.KvBatch([cache]).write):
        with pytest.raises(kk.KvbmValueError, match="the cache and k and v overlap"):
            call(inside, inside)


class TestLaunches:
    """What is put on a stream, told by one that only takes notes."""

    def pool(self, fake, **sizes):
        return kk.BlockPool(600, BS, NL, NH, HD, kv_dtype=kk.KvInt8, arrays=fake, **sizes)

    def test_a_decode_step_of_one(self, fake, rng):
        """An append and the length; where a block begins, its entry of the table before that."""
        cache = kk.KvCache.paged(self.pool(fake))
        k, v = (fake.put(rng.random((NL, 1, NH, HD), np.float32)) for _ in range(2))
        for n in range(9):
            fake.reset()
            cache.append(k, v)
            assert fake.launched == {"append": 1, "store": 1 + (n % BS == 0)}
            assert [len(words) for words in fake.stored] == [1] * fake.launched["store"]
            assert list(fake.stored[-1].values()) == [n + 1]

    def test_a_decode_step_of_many(self, fake, rng):
        """One append for all, and one launch for all tables: a word of each cache's own, and one of the batch's."""
        pool = self.pool(fake)
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

    def test_only_changes_are_published(self, fake):
        """Words that stay what they are, or are again what they were, are not stored."""
        pool = self.pool(fake)
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
    def test_a_launch_that_fails(self, fake, rng, what):
        """Blocks that were taken, or copied, for a call that fails are given back, and the tables say so."""
        cache = kk.KvCache.paged(self.pool(fake))
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

    def test_the_stream_given_is_that_of_all_launches(self, fake, rng):
        """Every call that has work for the device takes it to the stream it was given."""
        pool = self.pool(fake)
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

    def test_pageable_rows_are_refused(self, fake, rng):
        """And leave no trace."""
        cache = kk.KvCache.paged(self.pool(fake))
        rows = rng.random((NL, 6, NH, HD), np.float32)
        with pytest.raises(kk.KvbmValueError, match="k and v is in pageable host memory"):
            cache.append(rows, rows)
        assert fake.get(cache.block_table).tolist() == [600] * 600
        assert cache.pool.num_free == 600


def test_streams_are_for_cuda(rng):
    """In host memory there is none, and rows in CUDA memory cannot go there."""
    cache, flat = kk.KvCache.paged(new_pool()), contiguous()
    k = some(rng, 2)
    for call in (
        lambda: cache.append(k, k, stream=0),
        lambda: flat.append(k, k, stream=0),
        lambda: cache.gather(stream=0),
        lambda: cache.reserve(1, stream=0),
        lambda: cache.release(stream=0),
        lambda: kk.KvCache.paged(cache.pool, stream=0),
        lambda: kk.KvBatch([cache], stream=0),
        lambda: kk.KvBatch([cache]).write(k, k, stream=0),
        lambda: new_pool(stream=0),
        lambda: contiguous(stream=0),
    ):
        with pytest.raises(kk.KvbmValueError, match="stream is 0, expected None: the cache is in host memory"):
            call()
    with pytest.raises(kk.KvbmTypeError, match="stream is 'main', expected a handle"):
        cache.append(k, k, stream="main")
    fake = FakeCuda()
    on_device = fake.put(k)
    fake.close()
    with pytest.raises(kk.KvbmValueError, match="k and v is on cuda:0, expected host memory, as the cache"):
        cache.append(on_device, on_device)
    assert len(cache) == len(flat) == 0


def test_wrong_replacements(rng):
    """A slot is one of the batch, and what goes in is a cache of the pool with a table that fits, and in no other."""
    pool = new_pool()
    first, second = (kk.KvCache.paged(pool, max_blocks=4) for _ in range(2))
    batch = kk.KvBatch([first, None])
    assert batch.max_blocks == 4
    for call, error, message in (
        (lambda: batch.replace(2, second), IndexError, "slot is 2, expected 0 to 1"),
        (lambda: batch.replace(-1, second), IndexError, "slot is -1"),
        (lambda: batch.replace("0", second), TypeError, "slot is '0', expected an integer"),
        (lambda: batch.replace(1, first), ValueError, "cache is in slot 0 already"),
        (lambda: batch.replace(1, pool), TypeError, "cache is a BlockPool, expected a paged KvCache or None"),
        (lambda: batch.replace(1, kk.KvCache.paged(new_pool())), ValueError, "cache is of another pool than the batch"),
        (lambda: batch.replace(1, kk.KvCache.paged(pool)), ValueError, "cache has a table of 12 blocks, expected at"),
        (lambda: kk.KvBatch([first], max_blocks=3), ValueError, r"caches\[0\] has a table of 4 blocks, expected at"),
        (lambda: kk.KvBatch([None]), ValueError, "caches has only None, expected a cache, or a pool as well"),
        (lambda: kk.KvBatch([first], pool=3), TypeError, "pool is an int, expected a BlockPool"),
        (lambda: kk.KvBatch([None, first], pool=new_pool()), ValueError, r"caches\[1\] is of another pool"),
        (lambda: batch.tables(5), ValueError, "max_blocks is 5, expected at most 4, the batch's own"),
    ):
        with pytest.raises(error, match=message):
            call()
        assert batch.caches == (first, None)
    assert kk.KvBatch([None], pool=pool).block_table.shape == (1, 12)
    k, v = some(rng, 3), some(rng, 3)
    with pytest.raises(kk.KvbmValueError, match="k has rows for 3 tokens, expected a multiple of 2 slots"):
        batch.write(k, v)
    assert batch.replace(0, first) is first
    assert batch.csr().indptr.tolist() == [0, 0, 0]


def test_arrays_that_do_not_fit(rng):
    """A maker's tables are the host's own memory or CUDA's, and CUDA arrays need a build with CUDA."""

    class Copies(FakeCuda):
        def __init__(self):
            pass

        def zeros(self, shape, dtype):
            return super().zeros(shape, dtype).memory

        def table(self, host):
            return host.copy()

    with pytest.raises(kk.KvbmValueError, match=r"arrays\.table gave another array in host memory"):
        kk.KvCache.paged(new_pool(arrays=Copies()))
    with pytest.raises(kk.KvbmTypeError, match="arrays is an object, expected .*on, zeros, empty, view and table"):
        new_pool(arrays=object())
    with pytest.raises(kk.KvbmError, match="cupy\", which cannot be imported|device is 'here', expected the number of"):
        new_pool(arrays="cupy", device="here")
    if kk.is_stub_build():
        copies = Copies()
        copies.zeros = lambda shape, dtype: FakeCuda.zeros(copies, shape, dtype)
        with pytest.raises(kk.StubBuildError, match="arrays are in CUDA memory"):
            new_pool(arrays=copies)
