"""A cache gives back the rows it was given, wherever they lie, and a call that fails changes nothing."""

from __future__ import annotations

import weakref

import ml_dtypes
import numpy as np
import pytest

import kvbm_kernels as kk
import reference
from kv_support import BS, HD, NH, NL, check, check_tables, contiguous, new_pool, pair, some, state


@pytest.fixture(params=["HND", "NHD", "contiguous"])
def make(request):
    """Makes an empty cache; a paged one has the pool for itself."""

    def make(**changes):
        if request.param == "contiguous":
            return contiguous(**changes)
        return kk.KvCache.paged(new_pool(layout=request.param, **changes), max_blocks=10)

    return make


@pytest.fixture
def pool():
    return new_pool()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_rows_come_back_bit_for_bit(make, rng, dtype):
    """Prefill, decode, and prefill again over block boundaries: every bit is as it was given."""
    marker = {2: kk.KvFp16, 4: kk.KvFp32}[np.dtype(dtype).itemsize]
    cache = make(kv_dtype=kk.KvBf16 if dtype is ml_dtypes.bfloat16 else marker)
    k, v = some(rng, 0, dtype=dtype), some(rng, 0, dtype=dtype)
    check(cache, k, v)
    for n in (5, 1, 1, 1, 1, 0, 10, 4, 3):
        more_k, more_v = some(rng, n, dtype=dtype), some(rng, n, dtype=dtype)
        cache.append(more_k, more_v)
        k, v = np.concatenate([k, more_k], 1), np.concatenate([v, more_v], 1)
        check(cache, k, v)


