"""The three layouts of blocks, as views."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

from kvbm_kernels._wording import a_type, counted
from kvbm_kernels.array_group import Expected, gather
from kvbm_kernels.arrays import ArrayLike, Form, describe
from kvbm_kernels.errors import KvbmTypeError, KvbmValueError
from kvbm_kernels.geometry import PerIndex
from kvbm_kernels.layouts import BlockShape, Layout, as_layout, as_shape, contiguous_strides
from kvbm_kernels.views import View

if TYPE_CHECKING:
    from typing_extensions import Self

# The letters of `axes`, and how this package writes the extents they stand for.
_SYMBOLS = {"b": "nb", "l": "nl", "o": "no", "t": "nt", "h": "nh", "d": "hd"}


class BlockStack(View):
    """Block stacks: chunks that hold the rows of one block, layer and outer index.

    ``tensors`` is nested, ``[nb][nl*no]`` or ``[nb][nl][no]``, with an array ``[nt, nh, hd]`` for each chunk in NHD
    layout, or ``[nh, nt, hd]`` in HND. Only the rows, hd elements, have to be contiguous. An array holds elements of
    ``shape.dtype``, or integers of that size with their bits; a flat array of them, or of bytes, of the size of a chunk
    may stand for one.
    ``name`` is what errors call the tensors.

    Raises KvbmTypeError for other elements, KvbmValueError for other shapes and for chunks that differ in strides or
    device.
    """

    __slots__ = ()

    def __init__(
        self,
        tensors: Sequence[Sequence[ArrayLike]] | Sequence[Sequence[Sequence[ArrayLike]]],
        shape: BlockShape,
        layout: Layout | str = "NHD",
        *,
        name: str = "tensors",
    ) -> None:
        shape = as_shape(shape)
        layout = as_layout(layout)
        axes = _chunk_axes(layout)
        chunks, names = _chunks(tensors, shape, name)
        group = gather(chunks, _expected(axes, shape), names)
        steps = PerIndex(block=shape.nl * shape.no, layer=shape.no, outer=1)
        self._lay_out(group, axes, shape, layout, names, steps, len(tensors))

    @classmethod
    def from_layers(
        cls,
        tensors: ArrayLike | Sequence[ArrayLike] | Sequence[Sequence[ArrayLike]],
        shape: BlockShape,
        axes: str = "bothd",
        *,
        name: str = "tensors",
    ) -> Self:
        """Block stacks as an engine keeps them: tensors that hold one layer of many blocks each.

        ``axes`` names the dimensions of each tensor, one letter each: b block, l layer, o outer (K, V), t token, h
        head, d the elements of a row. Strides are the tensor's own, so a permuted or sliced tensor is fine as long as
        its rows are contiguous. The length of b is the number of blocks.

        - Without l, ``tensors`` is a list of nl entries, one for each layer; with l it is one tensor for all.
        - Without o, and with shape.no above 1, each of these is a list of no tensors, such as a pair (k, v).
        - b, t and h can be left out where their extent is 1.

        No shape tells a layout, and nothing is guessed: a tensor ``[2, 2, nt, nh, hd]`` fits both ``"bothd"`` and
        ``"obthd"``, and only the caller knows which it is.

        ========================================  ===========  =======================================
        tensors                                   axes         examples
        ========================================  ===========  =======================================
        ``[nb, 2, nt, nh, hd]`` a layer           ``"bothd"``  blocks first
        ``[2, nb, nt, nh, hd]`` a layer           ``"obthd"``  K and V first
        ``[nb, nh, nt, 2, hd]`` a layer           ``"bhtod"``  rows K|V packed, viewed with K, V apart
        pairs of ``[nb, nt, nh, hd]`` a layer     ``"bthd"``   token slots, viewed as pages
        ``[nb, nt, hd]`` a layer                  ``"btd"``    MLA: nh = no = 1
        one ``[nb, nl, 2, nt, nh, hd]``           ``"blothd"`` one pool for all layers
        ========================================  ===========  =======================================

        Raises KvbmTypeError and KvbmValueError as the class does.
        """
        shape = as_shape(shape)
        _check_axes(axes, shape)
        apart: dict[str, int] = {}
        if "l" not in axes:
            apart["nl"] = shape.nl
        if "o" not in axes and shape.no > 1:
            apart["no"] = shape.no
        arrays, names = _nested(tensors, apart, name, axes)
        steps = PerIndex(layer=apart.get("no", 1) if "nl" in apart else 0, outer=int("no" in apart))
        return cls._of_arrays(arrays, shape, axes, names, steps)

    @classmethod
    def _of_arrays(
        cls, arrays: Sequence[Any], shape: BlockShape, axes: str, names: Names, steps: PerIndex, num_tables: int = 1
    ) -> Self:
        """Block stacks in a flat list of arrays, through which the indices that are none of their axes ``step``."""
        group = gather(arrays, _expected(axes, shape), names)
        view = cls.__new__(cls)
        view._lay_out(group, axes, shape, _layout_of(axes, group.form), names, steps, num_tables)
        return view


class UniversalBlocks(View):
    """Universal blocks: ``[nh, nl, no, nt, hd]`` a block, in which a range of heads is one contiguous slice.

    ``arrays`` is one array ``[nb, nh, nl, no, nt, hd]`` or a list with an array for each block. Elements, strides, flat
    arrays, ``name`` and errors are as for :class:`BlockStack`.
    """

    __slots__ = ()

    def __init__(
        self,
        arrays: ArrayLike | Sequence[ArrayLike],
        shape: BlockShape,
        *,
        name: str = "arrays",
    ) -> None:
        shape = as_shape(shape)
        blocks, axes, names = _one_or_each(arrays, "hlotd", name)
        group = gather(blocks, _expected(axes, shape), names)
        self._lay_out(group, axes, shape, None, names, PerIndex(block=1), len(blocks))


class OperationalBlocks(View):
    """Operational blocks: ``[nl, no, inner]`` a block, where inner are the nt*nh*hd elements of a chunk in some order.

    ``arrays`` is one array ``[nb, nl, no, inner]`` or a list with an array for each block; inner may also be spelled
    out, as ``nt, nh, hd`` for NHD or ``nh, nt, hd`` for HND. ``inner`` names the order, which no array tells. Elements,
    strides, flat arrays, ``name`` and errors are as for :class:`BlockStack`.
    """

    __slots__ = ()

    def __init__(
        self,
        arrays: ArrayLike | Sequence[ArrayLike],
        shape: BlockShape,
        inner: Layout | str = "NHD",
        *,
        name: str = "arrays",
    ) -> None:
        shape = as_shape(shape)
        layout = as_layout(inner, "inner")
        blocks, outer_axes, names = _one_or_each(arrays, "lo", name)
        axes = outer_axes + _chunk_axes(layout)
        expected = _expected(axes, shape)
        if blocks and _ndim(blocks[0]) == len(axes):
            group = gather(blocks, expected, names)
        else:
            group = gather(blocks, _fused(expected), names)
            group = group._replace(form=_unfused(group.form, expected, names))
        self._lay_out(group, axes, shape, layout, names, PerIndex(block=1), len(blocks))


Names: TypeAlias = Callable[[int], str]


def _chunk_axes(layout: Layout) -> str:
    return "thd" if layout is Layout.NHD else "htd"


@lru_cache(maxsize=256)
def _expected(axes: str, shape: BlockShape) -> Expected:
    extents = {"b": None, "l": shape.nl, "o": shape.no, "t": shape.nt, "h": shape.nh, "d": shape.hd}
    return Expected(
        " ".join(_SYMBOLS[letter] for letter in axes),
        tuple(extents[letter] for letter in axes),
        shape.dtype,
    )


def _one_or_each(arrays: Any, axes: str, name: str) -> tuple[list[Any], str, Names]:
    """A list of arrays, their dimensions, and their names: one array with all blocks, or one for each block."""
    if isinstance(arrays, list | tuple):
        return list(arrays), axes, lambda i: f"{name}[{i}]"
    return [arrays], "b" + axes, lambda _: name


def _chunks(tensors: Any, shape: BlockShape, name: str) -> tuple[list[Any], Names]:
    """The chunks of a nested list in the order of the pointer table, and their names."""
    if not isinstance(tensors, list | tuple):
        raise KvbmTypeError(f"{name} is {a_type(tensors)}, expected a list with a list of chunks for each block")
    chunks: list[Any] = []
    per_block, no = shape.nl * shape.no, shape.no
    by_layer = False
    for b, block in enumerate(tensors):
        if not isinstance(block, list | tuple):
            raise KvbmTypeError(f"{name}[{b}] is {a_type(block)}, expected a list of chunks")
        if len(block) == shape.nl and isinstance(block[0], list | tuple):
            by_layer = True
            for layer, outers in enumerate(block):
                if not isinstance(outers, list | tuple) or len(outers) != no:
                    raise KvbmValueError(
                        f"{name}[{b}][{layer}] is {_sized(outers)}, expected a list of no = {no} chunks"
                    )
                chunks.extend(outers)
        elif len(block) == per_block:
            chunks.extend(block)
        else:
            found = counted(len(block), "entry", "entries")
            chunks_each = f"nl*no = {shape.nl}*{no} = {counted(per_block, 'chunk')}"
            raise KvbmValueError(f"{name}[{b}] has {found}, expected {chunks_each}")

    def chunk_name(i: int) -> str:
        b, chunk = divmod(i, per_block)
        inner = f"[{chunk // no}][{chunk % no}]" if by_layer else f"[{chunk}]"
        return f"{name}[{b}]{inner}"

    return chunks, chunk_name


# What is given apart where axes are without the letter.
_APART = {"nl": "layers", "no": "K and V of a layer"}


def _nested(tensors: Any, counts: dict[str, int], name: str, axes: str) -> tuple[list[Any], Names]:
    """The tensors of lists nested as deep as there are counts, and their names."""
    if not counts:
        return [tensors], lambda _: name
    (symbol, count), *inner = counts.items()
    if not isinstance(tensors, list | tuple) or len(tensors) != count:
        is_list = isinstance(tensors, list | tuple)
        why = "" if is_list else f": axes is {axes!r} without {symbol[1]}, so {_APART[symbol]} are given apart"
        raise KvbmValueError(f"{name} is {_sized(tensors)}, expected a list of {symbol} = {count}{why}")
    if not inner:
        return list(tensors), lambda i: f"{name}[{i}]"
    flat = []
    for i, entry in enumerate(tensors):
        flat += _nested(entry, dict(inner), f"{name}[{i}]", axes)[0]
    width = inner[0][1]
    return flat, lambda i: f"{name}[{i // width}][{i % width}]"


def _sized(obj: Any) -> str:
    if isinstance(obj, list | tuple):
        return f"a list of {len(obj)}"
    return f"a {type(obj).__name__}"


def _check_axes(axes: str, shape: BlockShape) -> None:
    if not isinstance(axes, str):
        raise KvbmTypeError(f"axes is {axes!r}, expected a string")
    if len(set(axes)) != len(axes) or not set(axes) <= set(_SYMBOLS) or "d" not in axes:
        raise KvbmValueError(f"axes is {axes!r}, expected each of the letters b, l, o, t, h and d at most once, and d")
    for letter, extent in (("t", shape.nt), ("h", shape.nh)):
        if letter not in axes and extent > 1:
            raise KvbmValueError(
                f"axes is {axes!r} without {letter}, expected {_SYMBOLS[letter]} = 1 then, not {extent}"
            )


def _layout_of(axes: str, form: Form) -> Layout:
    """The order that the strides of tokens and heads tell; that of the axes where there is only one of either."""
    strides = dict(zip(axes, form.strides, strict=True))
    token, head = abs(strides.get("t", 0)), abs(strides.get("h", 0))
    if token and head and token != head:
        return Layout.NHD if token > head else Layout.HND
    return Layout.HND if "h" in axes and axes.find("h") < axes.find("t") else Layout.NHD


def _ndim(array: Any) -> int:
    try:
        return describe(array).form.ndim
    except KvbmTypeError:
        return 0  # gather() will say what is wrong with it


def _fused(expected: Expected) -> Expected:
    """The same with the last three dimensions in one."""
    nt_nh_hd = math.prod(extent or 1 for extent in expected.shape[-3:])
    return Expected(
        " ".join([*expected.symbols.split()[:-3], "nt*nh*hd"]),
        (*expected.shape[:-3], nt_nh_hd),
        expected.dtype,
    )


def _unfused(form: Form, expected: Expected, names: Names) -> Form:
    inner = tuple(extent or 1 for extent in expected.shape[-3:])
    itemsize = expected.dtype.itemsize
    if form.shape[-1] > 1 and form.strides[-1] != itemsize:
        raise KvbmValueError(
            f"{names(0)} has the elements of a chunk {counted(form.strides[-1], 'byte')} apart, expected {itemsize}"
        )
    return form._replace(
        shape=form.shape[:-1] + inner,
        strides=form.strides[:-1] + contiguous_strides(inner, itemsize),
    )
