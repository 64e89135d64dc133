"""The rows of K and V of a cache: the one place that writes them into blocks and reads them back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, SupportsIndex, TypeVar

import numpy as np

from kvbm_kernels._native import check, ffi, lib
from kvbm_kernels._wording import counted
from kvbm_kernels.array_group import Expected, Group, conform
from kvbm_kernels.arrays import Array, Form, Memory, describe, memory_of
from kvbm_kernels.blocks import BlockStack
from kvbm_kernels.copy import copy_views
from kvbm_kernels.dtypes import DType
from kvbm_kernels.errors import (
    KvbmError,
    KvbmMemoryError,
    KvbmValueError,
    StubBuildError,
    Uncopied,
)
from kvbm_kernels.geometry import Geometry, PerIndex
from kvbm_kernels.kv_arrays import ArrayMaker
from kvbm_kernels.kv_quant import c_quantization, float_type, scale_offset
from kvbm_kernels.kv_row_spec import RowSpec
from kvbm_kernels.kv_tables import TokenMap, joined
from kvbm_kernels.layouts import BlockShape, Layout, QuantisedRow, quantised
from kvbm_kernels.overlap import share_bytes
from kvbm_kernels.streams import StreamLike, as_handle, launch

ResultT = TypeVar("ResultT")


class TokenRows(NamedTuple):
    """K and V of tokens, given or wanted: a view of both together, or one of each where that cannot be."""

    num_tokens: int
    views: tuple[BlockStack, ...]
    names: tuple[str, ...]


@lru_cache(maxsize=1024)
def _shape(nl: int, no: int, nh: int, nt: int, hd: int, dtype: DType, row: QuantisedRow | None = None) -> BlockShape:
    return quantised(BlockShape(nl, no, nh, nt, hd, dtype), row)


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
        k_row, v_row = spec.quantised
        self.k_view = BlockStack.from_layers(self.k, _shape(nl, 1, nh, block_size, hd, dtype, k_row), axes, name="k")
        self.v_view = BlockStack.from_layers(self.v, _shape(nl, 1, nh, block_size, v_hd, dtype, v_row), axes, name="v")
        self.kv_view: BlockStack | None = None
        self._of_layer: dict[tuple[int, int], tuple[BlockStack, ...]] = {}
        # Rows of 126 and of 128 elements can be as long, with padding and scale.
        if spec.head_dim == spec.v_head_dim:
            shape = _shape(nl, 2, nh, block_size, hd, dtype, k_row)
            self.kv_view = BlockStack.from_layers([self.k, self.v], shape, axes, name="kv")
        self._memory = joined([self.k_view.memory, self.v_view.memory])
        self.is_host = self._memory.is_host
        if not self.is_host and lib.kvbm_kernels_is_stub_build():
            raise StubBuildError("arrays are in CUDA memory, and this build of kvbm_kernels has no CUDA")

    def check_stream(self, stream: StreamLike | None) -> None:
        """Raise KvbmValueError or KvbmTypeError for what no call on this memory can be put on."""
        if stream is not None:
            as_handle(stream)
            if self.is_host:
                raise KvbmValueError(f"stream is {stream!r}, expected None: the cache is in host memory")

    def given(self, k: Any, v: Any, layer: SupportsIndex | None, order: Layout) -> TokenRows:
        """K and V of new tokens, of one layer or of all, checked. Raises KvbmTypeError and KvbmValueError."""
        k_array, v_array = _named("k", describe, k), _named("v", describe, v)
        dtypes = self._dtype_of(k_array, "k"), self._dtype_of(v_array, "v")
        return self._rows_of(k_array, v_array, layer, order, *dtypes)

    def _dtype_of(self, array: Array, name: str) -> DType:
        """The type that rows are given in: as they are stored or, to be quantised, as what they are."""
        return self.spec.kv_dtype.DTYPE if self.spec.scale is None else _named(name, float_type, array.form)

    def _rows_of(
        self, k: Array, v: Array, layer: SupportsIndex | None, order: Layout, dtype: DType, v_dtype: DType
    ) -> TokenRows:
        one = layer is not None or self.spec.num_layers == 1
        n, views = _laid_out(self.spec, one, order, k.address, k.form, dtype, v.address, v.form, v_dtype)
        memories = [memory_of(k, "k"), memory_of(v, "v")]
        if len(views) == 1:
            return TokenRows(n, (_in_memory(views[0], joined(memories)),), ("k and v",))
        return TokenRows(n, tuple(map(_in_memory, views, memories)), ("k", "v"))

    def append(
        self,
        rows: TokenRows,
        layers: tuple[int, int],
        places: TokenMap,
        written: Callable[[], Sequence[tuple[int, int]]] | None,
        stream: StreamLike | None,
        copied: Sequence[int] = (),
    ) -> None:
        """Put rows where a map says that their tokens lie.

        ``written`` gives the pairs of a block and a token in it that the map comes to; None if only kernels will know.
        ``copied`` are blocks that were written before, to make room for this. Raises KvbmValueError for rows that lie
        where some are written, or in memory that cannot be read from there.
        """
        if not rows.num_tokens:
            return
        if copied:
            self._check_not_copied(rows, copied)
        # Apart, for the rows may well lie between K and V.
        for place in self._stored(2, layers):
            for view, name in zip(rows.views, rows.names, strict=True):
                if share_bytes(place.geometry, view.geometry) and (
                    written is None or share_bytes(_at_slots(place.geometry, written()), view.geometry)
                ):
                    raise KvbmValueError(f"the cache and {name} overlap: some of the rows to write are also read")
        for view, name in zip(rows.views, rows.names, strict=True):
            if self.is_host and not view.memory.is_host:
                raise KvbmValueError(f"{name} is on {view.device}, expected host memory, as the cache")
        for place, view, name in zip(self._stored(len(rows.views), layers), rows.views, rows.names, strict=True):
            self._move("append", place, view, view, name, places, stream)

    def _check_not_copied(self, rows: TokenRows, copied: Sequence[int]) -> None:
        """Raise KvbmValueError for rows in blocks that have just been written, all layers of them."""
        for whole in (self.k_view, self.v_view):
            for view, name in zip(rows.views, rows.names, strict=True):
                if share_bytes(whole.geometry, view.geometry) and share_bytes(whole[copied].geometry, view.geometry):
                    raise KvbmValueError(
                        f"the cache and {name} overlap: a shared block is copied to where some of the rows to read are"
                    )

    def read(
        self,
        n: int,
        layer: SupportsIndex | None,
        order: Layout,
        dtype: DType,
        places: TokenMap,
        stream: StreamLike | None,
    ) -> tuple[Any, Any]:
        """New arrays with ``n`` tokens from where a map says that they lie, of one layer or of all."""
        nl, nh, hd, v_hd = self.spec[:4]
        outer = () if layer is not None or nl == 1 else (nl,)
        shape = (*outer, n, nh) if order is Layout.NHD else (*outer, nh, n)
        with self.arrays.on(stream):
            k = self.arrays.empty((*shape, hd), dtype)
            v = self.arrays.empty((*shape, v_hd), dtype)
        if n:
            rows = self._rows_of(describe(k), describe(v), layer, order, dtype, dtype)
            stored = self._stored(len(rows.views), self.spec.layer_range(layer))
            for place, view, name in zip(stored, rows.views, rows.names, strict=True):
                self._move("gather", view, place, view, name, places, stream)
        return k, v

    def _move(
        self,
        what: str,
        dst: BlockStack,
        src: BlockStack,
        rows: BlockStack,
        name: str,
        places: TokenMap,
        stream: StreamLike | None,
    ) -> None:
        """Call a function of the C API that moves these rows into the cache or out of it."""
        to, of, shape = dst.geometry, src.geometry, rows.geometry.c_shape()
        quantization = ffi.NULL
        if self.spec.scale is not None:
            quantization = c_quantization(self.spec.kv_dtype.DTYPE, rows.shape.dtype, self.spec.scale)
        if self.is_host:
            move = getattr(lib, f"kvbm_kernels_host_{what}")
            check(move(to.c_view(), of.c_view(), shape, places.c_map, quantization, 0))
            return
        move = getattr(lib, f"kvbm_kernels_launch_{what}")
        launch(
            lambda handle: move(to.c_view(), of.c_view(), shape, places.c_map, quantization, handle),
            stream,
            {"the cache": self._memory, name: rows.memory, "the tables": places.memory},
        )

    def copy_blocks(self, dsts: list[int], srcs: list[int], stream: StreamLike | None) -> None:
        """Copy blocks to other blocks."""
        for view in self._whole():
            copy_views(view[dsts], view[srcs], stream, "the new blocks", "the old blocks")

    def copy_beginning(self, other: Rows, n: int, stream: StreamLike | None) -> None:
        """Copy the first ``n`` tokens of each block from rows that differ only in how long their blocks are."""
        if n:
            for mine, its in ((self.k_view, other.k_view), (self.v_view, other.v_view)):
                copy_views(mine.tokens(0, n), its.tokens(0, n), stream, "the new array", "the old array")

    def scales(self, rows: Any, dim: int) -> Any:
        """The scales of rows of this many elements, ``rows.shape[:-1]``, in place; None if there are none."""
        if self.spec.scale is None:
            return None
        start = scale_offset(dim, self.spec.scale)
        return self.arrays.view(rows[..., start : start + self.spec.scale.itemsize], self.spec.scale)[..., 0]

    def _whole(self) -> tuple[BlockStack, ...]:
        return (self.k_view, self.v_view) if self.kv_view is None else (self.kv_view,)

    def _stored(self, num_views: int, layers: tuple[int, int]) -> tuple[BlockStack, ...]:
        """K and V of these layers as one view or two."""
        stored = self._whole() if num_views == 1 else (self.k_view, self.v_view)
        if layers == (0, self.spec.num_layers):
            return stored
        key = num_views, layers[0]
        found = self._of_layer.get(key)
        if found is None:
            found = self._of_layer[key] = tuple([view.layers(*layers) for view in stored])
        return found


def _at_slots(whole: Geometry, slots: Sequence[tuple[int, int]]) -> Geometry:
    """Single tokens, each as a block: blocks are counted in steps from one token to the next of a head."""
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
    return geometry


# A decode step gives the same arrays again and again, or others in their place.
@lru_cache(maxsize=1024)
def _laid_out(
    spec: RowSpec,
    one: bool,
    order: Layout,
    k_address: int,
    k_form: Form,
    k_dtype: DType,
    v_address: int,
    v_form: Form,
    v_dtype: DType,
) -> tuple[int, tuple[BlockStack, ...]]:
    """How many tokens there are in arrays of K and V, and their rows, as views that hold no memory."""
    nl, nh, hd, v_hd = spec[:4]
    axes = ("" if one else "l") + ("thd" if order is Layout.NHD else "htd")
    outer = None if one else nl
    k_form = _named("k", conform, k_form, _expected_rows(outer, order, nh, hd, "head_dim", k_dtype))
    v_form = _named("v", conform, v_form, _expected_rows(outer, order, nh, v_hd, "v_head_dim", v_dtype))
    n, v_n = (form.shape[axes.index("t")] for form in (k_form, v_form))
    if n != v_n:
        raise KvbmValueError(f"v has {counted(v_n, 'token')}, expected {n} as k")
    nl = 1 if one else nl
    if not n:
        return 0, ()
    if k_form == v_form:
        return n, (_view([k_address, v_address], k_form, axes, _shape(nl, 2, nh, n, hd, k_dtype), order, "k"),)
    return n, (
        _view([k_address], k_form, axes, _shape(nl, 1, nh, n, hd, k_dtype), order, "k"),
        _view([v_address], v_form, axes, _shape(nl, 1, nh, n, v_hd, v_dtype), order, "v"),
    )


def _view(addresses: list[int], form: Form, axes: str, shape: BlockShape, order: Layout, name: str) -> BlockStack:
    view = BlockStack.__new__(BlockStack)
    view._lay_out(
        Group(addresses, form, Memory([], [], set(), "")), axes, shape, order, lambda _: name, PerIndex(outer=1)
    )
    return view


def _in_memory(view: BlockStack, memory: Memory) -> BlockStack:
    found = view._narrowed(view.geometry, view.shape)
    found.memory = memory
    return found


def _named(name: str, function: Callable[..., ResultT], *arguments: Any) -> ResultT:
    """The function's result, with the name in front of what it raises."""
    try:
        return function(*arguments)
    except KvbmError as error:
        raise type(error)(f"{name} {error}") from None
