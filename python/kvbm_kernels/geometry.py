"""Where the rows of a set of blocks start: the numbers of the C API's view, and how they change as it narrows."""

from __future__ import annotations

import math
import weakref
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvbm_kernels._native import ffi
from kvbm_kernels.errors import Uncopied

Addresses: TypeAlias = npt.NDArray[np.int64]


# Resolved once: a name would be looked up at every call.
_POINTERS = ffi.typeof("void *const[]")
_IDS = ffi.typeof("int64_t[]")
_VIEW = ffi.typeof("kvbm_kernels_view *")
_SHAPE = ffi.typeof("kvbm_kernels_block_shape *")


class PerIndex(NamedTuple):
    """A number for each index that finds a row."""

    block: int = 0
    layer: int = 0
    outer: int = 0
    token: int = 0
    head: int = 0


_ORIGIN = PerIndex()


def _with(numbers: PerIndex, index: int, value: int) -> PerIndex:
    # A third of the time of _replace(), which a model's layers, one after the other, would notice.
    return PerIndex(*(*numbers[:index], value, *numbers[index + 1 :]))


class Geometry(Uncopied):
    """The rows (i, l, o, t, h) of blocks, each ``row_nbytes`` long, starting at

    ``bases[id*steps.block + l*steps.layer + o*steps.outer] + offset + id*strides.block + l*strides.layer + ...``

    where ``id`` is ``ids[i]``, or i without ids. ``extents`` counts each index, with the number of blocks that ids
    may name in ``extents.block``. Never changed once made: what is worked out about it can be kept.
    """

    __slots__ = (
        "__weakref__",
        "_c_numbers",
        "_c_shape",
        "_c_table",
        "_c_view",
        "_chosen",
        "bases",
        "bounds",
        "cannot_collide",
        "extents",
        "first",
        "has_repeats",
        "ids",
        "offset",
        "relations",
        "root",
        "row_nbytes",
        "steps",
        "strides",
    )

    def __init__(
        self,
        bases: Addresses,
        steps: PerIndex,
        strides: PerIndex,
        extents: PerIndex,
        row_nbytes: int,
        offset: int = 0,
        ids: Addresses | None = None,
        root: Geometry | None = None,
        first: PerIndex = _ORIGIN,
        chosen: Geometry | None = None,
    ) -> None:
        self.bases = bases
        self.steps = steps
        self.strides = strides
        self.extents = extents
        self.row_nbytes = row_nbytes
        self.offset = offset
        self.ids = ids
        # What this was narrowed from, and where in it the first layer, token and head are.
        self.root = self if root is None else root
        self.first = first
        self._chosen = chosen
        # What overlap.py found out.
        self.bounds: tuple[int, int] | None = None
        self.cannot_collide: bool | None = None
        self.has_repeats: bool | None = None
        self.relations: weakref.WeakKeyDictionary[Geometry, Any] | None = None
        self._c_table: Any = None
        self._c_numbers: Any = None
        self._c_view: Any = None
        self._c_shape: Any = None

    @property
    def chosen(self) -> Geometry:
        """Where the ids come from: what is found out about them is kept there, once for all its parts."""
        # Not kept as itself: a cycle would stay until the garbage collector comes.
        return self if self._chosen is None else self._chosen

    @property
    def num_blocks(self) -> int:
        """How many blocks a copy of everything moves."""
        return self.extents.block if self.ids is None else len(self.ids)

    def select(self, ids: Addresses) -> Geometry:
        """Only these blocks, in this order."""
        return Geometry(
            self.bases,
            self.steps,
            self.strides,
            self.extents,
            self.row_nbytes,
            self.offset,
            ids if self.ids is None else self.ids[ids],
            self.root,
            self.first,
        )

    def layers(self, start: int, stop: int) -> Geometry:
        """Only a range of layers."""
        return self._range_of(1, start, stop, self.bases[start * self.steps.layer :])

    def tokens(self, start: int, stop: int) -> Geometry:
        """Only a range of the tokens of each block."""
        return self._range_of(3, start, stop, self.bases)

    def heads(self, start: int, stop: int) -> Geometry:
        """Only a range of heads."""
        return self._range_of(4, start, stop, self.bases)

    def folded(self) -> Geometry:
        """The same rows, with strides in the place of bases that step evenly within a block, and of blocks that do.

        Tensors of layers that lie in one allocation, block by block, are then as good as one tensor for all of them:
        what follows on from one layer to the next is copied in one piece. Layers that are pools of their own keep a
        base each, whatever their distance: nothing follows on there, and copies take such pools one after the other.
        For a table as it was made, in order.
        """
        counts = dict(zip(self.steps._fields, self.extents, strict=True))
        moving = [name for name, step in zip(self.steps._fields, self.steps, strict=True) if step]
        table = self.bases[: math.prod(counts[name] for name in moving)].reshape([counts[name] for name in moving])
        strides = self.strides._asdict()
        kept: list[str] = []
        for name in moving:
            axis = len(kept)
            gaps = np.diff(table, axis=axis)
            step = int(gaps.flat[0]) if gaps.size else 0
            is_inside = name == "block" or not strides["block"] or abs(step) * counts[name] <= abs(strides["block"])
            if table.size and is_inside and (gaps == step).all():
                strides[name] += step
                table = np.asarray(table.take(0, axis=axis))
            else:
                kept.append(name)
        steps = {name: math.prod(table.shape[i + 1 :]) for i, name in enumerate(kept)}
        return Geometry(
            np.ascontiguousarray(table).reshape(-1),
            PerIndex(**steps),
            PerIndex(**strides),
            self.extents,
            self.row_nbytes,
            self.offset,
            self.ids,
        )

    def in_pieces(self, count: int) -> Geometry:
        """Each block as ``count`` blocks, of as many tokens each, that follow each other."""
        block, layer, outer = self.steps[:3]
        ids = np.arange(self.extents.block, dtype=np.int64) if self.ids is None else self.ids
        tokens = self.extents.token // count
        piece = tokens * self.strides.token
        within = np.arange(count, dtype=np.int64)
        extents = self.extents._replace(block=self.extents.block * count, token=tokens)
        if not block and self.strides.block == count * piece:
            strides = self.strides._replace(block=piece)
            numbered = (ids[:, None] * count + within).reshape(-1)
            ids_or_all = None if self.ids is None else numbered
            return Geometry(self.bases, self.steps, strides, extents, self.row_nbytes, self.offset, ids_or_all)
        chunks = np.zeros(1, np.int64)
        for extent, step in ((self.extents.layer, layer), (self.extents.outer, outer)):
            if step:
                chunks = (chunks[:, None] + np.arange(extent, dtype=np.int64) * step).reshape(-1)
        starts = self.bases[(ids * block)[:, None] + chunks] + (ids * self.strides.block)[:, None]
        table = starts[:, None, :] + (within * piece)[:, None]
        outers = self.extents.outer if outer else 1
        steps = PerIndex(block=len(chunks), layer=outers if layer else 0, outer=1 if outer else 0)
        strides = self.strides._replace(block=0)
        extents = extents._replace(block=len(ids) * count)
        return Geometry(table.reshape(-1), steps, strides, extents, self.row_nbytes, self.offset).folded()

    def _range_of(self, index: int, start: int, stop: int, bases: Addresses) -> Geometry:
        return Geometry(
            bases,
            self.steps,
            self.strides,
            _with(self.extents, index, stop - start),
            self.row_nbytes,
            self.offset + start * self.strides[index],
            self.ids,
            self.root,
            _with(self.first, index, self.first[index] + start),
            self.chosen,
        )

    def c_view(self) -> Any:
        """The ``kvbm_kernels_view *`` of this; it lives as long as this object."""
        if self._c_view is None:
            bases, ids = self._c_bases(), self._c_ids()
            view = ffi.new(
                _VIEW,
                (
                    bases,
                    len(self.bases),
                    self.steps.block,
                    self.steps.layer,
                    self.steps.outer,
                    ids,
                    self.extents.block,
                    self.offset,
                    *self.strides,
                ),
            )
            # The struct does not keep alive what it points at.
            self._c_view = view, self.root, self.chosen
        return self._c_view[0]

    def _c_bases(self) -> Any:
        # Parts have the end of the table of what they were narrowed from.
        root = self.root
        if root._c_table is None:
            root._c_table = ffi.from_buffer(_POINTERS, root.bases)
        return root._c_table + (len(root.bases) - len(self.bases))

    def _c_ids(self) -> Any:
        chosen = self.chosen
        if chosen.ids is None:
            return ffi.NULL
        if chosen._c_numbers is None:
            chosen._c_numbers = ffi.from_buffer(_IDS, chosen.ids)
        return chosen._c_numbers

    def c_shape(self) -> Any:
        """The ``kvbm_kernels_block_shape *`` of a copy of all rows; it lives as long as this object."""
        if self._c_shape is None:
            _, layers, outers, tokens, heads = self.extents
            self._c_shape = ffi.new(_SHAPE, (layers, outers, heads, tokens, self.row_nbytes))
        return self._c_shape
