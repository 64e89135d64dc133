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


class Geometry(Uncopied):
    """The rows (i, l, o, t, h) of blocks, each ``row_nbytes`` long, starting at

    ``bases[id*steps.block + l*steps.layer + o*steps.outer] + offset + id*strides.block + l*strides.layer + ...``

    where ``id`` is ``ids[i]``, or i without ids. ``extents`` counts each index, with the number of blocks that ids
    may name in ``extents.block``. Never changed once made: what is worked out about it can be kept.
    """

    __slots__ = (
        "__weakref__",
        "_c_shape",
        "_c_view",
        "apart_from",
        "bases",
        "bounds",
        "cannot_collide",
        "extents",
        "first",
        "has_repeats",
        "ids",
        "offset",
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
        # What overlap.py found out.
        self.bounds: tuple[int, int] | None = None
        self.cannot_collide: bool | None = None
        self.has_repeats: bool | None = None
        self.apart_from: weakref.WeakSet[Geometry] | None = None
        self._c_view: Any = None
        self._c_shape: Any = None

    @property
    def num_blocks(self) -> int:
        """How many blocks a copy of everything moves."""
        return self.extents.block if self.ids is None else len(self.ids)

    def select(self, ids: Addresses) -> Geometry:
        """Only these blocks, in this order."""
        return self._narrowed(ids=ids if self.ids is None else self.ids[ids])

    def layers(self, start: int, stop: int) -> Geometry:
        """Only a range of layers."""
        return self._narrowed(
            bases=self.bases[start * self.steps.layer :],
            extents=self.extents._replace(layer=stop - start),
            offset=self.offset + start * self.strides.layer,
            first=self.first._replace(layer=self.first.layer + start),
        )

    def tokens(self, start: int, stop: int) -> Geometry:
        """Only a range of the tokens of each block."""
        return self._narrowed(
            extents=self.extents._replace(token=stop - start),
            offset=self.offset + start * self.strides.token,
            first=self.first._replace(token=self.first.token + start),
        )

    def heads(self, start: int, stop: int) -> Geometry:
        """Only a range of heads."""
        return self._narrowed(
            extents=self.extents._replace(head=stop - start),
            offset=self.offset + start * self.strides.head,
            first=self.first._replace(head=self.first.head + start),
        )

    def folded(self) -> Geometry:
        """The same rows, with strides in the place of bases that step evenly. For a table as it was made, in order.

        Tensors of layers that lie in one allocation, as far from each other as it has layers, are then as good as one
        tensor for all of them: what follows on from one layer to the next is copied in one piece.
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
            if table.size and (gaps == step).all():
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

    def _narrowed(self, **changes: Any) -> Geometry:
        parts = {
            "bases": self.bases,
            "steps": self.steps,
            "strides": self.strides,
            "extents": self.extents,
            "row_nbytes": self.row_nbytes,
            "offset": self.offset,
            "ids": self.ids,
            "root": self.root,
            "first": self.first,
        }
        return Geometry(**{**parts, **changes})

    def c_view(self) -> Any:
        """The ``kvbm_kernels_view *`` of this; it lives as long as this object."""
        if self._c_view is None:
            bases = ffi.from_buffer(_POINTERS, self.bases)
            ids = ffi.NULL if self.ids is None else ffi.from_buffer(_IDS, self.ids)
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
            self._c_view = view, bases, ids
        return self._c_view[0]

    def c_shape(self) -> Any:
        """The ``kvbm_kernels_block_shape *`` of a copy of all rows; it lives as long as this object."""
        if self._c_shape is None:
            _, layers, outers, tokens, heads = self.extents
            self._c_shape = ffi.new(_SHAPE, (layers, outers, heads, tokens, self.row_nbytes))
        return self._c_shape
