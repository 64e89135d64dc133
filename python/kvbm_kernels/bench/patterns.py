"""What moves where: the layouts on both sides of a test, and how their parts are placed in memory.

A name is ``LAYOUT_to_LAYOUT``, alone or with a placement behind it: ``lw_to_fc``, ``nhd_to_universal_pools``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from kvbm_kernels.errors import KvbmValueError
from kvbm_kernels.layouts import BlockShape

ABBREVIATIONS = {"fc": "fc_to_fc", "lw": "lw_to_fc"}

# Of blocks copied as they are: fully contiguous, or a chunk for each layer, K and V.
COPIED = ("fc", "lw")
CONVERTED = ("nhd", "hnd", "operational", "universal", "packed")

# Where the parts of a side are: one behind the other, anywhere in one allocation, or an allocation for each layer (and
# K and V), with the blocks anywhere in each.
PLACEMENTS = ("adjacent", "shuffled", "pools")

# In a unit, which is contiguous, the dimensions from the outermost to the innermost.
_AXES = {
    "fc": "lothd",
    "lw": "thd",
    "nhd": "thd",
    "hnd": "htd",
    "universal": "hlotd",
    "packed": "thod",
}


class Pattern(NamedTuple):
    """A layout to read, one to write, and where their units are."""

    name: str
    src: str
    dst: str
    placement: str

    def axes(self, layout: str) -> str:
        """The dimensions of one contiguous unit of a side; the other dimensions count units."""
        if layout == "operational":
            # It keeps the order that chunks have on the other side.
            return "lohtd" if "hnd" in (self.src, self.dst) else "lothd"
        return _AXES[layout]

    @property
    def is_conversion(self) -> bool:
        return self.src not in COPIED

    def run_nbytes(self, shape: BlockShape) -> int:
        """How many bytes lie contiguously on both sides, whatever the placement: the piece that a copy can move."""
        extents = extents_of(shape)
        run, _, _ = self._split(shape)
        return shape.dtype.itemsize * math.prod(extents[axis] for axis in run)

    def keeps_order(self, shape: BlockShape) -> bool:
        """Whether the pieces follow each other in the same order on both sides, so that they are copied as they are."""
        _, src, dst = self._split(shape)
        return src == dst

    def _split(self, shape: BlockShape) -> tuple[str, str, str]:
        """The innermost dimensions that both sides have in common in a unit, and the other dimensions of each side."""
        extents = extents_of(shape)
        src, dst = ("".join(axis for axis in self.axes(layout) if extents[axis] > 1) for layout in (self.src, self.dst))
        run = ""
        while len(run) < min(len(src), len(dst)) and src.endswith(dst[-1 - len(run) :]):
            run = dst[-1 - len(run) :]
        outside = ("".join(axis for axis in "lo" if axis not in self.axes(layout)) for layout in (self.src, self.dst))
        rest = [
            "".join(axis for axis in outer if extents[axis] > 1) + inner.removesuffix(run)
            for outer, inner in zip(outside, (src, dst), strict=True)
        ]
        return run, rest[0], rest[1]


def extents_of(shape: BlockShape) -> dict[str, int]:
    """The extents of a block by the letters of its dimensions."""
    return {"l": shape.nl, "o": shape.no, "t": shape.nt, "h": shape.nh, "d": shape.hd}


def _patterns() -> dict[str, Pattern]:
    pairs = [(src, dst) for src in COPIED for dst in COPIED]
    pairs += [(src, dst) for src in CONVERTED for dst in CONVERTED if src != dst]
    found = {}
    for src, dst in pairs:
        for placement in PLACEMENTS:
            # Pages of K|V rows exist as one tensor and as one a layer; pools are per layer, which fc has not.
            if (placement == "shuffled" and "packed" in (src, dst)) or (placement == "pools" and src == dst == "fc"):
                continue
            name = f"{src}_to_{dst}" + ("" if placement == "adjacent" else f"_{placement}")
            found[name] = Pattern(name, src, dst, placement)
    return found


PATTERNS = _patterns()


def as_pattern(name: str) -> Pattern:
    """The pattern of a name or an abbreviation. Raises KvbmValueError."""
    found = PATTERNS.get(ABBREVIATIONS.get(name, name))
    if found is None:
        raise KvbmValueError(
            f"{name!r}, expected fc_to_fc (or fc), lw_to_fc (or lw), fc_to_lw, lw_to_lw, or A_to_B with two different "
            f"ones of {', '.join(CONVERTED)}; alone or followed by _shuffled or _pools"
        )
    return found
