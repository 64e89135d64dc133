"""Arrays of every kind are found where they are, and refused where they cannot be used."""

from __future__ import annotations

import array
import gc
import mmap
import weakref

import ml_dtypes
import numpy as np
import pytest

import kvbm_kernels as kk
from kvbm_kernels.arrays import Memory, describe, is_pinned
from memory import CudaArray, Exporter


def address(a: np.ndarray) -> int:
    return a.ctypes.data


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (np.float16, "float16"),
        (np.float64, "float64"),
        (np.uint16, "uint16"),
        (ml_dtypes.bfloat16, "bfloat16"),
        (ml_dtypes.float8_e4m3fn, "float8_e4m3fn"),
        (ml_dtypes.float8_e5m2, "float8_e5m2"),
        ("V2", "void16"),
    ],
)
def test_numpy(dtype, name):
    a = np.zeros((3, 4, 5), dtype)[:, ::2]
    found = describe(a)
    assert found.address == address(a)
    assert found.form.shape == (3, 2, 5)
    assert found.form.strides == a.strides
    assert found.form.element == (name, a.itemsize)
    assert found.form.device is None
    assert not found.readonly


def test_a_numpy_array_of_negative_strides_starts_at_its_first_element():
    a = np.arange(6)[::-1]
    assert describe(a).address == address(a)
    assert describe(a).form.strides == (-8,)


def test_a_read_only_numpy_array_is_known_as_one():
    a = np.frombuffer(b"1234", np.uint8)
    assert describe(a).readonly


def test_byte_order_is_part_of_the_element_type():
    """Bytes move as they are, so swapped floats must not pass for native ones."""
    assert describe(np.zeros(2, ">f2")).form.element.name == ">f2"


def test_torch(torch):
    t = torch.zeros(3, 4, 6, dtype=torch.bfloat16)[:, 1:, ::2]
    found = describe(t)
    assert found.address == t.data_ptr()
    assert found.form.shape == (3, 3, 3)
    assert found.form.strides == (48, 12, 4)
    assert found.form.element == ("bfloat16", 2)
    assert found.form.device is None
    assert found.form.library == "torch"


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"])
def test_torch_and_numpy_name_types_alike(torch, name):
    dtype = getattr(torch, name)
    scalar = getattr(np, name, None) or getattr(ml_dtypes, name)
    assert describe(torch.zeros(1, dtype=dtype)).form.element == describe(np.zeros(1, scalar)).form.element
    assert kk.BlockShape(1, 1, 1, 1, 1, dtype) == kk.BlockShape(1, 1, 1, 1, 1, scalar)


def test_torch_tensors_without_memory_here_are_refused(torch):
    with pytest.raises(kk.KvbmTypeError, match="device meta, expected CPU or CUDA"):
        describe(torch.zeros(2, device="meta"))
    with pytest.raises(kk.KvbmTypeError, match=r"sparse.* tensor, expected a strided one"):
        describe(torch.zeros(2, 2).to_sparse())


@pytest.mark.parametrize("make", ["_neg_view", "imag", "conj"])
def test_tensors_whose_values_are_not_in_memory_are_refused(torch, make):
    """PyTorch negates and conjugates lazily: memory has the values from before."""
    c = torch.zeros(3, dtype=torch.complex64).conj()
    tensor = {"_neg_view": torch._neg_view(torch.zeros(3)), "imag": c.imag, "conj": c}[make]
    with pytest.raises(kk.KvbmTypeError, match="lazy negative or conjugate"):
        describe(tensor)
    describe(tensor.resolve_conj().resolve_neg())


def test_tensors_larger_than_their_storage_are_refused(torch):
    whole = torch.zeros(8)
    part, odd = whole[4:], whole[::2]
    storage = whole.untyped_storage()
    storage.resize_(16)
    for tensor, needed in ((whole, 32), (part, 32), (odd, 28)):
        with pytest.raises(kk.KvbmValueError, match=f"needs {needed} bytes, and its storage has 16"):
            describe(tensor)
    describe(whole[:4])
    storage.resize_(0)
    for tensor in (whole, part):
        with pytest.raises(kk.KvbmTypeError, match="without memory"):
            describe(tensor)
    assert describe(whole[:0]).form.shape == (0,)
    assert describe(torch.zeros(0, 3)).form.shape == (0, 3)