@pytest.mark.parametrize("first", range(2 * BS + 1))
@pytest.mark.parametrize("second", range(2 * BS + 2))
def test_every_place_of_a_block_boundary(rng, first, second):
    """Whatever part of a block is filled, any number of tokens goes on from there and takes no block too many."""
    cache = kk.KvCache.paged(new_pool())
    k, v = pair(rng, first + second)
    cache.append(k[:, :first], v[:, :first])
    cache.append(k[:, first:], v[:, first:])
    check(cache, k, v)
    assert len(cache.paged_block_indices) == -(-(first + second) // BS)


@pytest.mark.parametrize("order", ["NHD", "HND"])
@pytest.mark.parametrize("by_layer", [False, True])
def test_orders_and_layers(make, rng, order, by_layer):
    """Rows are taken tokens first or heads first, all layers at once or one by one."""
    cache = make()
    k, v = pair(rng, 7)
    given_k, given_v = (a if order == "NHD" else a.swapaxes(1, 2).copy() for a in (k, v))
    if by_layer:
        for i in (1, 0, 2):
            cache.append(given_k[i], given_v[i], layer=i, order=order)
    else:
        cache.append(given_k, given_v, order=order)
    check(cache, k, v)


def test_the_length_moves_with_the_last_layer(make, rng):
    """Between the layers of a step, a layer that has its rows shows them, and the cache has not moved."""
    cache = make()
    k, v = pair(rng, 6)
    cache.append(k[:, :2], v[:, :2])
    for i in range(NL):
        assert len(cache) == 2
        layer = cache.layer(i)
        layer.append(k[i, 2:], v[i, 2:])
        assert len(layer) == layer.len == 6
        reference.assert_same_bytes(layer.gather()[0], k[i])
        if cache.block_size:
            assert layer.context_lens.tolist() == [6]
            assert cache.context_lens.tolist() == [2 if i < NL - 1 else 6]
            check_tables(cache)
    check(cache, k, v)


def test_an_unfinished_step_is_finished_or_dropped(make, rng):
    """All layers at once needs layers of one length, and says which is behind; truncate drops what is ahead."""
    cache = make()
    k, v = pair(rng, 6)
    cache.append(k[:, :5], v[:, :5])
    cache.append(k[0, 5:], v[0, 5:], layer=0)
    before = state(cache)
    with pytest.raises(kk.KvbmValueError, match="append .*: layer 1 has 5 tokens and layer 0 6"):
        cache.append(k, v)
    with pytest.raises(kk.KvbmValueError, match="layer 1 has 5 tokens"):
        cache.advance(1)
    if cache.block_size:
        with pytest.raises(kk.KvbmValueError, match="fork: layer 1 has 5 tokens"):
            cache.fork()
    assert state(cache) == before
    cache.truncate(5)
    cache.append(k[:, 5:], v[:, 5:])
    check(cache, k, v)


def test_different_head_dimensions(make, rng):
    """Rows of V may be shorter than those of K."""
    cache = make(v_head_dim=5)
    k, v = some(rng, 11), some(rng, 11, 5)
    cache.append(k[:, :6], v[:, :6])
    for i in range(NL):
        cache.append(k[i, 6:], v[i, 6:], layer=i)
    check(cache, k, v)
    assert (cache.head_dim, cache.v_head_dim) == (8, 5)
    with pytest.raises(kk.KvbmValueError, match=r"v has shape \[3, 1, 2, 8\], expected .*v_head_dim\] = .*5\]"):
        cache.append(some(rng, 1), some(rng, 1))


def test_k_and_v_may_lie_differently(make, rng):
    """K in one order of memory and V in another, as after a rotary embedding, is still one append."""
    cache = make()
    k, v = pair(rng, 9)
    cache.append(k, v.swapaxes(1, 2).copy().swapaxes(1, 2))
    check(cache, k, v)


def test_rows_repeated_by_strides(make, rng):
    """An array that repeats itself through strides of 0 is read like any other."""
    cache = make()
    row = some(rng, 1)
    many = np.broadcast_to(row, (NL, 6, NH, HD))
    cache.append(many, many)
    check(cache, many.copy(), many.copy())


def test_rows_are_not_kept(make, rng):
    """Where rows lie is remembered for the next step, the rows are not; others at the same address are others."""
    cache = make()
    k, v = pair(rng, 3)
    given = k.copy()
    alive = weakref.ref(given)
    cache.append(given, given)
    expected = [k]
    given[...] = v
    expected.append(v)
    cache.append(given, given)
    cache.append(given[:, :2], given[:, :2])
    expected.append(v[:, :2])
    del given
    assert alive() is None
    rows = np.concatenate(expected, 1)
    check(cache, rows, rows)


def test_tensors_are_taken_too(make, rng, torch):
    """NumPy's caches take tensors of PyTorch, bf16 among them."""
    cache = make(kv_dtype=kk.KvBf16)
    k, v = (torch.rand(NL, 6, NH, HD).to(torch.bfloat16) for _ in range(2))
    cache.append(k, v)
    check(cache, *(a.view(torch.int16).numpy().view(ml_dtypes.bfloat16) for a in (k, v)))
    raw = k.view(torch.uint16).numpy()
    cache.append(raw, raw)
    assert len(cache) == 12


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda k: k[0], ValueError, r"k has shape \[2, 2, 8\], expected \[num_layers, n, num_kv_heads, head_dim\]"),
        (lambda k: k[:2], ValueError, r"k has shape \[2, 2, 2, 8\], expected .* = \[3, any, 2, 8\]"),
        (lambda k: k[..., :7], ValueError, r"k has shape \[3, 2, 2, 7\]"),
        (lambda k: k[:, :, :1], ValueError, r"k has shape \[3, 2, 1, 8\]"),
        (lambda k: k[:, :1], ValueError, "v has 2 tokens, expected 1 as k"),
        (lambda k: k.astype(np.float32), TypeError, "k has dtype float32, expected f16"),
        (lambda k: k.view(ml_dtypes.bfloat16), TypeError, "k has dtype bfloat16, expected f16"),
        (lambda k: np.repeat(k, 2, 3)[..., ::2], ValueError, "k has the elements of a row 4 bytes apart"),
        (lambda k: 3, TypeError, "k is an int, expected an array"),
        (lambda k: None, TypeError, "k is a NoneType"),
    ],
)
def test_a_wrong_append_changes_nothing(make, rng, change, error, message):
    """What is no K or V of this cache is refused by name, and leaves no trace."""
    cache = make()
    cache.append(*pair(rng, 5))
    before = state(cache)
    k, v = pair(rng, 2)
    with pytest.raises(error, match=message) as raised:
        cache.append(change(k), v)
    assert isinstance(raised.value, kk.KvbmError)
    assert state(cache) == before


def test_other_wrong_arguments(make, rng):
    """Layers, orders and counts are checked."""
    cache = make()
    k, v = pair(rng, 2)
    cache.append(k, v)
    before = state(cache)
    for call, error, message in (
        (lambda: cache.append(k[0], v[0], layer=3), IndexError, "layer is 3, expected 0 to 2"),
        (lambda: cache.append(k[0], v[0], layer=-1), IndexError, "layer is -1"),
        (lambda: cache.append(k[0], v[0], layer="0"), TypeError, "layer is '0'"),
        (lambda: cache.append(k, v, order="DHN"), ValueError, "order is 'DHN'"),
        (lambda: cache.layer(3), IndexError, "layer is 3"),
        (lambda: cache.gather(5), IndexError, "layer is 5"),
        (lambda: cache.truncate(3), ValueError, "n is 3, expected at most the length, 2"),
        (lambda: cache.truncate(-1), ValueError, "n is -1"),
        (lambda: cache.reserve(1.5), TypeError, "n is 1.5"),
    ):
        with pytest.raises(error, match=message) as raised:
            call()
        assert isinstance(raised.value, kk.KvbmError)
        assert state(cache) == before


