"""Caches wherever their arrays are: NumPy's, arrays that say they are in CUDA memory, on a GPU PyTorch's and CuPy's.

Contents and tables are compared with plain NumPy bit for bit; quantised rows with the definition in reference.py.
"""

from __future__ import annotations

import gc

import numpy as np
import pytest

import kvbm_kernels as kk
import reference
from kv_held import FLOATS, Held, HeldSlots
from kv_places import ON_GPU, PLACES
from kv_support import BS, HD, NH, NL, contiguous, new_pool, some

MARKERS = [kk.KvFp32, kk.KvFp16, kk.KvBf16, kk.KvInt8, kk.KvFp8]


@pytest.fixture(params=["numpy", "fake cuda", *ON_GPU])
def place(request):
    made = PLACES[request.param]()
    yield made
    made.close()


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
    slots = HeldSlots(place, pool)
    batch = slots.batch
    table, lens = batch.block_table, batch.context_lens
    slots.enter(rng, 0, 3)
    slots.enter(rng, 2, 8)
    for step in range(2 * BS):
        if step == 3:
            slots.enter(rng, 3, 0)
        if step == 5:
            slots.enter(rng, 0, 6)
        if step == 6:
            slots.leave(2)
        n = 1 + step % 2
        k, v = slots.given(rng, n)
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
        slots.check()
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
