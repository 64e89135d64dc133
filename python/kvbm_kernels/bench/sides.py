"""The memory of one test: blocks on two sides, the tables and views of them, and what has to be in them afterwards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

import kvbm_kernels as kk
from kvbm_kernels.bench.machine import Machine
from kvbm_kernels.bench.patterns import Pattern, extents_of
from kvbm_kernels.layouts import BlockShape

# Results are compared so many bytes at a time, since rows in order take memory of their own.
_COMPARED_NBYTES = 1 << 28
_NAMES = {"b": "block", "l": "layer", "o": "outer", "t": "token", "h": "head", "d": "byte"}


class Side:
    """Blocks in one layout.

    A unit is what is contiguous in it: a block, a chunk, or a page of K|V rows. ``memory`` are arrays [units, bytes],
    one, or one for each layer (and K and V) with the placement "pools".
    """

    def __init__(
        self,
        machine: Machine,
        pattern: Pattern,
        layout: str,
        shape: BlockShape,
        num_blocks: int,
        memory: list[Any],
        random: np.random.Generator,
    ) -> None:
        self.machine, self.layout, self.shape, self.num_blocks = machine, layout, shape, num_blocks
        self.axes = pattern.axes(layout)
        self.placement = pattern.placement
        extents = self._extents = {"b": num_blocks, **extents_of(shape)}
        # The dimensions that count units, and how many units there are of each.
        self.outer = "".join(axis for axis in "blo" if axis not in self.axes)
        counts = [extents[axis] for axis in self.outer]
        self.unit_nbytes = shape.dtype.itemsize * math.prod(extents[axis] for axis in self.axes)
        self.memory = [array.reshape(-1, self.unit_nbytes) for array in memory]
        units = len(self.memory[0])
        # For each unit, where in its array it is.
        self.order: npt.NDArray[np.int64] = np.arange(math.prod(counts) // len(memory))
        if self.placement == "shuffled":
            self.order = random.permutation(units)
        elif self.placement == "pools":
            self.order = random.permutation(units)[:num_blocks]
        starts = np.array([machine.address(array) for array in self.memory], np.uint64)
        places = self.order.astype(np.uint64) * np.uint64(self.unit_nbytes)
        # One array has its units in their order; several, one a layer (and K and V), have a block in each.
        addresses = np.ascontiguousarray((starts[:, None] + places).T)
        self.addresses: npt.NDArray[np.uint64] = addresses.reshape(counts)

    def parts(self, nbytes: int) -> npt.NDArray[np.uint64]:
        """Where the units start, or their parts of nbytes bytes, in the order of a pointer table."""
        steps = np.arange(self.unit_nbytes // nbytes, dtype=np.uint64) * np.uint64(nbytes)
        return np.ascontiguousarray((self.addresses[..., None] + steps).reshape(-1))

    def view(self) -> kk.View:
        """The blocks as the package's view, on the arrays themselves."""
        layout = "HND" if self.axes[-3:] == "htd" else "NHD"
        if self.layout in ("fc", "operational", "universal"):
            (array,) = self.memory
            blocks = [array[i] for i in self.order.tolist()]
            if self.layout == "universal":
                return kk.UniversalBlocks(blocks, self.shape)
            return kk.OperationalBlocks(blocks, self.shape, layout)
        axes = self.axes
        if self.placement == "pools":
            arrays: list[Any] = [array.reshape(-1) for array in self.memory]
            if "o" not in axes and self.shape.no > 1:
                pairs = iter(arrays)
                arrays = [list(pair) for pair in zip(*[pairs] * self.shape.no, strict=True)]
            return kk.BlockStack.from_layers(arrays, self.shape, "b" + axes)[self.order]
        (array,) = self.memory
        if self.placement == "adjacent":
            return kk.BlockStack.from_layers(array.reshape(-1), self.shape, self.outer + axes)
        chunks = [array[i] for i in self.order.tolist()]
        per_block = self.shape.nl * self.shape.no
        return kk.BlockStack([chunks[i : i + per_block] for i in range(0, len(chunks), per_block)], self.shape, layout)

    def spoil(self) -> None:
        for array in self.memory:
            self.machine.spoil(array)

    def assign(self, rows: Any) -> None:
        """Write all blocks, given as by rows(), with the array library alone."""
        machine = self.machine
        outer = self.outer[1:] + "b" if self.placement == "pools" else self.outer
        axes = [axis for axis in "blothd" if axis in outer + self.axes]
        array = machine.transposed(rows, [axes.index(axis) for axis in outer + self.axes])
        width = math.gcd(self.shape.row_nbytes, 8)
        words = [machine.words(memory, width) for memory in self.memory]
        if self.placement == "adjacent":
            words[0].reshape(array.shape)[...] = array
            return
        units = array.reshape(len(words), len(self.order), -1)
        for memory, values in zip(words, units, strict=True):
            machine.put(memory, self.order, values)

    def rows(self, first: int, end: int) -> Any:
        """Some blocks in logical order [b, l, o, t, h, row], the rows in the widest integers that divide them."""
        machine = self.machine
        counts = [end - first if axis == "b" else self._extents[axis] for axis in self.outer]
        per_block = math.prod(counts[1:])
        if self.placement == "pools":
            ids = self.order[first:end]
            units = machine.stacked([self._units(array, ids) for array in self.memory])
            # Layers (and K and V) come first in here.
            outer, counts = self.outer[1:] + "b", [*counts[1:], counts[0]]
        else:
            outer = self.outer
            units = self._units(self.memory[0], self.order[first * per_block : end * per_block])
        axes = outer + self.axes
        row = self.shape.row_nbytes
        array = units.reshape(*counts, *[self._extents[axis] for axis in self.axes[:-1]], row)
        array = machine.transposed(array, [axes.index(axis) for axis in "blothd" if axis in axes])
        return machine.words(array, math.gcd(row, 8))

    def _units(self, array: Any, places: npt.NDArray[np.int64]) -> Any:
        if self.placement == "adjacent":
            return self.machine.near(array[int(places[0]) : int(places[-1]) + 1])
        return self.machine.take(array, places)


