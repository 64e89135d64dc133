"""The names of layouts, and the size of a block."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple, SupportsIndex

import numpy as np

from kvbm_kernels._native import lib
from kvbm_kernels._wording import a_type
from kvbm_kernels.dtypes import DType, DTypeLike, as_dtype
from kvbm_kernels.errors import KvbmTypeError, KvbmValueError


class Layout(IntEnum):
    """The order inside a chunk, with the value it has in the C API."""

    NHD = lib.KVBM_KERNELS_LAYOUT_NHD
    """[nt, nh, hd]: all heads of a token together."""
    HND = lib.KVBM_KERNELS_LAYOUT_HND
    """[nh, nt, hd]: all tokens of a head together."""


_LAYOUTS = dict(Layout.__members__)


def as_layout(layout: Layout | str, name: str = "layout") -> Layout:
    """The Layout for a Layout or its name, upper or lower case.

    Raises KvbmValueError for another string and KvbmTypeError for another object. Numbers are not taken: 0 and 1 are
    too easily something else.
    """
    if isinstance(layout, Layout):
        return layout
    if not isinstance(layout, str):
        raise KvbmTypeError(f'{name} is {layout!r}, expected a Layout, "NHD" or "HND"')
    found = _LAYOUTS.get(layout.upper())
    if found is None:
        raise KvbmValueError(f'{name} is {layout!r}, expected "NHD" or "HND"')
    return found


def as_count(value: SupportsIndex, name: str, least: int) -> int:
    """An integer that is at least ``least``; numbers of NumPy are fine, bool is not.

    Raises KvbmTypeError and KvbmValueError.
    """
    number = value if type(value) is int else as_integer(value)
    if number is None:
        raise KvbmTypeError(f"{name} is {value!r}, expected an integer")
    if number < least:
        raise KvbmValueError(f"{name} is {number}, expected {least} or more")
    return number


def as_c_int(value: SupportsIndex, name: str, least: int) -> int:
    """As as_count(), for what the library takes as an ``int``."""
    number = as_count(value, name, least)
    if number >= 1 << 31:
        raise KvbmValueError(f"{name} is {number}, expected less than 2**31")
    return number


def as_integer(value: object) -> int | None:
    """The integer that an object stands for; None for bools, floats, arrays with dimensions and all else."""
    if isinstance(value, np.integer):
        return int(value)
    # PyTorch takes tensors of bools, and of one element in several dimensions, for indices.
    of_array: Any = getattr(value, "ndim", 0), getattr(value, "dtype", "")
    if isinstance(value, bool) or of_array[0] or str(of_array[1]).endswith("bool"):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return None


@lru_cache(maxsize=256)
def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The strides in bytes of an array in C order without gaps."""
    strides = []
    stride = itemsize
    for extent in reversed(shape):
        strides.append(stride)
        stride *= extent
    return tuple(reversed(strides))


class QuantisedRow(NamedTuple):
    """What the bytes of a row with its scale are."""

    head_dim: int
    scale: DType

    def __str__(self) -> str:
        return f"head_dim = {self.head_dim} with {self.scale!s} scales"


@dataclass(frozen=True, init=False, slots=True)
class BlockShape:
    """The extents of one block.

    ``nl`` layers, ``no`` outer chunks (2 for K and V, 1 for MLA or for K and V packed in one row), ``nh`` KV heads of
    this rank, ``nt`` tokens, ``hd`` elements in a row, and the type of the elements: a :class:`DType`, a name such as
    "bf16", "fp16", "f32", "fp8_e4m3" or "int8", or a dtype of NumPy, ml_dtypes or PyTorch.

    Raises KvbmTypeError and KvbmValueError for a size that is no positive integer, an unknown type, and a block of more
    bytes than 63 bits count.
    """

    nl: int
    no: int
    nh: int
    nt: int
    hd: int
    dtype: DType
    # None where the rows are not of a quantised cache, or it is not known: no part of what is compared.
    quantised: QuantisedRow | None = field(init=False, compare=False, repr=False)

    def __init__(
        self,
        nl: SupportsIndex,
        no: SupportsIndex,
        nh: SupportsIndex,
        nt: SupportsIndex,
        hd: SupportsIndex,
        dtype: DTypeLike,
    ) -> None:
        set_field = object.__setattr__
        set_field(self, "nl", as_count(nl, "nl", 1))
        set_field(self, "no", as_count(no, "no", 1))
        set_field(self, "nh", as_count(nh, "nh", 1))
        set_field(self, "nt", as_count(nt, "nt", 1))
        set_field(self, "hd", as_count(hd, "hd", 1))
        set_field(self, "dtype", as_dtype(dtype))
        set_field(self, "quantised", None)
        if self.block_nbytes >= 1 << 63:
            raise KvbmValueError(f"{self} has {self.block_nbytes} bytes a block, expected less than 2**63")

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row: the hd elements of one head of one token."""
        return self.hd * self.dtype.itemsize

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of one chunk: the rows of one layer and outer index."""
        return self.nt * self.nh * self.row_nbytes

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block, all layers."""
        return self.nl * self.no * self.chunk_nbytes

    def __str__(self) -> str:
        return f"nl={self.nl} no={self.no} nh={self.nh} nt={self.nt} hd={self.hd} {self.dtype!s}"


def resized(shape: BlockShape, *, nl: int | None = None, nh: int | None = None, nt: int | None = None) -> BlockShape:
    """A shape with these extents in place of its own, which are no larger. The same ones give the same object."""
    return _shape(
        shape.nl if nl is None else nl,
        shape.no,
        shape.nh if nh is None else nh,
        shape.nt if nt is None else nt,
        shape.hd,
        # By value: an enumeration hashes slowly.
        int(shape.dtype),
        shape.quantised,
    )


@lru_cache(maxsize=256)
def _shape(nl: int, no: int, nh: int, nt: int, hd: int, dtype: int, row: QuantisedRow | None) -> BlockShape:
    return quantised(BlockShape(nl, no, nh, nt, hd, DType(dtype)), row)


def quantised(shape: BlockShape, row: QuantisedRow | None) -> BlockShape:
    """A shape just made, of which no one else knows, with what its rows are."""
    object.__setattr__(shape, "quantised", row)
    return shape


def as_shape(shape: object) -> BlockShape:
    """The argument ``shape`` of a view. Raises KvbmTypeError for anything but a BlockShape."""
    if not isinstance(shape, BlockShape):
        raise KvbmTypeError(f"shape is {a_type(shape)}, expected a BlockShape")
    return shape
