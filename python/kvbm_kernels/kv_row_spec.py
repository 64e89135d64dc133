"""What the rows of a cache are: how many, of what shape and type."""

from __future__ import annotations

from typing import NamedTuple, SupportsIndex

from kvbm_kernels.dtypes import DType, DTypeLike, as_dtype
from kvbm_kernels.errors import (
    KvbmIndexError,
    KvbmTypeError,
    KvbmValueError,
)
from kvbm_kernels.kv_dtypes import KvDtypeLike, as_kv_dtype
from kvbm_kernels.kv_quant import FLOATS, row_size
from kvbm_kernels.layouts import QuantisedRow, as_count, as_integer


class RowSpec(NamedTuple):
    """What the rows of a cache are."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    kv_dtype: KvDtypeLike
    scale: DType | None
    """The type of the scale behind each row of a quantised cache."""

    @classmethod
    def checked(
        cls,
        num_layers: SupportsIndex,
        num_kv_heads: SupportsIndex,
        head_dim: SupportsIndex,
        v_head_dim: SupportsIndex | None,
        kv_dtype: KvDtypeLike,
        scale_dtype: DTypeLike | None,
    ) -> RowSpec:
        """From arguments of these names. Raises KvbmTypeError and KvbmValueError."""
        marker = as_kv_dtype(kv_dtype)
        scale = None
        if marker.IS_QUANTISED:
            scale = DType.F32 if scale_dtype is None else as_dtype(scale_dtype)
            if scale not in (DType.F32, DType.F16):
                raise KvbmValueError(f'scale_dtype is {scale_dtype!r}, expected "fp32" or "fp16"')
        elif scale_dtype is not None:
            raise KvbmValueError(f"scale_dtype is {scale_dtype!r}, expected None: {marker.__name__} has no scales")
        return cls(
            as_count(num_layers, "num_layers", 1),
            as_count(num_kv_heads, "num_kv_heads", 1),
            as_count(head_dim, "head_dim", 1),
            as_count(head_dim if v_head_dim is None else v_head_dim, "v_head_dim", 1),
            marker,
            scale,
        )

    @property
    def widths(self) -> tuple[int, int]:
        """Elements of a row of K and of V as they are stored."""
        if self.scale is None:
            return self.head_dim, self.v_head_dim
        return row_size(self.head_dim, self.scale), row_size(self.v_head_dim, self.scale)

    @property
    def quantised(self) -> tuple[QuantisedRow | None, QuantisedRow | None]:
        """What the bytes of a row of K and of V are, if they are quantised."""
        if self.scale is None:
            return None, None
        return QuantisedRow(self.head_dim, self.scale), QuantisedRow(self.v_head_dim, self.scale)

    def given_dtype(self, dtype: DTypeLike | None) -> DType:
        """The type of what is read, for an argument ``dtype``. Raises KvbmValueError and KvbmTypeError."""
        found = None if dtype is None else as_dtype(dtype)
        if self.scale is None:
            if found not in (None, self.kv_dtype.DTYPE):
                raise KvbmValueError(
                    f"dtype is {dtype!r}, expected None or {self.kv_dtype.NAME}: rows are given as they are stored"
                )
            return self.kv_dtype.DTYPE
        if found is not None and found not in FLOATS:
            raise KvbmValueError(f'dtype is {dtype!r}, expected "fp32", "fp16" or "bf16"')
        return DType.F32 if found is None else found

    def __str__(self) -> str:
        nl, nh, hd, v_hd, kv_dtype, _ = self
        dims = f"head_dim = {hd}" if hd == v_hd else f"head_dim = {hd}, v_head_dim = {v_hd}"
        return f"num_layers = {nl}, num_kv_heads = {nh}, {dims}, {kv_dtype.NAME}"

    def layer_range(self, layer: SupportsIndex | None) -> tuple[int, int]:
        """The layers that an argument ``layer`` stands for, None for all. Raises KvbmIndexError."""
        if layer is None:
            return 0, self.num_layers
        number = layer if type(layer) is int else as_integer(layer)
        if number is None:
            raise KvbmTypeError(f"layer is {layer!r}, expected an integer or None")
        if not 0 <= number < self.num_layers:
            raise KvbmIndexError(f"layer is {number}, expected 0 to {self.num_layers - 1}")
        return number, number + 1
