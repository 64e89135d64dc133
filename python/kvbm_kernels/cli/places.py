"""Layouts by name, over memory that need not be there, and which rows of them a drawing shows where."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvbm_kernels.blocks import BlockStack, OperationalBlocks, UniversalBlocks
from kvbm_kernels.errors import KvbmValueError
from kvbm_kernels.layouts import BlockShape
from kvbm_kernels.views import View

# The letters of layers, outer indices, tokens and heads, as in the `axes` of a block stack.
DIMS = "loth"

# Allocators of GPU memory align to this. Allocations are as far apart, so that none follows another.
_ALIGNMENT = 512
# The addresses that a process has at most; finding out what a larger copy comes to would take minutes.
_MOST_NBYTES = 1 << 56
# Each is an array of Python's, of a kilobyte or so while it is explained.
_MOST_BUFFERS = 1 << 18


class _Allocation:
    """An array of bytes at an address where nothing is: enough for a view that is only explained."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"version": 3, "data": (address, False), "shape": (nbytes,), "typestr": "|u1"}


class Memory:
    """Allocates addresses."""

    def __init__(self, start: int) -> None:
        self._next = start
        self._end = start + _MOST_NBYTES

    @staticmethod
    def expect(**factors: int) -> None:
        """Raises KvbmValueError for more buffers than there can be: the product of extents by their names."""
        count = math.prod(factors.values())
        if count > _MOST_BUFFERS:
            given = " * ".join(f"--{name} {extent}" for name, extent in factors.items())
            raise KvbmValueError(f"{given}: {count:,} buffers on a side, expected at most {_MOST_BUFFERS:,}")

    def take(self, nbytes: int) -> Any:
        """A flat array of which nothing may be touched. Raises KvbmValueError for more than there can be."""
        address = self._next
        self._next += (nbytes // _ALIGNMENT + 2) * _ALIGNMENT
        if self._next > self._end:
            raise KvbmValueError("a side has more bytes than there are addresses, which are 2**56")
        return np.asarray(_Allocation(address, nbytes))


class LayoutKind(NamedTuple):
    """A layout that the command knows by name."""

    title: str
    memory: str
    """What one block is in memory."""
    buffer: str
    """What a buffer is called, with {} for its number; "" where a block has one."""
    make: Callable[[BlockShape, int, Memory], View]


def _stack(layout: str) -> Callable[[BlockShape, int, Memory], View]:
    def make(shape: BlockShape, num_blocks: int, memory: Memory) -> View:
        memory.expect(nb=num_blocks, nl=shape.nl, no=shape.no)
        per_block = range(shape.nl * shape.no)
        chunks = [[memory.take(shape.chunk_nbytes) for _ in per_block] for _ in range(num_blocks)]
        return BlockStack(chunks, shape, layout)

    return make


def _operational(layout: str) -> Callable[[BlockShape, int, Memory], View]:
    def make(shape: BlockShape, num_blocks: int, memory: Memory) -> View:
        memory.expect(nb=num_blocks)
        return OperationalBlocks([memory.take(shape.block_nbytes) for _ in range(num_blocks)], shape, layout)

    return make


def _universal(shape: BlockShape, num_blocks: int, memory: Memory) -> View:
    memory.expect(nb=num_blocks)
    return UniversalBlocks([memory.take(shape.block_nbytes) for _ in range(num_blocks)], shape)


def _layers(axes: str) -> Callable[[BlockShape, int, Memory], View]:
    def make(shape: BlockShape, num_blocks: int, memory: Memory) -> View:
        memory.expect(nl=shape.nl)
        nbytes = num_blocks * shape.no * shape.chunk_nbytes
        return BlockStack.from_layers([memory.take(nbytes) for _ in range(shape.nl)], shape, axes)

    return make


KINDS = {
    "nhd": LayoutKind("NHD block stack", "nl*no chunks [nt, nh, hd]", "chunk {}", _stack("NHD")),
    "hnd": LayoutKind("HND block stack", "nl*no chunks [nh, nt, hd]", "chunk {}", _stack("HND")),
    "layers": LayoutKind(
        "a tensor a layer", "nl parts [no, nt, nh, hd], one of each tensor", "tensor {}", _layers("bothd")
    ),
    "packed": LayoutKind(
        "K|V rows packed", "nl parts [nt, nh, no, hd], one of each tensor", "tensor {}", _layers("bthod")
    ),
    "operational_nhd": LayoutKind("operational, NHD", "one buffer [nl, no, nt, nh, hd]", "", _operational("NHD")),
    "operational_hnd": LayoutKind("operational, HND", "one buffer [nl, no, nh, nt, hd]", "", _operational("HND")),
    "universal": LayoutKind("universal", "one buffer [nh, nl, no, nt, hd]", "", _universal),
}


Indices: TypeAlias = tuple[int, int, int, int]


class Row(NamedTuple):
    """A row of the first block, and where a side has it: a number of a buffer and a byte in it."""

    layer: int
    outer: int
    token: int
    head: int
    buffer: int
    byte: int

    @property
    def indices(self) -> Indices:
        return self[:4]


class Shown(NamedTuple):
    """The indices that a drawing shows of each dimension."""

    layers: list[int]
    outers: list[int]
    tokens: list[int]
    heads: list[int]

    @property
    def is_all(self) -> bool:
        """Whether no index is left out in between."""
        return all(indices[-1] == len(indices) - 1 for indices in self)


def show(shape: BlockShape, layers: int, outers: int, tokens: int, heads: int) -> Shown:
    """At most so many indices of each dimension: all, or the first ones and the last."""
    counts = ((shape.nl, layers), (shape.no, outers), (shape.nt, tokens), (shape.nh, heads))
    return Shown(*[list(range(n)) if n <= most else [*range(most - 1), n - 1] for n, most in counts])


class Side:
    """One side of a copy as it is drawn: its shown rows in the order of memory, and in lines of it.

    A line is rows of one layer, and of one outer index unless K and V take turns in it; as much of tokens and heads as
    follow each other innermost in memory.
    """

    def __init__(self, name: str, view: View, shown: Shown) -> None:
        self.kind = KINDS[name]
        geometry = view.geometry
        strides, steps = geometry.strides, geometry.steps
        self.rows = sorted(
            (
                Row(
                    layer,
                    o,
                    t,
                    h,
                    layer * steps.layer + o * steps.outer,
                    geometry.offset + layer * strides.layer + o * strides.outer + t * strides.token + h * strides.head,
                )
                for layer, o, t, h in product(*shown)
            ),
            key=lambda row: (row.buffer, row.byte),
        )
        self.places = {row.indices: row for row in self.rows}
        by_stride = sorted(
            (abs(stride), dim)
            for dim, stride, indices in zip(
                DIMS, (strides.layer, strides.outer, strides.token, strides.head), shown, strict=True
            )
            if stride and len(indices) > 1
        )
        self.inner: set[str] = set()
        for _, dim in by_stride:
            if dim == "l" or (dim == "o" and self.inner):
                break
            self.inner.add(dim)

        self.lines: list[list[Row]] = []
        for row in self.rows:
            if not self.lines or self._outside(row) != self._outside(self.lines[-1][0]):
                self.lines.append([])
            self.lines[-1].append(row)

    def _outside(self, row: Row) -> tuple[int, ...]:
        """What all rows of a line have in common."""
        return (row.buffer, *[index for dim, index in zip(DIMS, row.indices, strict=True) if dim not in self.inner])


@dataclass(frozen=True)
class Picture:
    """What is drawn of a copy: rows of its first block, and which of them move together."""

    shape: BlockShape
    shown: Shown
    src: Side
    dst: Side
    segment_nbytes: int

    def together(self, first: Row, second: Row) -> bool:
        """Whether two rows are of one segment: segments fill every buffer from its first byte on."""
        for side in (self.src, self.dst):
            a, b = side.places[first.indices], side.places[second.indices]
            if a.buffer != b.buffer or a.byte // self.segment_nbytes != b.byte // self.segment_nbytes:
                return False
        return True

    def segments(self, side: Side) -> list[list[Row]]:
        """The shown rows in the order of a side, those of one segment in one list."""
        found = [[side.rows[0]]]
        for before, row in pairwise(side.rows):
            if self.together(before, row):
                found[-1].append(row)
            else:
                found.append([row])
        return found


def head_name(head: int) -> str:
    """A, B, ... Z, AA, AB, ..."""
    name = ""
    while head >= 0:
        head, letter = divmod(head, 26)
        name = chr(ord("A") + letter) + name
        head -= 1
    return name


def outer_name(outer: int, no: int) -> str:
    """K and V where there are two, else a number; "" where there is one."""
    return "" if no == 1 else "KV"[outer] if no == 2 else f"o{outer}"


def row_name(row: Row, no: int) -> str:
    """As in the drawings of the README: token 0 of head A is 0A. With K or V behind it, unless no is 1."""
    return f"{row.token}{head_name(row.head)}{outer_name(row.outer, no)}"
