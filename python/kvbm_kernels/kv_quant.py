"""Rows of int8 and fp8, each with its scale behind it, as docs/kv_cache.md and the C API's header define them.

A row of one token and head is ``head_dim`` elements of a byte, padding up to a multiple of the scale's size, and the
scale. So a scale is never anywhere but with its row, whatever layout or memory that is copied to.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from kvbm_kernels._native import ffi, lib
from kvbm_kernels.arrays import Form
from kvbm_kernels.dtypes import DType, dtype_of
from kvbm_kernels.errors import KvbmTypeError

FLOATS = (DType.F32, DType.F16, DType.BF16)


def scale_offset(head_dim: int, scale: DType) -> int:
    """Where in a row the scale is."""
    return -(-head_dim // scale.itemsize) * scale.itemsize


def row_size(head_dim: int, scale: DType) -> int:
    """Bytes of a row with its scale."""
    return scale_offset(head_dim, scale) + scale.itemsize


def float_type(form: Form) -> DType:
    """The type of numbers that can be quantised. Raises, without a name in front, for others, raw bits among them."""
    dtype = dtype_of(form.element)
    if dtype not in FLOATS:
        raise KvbmTypeError(f"has dtype {form.element.name}, expected f32, f16 or bf16: it is to be quantised")
    return dtype


@lru_cache(maxsize=32)
def c_quantization(stored: DType, given: DType, scale: DType) -> Any:
    """The ``kvbm_kernels_quantization *`` of rows stored as int8 or fp8 and given, or wanted, in another type."""
    value = lib.KVBM_KERNELS_STORED_INT8 if stored is DType.INT8 else lib.KVBM_KERNELS_STORED_FP8
    return ffi.new("kvbm_kernels_quantization *", (ffi.sizeof("kvbm_kernels_quantization"), value, given, scale))
