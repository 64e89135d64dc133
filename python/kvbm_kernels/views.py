"""What all views have in common. A view is a set of blocks over the arrays of any library, and copies nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt

from kvbm_kernels._wording import counted
from kvbm_kernels.array_group import Group
from kvbm_kernels.arrays import Form, Memory
from kvbm_kernels.errors import KvbmIndexError, KvbmTypeError, KvbmValueError, Uncopied
from kvbm_kernels.geometry import Addresses, Geometry, PerIndex
from kvbm_kernels.layouts import BlockShape, Layout, as_integer, resized
from kvbm_kernels.overlap import repeated_block
from kvbm_kernels.tp import heads_of_rank

if TYPE_CHECKING:
    from typing_extensions import Self

BlockIds: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]


class View(Uncopied):
    """Blocks of one shape in one layout: what :func:`kvbm_kernels.copy_blocks` reads and writes.

    ``len(view)`` is the number of blocks. ``shape`` is the :class:`BlockShape` of each, ``layout`` the order inside a
    chunk, or None for universal blocks. The arrays live at least as long as the view, which can be neither copied nor
    pickled. Its other attributes are for this package alone.
    """

    __slots__ = ("geometry", "layout", "memory", "shape")

    shape: BlockShape
    layout: Layout | None
    geometry: Geometry
    memory: Memory

    def __init__(self) -> None:
        raise KvbmTypeError(f"{type(self).__name__} is no layout, expected BlockStack or another kind of view")

    def __len__(self) -> int:
        return self.geometry.num_blocks

    @property
    def device(self) -> str:
        """Where the blocks are: "cpu", or "cuda:0" and so on."""
        return self.memory.device

    def __getitem__(self, ids: SupportsIndex | slice | BlockIds) -> Self:
        """Only some blocks: one id, a slice, or a sequence or integer array of ids in any order.

        Ids count from 0 in this view. Raises KvbmIndexError for an id that is negative or too large, and KvbmTypeError
        for ids that are no integers.
        """
        return self._narrowed(self.geometry.select(as_block_ids(ids, len(self))), self.shape)

    def heads(self, start: SupportsIndex, stop: SupportsIndex) -> Self:
        """Only the heads from ``start`` up to, but not with, ``stop``. Raises KvbmIndexError outside 0 to nh."""
        first, end = _as_range("heads", start, stop, self.shape.nh)
        return self._narrowed(self.geometry.heads(first, end), resized(self.shape, nh=end - first))

    def layers(self, start: SupportsIndex, stop: SupportsIndex) -> Self:
        """Only the layers from ``start`` up to, but not with, ``stop``. Raises KvbmIndexError outside 0 to nl."""
        first, end = _as_range("layers", start, stop, self.shape.nl)
        return self._narrowed(self.geometry.layers(first, end), resized(self.shape, nl=end - first))

    def tokens(self, start: SupportsIndex, stop: SupportsIndex) -> Self:
        """Only these tokens of each block: ``start`` up to, but not with, ``stop``. Raises KvbmIndexError."""
        first, end = _as_range("tokens", start, stop, self.shape.nt)
        return self._narrowed(self.geometry.tokens(first, end), resized(self.shape, nt=end - first))

    def shard(self, rank: SupportsIndex, size: SupportsIndex) -> Self:
        """Only the heads that one of ``size`` tensor-parallel ranks holds.

        With more ranks than heads, neighbouring ranks hold the same head; on the way back, let one of them write it.
        Raises KvbmValueError if neither of nh and ``size`` divides the other, or ``rank`` is no rank.
        """
        return self.heads(*heads_of_rank(rank, size, self.shape.nh))

    def __repr__(self) -> str:
        layout = f", {self.layout.name}" if self.layout is not None else ""
        return f"<{type(self).__name__}: {self._counted()} of {self.shape}{layout}, {self.device}>"

    def _counted(self) -> str:
        return counted(len(self), "block")

    def _repeated(self) -> tuple[int, int, int] | None:
        """A block that is there twice, if one is: its id, and the first two places it has."""
        return repeated_block(self.geometry)

    def _narrowed(self, geometry: Geometry, shape: BlockShape) -> Self:
        view = object.__new__(type(self))
        view.geometry = geometry
        view.shape = shape
        view.layout = self.layout
        view.memory = self.memory
        return view

    def _lay_out(
        self,
        group: Group,
        axes: str,
        shape: BlockShape,
        layout: Layout | None,
        names: Callable[[int], str],
        steps: PerIndex,
        num_tables: int = 1,
    ) -> None:
        """Fill in a new view.

        ``axes`` are the dimensions of each array of the group, in letters; ``steps`` is how an index that is none of
        them moves through the arrays. Without b among the axes, there are ``num_tables`` blocks.
        """
        form = group.form
        try:
            strides, extents = _rows_of(axes, form, shape, num_tables)
        except KvbmValueError as error:
            raise KvbmValueError(f"{names(0)} {error}") from None
        if "b" in axes:
            steps = steps._replace(block=0)
        bases = np.array(group.addresses, dtype=np.int64)
        self.geometry = Geometry(bases, steps, strides, extents, shape.row_nbytes)
        self.shape = shape
        self.layout = layout
        self.memory = group.memory


@lru_cache(maxsize=256)
def _rows_of(axes: str, form: Form, shape: BlockShape, num_tables: int) -> tuple[PerIndex, PerIndex]:
    """How rows lie in an array with these axes: the strides, and the extents, of each index."""
    stride = dict(zip(axes, form.strides, strict=True))
    itemsize = shape.dtype.itemsize
    if shape.hd > 1 and stride["d"] != itemsize:
        raise KvbmValueError(
            f"has the elements of a row {counted(stride['d'], 'byte')} apart, expected {itemsize}: rows have to be "
            "contiguous"
        )
    num_blocks = form.shape[axes.index("b")] if "b" in axes else num_tables
    return (
        PerIndex(*[stride.get(letter, 0) for letter in "bloth"]),
        PerIndex(num_blocks, shape.nl, shape.no, shape.nt, shape.nh),
    )


def _as_range(what: str, start: SupportsIndex, stop: SupportsIndex, count: int) -> tuple[int, int]:
    first = start if type(start) is int else as_integer(start)
    end = stop if type(stop) is int else as_integer(stop)
    if first is None or end is None:
        raise KvbmTypeError(f"{what}({start!r}, {stop!r}), expected two integers")
    if not 0 <= first < end <= count:
        raise KvbmIndexError(f"{what}({first}, {end}), expected 0 <= start < stop <= {count}")
    return first, end


def as_block_ids(ids: Any, count: int, num_reserved: int = 0, pieces: int = 1) -> Addresses:
    """Block ids below ``count``, of which those below ``num_reserved`` are left to the caller to refuse.

    ``pieces`` is how many blocks of the view each of them stands for.
    """
    if isinstance(ids, slice):
        try:
            return np.arange(*ids.indices(count), dtype=np.int64)
        except TypeError:
            raise KvbmTypeError(f"block ids are {ids!r}, expected a slice of integers") from None
        except ValueError as error:
            raise KvbmValueError(f"block ids are {ids!r}: {error}") from None
    found = _ids_of_numbers(ids) if isinstance(ids, list | tuple | range) else _ids_of_array(ids)
    if found.size and (found.min() < 0 or found.max() >= count):
        wrong = found[(found < 0) | (found >= count)][0]
        if count <= num_reserved:
            expected = "none: all blocks are reserved" if num_reserved else "none: the view has no blocks"
        else:
            why = "those below are reserved" if num_reserved else f"the view has {counted(count, 'block')}"
            if pieces > 1:
                each = f"an id stands for {pieces} blocks of the view, and view[:] has one for each"
                why = f"{why}; {each}" if num_reserved else each
            expected = f"{num_reserved} to {count - 1}: {why}"
        raise KvbmIndexError(f"block id {wrong}, expected {expected}")
    # A copy even so, for the caller's table may change later.
    return found.astype(np.int64)


def _ids_of_numbers(ids: Sequence[Any]) -> npt.NDArray[Any]:
    # NumPy alone would take True for 1, and turn a list with one float in it into floats.
    numbers: list[int] | Sequence[int] = ids
    if not set(map(type, ids)) <= {int}:
        numbers = []
        for i, each in enumerate(ids):
            number = as_integer(each)
            if number is None:
                raise KvbmTypeError(f"block ids [{i}] is {each!r}, expected an integer")
            numbers.append(number)
    try:
        return np.array(numbers, dtype=np.int64)
    except OverflowError:
        wrong = next(number for number in numbers if not -(1 << 63) <= number < 1 << 63)
        raise KvbmIndexError(f"block id {wrong} is out of range") from None


def _ids_of_array(ids: Any) -> npt.NDArray[Any]:
    number = None if hasattr(ids, "__len__") else as_integer(ids)
    if number is not None:
        return _ids_of_numbers([number])
    # NumPy would make an array of objects of these.
    if isinstance(ids, str | bytes | set | frozenset | dict) or not hasattr(ids, "__len__"):
        raise KvbmTypeError(f"block ids are a {type(ids).__name__}, expected an integer, a slice, a list or an array")
    try:
        array = np.asarray(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise KvbmTypeError(f"block ids are a {type(ids).__name__}: {error}") from None
    if isinstance(ids, np.ma.MaskedArray):
        raise KvbmTypeError("block ids are a masked array, expected all of them")
    if array.dtype.kind not in "iu":
        hint = "; numpy.flatnonzero makes ids of a mask" if array.dtype.kind == "b" else ""
        raise KvbmTypeError(f"block ids have dtype {array.dtype}, expected integers{hint}")
    if array.ndim > 1:
        raise KvbmTypeError(f"block ids have {array.ndim} dimensions, expected one")
    return np.ascontiguousarray(array.reshape(-1))
