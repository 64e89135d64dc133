"""The rows of K and V of a cache: the one place that writes them into blocks and reads them back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, SupportsIndex

import numpy as np

from kvbm_kernels.arrays import Expected, Group, Memory, describe, gather
from kvbm_kernels.blocks import BlockStack
from kvbm_kernels.copy import copy_views
from kvbm_kernels.dtypes import DType, DTypeLike, as_dtype
from kvbm_kernels.errors import KvbmError, KvbmIndexError, KvbmMemoryError, KvbmTypeError, KvbmValueError, Uncopied
from kvbm_kernels.geometry import Geometry, PerIndex
from kvbm_kernels.kv_arrays import ArrayMaker
from kvbm_kernels.kv_dtypes import KvDtypeLike, as_kv_dtype
from kvbm_kernels.kv_quant import FLOATS, decode, encode, float_type, numbers_of, put_numbers, row_size, scale_offset
from kvbm_kernels.layouts import BlockShape, Layout, as_count, as_integer
from kvbm_kernels.overlap import share_bytes


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
        number = as_integer(layer)
        if number is None:
            raise KvbmTypeError(f"layer is {layer!r}, expected an integer or None")
        if not 0 <= number < self.num_layers:
            raise KvbmIndexError(f"layer is {number}, expected 0 to {self.num_layers - 1}")
        return number, number + 1


class Incoming(NamedTuple):
    """Rows to be written: views of K and V together, or one of each where that cannot be."""

    num_tokens: int
    views: tuple[BlockStack, ...]
    names: tuple[str, ...]


@lru_cache(maxsize=1024)
def _shape(nl: int, no: int, nh: int, nt: int, hd: int, dtype: Any) -> BlockShape:
    return BlockShape(nl, no, nh, nt, hd, dtype)


@lru_cache(maxsize=256)
def _expected_rows(nl: int | None, order: Layout, nh: int, dim: int, symbol: str, dtype: DType) -> Expected:
    tokens = [("n", None), ("num_kv_heads", nh)]
    if order is Layout.HND:
        tokens.reverse()
    dims = [*([] if nl is None else [("num_layers", nl)]), *tokens, (symbol, dim)]
    return Expected(" ".join(name for name, _ in dims), tuple(extent for _, extent in dims), dtype)


class Rows(Uncopied):
    """The K and V of ``num_blocks`` blocks of ``block_size`` tokens, all layers.

    ``k`` and ``v`` are arrays ``[num_layers, num_blocks, num_kv_heads, block_size, head_dim]`` for HND, or with heads
    and tokens the other way round for NHD. A contiguous cache is one block as long as the cache. Behind the last block
    of each layer there is memory for ``spare`` more, which nothing here touches.
    """

    def __init__(
        self, arrays: ArrayMaker, spec: RowSpec, layout: Layout, num_blocks: int, block_size: int, spare: int = 0
    ) -> None:
        self.arrays = arrays
        self.spec = spec
        self.layout = layout
        self.block_size = block_size
        nl, nh, dtype = spec.num_layers, spec.num_kv_heads, spec.kv_dtype.DTYPE
        hd, v_hd = spec.widths
        inner = (block_size, nh) if layout is Layout.NHD else (nh, block_size)
        try:
            self.k = arrays.zeros((nl, num_blocks + spare, *inner, hd), dtype)[:, :num_blocks]
            self.v = arrays.zeros((nl, num_blocks + spare, *inner, v_hd), dtype)[:, :num_blocks]
        # PyTorch has an exception of its own.
        except (MemoryError, RuntimeError, ValueError) as error:
            nbytes = nl * (num_blocks + spare) * nh * block_size * (hd + v_hd) * dtype.itemsize
            raise KvbmMemoryError(f"{nbytes} bytes for K and V with {spec} cannot be had: {error}") from None
        axes = "lbthd" if layout is Layout.NHD else "lbhtd"
        self.k_view = BlockStack.from_layers(self.k, _shape(nl, 1, nh, block_size, hd, dtype), axes, name="k")
        self.v_view = BlockStack.from_layers(self.v, _shape(nl, 1, nh, block_size, v_hd, dtype), axes, name="v")
        self.kv_view: BlockStack | None = None
        self._of_layer: dict[tuple[int, int], tuple[BlockStack, ...]] = {}
        if hd == v_hd:
            shape = _shape(nl, 2, nh, block_size, hd, dtype)
            self.kv_view = BlockStack.from_layers([self.k, self.v], shape, axes, name="kv")

    def incoming(self, k: Any, v: Any, layer: SupportsIndex | None, order: Layout) -> Incoming:
        """K and V of new tokens, of one layer or of all, checked and as they are to be stored.

        Raises KvbmTypeError and KvbmValueError.
        """
        self.spec.layer_range(layer)
        if self.spec.scale is not None:
            k = self._encoded(k, self.spec.head_dim, layer, order, "k", "head_dim")
            v = self._encoded(v, self.spec.v_head_dim, layer, order, "v", "v_head_dim")
        return self._stored_form(k, v, layer, order)

    def _encoded(self, array: Any, dim: int, layer: SupportsIndex | None, order: Layout, name: str, symbol: str) -> Any:
        try:
            dtype = float_type(describe(array).form)
        except KvbmError as error:
            raise type(error)(f"{name} {error}") from None
        group = gather([array], self._expected(layer, order, dim, symbol, dtype), lambda _: name)
        numbers = numbers_of(array).reshape(group.form.shape)
        return encode(numbers, self.spec.kv_dtype.DTYPE, self._scale)

    def _stored_form(self, k: Any, v: Any, layer: SupportsIndex | None, order: Layout) -> Incoming:
        """Views of arrays that hold rows as they are stored."""
        nl, nh, dtype = self.spec.num_layers, self.spec.num_kv_heads, self.spec.kv_dtype.DTYPE
        hd, v_hd = self.spec.widths
        k_rows = gather([k], self._expected(layer, order, hd, "head_dim", dtype), lambda _: "k")
        v_rows = gather([v], self._expected(layer, order, v_hd, "v_head_dim", dtype), lambda _: "v")
        one = layer is not None or nl == 1
        axes = ("" if one else "l") + ("thd" if order is Layout.NHD else "htd")
        n, v_n = (group.form.shape[axes.index("t")] for group in (k_rows, v_rows))
        if n != v_n:
            raise KvbmValueError(f"v has {v_n} tokens, expected {n} as k")
        if not n:
            return Incoming(0, (), ())
        nl = 1 if one else nl
        if k_rows.form == v_rows.form:
            memory = _memory_of_both(k_rows.memory, v_rows.memory)
            joint = Group(k_rows.addresses + v_rows.addresses, k_rows.form, memory)
            return Incoming(n, (_view(joint, axes, _shape(nl, 2, nh, n, hd, dtype), order, "k"),), ("k and v",))
        views = (
            _view(k_rows, axes, _shape(nl, 1, nh, n, hd, dtype), order, "k"),
            _view(v_rows, axes, _shape(nl, 1, nh, n, v_hd, dtype), order, "v"),
        )
        return Incoming(n, views, ("k", "v"))

    def _expected(self, layer: SupportsIndex | None, order: Layout, dim: int, symbol: str, dtype: DType) -> Expected:
        one = layer is not None or self.spec.num_layers == 1
        return _expected_rows(None if one else self.spec.num_layers, order, self.spec.num_kv_heads, dim, symbol, dtype)

    def write(self, blocks: Sequence[int], start: int, rows: Incoming, layers: tuple[int, int]) -> None:
        """Put rows at the tokens from ``start`` on of a sequence that lies in these blocks."""
        stored = self._stored(rows, layers)
        parts = _parts(start, rows.num_tokens, self.block_size)
        self._write([([_within(place, blocks, part) for place in stored], part) for part in parts], rows)

    def write_slots(self, slots: Sequence[tuple[int, int]], rows: Incoming, layers: tuple[int, int]) -> None:
        """Put one row each at these pairs of a block and a token in it, no two of them the same."""
        places = [_at_slots(place, slots) for place in self._stored(rows, layers)]
        self._write([(places, _Part(0, len(slots), 0, 1, 0))], rows)

    def _write(self, copies: list[tuple[list[BlockStack], _Part]], rows: Incoming) -> None:
        if len(copies) > 1 or len(rows.views) > 1:
            # No copy may change what a later one reads.
            for places, _ in copies:
                for place in places:
                    for view, name in zip(rows.views, rows.names, strict=True):
                        if share_bytes(place.geometry, view.geometry):
                            raise KvbmValueError(
                                f"the cache and {name} overlap: some of the rows to write are also read"
                            )
        for places, part in copies:
            for place, view, name in zip(places, rows.views, rows.names, strict=True):
                copy_views(place, _cut(view, part), None, "the cache", name)

    def read(
        self, blocks: Sequence[int], n: int, layer: SupportsIndex | None, order: Layout, dtype: DType
    ) -> tuple[Any, Any]:
        """New arrays with the first ``n`` tokens of a sequence that lies in these blocks, of one layer or of all."""
        spec = self.spec
        outer = () if layer is not None or spec.num_layers == 1 else (spec.num_layers,)
        shape = (*outer, n, spec.num_kv_heads) if order is Layout.NHD else (*outer, spec.num_kv_heads, n)
        k = self.arrays.empty((*shape, spec.head_dim), dtype)
        v = self.arrays.empty((*shape, spec.v_head_dim), dtype)
        if n and spec.scale is None:
            self._read(blocks, k, v, layer, order)
        elif n:
            k_rows, v_rows = (np.empty((*shape, width), np.uint8) for width in spec.widths)
            self._read(blocks, k_rows, v_rows, layer, order)
            for array, rows, dim in ((k, k_rows, spec.head_dim), (v, v_rows, spec.v_head_dim)):
                put_numbers(array, decode(rows, dim, spec.kv_dtype.DTYPE, self._scale))
        return k, v

    def _read(self, blocks: Sequence[int], k: Any, v: Any, layer: SupportsIndex | None, order: Layout) -> None:
        """Fill arrays of rows as they are stored."""
        rows = self._stored_form(k, v, layer, order)
        stored = self._stored(rows, self.spec.layer_range(layer))
        for part in _parts(0, rows.num_tokens, self.block_size):
            for place, view, name in zip(stored, rows.views, rows.names, strict=True):
                copy_views(_cut(view, part), _within(place, blocks, part), None, name, "the cache")

    def copy_blocks(self, dsts: list[int], srcs: list[int]) -> None:
        """Copy blocks to other blocks."""
        for view in self._whole():
            copy_views(view[dsts], view[srcs], None, "the new blocks", "the old blocks")

    def copy_beginning(self, other: Rows, n: int) -> None:
        """Copy the first ``n`` tokens of each block from rows that differ only in how long their blocks are."""
        if n:
            for mine, its in ((self.k_view, other.k_view), (self.v_view, other.v_view)):
                copy_views(mine.tokens(0, n), its.tokens(0, n), None, "the new array", "the old array")

    @property
    def _scale(self) -> DType:
        assert self.spec.scale is not None
        return self.spec.scale

    def scales(self, rows: Any, dim: int) -> Any:
        """The scales of rows of this many elements, ``rows.shape[:-1]``, in place; None if there are none."""
        if self.spec.scale is None:
            return None
        start = scale_offset(dim, self.spec.scale)
        return self.arrays.view(rows[..., start : start + self.spec.scale.itemsize], self.spec.scale)[..., 0]

    def _whole(self) -> tuple[BlockStack, ...]:
        return (self.k_view, self.v_view) if self.kv_view is None else (self.kv_view,)

    def _stored(self, rows: Incoming, layers: tuple[int, int]) -> tuple[BlockStack, ...]:
        stored = self._whole() if len(rows.views) == 1 else (self.k_view, self.v_view)
        if layers == (0, self.spec.num_layers):
            return stored
        key = len(stored), layers[0]
        found = self._of_layer.get(key)
        if found is None:
            found = self._of_layer[key] = tuple([view.layers(*layers) for view in stored])
        return found


class _Part(NamedTuple):
    """Neighbouring tokens of a sequence that take up the same tokens of each of some blocks."""

    block: int
    """Where in the sequence's list of blocks they begin."""
    num_blocks: int
    token: int
    """The first token in each block."""
    num_tokens: int
    """How many of each block."""
    row: int
    """Where among the tokens to move they begin."""