def test_a_cache_fed_from_itself_is_refused_where_it_overlaps(make, rng):
    """Rows that would be written while they are read are refused, and the room made for them is given back."""
    cache = make()
    cache.append(*pair(rng, 2))
    cache.reserve(2)
    before = state(cache)
    layer = cache.layer(0)
    inside = layer.k[..., 1:3, :].swapaxes(-3, -2) if not cache.block_size else layer.k[cache.paged_block_indices[0]]
    if cache.block_size and cache.pool.layout is kk.Layout.HND:
        inside = inside.swapaxes(0, 1)
    with pytest.raises(kk.KvbmValueError, match="overlap"):
        layer.append(inside, inside)
    assert state(cache)[:3] == before[:3]
    assert len(cache.paged_block_indices) == (1 if cache.block_size else 0)


def test_append_past_the_capacity(make, rng):
    """At the end of the capacity, an append raises with the numbers and changes nothing; one that fits goes through."""
    cache = make()
    k, v = pair(rng, 41)
    cache.append(k[:, :39], v[:, :39])
    before = state(cache)
    for call in (lambda: cache.append(k[:, 39:], v[:, 39:]), lambda: cache.reserve(2)):
        with pytest.raises(kk.CapacityError, match="41 tokens are needed and the capacity is 40") as raised:
            call()
        assert (raised.value.needed, raised.value.capacity) == (41, 40)
        assert isinstance(raised.value, ValueError)
        assert state(cache) == before
    cache.append(k[:, 39:40], v[:, 39:40])
    check(cache, k[:, :40], v[:, :40])
    cache.append(k[:, :0], v[:, :0])
    check(cache, k[:, :40], v[:, :40])


def test_reserved_room_is_there(make, rng):
    """After reserve, appending that many tokens takes nothing more; what is not used goes back with truncate."""
    cache = make()
    k, v = pair(rng, 12)
    cache.append(k[:, :2], v[:, :2])
    cache.reserve(10)
    held, capacity = cache.paged_block_indices, cache.capacity
    assert len(cache) == 2
    cache.append(k[:, 2:], v[:, 2:])
    assert (cache.paged_block_indices, cache.capacity) == (held, capacity)
    check(cache, k, v)
    if cache.block_size:
        cache.reserve(9)
        check(cache, k, v)
        assert len(cache.paged_block_indices) == 6
        cache.truncate(12)
        assert cache.paged_block_indices == held


def test_truncate_gives_blocks_back(make, rng):
    """What is cut off is gone, its blocks are free, the tables say so, and appending goes on from there."""
    cache = make()
    k, v = pair(rng, 11)
    cache.append(k, v)
    for n in (10, 8, 5, 5, 4, 1, 0):
        cache.truncate(n)
        check(cache, k[:, :n], v[:, :n])
        if cache.block_size:
            assert cache.pool.num_free == 12 - -(-n // BS)
    cache.append(v, k)
    check(cache, v, k)


def test_release(make, rng):
    """A released cache has given all back, is empty, takes nothing, and can be released again."""
    k, v = pair(rng, 6)
    with make() as cache:
        cache.append(k, v)
        cache.reserve(8)
        assert not cache.is_released
    assert cache.is_released
    assert len(cache) == 0
    if cache.block_size:
        check_tables(cache)
        assert cache.pool.num_free == 12
    cache.release()
    assert "released" in repr(cache)
    for call in (
        lambda: cache.append(k, v),
        lambda: cache.reserve(1),
        lambda: cache.truncate(0),
        lambda: cache.advance(0),
    ):
        with pytest.raises(kk.KvbmValueError, match="the cache was released"):
            call()


def test_release_happens_when_the_block_fails(pool, rng):
    """A with block gives everything back however it ends."""

    def fail():
        with kk.KvCache.paged(pool) as cache:
            cache.append(*pair(rng, 6))
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        fail()
    assert pool.num_free == 12


def test_repr(make, rng):
    """A cache says what it is and how full."""
    cache = make()
    cache.append(*pair(rng, 2))
    assert "2 of" in repr(cache)
    assert "3 layers, fp16" in repr(cache)
