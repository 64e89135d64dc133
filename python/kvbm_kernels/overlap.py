"""Whether the rows that a copy writes overlap each other or the rows it reads.

The answer is exact, and cheap where it can be: a proof from strides alone is tried first and kept, and only what it
leaves open is decided by laying out and sorting every run of bytes.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Sequence
from enum import Enum, auto
from functools import lru_cache

import numpy as np

from kvbm_kernels.geometry import Addresses, Geometry, PerIndex

_FEW = 16


def repeated_block(rows: Geometry) -> tuple[int, int, int] | None:
    """A block that is there twice, if one is: its id, and the first two places it has."""
    ids = rows.ids
    if ids is None or not _has_repeats(rows):
        return None
    order = np.argsort(ids, kind="stable")
    twice = int(np.flatnonzero(np.diff(ids[order]) == 0)[0])
    return int(ids[order[twice]]), int(order[twice]), int(order[twice + 1])


def rows_collide(rows: Geometry) -> bool:
    """Whether two rows, each of them named once, share a byte."""
    if _has_repeats(rows):
        return True
    if _cannot_collide(rows.root) or _cannot_collide(rows):
        return False
    if _stands_still(rows):
        return True
    starts, nbytes = _runs(rows)
    return not _gaps_are_at_least(starts, nbytes)


def _stands_still(rows: Geometry) -> bool:
    """Whether an index does not move at all, as in an array that was broadcast, of however many rows."""
    counts = (rows.num_blocks, *rows.extents[1:])
    return rows.num_blocks > 0 and any(
        count > 1 and not stride and not step
        for count, stride, step in zip(counts, rows.strides, rows.steps, strict=True)
    )


def _has_repeats(rows: Geometry) -> bool:
    """Whether the ids name a block twice."""
    chosen = rows.chosen
    if chosen.has_repeats is None:
        ids = chosen.ids
        chosen.has_repeats = ids is not None and len(ids) > 1 and len(set(ids.tolist())) < len(ids)
    return chosen.has_repeats


def share_bytes(rows: Geometry, others: Geometry) -> bool:
    """Whether a row of the one and a row of the other share a byte."""
    if not rows.num_blocks or not others.num_blocks:
        return False
    root, other_root = rows.root, others.root
    if root is other_root:
        if _cannot_collide(root):
            return _share_indices(rows, others)
    else:
        low, high = _bounds(root)
        other_low, other_high = _bounds(other_root)
        if high <= other_low or other_high <= low:
            return False
        relation = _relation(root, other_root)
        if relation is _Relation.APART or (relation is _Relation.BY_BLOCK and not _share_blocks(rows, others)):
            return False
    return ranges_meet(*_runs(rows), *_runs(others))


def first_sharing(dsts: Sequence[Geometry], srcs: Sequence[Geometry]) -> tuple[int, int, bool] | None:
    """Two places among these pairs, of which the first writes what the second writes or reads, and which of the two.

    That a pair shares nothing within itself has been looked at before.
    """
    # In the order of their bounds, so that only those whose bounds meet are compared.
    sides = [
        (*_bounds(rows.root), i, is_written, rows)
        for is_written, geometries in ((True, dsts), (False, srcs))
        for i, rows in enumerate(geometries)
        if rows.num_blocks
    ]
    sides.sort(key=operator.itemgetter(0))
    begun: list[tuple[int, int, int, bool, Geometry]] = []
    for side in sides:
        low, _, i, is_written, rows = side
        begun = [other for other in begun if other[1] > low]
        for _, _, j, other_is_written, others in begun:
            if i != j and (is_written or other_is_written) and share_bytes(rows, others):
                if is_written and other_is_written:
                    return min(i, j), max(i, j), True
                return (i, j, False) if is_written else (j, i, False)
        begun.append(side)
    return None


def ranges_meet(starts: Addresses, nbytes: int, other_starts: Addresses, other_nbytes: int) -> bool:
    """Whether a range of the one length and one of the other share a byte."""
    if len(starts) > len(other_starts):
        starts, nbytes, other_starts, other_nbytes = other_starts, other_nbytes, starts, nbytes
    other_starts = np.sort(other_starts)
    # Of the others, the first that starts late enough to end after this one's start.
    at = np.searchsorted(other_starts, starts - other_nbytes, side="right")
    inside = at < len(other_starts)
    return bool((other_starts[at[inside]] < starts[inside] + nbytes).any())


def _share_indices(rows: Geometry, others: Geometry) -> bool:
    for i in (1, 3, 4):
        start, other_start = rows.first[i], others.first[i]
        if start + rows.extents[i] <= other_start or other_start + others.extents[i] <= start:
            return False
    return _share_blocks(rows, others)


def _share_blocks(rows: Geometry, others: Geometry) -> bool:
    """Whether a block has the same number in both. Without ids, all are there."""
    if rows.ids is None or others.ids is None:
        return True
    return not set(rows.ids.tolist()).isdisjoint(others.ids.tolist())


class _Relation(Enum):
    """What strides and bases alone show of two sets of rows."""

    APART = auto()
    """None of the one shares a byte with one of the other."""
    BY_BLOCK = auto()
    """Only rows of blocks with the same number may share bytes."""
    UNKNOWN = auto()


def _relation(root: Geometry, other: Geometry) -> _Relation:
    if root.relations is None:
        root.relations = weakref.WeakKeyDictionary()
    relation: _Relation | None = root.relations.get(other)
    if relation is None:
        apart = not ranges_meet(*_spans(root), *_spans(other))
        relation = root.relations[other] = _Relation.APART if apart else _in_cells(root, other)
    return relation


def _in_cells(rows: Geometry, others: Geometry) -> _Relation:
    """The relation of rows whose blocks are as far from each other in both, such as groups of layers in one buffer.

    From each base on, the blocks then lie in cells of the length of that stride, each in that of its number, where the
    rows of a block do not reach past the cell. Two bases lead to the same cells, or to cells that are all elsewhere.
    """
    cell = rows.strides.block
    starts, nbytes = _spans_of_block(rows)
    other_starts, other_nbytes = _spans_of_block(others)
    if others.strides.block != cell or max(nbytes, other_nbytes) > cell:
        return _Relation.UNKNOWN
    gap = starts[:, None] - other_starts
    elsewhere = (gap >= others.extents.block * cell) | (-gap >= rows.extents.block * cell)
    same_cells = ((gap >= 0) & (gap + nbytes <= cell)) | ((gap <= 0) & (other_nbytes - gap <= cell))
    if not (elsewhere | same_cells).all():
        return _Relation.UNKNOWN
    beside = (gap >= other_nbytes) | (-gap >= nbytes)
    return _Relation.APART if (elsewhere | beside).all() else _Relation.BY_BLOCK


def _cannot_collide(rows: Geometry) -> bool:
    """Whether strides and bases alone show that rows with distinct indices share no byte. False proves nothing."""
    if rows.cannot_collide is None:
        rows.cannot_collide = _nest_apart(rows)
    return rows.cannot_collide


def _nest_apart(rows: Geometry) -> bool:
    bases = _used_bases(rows)
    if bases is None:
        return False
    dims = _affine(rows.extents, rows.strides, rows.steps)
    nbytes = _nested_extent(dims, rows.row_nbytes)
    if nbytes and _gaps_are_at_least(bases, nbytes):
        return True
    if rows.steps.block:
        return False
    # Separate tensors for layers or for K and V may be interleaved slices of one: then they step by a fixed stride too.
    table = bases.reshape(-1, rows.extents.outer if rows.steps.outer else 1)
    for _ in range(2):
        steps = np.diff(table, axis=1)
        if steps.size and (steps == steps[0, 0]).all():
            dims = (*dims, (table.shape[1], int(steps[0, 0])))
            table = table[:, :1]
            nbytes = _nested_extent(dims, rows.row_nbytes)
            if nbytes and _gaps_are_at_least(table.ravel(), nbytes):
                return True
        table = table.T
    return False


@lru_cache(maxsize=256)
def _affine(extents: PerIndex, strides: PerIndex, steps: PerIndex) -> tuple[tuple[int, int], ...]:
    """Extent and stride of each index that does not move through the table."""
    return tuple(
        (extent, stride)
        for extent, stride, step in zip(extents, strides, steps, strict=True)
        if not step and extent > 1
    )


@lru_cache(maxsize=256)
def _nested_extent(dims: tuple[tuple[int, int], ...], nbytes: int) -> int:
    """Bytes from first to last if each stride steps over all that lies inside it, else 0."""
    for stride, extent in sorted((abs(stride), extent) for extent, stride in dims):
        if stride < nbytes:
            return 0
        nbytes += stride * (extent - 1)
    return nbytes


def _used_bases(rows: Geometry) -> Addresses | None:
    """The table entries for all (block, layer, outer); None if the same index also has a stride."""
    block, layer, outer = rows.steps[:3]
    if (block and rows.strides.block) or (layer and rows.strides.layer) or (outer and rows.strides.outer):
        return None
    moving = [(extent, step) for extent, step in zip(rows.extents, rows.steps, strict=True) if step]
    if len(rows.bases) == math.prod([extent for extent, _ in moving]):
        return rows.bases
    indices = np.zeros(1, np.int64)
    for extent, step in moving:
        indices = (indices[:, None] + np.arange(extent, dtype=np.int64) * step).ravel()
    return rows.bases[indices]


def _gaps_are_at_least(starts: Addresses, nbytes: int) -> bool:
    if len(starts) < 2:
        return True
    ordered = np.sort(starts)
    return bool((ordered[1:] - ordered[:-1]).min() >= nbytes)


@lru_cache(maxsize=256)
def _reach(extents: PerIndex, strides: PerIndex, row_nbytes: int) -> tuple[int, int]:
    """The first byte, and the byte after the last, that lie at one base, seen from it."""
    low, high = 0, row_nbytes
    for extent, stride in zip(extents, strides, strict=True):
        distance = stride * (extent - 1)
        if distance < 0:
            low += distance
        else:
            high += distance
    return low, high


def _bounds(rows: Geometry) -> tuple[int, int]:
    """The lowest address of a row and the address after the highest, or a little wider."""
    if rows.bounds is None:
        low, high = _reach(rows.extents, rows.strides, rows.row_nbytes)
        # Of a few, Python finds them sooner than NumPy.
        few = rows.bases.tolist() if len(rows.bases) <= _FEW else [rows.bases.min(), rows.bases.max()]
        first, last = min(few), max(few)
        rows.bounds = int(first) + rows.offset + low, int(last) + rows.offset + high
    return rows.bounds


def _spans(rows: Geometry) -> tuple[Addresses, int]:
    """Ranges, one for each base, that hold all rows and perhaps more."""
    low, high = _reach(rows.extents, rows.strides, rows.row_nbytes)
    return rows.bases + (rows.offset + low), high - low


def _spans_of_block(rows: Geometry) -> tuple[Addresses, int]:
    """As _spans(), but of block 0 alone."""
    low, high = _reach(rows.extents._replace(block=1), rows.strides, rows.row_nbytes)
    return rows.bases + (rows.offset + low), high - low


def _runs(rows: Geometry) -> tuple[Addresses, int]:
    """The start of each run of bytes, and the length they all have: exactly the bytes of the rows."""
    ids = np.arange(rows.extents.block, dtype=np.int64) if rows.ids is None else rows.ids
    indices = ids * rows.steps.block
    starts = ids * rows.strides.block + rows.offset
    within = []
    for extent, stride, step in list(zip(rows.extents, rows.strides, rows.steps, strict=True))[1:]:
        if step:
            along = np.arange(extent, dtype=np.int64)
            indices = (indices[:, None] + along * step).ravel()
            starts = (starts[:, None] + along * stride).ravel()
        elif extent > 1:
            within.append((stride, extent))
    starts = starts + rows.bases[indices]

    nbytes = rows.row_nbytes
    for stride, extent in sorted(within, key=lambda dim: abs(dim[0])):
        if abs(stride) == nbytes:
            starts = starts + min(0, stride) * (extent - 1)
            nbytes *= extent
        else:
            along = np.arange(extent, dtype=np.int64)
            starts = (starts[:, None] + along * stride).ravel()
    return starts, nbytes
