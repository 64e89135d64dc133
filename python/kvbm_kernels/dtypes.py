"""Element types.

The library moves bytes and converts no value: a type stands for its size, and for the promise that both ends of a copy
mean the same thing by it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvbm_kernels._native import lib
from kvbm_kernels.errors import KvbmTypeError, KvbmValueError

# A DType, one of its names, or the dtype object of an array library.
DTypeLike: TypeAlias = Any


class DType(IntEnum):
    """An element type, with the value it has in the C API."""

    F16 = lib.KVBM_KERNELS_DTYPE_F16
    BF16 = lib.KVBM_KERNELS_DTYPE_BF16
    F32 = lib.KVBM_KERNELS_DTYPE_F32
    F64 = lib.KVBM_KERNELS_DTYPE_F64
    FP8_E4M3 = lib.KVBM_KERNELS_DTYPE_FP8_E4M3
    FP8_E5M2 = lib.KVBM_KERNELS_DTYPE_FP8_E5M2
    INT8 = lib.KVBM_KERNELS_DTYPE_INT8
    UINT8 = lib.KVBM_KERNELS_DTYPE_UINT8

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _ITEMSIZES[self]

    def __str__(self) -> str:
        return self.name.lower()


class Element(NamedTuple):
    """What an array says it holds: the name array libraries give the type, and its size in bytes."""

    name: str
    itemsize: int


_ELEMENTS = {
    DType.F16: Element("float16", 2),
    DType.BF16: Element("bfloat16", 2),
    DType.F32: Element("float32", 4),
    DType.F64: Element("float64", 8),
    DType.FP8_E4M3: Element("float8_e4m3fn", 1),
    DType.FP8_E5M2: Element("float8_e5m2", 1),
    DType.INT8: Element("int8", 1),
    DType.UINT8: Element("uint8", 1),
}

# By value: an enumeration hashes slowly.
_ITEMSIZES = [_ELEMENTS[dtype].itemsize for dtype in sorted(DType)]

_BY_ELEMENT = {element: dtype for dtype, element in _ELEMENTS.items()}

_ALIASES = {
    "half": DType.F16,
    "fp16": DType.F16,
    "fp32": DType.F32,
    "fp64": DType.F64,
    "float": DType.F32,
    "double": DType.F64,
    "e4m3": DType.FP8_E4M3,
    "e5m2": DType.FP8_E5M2,
    "i8": DType.INT8,
    "u8": DType.UINT8,
}

_BY_NAME = {
    **_ALIASES,
    **{element.name: dtype for dtype, element in _ELEMENTS.items()},
    **{str(dtype): dtype for dtype in DType},
}

# Integers of a size stand for any type of that size: how bf16 and fp8 are kept where an array library lacks them.
# NumPy loads a saved bf16 array as "void16".
_RAW_NAMES = frozenset(
    [f"{sign}int{bits}" for sign in ("u", "") for bits in (8, 16, 32, 64)] + [f"void{bits}" for bits in (8, 16, 32, 64)]
)
_CARRIERS = {1: DType.UINT8, 2: DType.F16, 4: DType.F32, 8: DType.F64}


def is_raw(element: Element) -> bool:
    """Whether an array of these elements may hold the bits of another type of their size."""
    return element.name in _RAW_NAMES


def is_bytes(element: Element) -> bool:
    """Whether a flat array of these elements may be plain memory for anything."""
    return element.itemsize == 1 and is_raw(element)


def holds(element: Element, dtype: DType) -> bool:
    """Whether an array of these elements can be a place for values of the type."""
    wanted = _ELEMENTS[dtype]
    return element == wanted or (element.itemsize == wanted.itemsize and is_raw(element))


def dtype_of(element: Element) -> DType | None:
    """The type that these elements are, or None for raw bits and for types the library has no name for."""
    return _BY_ELEMENT.get(element)


def element_of(dtype: DType) -> Element:
    """What an array of this type says it holds."""
    return _ELEMENTS[dtype]


def common_dtype(elements: list[Element], names: list[str]) -> DType:
    """The type of arrays that are to exchange elements: the one that is not mere raw bits, if any is not.

    Raises KvbmTypeError if there is no such type; that all arrays agree with it is for the caller to check.
    """
    for element in elements:
        if not is_raw(element):
            dtype = dtype_of(element)
            if dtype is None:
                break
            return dtype
    else:
        sizes = {element.itemsize for element in elements}
        if len(sizes) == 1:
            return dtype_of(elements[0]) or _CARRIERS[sizes.pop()]
    listed = ", ".join(f"{name} has {element.name}" for name, element in zip(names, elements, strict=True))
    raise KvbmTypeError(f"{listed}; expected one of {_accepted()}, or integers of one size holding their bits")


def as_dtype(dtype: DTypeLike) -> DType:
    """The DType for a DType, a name such as "bf16" or "float8_e4m3fn", or a NumPy, ml_dtypes, PyTorch or JAX dtype.

    Raises KvbmValueError for a name, and KvbmTypeError for an object, that is none of these.
    """
    if isinstance(dtype, DType):
        return dtype
    if isinstance(dtype, str):
        found = _BY_NAME.get(dtype.lower().removeprefix("torch."))
        if found is None:
            raise KvbmValueError(f"dtype is {dtype!r}, expected one of {_accepted()}")
        return found
    name = _name_of(dtype)
    found = _BY_NAME.get(name)
    if found is None:
        raise KvbmTypeError(
            f"dtype is {dtype!r}, expected one of {_accepted()}; arrays may hold its bits as integers of its size"
        )
    return found


def _name_of(dtype: object) -> str:
    if type(dtype).__module__ == "torch":
        return str(dtype).removeprefix("torch.")
    # NumPy takes None and float for float64; here that would be a guess.
    if dtype is None or dtype is float:
        return ""
    try:
        numpy_dtype = np.dtype(dtype)  # type: ignore[call-overload]
    except TypeError:
        return ""
    return str(numpy_dtype.name) if numpy_dtype.isnative else ""


def _accepted() -> str:
    return ", ".join(str(dtype) for dtype in DType)