def test_tensors_that_only_stand_for_others_are_refused(torch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    def refuse(tensor):
        with pytest.raises(kk.KvbmTypeError, match="without memory"):
            describe(tensor)
        return tensor

    with FakeTensorMode():
        fake = torch.zeros(4, 4)
        parts = fake, fake[1:]
    for tensor in (*parts, torch._to_functional_tensor(torch.zeros(2))):
        refuse(tensor)
    torch.vmap(refuse)(torch.zeros(3, 2))


@pytest.mark.parametrize("copies", [describe, lambda a: kk.memcpy_batch([np.zeros(3)], [a])])
def test_a_masked_array_is_refused(copies):
    with pytest.raises(kk.KvbmTypeError, match="masked array"):
        copies(np.ma.array(np.zeros(3), mask=[0, 1, 0]))


@pytest.mark.parametrize(
    "change",
    [
        {"data": None},
        {"data": 5},
        {"data": ("x", False)},
        {"data": (-1, False)},
        {"data": (1 << 64, False)},
        {"shape": None},
        {"shape": (1.5,)},
        {"shape": (-1,)},
        {"typestr": "nothing"},
        {"typestr": None},
        {"strides": 3},
        {"strides": (2, 2)},
        {"strides": ("a",)},
    ],
    ids=repr,
)
def test_a_malformed_cuda_array_interface_is_refused(change):
    wrong = CudaArray((2,))
    wrong.__cuda_array_interface__.update(change)
    with pytest.raises(kk.KvbmError, match="__cuda_array_interface__"):
        describe(wrong)
    for interface in ({}, [], 3):
        wrong.__cuda_array_interface__ = interface
        with pytest.raises(kk.KvbmTypeError, match="malformed __cuda_array_interface__"):
            describe(wrong)


def test_a_cuda_array_interface_that_fails_is_a_type_error():
    class Failing:
        @property
        def __cuda_array_interface__(self):
            raise RuntimeError("not now")

    with pytest.raises(kk.KvbmTypeError, match="fails: not now"):
        describe(Failing())


def test_cuda_array_interface():
    found = describe(CudaArray((2, 3), "<f2", address=4096, readonly=True))
    assert found.address == 4096
    assert found.form.shape == (2, 3)
    assert found.form.strides == (6, 2)
    assert found.form.element == ("float16", 2)
    assert found.form.device == 0
    assert found.readonly
    assert describe(CudaArray((2, 3), "<f2", strides=(2, 4))).form.strides == (2, 4)


def test_a_masked_cuda_array_is_refused():
    masked = CudaArray((2,))
    masked.__cuda_array_interface__["mask"] = CudaArray((2,))
    with pytest.raises(kk.KvbmTypeError, match="masked"):
        describe(masked)


def test_dlpack_takes_over_where_the_cuda_array_interface_fails():
    """As it does in JAX for bf16, with an error of JAX's own."""

    class Array(Exporter):
        @property
        def __cuda_array_interface__(self):
            raise RuntimeError("no bfloat16 here")

    a = np.zeros((2, 3), np.float32)
    assert describe(Array(a)).address == address(a)


@pytest.mark.parametrize("old", [False, True])
def test_dlpack(old):
    a = np.zeros((4, 6), np.float32)[1:, ::3]
    found = describe(Exporter(a, old=old))
    assert found.address == address(a)
    assert found.form.shape == (3, 2)
    assert found.form.strides == a.strides
    assert found.form.element == ("float32", 4)
    assert found.form.device is None
    assert not found.readonly


def test_dlpack_says_read_only():
    a = np.zeros(3, np.float32)
    a.flags.writeable = False
    assert describe(Exporter(a)).readonly


def test_dlpack_memory_lives_as_long_as_its_description():
    a = np.zeros(3, np.float32)
    alive = weakref.ref(a)
    found = describe(Exporter(a))
    del a
    gc.collect()
    assert alive() is not None
    del found
    gc.collect()
    assert alive() is None


def test_a_refused_dlpack_export_is_a_type_error():
    class Distributed:
        def __dlpack__(self, **_):
            raise BufferError("the array is spread over devices")

    with pytest.raises(kk.KvbmTypeError, match="DLPack: the array is spread over devices"):
        describe(Distributed())


def test_a_used_up_capsule_is_refused():
    class Once:
        capsule = np.zeros(2).__dlpack__()

        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **_):
            return self.capsule

    taken = np.from_dlpack(Once())
    with pytest.raises(kk.KvbmTypeError, match="used up"):
        describe(Once())
    assert taken.shape == (2,)


