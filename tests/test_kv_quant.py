"""int8 and fp8: every number is stored as defined, and no scale is ever without its row or a row without its scale."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import kvbm_kernels as kk
import reference
from kv_quant_definition import MARKERS, expected, rows, same
from kv_support import BS, HD, NH, NL, check_tables, new_pool, state

INPUTS = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}


def caches(marker, scale_dtype):
    yield kk.KvCache.paged(new_pool(kv_dtype=marker, scale_dtype=scale_dtype))
    yield kk.KvCache.paged(new_pool(kv_dtype=marker, scale_dtype=scale_dtype, layout="NHD"))
    yield kk.KvCache.contiguous(
        num_layers=NL,
        num_kv_heads=NH,
        head_dim=HD,
        capacity=40,
        initial_capacity=4,
        kv_dtype=marker,
        scale_dtype=scale_dtype,
    )


@pytest.mark.parametrize("marker", MARKERS)
@pytest.mark.parametrize("scale_dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("name", INPUTS)
def test_rows_are_stored_as_defined(rng, marker, scale_dtype, name):
    """Prefill and decode, from each type of input: stored values, scales and what is read equal the definition."""
    k, v = rows(rng, 11, INPUTS[name]), rows(rng, 11, INPUTS[name])
    for cache in caches(marker, scale_dtype):
        cache.append(k[:, :9], v[:, :9])
        for i in range(NL):
            cache.append(k[i, 9:10].swapaxes(0, 1), v[i, 9:10].swapaxes(0, 1), layer=i, order="HND")
        cache.append(k[:, :0], v[:, :0])
        cache.append(k[:, 10:], v[:, 10:])
        for given, back in zip((k, v), cache.gather(), strict=True):
            wanted = expected(given, marker, scale_dtype)[2]
            assert back.dtype == np.float32
            same(back, wanted)
        same(cache.gather(1, order="HND")[0], expected(k, marker, scale_dtype)[2][1].swapaxes(0, 1))
        if cache.block_size:
            check_tables(cache)


@pytest.mark.parametrize("marker", MARKERS)
def test_fields_are_values_and_scales(rng, marker):
    """k holds the stored values of a byte and k_scales the number to multiply each row by, both where the rows lie."""
    k, v = rows(rng, 6), rows(rng, 6)
    for cache in caches(marker, None):
        cache.append(k, v)
        for layer in range(NL):
            one = cache.layer(layer)
            for given, array, scales in ((k, one.k, one.k_scales), (v, one.v, one.v_scales)):
                stored, wanted, _ = expected(given[layer], marker, "fp32")
                assert array.dtype == {"int8": np.int8, "fp8": ml_dtypes.float8_e4m3fn}[marker.NAME]
                assert array.dtype.itemsize == marker.BYTES_PER_ELEM
                assert scales.shape == array.shape[:-1]
                assert scales.dtype == np.float32
                if cache.block_size == 0:
                    found, found_scales = array[:, :6].swapaxes(0, 1), scales[:, :6].swapaxes(0, 1)
                else:
                    slots = cache.slot_mapping(0, 6)
                    at = (slots // BS, slice(None), slots % BS)
                    at = at if cache.pool.layout is kk.Layout.HND else (slots // BS, slots % BS)
                    found, found_scales = array[at], scales[at]
                same(found.astype(np.float32), stored)
                same(found_scales, wanted)


@pytest.mark.parametrize("marker", MARKERS)
@pytest.mark.parametrize("scale_dtype", ["fp32", "fp16"])
def test_zeros_are_exact(marker, scale_dtype):
    """A row of zeros, or of numbers too small for a scale, reads back as zeros."""
    tiny = 1e-45 if scale_dtype == "fp32" else 1e-7
    for value in (0.0, -0.0, tiny):
        x = np.full((NL, 3, NH, HD), value, np.float32)
        for cache in caches(marker, scale_dtype):
            cache.append(x, x)
            assert not cache.gather()[0].any()


@pytest.mark.parametrize("marker", MARKERS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_reads_back_as_nan(rng, marker, bad):
    """NaN or infinity anywhere in a row makes all of it NaN, and no other row."""
    k = rows(rng, 6)
    k[1, 4, 1, 3] = bad
    for cache in caches(marker, None):
        cache.append(k, k)
        found = cache.gather()[0]
        assert np.isnan(found[1, 4, 1]).all()
        assert np.isnan(found).sum() == HD
        same(found, expected(k, marker, "fp32")[2])


@pytest.mark.parametrize("marker", MARKERS)
def test_the_largest_number_stays_the_largest(rng, marker):
    """The largest magnitude of a row reads back to the last bits, and nothing is off by more than half a step."""
    x = rng.standard_normal((NL, 40, NH, HD)).astype(np.float32)
    cache = kk.KvCache.paged(new_pool(kv_dtype=marker))
    cache.append(x, x)
    back = cache.gather()[0]
    amax = np.abs(x).max(-1, keepdims=True)
    np.testing.assert_allclose(np.abs(back).max(-1, keepdims=True), amax, rtol=1e-6)
    step = amax / 127 if marker is kk.KvInt8 else np.maximum(np.abs(x) / 8, amax / 448 * 2.0**-8)
    assert (np.abs(back - x) <= step / 2 * 1.0001).all()


def test_every_fp8_code_is_kept():
    """All 254 finite numbers of E4M3 pass through unchanged when the scale is 1, and ties go to the even code."""
    codes = np.arange(256, dtype=np.uint8)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    finite = values[np.isfinite(values)]
    between = (np.sort(finite)[1:] + np.sort(finite)[:-1]) / 2
    x = np.concatenate(
        [finite, between, np.nextafter(between, np.float32(1e9)), np.nextafter(between, np.float32(-1e9))]
    )
    cache = kk.KvCache.contiguous(num_kv_heads=1, head_dim=len(x), capacity=1, kv_dtype=kk.KvFp8)
    cache.append(x[None, None], x[None, None])
    assert cache.k_scales[0, 0] == 1
    same(cache.gather()[0][0, 0], x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))


@pytest.mark.parametrize("name", INPUTS)
def test_numbers_are_given_as_asked(rng, name):
    """gather gives float32, float16 or bfloat16, each rounded to nearest even."""
    x = rows(rng, 5)
    cache = kk.KvCache.paged(new_pool(kv_dtype=kk.KvInt8))
    cache.append(x, x)
    with np.errstate(over="ignore"):
        wanted = cache.gather()[0].astype(INPUTS[name])
    found = cache.gather(dtype=name)[0]
    assert found.dtype == INPUTS[name]
    reference.assert_same_bytes(found, wanted)
    with pytest.raises(kk.KvbmValueError, match="dtype is 'int8', expected \"fp32\""):
        cache.gather(dtype="int8")
    plain = kk.KvCache.paged(new_pool())
    assert plain.gather(dtype="fp16")[0].dtype == np.float16
    with pytest.raises(kk.KvbmValueError, match="dtype is 'bf16', expected None or fp16"):
        plain.gather(dtype="bf16")


@pytest.mark.parametrize("marker", MARKERS)
@pytest.mark.parametrize("scale_dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_scales_travel_with_their_rows(rng, marker, scale_dtype, layout):
    """Saved as universal blocks, split among two ranks, and restored: values and scales are those that were saved."""
    pool = new_pool(kv_dtype=marker, scale_dtype=scale_dtype, layout=layout)
    cache = kk.KvCache.paged(pool)
    k, v = rows(rng, 6), rows(rng, 6)
    cache.append(k, v)
    shape = pool.block_shape
    assert shape.hd == HD + {"fp32": 4, "fp16": 2}[scale_dtype]
    saved = kk.UniversalBlocks(np.zeros((2, NH, NL, 2, BS, shape.hd), np.uint8), shape)
    kk.copy_blocks(saved, cache.blocks())
    before = [a.copy() for a in cache.gather()]
    cache.truncate(0)
    pool.allocator.allocate(3)
    cache.restore(saved, 6)
    for found, wanted in zip(cache.gather(), before, strict=True):
        reference.assert_same_bytes(found, wanted)
    rank = kk.BlockPool(4, BS, NL, 1, HD, kv_dtype=marker, scale_dtype=scale_dtype)
    part = kk.KvCache.paged(rank)
    part.restore(saved.shard(1, 2), 6)
    reference.assert_same_bytes(part.gather()[0], before[0][:, :, 1:])


def test_an_import_without_scales_is_refused(rng):
    """Blocks of bare values do not fit, nor do those of another scale or another kind; nothing changes."""
    pool = new_pool(kv_dtype=kk.KvInt8)
    cache = kk.KvCache.paged(pool)
    for hd, dtype, error in ((HD, "int8", ValueError), (HD + 2, "int8", ValueError), (HD + 4, "fp8_e4m3", TypeError)):
        bare = kk.UniversalBlocks(np.zeros((2, NH, NL, 2, BS, hd), np.uint8), kk.BlockShape(NL, 2, NH, BS, hd, dtype))
        before = state(cache)
        with pytest.raises(error, match="expected the same"):
            cache.restore(bare, 6)
        with pytest.raises(error, match="expected the same"):
            kk.copy_blocks(bare, pool.blocks([0, 1]))
        assert state(cache) == before


def test_forks_batches_and_growth_keep_scales(rng):
    """A copied tail, a step of several sequences, and a grown array have the scales too."""
    pool = new_pool(kv_dtype=kk.KvFp8)
    cache = kk.KvCache.paged(pool)
    x = rows(rng, 8)
    cache.append(x[:, :6], x[:, :6])
    fork = cache.fork()
    kk.KvBatch([cache, fork]).append(x[:, 6:], x[:, 6:])
    wanted = expected(x, kk.KvFp8, "fp32")[2]
    same(cache.gather()[1], wanted[:, :7])
    same(fork.gather()[1], wanted[:, [0, 1, 2, 3, 4, 5, 7]])


@pytest.mark.parametrize("hd", [1, 3, 5, 6])
@pytest.mark.parametrize("scale_dtype", ["fp32", "fp16"])
def test_odd_head_dimensions(rng, hd, scale_dtype):
    """A scale is on an address of its size whatever the head dimension; padding does not matter."""
    pool = new_pool(head_dim=hd, v_head_dim=hd + 1, kv_dtype=kk.KvInt8, scale_dtype=scale_dtype)
    cache = kk.KvCache.paged(pool)
    k, v = rows(rng, 6, hd=hd), rows(rng, 6, hd=hd + 1)
    cache.append(k, v)
    for given, found in zip((k, v), cache.gather(), strict=True):
        same(found, expected(given, kk.KvInt8, scale_dtype)[2])
    itemsize = {"fp32": 4, "fp16": 2}[scale_dtype]
    assert pool.k_scales.ctypes.data % itemsize == 0
    assert all(stride % itemsize == 0 for stride in pool.k_scales.strides)


def test_any_strides_are_read(rng):
    """Input need not be contiguous, as long as rows are; those are refused by name."""
    x = rows(rng, 10, hd=2 * HD)
    odd = x[::-1, ::-2, ::-1, 3 : HD + 3]
    cache = kk.KvCache.paged(new_pool(kv_dtype=kk.KvInt8))
    cache.append(odd, odd.swapaxes(1, 2).copy().swapaxes(1, 2))
    for found in cache.gather():
        same(found, expected(odd.copy(), kk.KvInt8, "fp32")[2])
    with pytest.raises(kk.KvbmValueError, match="k has the elements of a row 8 bytes apart, expected 4"):
        cache.append(x[..., ::2], x[..., ::2])


def test_keys_and_values_of_different_types(rng):
    """K may come as float32 and V as float16."""
    k, v = rows(rng, 5), rows(rng, 5, np.float16)
    for cache in caches(kk.KvInt8, None):
        cache.append(k, v)
        for given, found in zip((k, v), cache.gather(), strict=True):
            same(found, expected(given, kk.KvInt8, "fp32")[2])


def test_tensors(rng, torch):
    """Tensors of PyTorch go in and come out."""
    pool = new_pool(kv_dtype=kk.KvFp8, arrays="torch")
    cache = kk.KvCache.paged(pool)
    x = torch.from_numpy(rows(rng, 6)).to(torch.bfloat16)
    cache.append(x, x)
    wanted = expected(x.float().numpy(), kk.KvFp8, "fp32")[2]
    found = cache.gather(dtype="bf16")[0]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, torch.from_numpy(wanted).to(torch.bfloat16))
    assert pool.k.dtype == torch.float8_e4m3fn
    assert pool.k_scales.dtype == torch.float32
    assert pool.k_scales.shape == pool.k.shape[:-1]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x: x.astype(np.float64), TypeError, "k has dtype float64, expected f32, f16 or bf16"),
        (lambda x: x.astype(np.float16).view(np.uint16), TypeError, "k has dtype uint16, expected f32, f16 or bf16"),
        (lambda x: x[..., :7], ValueError, r"k has shape \[3, 2, 2, 7\], expected \[num_layers, n, num_kv_heads"),
        (lambda x: x[:, :1], ValueError, "v has 2 tokens, expected 1 as k"),
        (lambda x: None, TypeError, "k is a NoneType"),
    ],
)
def test_wrong_input_changes_nothing(rng, change, error, message):
    """What cannot be quantised is refused by name."""
    x = rows(rng, 2)
    for cache in caches(kk.KvInt8, None):
        cache.append(x, x)
        before = state(cache)
        with pytest.raises(error, match=message):
            cache.append(change(x), x)
        assert state(cache) == before


def test_wrong_arguments():
    """Scales are for quantised caches, float32 or float16; values are no plain numbers to view."""
    with pytest.raises(kk.KvbmValueError, match='scale_dtype is \'bf16\', expected "fp32" or "fp16"'):
        new_pool(kv_dtype=kk.KvInt8, scale_dtype="bf16")
    with pytest.raises(kk.KvbmValueError, match="scale_dtype is 'fp32', expected None: KvFp16 has no scales"):
        new_pool(scale_dtype="fp32")
    for cache in caches(kk.KvFp8, None):
        with pytest.raises(kk.KvbmValueError, match="view: rows of fp8 have to be multiplied"):
            cache.view()
    assert new_pool().k_scales is None
    assert kk.KvCache.paged(new_pool()).layer(0).v_scales is None
    assert kk.KvCache.contiguous(num_kv_heads=1, head_dim=1, capacity=1).k_scales is None
    assert (kk.KvInt8.NAME, kk.KvInt8.BYTES_PER_ELEM) == ("int8", 1)
    assert (kk.KvFp8.NAME, kk.KvFp8.BYTES_PER_ELEM) == ("fp8", 1)


@pytest.mark.parametrize("scale_dtype", [None, "fp16"])
@pytest.mark.parametrize("marker", [kk.KvInt8, kk.KvFp8])
def test_extreme_numbers_warn_of_nothing(marker, scale_dtype):
    """Whatever NumPy is set to say of overflow."""
    rows = np.zeros((NL, 8, NH, HD), np.float32)
    for i, number in enumerate([3.4e38, -3.4e38, np.finfo(np.float32).max, 1e-45, 1e-38, np.inf, np.nan, 7e4]):
        rows[:, i, :, 0] = number
    with np.errstate(all="raise"):
        for cache in caches(marker, scale_dtype):
            cache.append(rows[: cache.num_layers], rows[: cache.num_layers])
            found, _ = cache.gather()
            assert np.isnan(found[:, 6]).all()
