"""Conversions between block stacks and universal or operational blocks, on plain lists of arrays.

The two with universal blocks have the names of the C API; as everywhere in this package, what is written comes first.
Sizes come from the arrays. :func:`kvbm_kernels.copy_blocks` does the same between views that are made once and used
often, and for every other pair of layouts.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from kvbm_kernels._native import check, ffi, lib
from kvbm_kernels._wording import a_type, counted
from kvbm_kernels.arrays import ArrayLike, Form, describe
from kvbm_kernels.blocks import BlockStack, OperationalBlocks, UniversalBlocks
from kvbm_kernels.copy import copy_views
from kvbm_kernels.dtypes import DType, common_dtype, holds
from kvbm_kernels.errors import KvbmError, KvbmTypeError, KvbmValueError
from kvbm_kernels.layouts import BlockShape, Layout, as_layout
from kvbm_kernels.overlap import ranges_meet
from kvbm_kernels.streams import StreamLike


def universal_from_block(
    universals: Sequence[ArrayLike],
    blocks: Sequence[Sequence[ArrayLike]],
    layout: Layout | str,
    *,
    stream: StreamLike | None = None,
) -> None:
    """Copy block stacks into universal blocks.

    ``universals`` are nb arrays ``[nh, nl, no, nt, hd]``, written; ``blocks`` are nb lists of nl*no chunks, each
    ``[nt, nh, hd]`` for the layout "NHD" or ``[nh, nt, hd]`` for "HND", read. Chunk (l, o) is entry ``l*no + o``.

    Where the arrays may be, ``stream``, and what is raised are as for :func:`kvbm_kernels.copy_blocks`.
    """
    layout = as_layout(layout)
    if stream is None and _copied_by_tables(universals, blocks, layout, to_universal=True):
        return
    universal, stack = _universal_and_stack(universals, blocks, layout)
    copy_views(universal, stack, stream, "universals", "blocks")


def block_from_universal(
    blocks: Sequence[Sequence[ArrayLike]],
    universals: Sequence[ArrayLike],
    layout: Layout | str,
    *,
    stream: StreamLike | None = None,
) -> None:
    """Copy universal blocks into block stacks: :func:`universal_from_block` the other way, ``blocks`` written."""
    layout = as_layout(layout)
    if stream is None and _copied_by_tables(universals, blocks, layout, to_universal=False):
        return
    universal, stack = _universal_and_stack(universals, blocks, layout)
    copy_views(stack, universal, stream, "blocks", "universals")


def operational_from_block(
    operationals: Sequence[ArrayLike],
    blocks: Sequence[Sequence[ArrayLike]],
    *,
    stream: StreamLike | None = None,
) -> None:
    """Copy block stacks into operational blocks, the elements of each chunk in the order they have.

    ``operationals`` are nb arrays ``[nl, no, inner]``, written; ``blocks`` are nb lists of nl*no chunks of inner
    elements each, read: arrays of three dimensions with contiguous rows, or of one.

    Where the arrays may be, ``stream``, and what is raised are as for :func:`kvbm_kernels.copy_blocks`.
    """
    operational, stack = _operational_and_stack(operationals, blocks)
    copy_views(operational, stack, stream, "operationals", "blocks")


def block_from_operational(
    blocks: Sequence[Sequence[ArrayLike]],
    operationals: Sequence[ArrayLike],
    *,
    stream: StreamLike | None = None,
) -> None:
    """Copy operational blocks into block stacks: :func:`operational_from_block` the other way, ``blocks`` written."""
    operational, stack = _operational_and_stack(operationals, blocks)
    copy_views(stack, operational, stream, "blocks", "operationals")


_block_shape = lru_cache(maxsize=256)(BlockShape)

_POINTERS = ffi.typeof("void *const[]")

# Up to so many ranges, asking for each costs less than NumPy's set-up.
_FEW = 32

# Stands for the blocks of empty lists, of which there are none.
_NO_SHAPE = BlockShape(1, 1, 1, 1, 1, "uint8")


def _copied_by_tables(universals: Any, blocks: Any, layout: Layout, *, to_universal: bool) -> bool:
    """Copy, if the arrays are the simple kind: contiguous, in host memory, alike, and plainly apart.

    The C functions of these names then take their addresses as they are, in a third of the time that views need. Where
    anything is otherwise, nothing is done, and views either manage or say what is wrong.
    """
    if not isinstance(universals, list | tuple) or not isinstance(blocks, list | tuple):
        return False
    if not all(isinstance(block, list | tuple) for block in blocks):
        return False
    try:
        of_universals = [describe(array) for array in universals]
        of_chunks = [describe(chunk) for block in blocks for chunk in block]
    except KvbmTypeError:
        return False
    if not of_chunks or len(of_universals) != len(blocks):
        return False
    universal, chunk = of_universals[0].form, of_chunks[0].form
    sizes = _table_sizes(universal, chunk, layout)
    if sizes is None:
        return False
    nl, no = sizes[1:3]
    if any(len(block) != nl * no for block in blocks):
        return False
    if any(array.form != universal for array in of_universals) or any(array.form != chunk for array in of_chunks):
        return False

    universal_starts = [array.address for array in of_universals]
    chunk_starts = [array.address for array in of_chunks]
    if to_universal:
        written = of_universals
        are_apart = _are_apart(universal_starts, universal.nbytes, chunk_starts, chunk.nbytes)
        convert = lib.kvbm_kernels_host_universal_from_block
    else:
        written = of_chunks
        are_apart = _are_apart(chunk_starts, chunk.nbytes, universal_starts, universal.nbytes)
        convert = lib.kvbm_kernels_host_block_from_universal
    if not are_apart or any(array.readonly for array in written):
        return False
    check(convert(_table(universal_starts), _table(chunk_starts), len(blocks), *sizes, layout, 0))
    return True


def _are_apart(starts: list[int], nbytes: int, others: list[int], other_nbytes: int) -> bool:
    """Whether ranges of one length share no byte with each other, nor with other ranges of one length."""
    ordered = sorted(starts)
    if any(start - before < nbytes for before, start in pairwise(ordered)):
        return False
    if ordered[-1] + nbytes <= min(others) or max(others) + other_nbytes <= ordered[0]:
        return True
    if len(others) > _FEW:
        return not ranges_meet(np.array(starts), nbytes, np.array(others), other_nbytes)
    for other in others:
        # Of the ranges that start before this one ends, the last is the only one that can reach into it.
        at = bisect_left(ordered, other + other_nbytes)
        if at and ordered[at - 1] + nbytes > other:
            return False
    return True


@lru_cache(maxsize=256)
def _table_sizes(universal: Form, chunk: Form, layout: Layout) -> tuple[int, int, int, int, int, int] | None:
    """nh, nl, no, nt, hd and the type for arrays of these forms; None if the C functions cannot take them."""
    if universal.device is not None or chunk.device is not None or universal.ndim != 5:
        return None
    nh, nl, no, nt, hd = universal.shape
    inner = (nt, nh, hd) if layout is Layout.NHD else (nh, nt, hd)
    if chunk.shape != inner or 0 in universal.shape or not (universal.is_contiguous and chunk.is_contiguous):
        return None
    try:
        dtype = common_dtype([universal.element, chunk.element], ["universals[0]", "blocks[0][0]"])
    except KvbmTypeError:
        return None
    if not holds(universal.element, dtype) or not holds(chunk.element, dtype):
        return None
    return nh, nl, no, nt, hd, dtype


def _table(addresses: list[int]) -> Any:
    return ffi.from_buffer(_POINTERS, np.array(addresses, dtype=np.int64))


def _universal_and_stack(universals: Any, blocks: Any, layout: Layout | str) -> tuple[UniversalBlocks, BlockStack]:
    layout = as_layout(layout)
    shape = _NO_SHAPE
    if _has_blocks(universals, "universals", blocks):
        extents, dtype, _ = _first(universals, "universals", blocks)
        if len(extents) != 5:
            raise KvbmValueError(f"universals[0] has shape {list(extents)}, expected [nh, nl, no, nt, hd]")
        nh, nl, no, nt, hd = extents
        shape = _block_shape(nl, no, nh, nt, hd, dtype)
    return (
        UniversalBlocks(universals, shape, name="universals"),
        BlockStack(blocks, shape, layout, name="blocks"),
    )


def _operational_and_stack(operationals: Any, blocks: Any) -> tuple[OperationalBlocks, BlockStack]:
    shape = _NO_SHAPE
    if _has_blocks(operationals, "operationals", blocks):
        extents, dtype, chunk = _first(operationals, "operationals", blocks)
        if len(extents) not in (3, 5):
            raise KvbmValueError(f"operationals[0] has shape {list(extents)}, expected [nl, no, nt*nh*hd]")
        # Both sides have their rows in one order, so it does not matter which dimension of a chunk is called what.
        nt, nh, hd = chunk if len(chunk) == 3 else (1, 1, math.prod(extents[2:]))
        shape = _block_shape(extents[0], extents[1], nh, nt, hd, dtype)
    return (
        OperationalBlocks(operationals, shape, name="operationals"),
        BlockStack(blocks, shape, name="blocks"),
    )


def _has_blocks(arrays: Any, name: str, blocks: Any) -> bool:
    """Whether two lists hold anything. Raises if they are no lists, or not of the same length."""
    for argument, value in ((name, arrays), ("blocks", blocks)):
        if not isinstance(value, list | tuple):
            raise KvbmTypeError(f"{argument} is {a_type(value)}, expected a list with an entry for each block")
    if len(arrays) != len(blocks):
        found = counted(len(arrays), "entry", "entries")
        raise KvbmValueError(f"{name} has {found} and blocks {len(blocks)}, expected one for each block")
    return len(arrays) > 0


def _first(arrays: Any, name: str, blocks: Any) -> tuple[tuple[int, ...], DType, tuple[int, ...]]:
    """The shape of the first array, the type that the arrays exchange, and the shape of the first chunk."""
    chunk, chunk_name = blocks, "blocks"
    while isinstance(chunk, list | tuple):
        if not chunk:
            raise KvbmValueError(f"{chunk_name} is empty, expected nl*no chunks")
        chunk, chunk_name = chunk[0], f"{chunk_name}[0]"
    forms = []
    names = [f"{name}[0]", chunk_name]
    for obj, argument in zip((arrays[0], chunk), names, strict=True):
        try:
            forms.append(describe(obj).form)
        except KvbmError as error:
            raise type(error)(f"{argument} {error}") from None
    dtype = common_dtype([form.element for form in forms], names)
    return forms[0].shape, dtype, forms[1].shape
