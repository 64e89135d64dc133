"""A pool is arrays that a kernel can read, blocks that views can name, and one block that stands for none."""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np
import pytest

import kvbm_kernels as kk
import reference


def small(**changes):
    return kk.BlockPool(**{**dict(num_blocks=6, block_size=4, num_layers=3, num_kv_heads=2, head_dim=8), **changes})


@pytest.mark.parametrize(
    ("marker", "name", "nbytes", "dtype"),
    [
        (kk.KvFp32, "fp32", 4, np.float32),
        (kk.KvFp16, "fp16", 2, np.float16),
        (kk.KvBf16, "bf16", 2, ml_dtypes.bfloat16),
    ],
)
def test_markers_select_the_storage(marker, name, nbytes, dtype):
    """The marker says how elements are stored, and what they are called."""
    pool = small(kv_dtype=marker)
    assert (marker.NAME, marker.BYTES_PER_ELEM) == (name, nbytes)
    assert pool.k.dtype == pool.v.dtype == dtype
    assert pool.kv_dtype is marker
    assert pool.block_shape == kk.BlockShape(3, 2, 2, 4, 8, name)


def test_without_ml_dtypes_there_are_bits(monkeypatch, rng):
    """NumPy alone has no bf16 and no fp8: their bits are then in integers, and rows go in and come out as those."""
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    cache = kk.KvCache.paged(small(kv_dtype=kk.KvBf16))
    bits = rng.integers(0, 1 << 16, (3, 5, 2, 8)).astype(np.uint16)
    cache.append(bits, bits)
    assert cache.k.dtype == np.uint16
    reference.assert_same_bytes(cache.gather()[0], bits)
    quantised = kk.KvCache.paged(small(kv_dtype=kk.KvFp8))
    quantised.append(np.ones((3, 5, 2, 8), np.float16), np.ones((3, 5, 2, 8), np.float16))
    assert quantised.k.dtype == np.uint8
    assert (quantised.gather(dtype="bf16")[1] == 0x3F80).all()


@pytest.mark.parametrize("wrong", ["fp16", np.float16, kk.KvDtype, kk.KvFp16()])
def test_other_markers_are_refused(wrong):
    """A name or a dtype is no marker."""
    with pytest.raises(kk.KvbmTypeError, match="kv_dtype is .*, expected KvFp32"):
        small(kv_dtype=wrong)


@pytest.mark.parametrize(("layout", "inner"), [("HND", (2, 4)), ("NHD", (4, 2))])
def test_arrays_are_laid_out_as_documented(layout, inner):
    """A layer of K is [num_blocks, num_kv_heads, block_size, head_dim], tokens first in NHD; V has its own rows."""
    pool = small(layout=layout, v_head_dim=5)
    assert pool.k.shape == (3, 6, *inner, 8)
    assert pool.v.shape == (3, 6, *inner, 5)
    assert pool.layout is kk.Layout[layout]
    assert (pool.num_blocks, pool.num_layers, pool.num_kv_heads, pool.head_dim, pool.v_head_dim) == (6, 3, 2, 8, 5)


def test_behind_every_layer_lies_the_null_block():
    """A kernel that follows a padded entry of a table reads memory of the pool that no block owns."""
    pool = small()
    assert pool.null_block == pool.num_blocks == 6
    strides = pool.k.strides
    assert strides[0] == (pool.num_blocks + 1) * strides[1]


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_blocks_are_a_block_stack(layout, rng):
    """pool.blocks(ids) names these blocks, K and V as outer index 0 and 1, for every conversion there is."""
    pool = small(layout=layout)
    pool.k[...] = rng.random(pool.k.shape)
    pool.v[...] = rng.random(pool.v.shape)
    kv = np.stack([pool.k, pool.v], 2)[:, [4, 1]].swapaxes(0, 1)  # [nb, nl, no, ...]
    kv = kv if layout == "NHD" else kv.swapaxes(3, 4)
    saved = np.zeros((2, 2, 3, 2, 4, 8), np.float16)
    kk.copy_blocks(kk.UniversalBlocks(saved, pool.block_shape), pool.blocks([4, 1]))
    reference.assert_same_bytes(saved, reference.universal(kv))
    assert len(pool.blocks()) == 6
    assert pool.blocks().layout is pool.layout
    assert pool.blocks(of="v").shape.no == 1


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint32])
def test_tables_of_any_integer_type_name_blocks(dtype):
    """A block table is taken as it is; floats, and the null block, are not."""
    pool = small()
    assert pool.blocks(np.array([5, 0], dtype)).geometry.ids.tolist() == [5, 0]
    with pytest.raises(kk.KvbmIndexError, match="block id 6"):
        pool.blocks(np.array([0, 6], dtype))
    with pytest.raises(kk.KvbmTypeError, match="float64"):
        pool.blocks(np.array([1.0]))