def _parts(start: int, n: int, block_size: int) -> list[_Part]:
    """Tokens from ``start`` on: the rest of a block begun, whole blocks, and the beginning of one more."""
    parts = []
    block, token = divmod(start, block_size)
    row = 0
    if token or n < block_size:
        row = min(n, block_size - token)
        parts.append(_Part(block, 1, token, row, 0))
        block += 1
    whole, rest = divmod(n - row, block_size)
    if whole:
        parts.append(_Part(block, whole, 0, block_size, row))
    if rest:
        parts.append(_Part(block + whole, 1, 0, rest, n - rest))
    return parts


def _within(stored: BlockStack, blocks: Sequence[int], part: _Part) -> BlockStack:
    """The place of a part in the storage."""
    ids = np.array(blocks[part.block : part.block + part.num_blocks], np.int64)
    geometry = stored.geometry.tokens(part.token, part.token + part.num_tokens).select(ids)
    return stored._narrowed(geometry, _with_tokens(stored.shape, part.num_tokens))


def _cut(rows: BlockStack, part: _Part) -> BlockStack:
    """A part of rows that are all in one long block, as the blocks they are to be."""
    whole = rows.geometry
    stride = whole.strides.token
    geometry = Geometry(
        whole.bases,
        whole.steps,
        whole.strides._replace(block=part.num_tokens * stride),
        whole.extents._replace(block=part.num_blocks, token=part.num_tokens),
        whole.row_nbytes,
        whole.offset + part.row * stride,
    )
    return rows._narrowed(geometry, _with_tokens(rows.shape, part.num_tokens))