def test_jax_arrays_can_be_read_but_not_written():
    """A program takes a JAX array for constant."""
    jnp = pytest.importorskip("jax.numpy")
    source = jnp.arange(8, dtype=jnp.bfloat16)
    found = describe(source)
    assert found.form.element == ("bfloat16", 2)
    assert found.readonly
    out = np.zeros(8, ml_dtypes.bfloat16)
    kk.memcpy_batch([out], [source])
    assert out.tolist() == list(range(8))
    assert kk.BlockShape(1, 1, 1, 1, 1, jnp.bfloat16).dtype is kk.DType.BF16


@pytest.mark.parametrize(
    "buffer",
    [bytearray(12), memoryview(bytearray(24))[::2], array.array("B", range(12)), mmap.mmap(-1, 12)],
    ids=["bytearray", "memoryview", "array.array", "mmap"],
)
def test_buffers(buffer):
    found = describe(buffer)
    assert found.address == address(np.asarray(memoryview(buffer)))
    assert found.form.shape == (12,)
    assert found.form.element == ("uint8", 1)
    assert not found.readonly


def test_bytes_are_read_only():
    assert describe(b"1234").readonly


def test_a_view_keeps_its_buffer_from_being_resized():
    """A bytearray that moved would leave the view with an address of nothing."""
    buffer = bytearray(16)
    view = kk.UniversalBlocks([buffer], kk.BlockShape(1, 1, 1, 1, 8, "f16"))
    with pytest.raises(BufferError):
        buffer.extend(b"more")
    del view
    buffer.extend(b"more")


def test_a_view_keeps_its_arrays_alive():
    a = np.zeros((1, 1, 1, 1, 8), np.float16)
    alive = weakref.ref(a)
    view = kk.UniversalBlocks([a], kk.BlockShape(1, 1, 1, 1, 8, "f16")).heads(0, 1)[[0]]
    del a
    gc.collect()
    assert alive() is not None
    del view
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("obj", [None, 3, "text", [1.0], object()])
def test_things_that_are_no_arrays_are_refused(obj):
    with pytest.raises(kk.KvbmTypeError, match=f"is an? {type(obj).__name__}, expected an array"):
        describe(obj)


def test_arrays_of_objects_are_refused():
    with pytest.raises(kk.KvbmTypeError, match="Python objects"):
        describe(np.array([{}, None]))


def test_pageable_memory_is_not_taken_for_pinned(torch):
    assert not is_pinned(np.zeros(3))
    assert not is_pinned(np.zeros(3)[1:])
    assert not is_pinned(bytearray(3))
    assert not is_pinned(torch.zeros(3))
    assert not is_pinned(torch.zeros(3).numpy())


def test_one_pageable_array_among_others_puts_memory_out_of_reach():
    cuda, pageable = CudaArray((4,)), np.zeros(4)
    assert Memory([cuda, cuda], [], {("", 0), ("", 1)}, "").is_reachable
    mixed = Memory([cuda, pageable], [pageable], {("", 0), ("", None)}, "")
    assert not mixed.is_reachable
    assert not mixed.is_host
    assert mixed.device == "cpu, cuda:0"


def test_a_view_knows_every_library_its_arrays_are_of():
    """The current streams of two libraries may differ; a view over both must not settle for one."""

    class CupyArray(CudaArray):
        pass

    CupyArray.__module__ = "cupy"
    arrays = [CupyArray((1, 1, 1, 1, 8)), CudaArray((1, 1, 1, 1, 8))]
    view = kk.UniversalBlocks(arrays, kk.BlockShape(1, 1, 1, 1, 8, "f16"))
    assert view.memory.places == {("cupy", 0), ("", 0)}
