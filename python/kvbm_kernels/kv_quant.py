"""Rows of int8 and fp8, each with its scale behind it. What is here is the definition; kernels have to equal it.

A row of one token and head is ``head_dim`` elements of a byte, padding up to a multiple of the scale's size, and the
scale. So a scale is never anywhere but with its row, whatever layout or memory that is copied to.

With ``amax`` the largest magnitude in a row, all in float32 with every operation rounded to nearest even:

    scale = amax / limit             limit is 127 for int8, and 448, the largest number of E4M3, for fp8
    stored = round(x / scale)        to nearest even, at most ``limit`` in magnitude; 0 where the scale is 0
    x' = stored * scale

A scale that is to be kept as float16 is rounded to it first, to at most 65504. A row with a NaN or an infinity in it
is stored as zeros with a NaN for a scale: all of it reads back as NaN, and what went wrong does not go unseen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvbm_kernels._native import ffi
from kvbm_kernels.arrays import Form, describe
from kvbm_kernels.dtypes import DType, dtype_of
from kvbm_kernels.errors import KvbmTypeError, KvbmValueError

Floats: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]

FLOATS = (DType.F32, DType.F16, DType.BF16)
_CARRIERS = {DType.F32: np.float32, DType.F16: np.float16, DType.BF16: np.uint16}
_INT8_LIMIT = np.float32(127)
_FP8_LIMIT = np.float32(448)
# Elements worked on at a time.
_PART = 1 << 14
_FP16_LARGEST = np.float32(65504)


def scale_offset(head_dim: int, scale: DType) -> int:
    """Where in a row the scale is."""
    return -(-head_dim // scale.itemsize) * scale.itemsize


def row_size(head_dim: int, scale: DType) -> int:
    """Bytes of a row with its scale."""
    return scale_offset(head_dim, scale) + scale.itemsize


def encode(x: Floats, dtype: DType, scale: DType) -> Bytes:
    """Rows of numbers ``[..., head_dim]`` as rows of bytes ``[..., row_size]``."""
    head_dim = x.shape[-1]
    numbers = x.reshape(-1, head_dim)
    rows = np.zeros((len(numbers), row_size(head_dim, scale)), np.uint8)
    for part in _parts(len(numbers), head_dim):
        _encode(numbers[part], dtype, scale, rows[part])
    return rows.reshape(*x.shape[:-1], rows.shape[-1])


def _parts(num_rows: int, head_dim: int) -> Iterator[slice]:
    """All rows, as many at a time as stay in a cache close to the processor through all that is done with them."""
    step = max(1, _PART // head_dim)
    for start in range(0, num_rows, step):
        yield slice(start, start + step)


@np.errstate(all="ignore")
def _encode(x: Floats, dtype: DType, scale: DType, rows: Bytes) -> None:
    head_dim = x.shape[-1]
    limit = _INT8_LIMIT if dtype is DType.INT8 else _FP8_LIMIT
    amax = np.abs(x).max(-1, keepdims=True)
    broken = ~np.isfinite(amax)
    scales = amax / limit
    if scale is DType.F16:
        scales = np.minimum(scales, _FP16_LARGEST).astype(np.float16).astype(np.float32)
    usable = (scales > 0) & ~broken
    quotients = np.divide(x, scales, out=np.zeros_like(x), where=usable)
    if dtype is DType.INT8:
        codes = np.clip(np.rint(quotients), -limit, limit).astype(np.int8).view(np.uint8)
    else:
        codes = _fp8_codes(quotients)
    rows[..., :head_dim] = codes
    scales[broken] = np.nan
    kept = scales.astype(_CARRIERS[scale])
    rows[..., scale_offset(head_dim, scale) :] = kept.view(np.uint8)


def decode(rows: Bytes, head_dim: int, dtype: DType, scale: DType) -> Floats:
    """The numbers of rows that :func:`encode` made."""
    flat = rows.reshape(-1, rows.shape[-1])
    numbers = np.empty((len(flat), head_dim), np.float32)
    for part in _parts(len(flat), head_dim):
        numbers[part] = _decode(flat[part], head_dim, dtype, scale)
    return numbers.reshape(*rows.shape[:-1], head_dim)


@np.errstate(all="ignore")
def _decode(rows: Bytes, head_dim: int, dtype: DType, scale: DType) -> Floats:
    kept = np.ascontiguousarray(rows[..., scale_offset(head_dim, scale) :]).view(_CARRIERS[scale])
    codes = rows[..., :head_dim]
    numbers = codes.view(np.int8).astype(np.float32) if dtype is DType.INT8 else _FP8_VALUES[codes]
    decoded: Floats = numbers * kept.astype(np.float32)
    return decoded


def _fp8_codes(x: Floats) -> Bytes:
    """E4M3, rounded to nearest even and at most 448 in magnitude."""
    bits = x.view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    # Half of what is cut off, and one less where the last bit kept is 0, so that a tie goes to the even neighbour.
    # The bias of the exponent is 7 instead of 127.
    rounded = (magnitude + np.uint32(0x7FFFF) + ((magnitude >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)
    normal = np.minimum(rounded, np.uint32(0x7E + (120 << 3))) - np.uint32(120 << 3)
    # Below 2**-6 numbers are multiples of 2**-9.
    small = np.rint(np.minimum(np.abs(x), np.float32(1)) * np.float32(512))
    codes = np.where(magnitude < np.uint32((127 - 6) << 23), small.astype(np.uint32), normal)
    encoded: Bytes = (codes | (bits >> np.uint32(24) & np.uint32(0x80))).astype(np.uint8)
    return encoded


def _fp8_value(code: int) -> float:
    exponent, fraction = code >> 3 & 15, code & 7
    magnitude = (8 + fraction) * 2.0 ** (exponent - 10) if exponent else fraction * 2.0**-9
    return -magnitude if code & 0x80 else magnitude


_FP8_VALUES = np.array([np.nan if code & 0x7F == 0x7F else _fp8_value(code) for code in range(256)], np.float32)


def float_type(form: Form) -> DType:
    """The type of numbers that can be quantised. Raises, without a name in front, for others, raw bits among them."""
    if form.device is not None:
        raise KvbmValueError("is in CUDA memory, expected host memory: quantised caches have no kernels yet")
    dtype = dtype_of(form.element)
    if dtype not in FLOATS:
        raise KvbmTypeError(f"has dtype {form.element.name}, expected f32, f16 or bf16: it is to be quantised")
    return dtype


def numbers_of(array: Any) -> Floats:
    """The numbers in an array in host memory of one of these types."""
    described = describe(array)
    dtype = float_type(described.form)
    memory = _memory(described.address, described.form, dtype)
    if dtype is DType.BF16:
        numbers: Floats = (memory.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return numbers
    return memory.astype(np.float32)


def put_numbers(array: Any, numbers: Floats) -> None:
    """Write numbers to an array in host memory, rounded to nearest even."""
    described = describe(array)
    found = dtype_of(described.form.element)
    # Without a type for it, NumPy has bf16 as integers.
    dtype = DType.BF16 if found is None else found
    memory = _memory(described.address, described.form, dtype)
    if dtype is DType.BF16:
        bits = numbers.view(np.uint32)
        memory[...] = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    else:
        with np.errstate(over="ignore"):
            memory[...] = numbers


def _memory(address: int, form: Form, dtype: DType) -> npt.NDArray[Any]:
    """The array as NumPy sees it, bf16 as integers with its bits. It must not outlive the array."""
    carrier = np.dtype(_CARRIERS[dtype])
    if 0 in form.shape:
        return np.empty(form.shape, carrier)
    distances = [stride * (extent - 1) for extent, stride in zip(form.shape, form.strides, strict=True)]
    before = -sum(distance for distance in distances if distance < 0)
    after = sum(distance for distance in distances if distance > 0) + form.element.itemsize
    buffer = ffi.buffer(ffi.cast("char *", address - before), before + after)
    return np.ndarray(form.shape, carrier, buffer, before, form.strides)