class Buffers:
    """One set of memory for a pattern: what is read, what is written, and how much."""

    def __init__(
        self,
        machine: Machine,
        pattern: Pattern,
        shape: BlockShape,
        num_blocks: int,
        places: tuple[str, str],
        random: np.random.Generator,
    ) -> None:
        self.nbytes = num_blocks * shape.block_nbytes
        self.num_blocks, self.shape, self.machine = num_blocks, shape, machine
        counts = [_allocations(pattern, layout, shape) for layout in (pattern.src, pattern.dst)]
        # Some blocks of a pool belong to nobody.
        pool = num_blocks + (num_blocks // 4 + 1 if pattern.placement == "pools" else 0)
        sizes = [pool * shape.block_nbytes // count for count in counts]
        self._flat: list[Any] = []
        if counts == [1, 1] and places[0] == places[1]:
            # Both sides in one allocation: how two of them lie to each other is worth some percent.
            both = machine.empty(sum(sizes), places[0])
            memory = [[both[: sizes[0]]], [both[sizes[0] :]]]
        else:
            memory = [
                [machine.empty(size, place) for _ in range(count)]
                for size, count, place in zip(sizes, counts, places, strict=True)
            ]
        if pattern.placement == "pools":
            # The plain copy beside it needs as many bytes in one piece.
            self._flat = [machine.empty(self.nbytes, place) for place in places]
            machine.randomize(self._flat[0])
        else:
            self._flat = [memory[0][0], memory[1][0]]
        for array in memory[0]:
            machine.randomize(array)
        self.src, self.dst = (
            Side(machine, pattern, layout, shape, num_blocks, arrays, random)
            for layout, arrays in zip((pattern.src, pattern.dst), memory, strict=True)
        )

    def copy(self) -> None:
        """The baseline: as many bytes in one plain copy, between the same memory where it is in one piece."""
        self.machine.copy(self._flat[1], self._flat[0])

    def permute(self) -> None:
        """The other baseline: the conversion as one writes it with the array library alone, from rows to rows."""
        self.dst.assign(self.src.rows(0, self.num_blocks))

    def first_difference(self) -> str | None:
        """Which byte is not what it should be, or None."""
        self.machine.synchronize()
        for first, end in self._slices():
            got, expected = self.dst.rows(first, end), self.src.rows(first, end)
            if not self.machine.equal(got, expected):
                return _describe(self.machine.to_numpy(got), self.machine.to_numpy(expected), first)
        return None

    def _slices(self) -> Iterator[tuple[int, int]]:
        step = max(1, _COMPARED_NBYTES // self.shape.block_nbytes)
        for first in range(0, self.num_blocks, step):
            yield first, min(first + step, self.num_blocks)


def _allocations(pattern: Pattern, layout: str, shape: BlockShape) -> int:
    if pattern.placement != "pools":
        return 1
    return math.prod(extents_of(shape)[axis] for axis in "lo" if axis not in pattern.axes(layout))


def _describe(got: npt.NDArray[Any], expected: npt.NDArray[Any], first_block: int) -> str:
    bytes_got, bytes_expected = (np.ascontiguousarray(array).view(np.uint8) for array in (got, expected))
    wrong = bytes_got != bytes_expected
    place = np.argwhere(wrong)[0]
    where = dict(zip("blothd", place.tolist(), strict=True))
    where["b"] += first_block
    named = ", ".join(f"{_NAMES[axis]} {index}" for axis, index in where.items())
    index = tuple(place)
    return f"{named} is 0x{bytes_got[index]:02x}, expected 0x{bytes_expected[index]:02x}"
