"""The little of DLPack that this package needs: where an exported tensor lies, and what it holds."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

from cffi import FFI

from kvbm_kernels.dtypes import Element
from kvbm_kernels.errors import KvbmTypeError
from kvbm_kernels.layouts import contiguous_strides

CPU = 1
CUDA = 2
CUDA_HOST = 3
CUDA_MANAGED = 13

_ffi = FFI()
# From dlpack.h, version 1.0; later minor versions only add at places this code does not read.
_ffi.cdef("""
    typedef struct { int32_t device_type; int32_t device_id; } DLDevice;
    typedef struct { uint8_t code; uint8_t bits; uint16_t lanes; } DLDataType;
    typedef struct {
      void *data;
      DLDevice device;
      int32_t ndim;
      DLDataType dtype;
      int64_t *shape;
      int64_t *strides;
      uint64_t byte_offset;
    } DLTensor;
    typedef struct { DLTensor dl_tensor; void *manager_ctx; void *deleter; } DLManagedTensor;
    typedef struct {
      uint32_t major;
      uint32_t minor;
      void *manager_ctx;
      void *deleter;
      uint64_t flags;
      DLTensor dl_tensor;
    } DLManagedTensorVersioned;
""")
_READ_ONLY = 1

_NAMES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 5: "complex"}
_FLOAT8_NAMES = {10: "float8_e4m3fn", 12: "float8_e5m2"}

_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]
_is_valid.restype = ctypes.c_int
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_get_pointer.restype = ctypes.c_void_p


class Exported(NamedTuple):
    """A tensor as DLPack describes it; it lives as long as ``capsule``, whose destructor releases it."""

    capsule: object
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element: Element
    device_type: int
    device_id: int
    readonly: bool


def export(array: Any) -> Exported:
    """Ask an array with ``__dlpack__`` for its description. Raises KvbmTypeError if it cannot give one."""
    try:
        try:
            capsule = array.__dlpack__(max_version=(1, 0), copy=False)
        except TypeError:
            # A producer from before DLPack 1.0 knows neither argument.
            capsule = array.__dlpack__()
    except Exception as error:
        raise KvbmTypeError(f"cannot be shared through DLPack: {error}") from error

    if _is_valid(capsule, b"dltensor_versioned"):
        pointer = _get_pointer(capsule, b"dltensor_versioned")
        managed: Any = _ffi.cast("DLManagedTensorVersioned *", pointer)
        if managed.major != 1:
            raise KvbmTypeError(f"gave DLPack version {managed.major}, expected 1")
        readonly = bool(managed.flags & _READ_ONLY)
    elif _is_valid(capsule, b"dltensor"):
        managed = _ffi.cast("DLManagedTensor *", _get_pointer(capsule, b"dltensor"))
        readonly = False
    else:
        raise KvbmTypeError("gave a DLPack capsule that is used up or of an unknown kind")

    tensor = managed.dl_tensor
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    element = _element(tensor.dtype)
    address = int(_ffi.cast("uintptr_t", tensor.data)) + tensor.byte_offset
    if tensor.strides == _ffi.NULL:
        strides = contiguous_strides(shape, element.itemsize)
    else:
        strides = tuple(tensor.strides[i] * element.itemsize for i in range(tensor.ndim))
    device = tensor.device
    return Exported(capsule, address, shape, strides, element, device.device_type, device.device_id, readonly)


def _element(dtype: Any) -> Element:
    bits = dtype.bits * dtype.lanes
    if dtype.lanes == 1 and dtype.code in _FLOAT8_NAMES:
        name = _FLOAT8_NAMES[dtype.code]
    elif dtype.lanes == 1 and dtype.code in _NAMES:
        name = f"{_NAMES[dtype.code]}{bits}"
    else:
        name = f"DLPack type code {dtype.code} with {dtype.lanes} lanes of {dtype.bits} bits"
    if bits % 8:
        raise KvbmTypeError(f"has elements of {bits} bits, expected whole bytes")
    return Element(name, bits // 8)