def test_different_head_dimensions_have_no_common_view():
    """K and V of different head dimension are two views, and asking for one says so."""
    pool = small(v_head_dim=6)
    with pytest.raises(kk.KvbmValueError, match='of is "kv", expected "k" or "v": .* 8 elements and rows of V 6'):
        pool.blocks([0])
    assert pool.blocks([0], of="k").shape.hd == 8
    assert pool.blocks([0], of="v").shape.hd == 6
    with pytest.raises(kk.KvbmValueError, match="of is 'kvs'"):
        pool.blocks([0], of="kvs")
    with pytest.raises(kk.KvbmTypeError, match="of is 0"):
        pool.blocks([0], of=0)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_blocks": 0}, ValueError, "num_blocks is 0, expected 1 or more"),
        ({"block_size": 0}, ValueError, "block_size is 0"),
        ({"num_layers": 1.0}, TypeError, "num_layers is 1.0, expected an integer"),
        ({"num_kv_heads": -1}, ValueError, "num_kv_heads is -1"),
        ({"head_dim": 0}, ValueError, "head_dim is 0"),
        ({"v_head_dim": 0}, ValueError, "v_head_dim is 0"),
        ({"layout": "DHN"}, ValueError, "layout is 'DHN'"),
        ({"arrays": "tensorflow"}, ValueError, "arrays is 'tensorflow'"),
        ({"arrays": 3}, TypeError, "arrays is an int"),
        ({"device": "cuda"}, ValueError, "device is 'cuda', expected None with arrays=\"numpy\""),
    ],
)
def test_wrong_arguments_are_named(changes, error, message):
    """Every error says which argument, what it was, and what was expected."""
    with pytest.raises(error, match=message) as raised:
        small(**changes)
    assert isinstance(raised.value, kk.KvbmError)


def test_arrays_of_torch(torch):
    """With arrays="torch", everything a kernel reads is a tensor."""
    pool = small(arrays="torch", kv_dtype=kk.KvBf16)
    assert pool.k.dtype == torch.bfloat16
    cache = kk.KvCache.paged(pool, max_blocks=3)
    k = torch.rand(3, 5, 2, 8).to(torch.bfloat16)
    cache.append(k, k + 1)
    assert torch.equal(cache.gather()[0], k)
    assert torch.equal(cache.gather(2)[1], k[2] + 1)
    assert cache.block_table.tolist() == [0, 1, 6]
    assert cache.context_lens.tolist() == [5]
    assert (cache.block_table.dtype, cache.context_lens.dtype) == (torch.uint32, torch.uint32)
    assert cache.csr().indices.dtype == torch.int32
    with pytest.raises(kk.KvbmValueError, match="device is 'nowhere'"):
        small(arrays="torch", device="nowhere")


def test_arrays_of_the_callers_making():
    """An object with the five methods of an array maker gives the arrays: of shared memory, say."""
    made = []

    class Maker(type(small().rows.arrays)):
        def zeros(self, shape, dtype):
            made.append((shape, dtype))
            return super().zeros(shape, dtype)

    small(arrays=Maker())
    assert made == [((3, 7, 2, 4, 8), kk.DType.F16)] * 2


@pytest.mark.parametrize("arrays", ["numpy", "torch"])
@pytest.mark.parametrize("block_size", [1 << 30, 1 << 60])
def test_more_memory_than_there_is(arrays, block_size):
    """A pool that memory cannot hold says how large it would be."""
    if arrays == "torch":
        pytest.importorskip("torch")
    with pytest.raises(kk.KvbmMemoryError, match="bytes for K and V with num_layers = 3, num_kv_heads = 2, head_dim"):
        small(arrays=arrays, block_size=block_size, num_blocks=1 << 20)


@pytest.mark.parametrize("max_blocks", [1 << 50, 1 << 62])
def test_a_longer_table_than_there_is_memory_for(max_blocks):
    with pytest.raises(kk.KvbmMemoryError, match=f"max_blocks is {max_blocks}: {4 * max_blocks} bytes for the table"):
        kk.KvCache.paged(small(), max_blocks=max_blocks)


def test_repr():
    """A pool says how full it is."""
    pool = small()
    pool.allocator.allocate(2)
    assert repr(pool) == "<BlockPool: 2 of 6 blocks of 4 tokens used, 3 layers, fp16, HND>"
    assert pool.num_free == 4
