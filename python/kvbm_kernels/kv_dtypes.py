"""How a KV cache stores its elements: marker classes, passed as ``kv_dtype``."""

from __future__ import annotations

from typing import ClassVar, TypeAlias

from kvbm_kernels.dtypes import DType
from kvbm_kernels.errors import KvbmTypeError


class KvDtype:
    """What every marker derives from; never used itself.

    ``NAME`` is the name in logs and file headers, ``BYTES_PER_ELEM`` the size of a stored element, ``DTYPE`` its type,
    and ``IS_QUANTISED`` whether a scale goes with each row.
    """

    NAME: ClassVar[str]
    BYTES_PER_ELEM: ClassVar[int]
    DTYPE: ClassVar[DType]
    IS_QUANTISED: ClassVar[bool] = False


class KvFp32(KvDtype):
    """Rows of float32, stored as they come."""

    NAME = "fp32"
    BYTES_PER_ELEM = 4
    DTYPE = DType.F32


class KvFp16(KvDtype):
    """Rows of float16, stored as they come."""

    NAME = "fp16"
    BYTES_PER_ELEM = 2
    DTYPE = DType.F16


class KvBf16(KvDtype):
    """Rows of bfloat16, stored as they come."""

    NAME = "bf16"
    BYTES_PER_ELEM = 2
    DTYPE = DType.BF16


class KvInt8(KvDtype):
    """Rows of int8 with a scale for each token and head."""

    NAME = "int8"
    BYTES_PER_ELEM = 1
    DTYPE = DType.INT8
    IS_QUANTISED = True


class KvFp8(KvDtype):
    """Rows of float8 E4M3 with a scale for each token and head."""

    NAME = "fp8"
    BYTES_PER_ELEM = 1
    DTYPE = DType.FP8_E4M3
    IS_QUANTISED = True


KvDtypeLike: TypeAlias = type[KvDtype]


def as_kv_dtype(kv_dtype: KvDtypeLike) -> KvDtypeLike:
    """The marker itself. Raises KvbmTypeError for anything else."""
    if isinstance(kv_dtype, type) and issubclass(kv_dtype, KvDtype) and kv_dtype is not KvDtype:
        return kv_dtype
    raise KvbmTypeError(f"kv_dtype is {kv_dtype!r}, expected KvFp32, KvFp16, KvBf16, KvInt8 or KvFp8")
