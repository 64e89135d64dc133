"""Calls of append and gather on memory of which every byte is known, for the host and for the GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int, c_size_t, c_void_p
from dataclasses import dataclass, field, replace

import numpy as np

import reference
from gpu_support import Shape, View

GUARD = 64
BITS = {"f16": np.uint16, "bf16": np.uint16, "f32": np.uint32}
DTYPES = {"f16": 0, "bf16": 1, "f32": 2}
STORED = {"int8": 1, "fp8": 2}
SCALES = {"f32": np.float32, "f16": np.float16}
NULL_BLOCK = 0xFFFFFFFF


class Quantization(ctypes.Structure):
    _fields_ = [
        ("struct_nbytes", c_size_t),
        ("stored_value", c_int),
        ("dtype_value", c_int),
        ("scale_dtype_value", c_int),
    ]


class TokenMap(ctypes.Structure):
    _fields_ = [
        ("struct_nbytes", c_size_t),
        ("block_size", c_size_t),
        ("slots", c_void_p),
        ("block_tables", c_void_p),
        ("block_table_stride", c_size_t),
        ("starts", c_void_p),
        ("num_sequences", c_size_t),
    ]


class Rows:
    """Rows (b, l, o, t, h) in one stretch of bytes, guards around it and gaps between, and the view of them.

    ``order`` names the dimensions from the outermost in; each row is followed by ``gap`` bytes.
    """

    def __init__(
        self, extents: dict[str, int], row: int, order: str, gap: int, misalign: int, base_a_layer: bool
    ) -> None:
        self.row, self.extents, self.base_a_layer = row, extents, base_a_layer
        self.strides, step = {}, row + gap
        for axis in reversed(order):
            self.strides[axis] = step
            step *= extents[axis]
        self.start = GUARD + misalign
        self.nbytes = self.start + step + GUARD

    def of(self, image: np.ndarray) -> np.ndarray:
        """The rows in such a stretch of bytes, [b, l, o, t, h, row]; writing to them writes there."""
        shape = [self.extents[axis] for axis in "bloth"]
        strides = [self.strides[axis] for axis in "bloth"]
        return np.lib.stride_tricks.as_strided(image[self.start :], (*shape, self.row), (*strides, 1), writeable=True)

    def view(self, address: int) -> tuple[View, np.ndarray]:
        """The view of such a stretch at an address, and its table, which has to outlive the call."""
        s, first = self.strides, address + self.start
        if self.base_a_layer:
            nl, no = self.extents["l"], self.extents["o"]
            bases = first + s["l"] * np.repeat(np.arange(nl), no) + s["o"] * np.tile(np.arange(no), nl)
            moves = {"steps": (0, no, 1), "layer": 0, "outer": 0}
        else:
            bases, moves = np.array([first - 16]), {"steps": (0, 0, 0), "layer": s["l"], "outer": s["o"]}
        bases = bases.astype(np.uint64)
        offset = 0 if self.base_a_layer else 16
        view = View(
            bases.ctypes.data, len(bases), *moves["steps"], None, self.extents["b"], offset, s["b"], moves["layer"],
            moves["outer"], s["t"], s["h"],
        )  # fmt: skip
        return view, bases


@dataclass(frozen=True)
class Case:
    """What of append and gather can differ."""

    nl: int = 2
    no: int = 2
    nh: int = 3
    hd: int = 16
    dtype: str = "bf16"
    stored: str | None = None
    scale: str = "f32"
    num_sequences: int = 1
    each: int = 7  # tokens of a sequence in the call
    block_size: int = 4
    num_blocks: int = 12
    by_slots: bool = False
    with_starts: bool = True
    holes: bool = True  # tokens without a place
    cache_order: str = "bloth"
    rows_order: str = "bloth"
    gaps: tuple[int, int] = (0, 0)  # behind each row of the cache, and of the rows
    misalign: tuple[int, int] = (0, 0)
    bases: tuple[bool, bool] = (False, False)  # one a layer and outer index
    seed: int = 0

    def but(self, **changes: object) -> Case:
        return replace(self, **changes)

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.each

    @property
    def row(self) -> int:
        return self.hd * BITS[self.dtype]().itemsize

    @property
    def stored_row(self) -> int:
        if self.stored is None:
            return self.row
        return reference.scale_offset(self.hd, SCALES[self.scale]) + SCALES[self.scale]().itemsize


@dataclass
class Tables:
    """The arrays of a token map."""

    slots: np.ndarray | None
    block_tables: np.ndarray
    starts: np.ndarray | None
    places: list[tuple[int, int] | None] = field(default_factory=list)


def tables_of(case: Case, rng: np.random.Generator) -> Tables:
    """Blocks in any order, no place twice; where there are holes, some of every kind."""
    blocks = rng.permutation(case.num_blocks).astype(np.uint32)
    stride = case.num_blocks // case.num_sequences
    tables = blocks[: stride * case.num_sequences].reshape(case.num_sequences, stride)
    starts = None
    if case.with_starts:
        room = max(1, stride * case.block_size - (0 if case.holes else case.each - 1))
        starts = rng.integers(0, room, case.num_sequences).astype(np.uint32)
    slots = None
    if case.by_slots:
        slots = rng.permutation(case.num_blocks * case.block_size)[: case.num_tokens].astype(np.int64)
        for i in range(0, len(slots) - 3, 8):  # some runs, as a prefill has them
            slots[i : i + 3] = slots[i] // case.block_size * case.block_size + np.arange(3)
        unique = {int(slot): i for i, slot in reversed(list(enumerate(slots)))}
        slots = np.array([slot if unique[int(slot)] == i else -1 for i, slot in enumerate(slots)], np.int64)
        if case.holes:
            outside = np.array([-1, case.num_blocks * case.block_size, 1 << 40, -(1 << 63), (1 << 63) - 1])
            slots = np.where(rng.random(len(slots)) < 0.2, rng.choice(outside, len(slots)), slots)
    elif case.holes:
        outside = np.array([case.num_blocks, NULL_BLOCK], np.uint32)
        tables = np.where(rng.random(tables.shape) < 0.2, rng.choice(outside, tables.shape), tables).astype(np.uint32)
    places = reference.token_places(case.num_tokens, case.block_size, case.num_blocks, slots, tables, starts)
    return Tables(slots, np.ascontiguousarray(tables), starts, places)


def numbers(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> np.ndarray:
    """The bits of rows [..., hd] of every kind: of all magnitudes, subnormal, zero, on ties, broken, random."""
    magnitudes = np.float32(10) ** rng.integers(-44, 38, (*shape[:-1], 1)).astype(np.float32)
    with np.errstate(all="ignore"):
        usual = rng.standard_normal(shape).astype(np.float32) * np.where(
            rng.random(magnitudes.shape) < 0.6, 1, magnitudes
        )
    ties = rng.integers(-254, 255, shape).astype(np.float32) / 2
    ties[..., 0] = 127
    kind = rng.random((*shape[:-1], 1))
    x = np.where(kind < 0.2, ties * np.float32(2) ** rng.integers(-20, 8, kind.shape).astype(np.float32), usual)
    x = np.where(kind > 0.9, np.where(rng.random(shape) < 0.5, np.float32(0), np.float32(-0.0)), x)
    bits = reference.bits_of(x.astype(np.float32), dtype).copy()
    scattered = reference.random_kv(rng, shape, BITS[dtype])
    bits = np.where((0.8 < kind) & (kind < 0.85), scattered, bits)
    special = {"f16": 0x7C00, "bf16": 0x7F80, "f32": 0x7F800000}[dtype]
    one = (kind > 0.85) & (kind < 0.9) & (np.arange(shape[-1]) == rng.integers(0, shape[-1], kind.shape))
    sign = {"f16": 0x8000, "bf16": 0x8000, "f32": 0x80000000}[dtype]
    values = np.array([special, special | sign, special | 1, special | sign | 7])
    return np.where(one, rng.choice(values, shape), bits).astype(BITS[dtype])


@dataclass
class Call:
    """One call: the images of both sides before it, and what they have to be after it."""

    case: Case
    appends: bool
    cache: Rows
    rows: Rows
    cache_image: np.ndarray
    rows_image: np.ndarray
    expected: np.ndarray
    tables: Tables

    def arguments(
        self, cache_address: int, rows_address: int, slots: int | None, block_tables: int, starts: int | None
    ):
        """dst, src, shape, map and quantization for these addresses, and what has to outlive the call."""
        case = self.case
        cache, keep = self.cache.view(cache_address)
        rows, keep_too = self.rows.view(rows_address)
        shape = Shape(case.nl, case.no, case.nh, case.num_tokens, case.row)
        # With slots the rest does not count.
        rest = (block_tables, self.tables.block_tables.shape[1], starts, case.num_sequences)
        if slots is not None:
            rest = (None, 0, None, 0)
        token_map = TokenMap(ctypes.sizeof(TokenMap), case.block_size, slots, *rest)
        quantization = None
        if case.stored is not None:
            values = STORED[case.stored], DTYPES[case.dtype], DTYPES[case.scale]
            quantization = Quantization(ctypes.sizeof(Quantization), *values)
        views = (cache, rows) if self.appends else (rows, cache)
        return (*views, shape, token_map, quantization), (keep, keep_too)


def sides_of(case: Case) -> tuple[Rows, Rows]:
    """The cache, and the rows beside it."""
    extents = {"l": case.nl, "o": case.no, "h": case.nh}
    of_cache, of_rows = (
        {**extents, "b": case.num_blocks, "t": case.block_size},
        {**extents, "b": 1, "t": case.num_tokens},
    )
    return (
        Rows(of_cache, case.stored_row, case.cache_order, case.gaps[0], case.misalign[0], case.bases[0]),
        Rows(of_rows, case.row, case.rows_order, case.gaps[1], case.misalign[1], case.bases[1]),
    )


def make_call(case: Case, appends: bool) -> Call:
    rng = np.random.default_rng(case.seed)
    cache, rows = sides_of(case)
    cache_image = rng.integers(0, 256, cache.nbytes, np.uint8)
    rows_image = rng.integers(0, 256, rows.nbytes, np.uint8)
    given = numbers((1, case.nl, case.no, case.num_tokens, case.nh, case.hd), case.dtype, rng)
    rows.of(rows_image)[...] = given.view(np.uint8)
    tables = tables_of(case, rng)
    if case.stored is not None and not appends:
        # Half of what is fetched was stored, the rest is anything.
        here = cache.of(cache_image)
        stored = numbers((*here.shape[:-1], case.hd), case.dtype, rng)
        encoded = reference.quantised(reference.numbers_of(stored, case.dtype), case.stored, SCALES[case.scale])
        here[...] = np.where(rng.random((*here.shape[:-1], 1)) < 0.7, encoded, here)

    expected = (cache_image if appends else rows_image).copy()
    for token, place in enumerate(tables.places):
        if place is None:
            continue
        block, inside = place
        if appends:
            row = given[0, :, :, token]
            if case.stored is not None:
                row = reference.quantised(reference.numbers_of(row, case.dtype), case.stored, SCALES[case.scale])
            cache.of(expected)[block, :, :, inside] = row.view(np.uint8)
        else:
            row = cache.of(cache_image)[block, :, :, inside]
            if case.stored is not None:
                wanted = reference.dequantised(row, case.hd, case.stored, SCALES[case.scale])
                row = np.ascontiguousarray(reference.bits_of(wanted, case.dtype)).view(np.uint8)
            rows.of(expected)[0, :, :, token] = row
    return Call(case, appends, cache, rows, cache_image, rows_image, expected, tables)


def check_case(case: Case, run: Callable[[Call], tuple[np.ndarray, np.ndarray]]) -> None:
    """Append and gather as the case says; ``run`` gives both images after the call, that of the cache first."""
    for appends in (True, False):
        made = make_call(case, appends)
        cache, rows = run(made)
        written, read = (cache, rows) if appends else (rows, cache)
        reference.assert_same_bytes(written, made.expected)
        reference.assert_same_bytes(read, made.rows_image if appends else made.cache_image)


ALL_FORMATS = [(dtype, stored, scale) for dtype in DTYPES for stored in STORED for scale in SCALES]

# What differs in the places of rows: layouts, orders, tables, bases, gaps and alignment.
PLACES = {
    "one token": Case(each=1, holes=False),
    "one of several sequences": Case(num_sequences=4, each=1),
    "several of several sequences": Case(num_sequences=3, each=5, num_blocks=13),
    "slots": Case(by_slots=True, each=30),
    "slots of a cache of one block": Case(by_slots=True, each=30, num_blocks=1, block_size=64),
    "no starts": Case(with_starts=False, each=20),
    "blocks of one token": Case(block_size=1, each=9, num_sequences=1),
    "HND": Case(cache_order="blhot"),
    "HND and rows HND": Case(cache_order="bloht", rows_order="bloht", each=20),
    "layers first": Case(cache_order="lobth", rows_order="lobth", each=20, bases=(True, True)),
    "K and V first, HND": Case(cache_order="olbht", bases=(True, False)),
    "packed rows": Case(cache_order="bltho"),
    "heads outermost": Case(cache_order="hblot", rows_order="tlobh"),
    "one head, one layer": Case(nl=1, no=1, nh=1, each=25, hd=576, holes=False),
    "gaps": Case(gaps=(8, 24), each=20),
    "misaligned": Case(misalign=(2, 1), each=20),
    "misaligned, with gaps": Case(misalign=(5, 3), gaps=(3, 1), each=20, bases=(True, True)),
    "odd rows": Case(hd=13, gaps=(1, 0), cache_order="bloht", each=20),
}