def _at_slots(stored: BlockStack, slots: Sequence[tuple[int, int]]) -> BlockStack:
    """Single tokens, each as a block: blocks are counted in steps from one token to the next of a head."""
    whole = stored.geometry
    stride = whole.strides.token
    # A single block has no stride.
    per_block = max(whole.strides.block // stride, whole.extents.token) if stride else 1
    geometry = Geometry(
        whole.bases,
        whole.steps,
        whole.strides._replace(block=stride or whole.strides.block),
        whole.extents._replace(block=whole.extents.block * per_block, token=1),
        whole.row_nbytes,
        whole.offset,
        np.array([block * per_block + token for block, token in slots], np.int64),
    )
    # Not every such number is a token, so the strides cannot show it. These are, and no two the same.
    geometry.cannot_collide = True
    return stored._narrowed(geometry, _with_tokens(stored.shape, 1))


def _with_tokens(shape: BlockShape, num_tokens: int) -> BlockShape:
    return _shape(shape.nl, shape.no, shape.nh, num_tokens, shape.hd, shape.dtype)


def _view(group: Group, axes: str, shape: BlockShape, order: Layout, name: str) -> BlockStack:
    view = BlockStack.__new__(BlockStack)
    view._lay_out(group, axes, shape, order, lambda _: name, PerIndex(outer=1))
    return view


def _memory_of_both(k: Memory, v: Memory) -> Memory:
    return Memory(k.owners + v.owners, k.host_owners + v.host_owners, k.places | v.places, k.readonly or v.readonly)
