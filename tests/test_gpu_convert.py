"""Conversions on the GPU, bit for bit against the reference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import reference
from gpu_support import (
    DTYPE_OF_NBYTES,
    HND,
    NHD,
    Memory,
    Shape,
    call,
    check,
    copy_blocks,
    device_table,
    make_view,
    synchronize,
    table,
)

pytestmark = pytest.mark.gpu

GUARD = 64


def spread(chunks: list[np.ndarray], where: str, misalign: int, rng: np.random.Generator) -> tuple[Memory, np.ndarray]:
    """The chunks shuffled in one allocation with guard bytes around each; the allocation and the offset of each."""
    pitch = (chunks[0].nbytes + 2 * GUARD + 15) // 16 * 16
    image = np.full(pitch * len(chunks) + GUARD, 0xA5, dtype=np.uint8)
    offsets = rng.permutation(len(chunks)) * pitch + GUARD + misalign
    for chunk, offset in zip(chunks, offsets, strict=True):
        image[offset : offset + chunk.nbytes] = chunk.reshape(-1).view(np.uint8)
    return Memory(image.size, where).write(image), offsets


def flat(arrays: np.ndarray) -> list[np.ndarray]:
    return list(arrays.reshape(len(arrays), -1))


def convert(
    name: str, kv: np.ndarray, layout: int, places: tuple[str, str], misalign: tuple[int, int], tables: str
) -> None:
    """Convert kv one way and compare the whole destination allocation, guards included."""
    rng = np.random.default_rng(7)
    nb, nl, no, nt, nh, hd = kv.shape
    stacks = reference.block_stack(kv, "NHD" if layout == NHD else "HND")
    chunks = [chunk for block in stacks for chunk in block]
    blocks, block_at = spread(chunks, places[0], misalign[0], rng)
    universal, universal_at = spread(flat(reference.universal(kv)), places[1], misalign[1], rng)
    target, other = (universal, universal_at) if name == "launch_universal_from_block" else (blocks, block_at)
    expected = target.read()
    wiped = expected.copy()
    nbytes = kv.nbytes // len(other)
    for offset in other:
        wiped[offset : offset + nbytes] = 0x11
    target.write(wiped)
    universal_table = device_table(universal.address + universal_at, tables)
    block_table = device_table(blocks.address + block_at, tables)
    synchronize()
    check(
        name,
        universal_table.address,
        block_table.address,
        nb,
        nh,
        nl,
        no,
        nt,
        hd,
        DTYPE_OF_NBYTES[kv.dtype.itemsize],
        layout,
        0,
    )
    synchronize()
    reference.assert_same_bytes(target.read(), expected)


DIRECTIONS = ("launch_universal_from_block", "launch_block_from_universal")
SHAPES = [(2, 2, 2, t, 3, hd) for t, hd in itertools.product((1, 5), (1, 46, 80, 96, 112, 192, 256, 576))]
SHAPES += [
    (1, 1, 1, 1, 1, 1),
    (3, 3, 2, 16, 8, 128),
    (2, 4, 1, 64, 1, 576),
    (2, 3, 1, 13, 2, 328),
    (5, 2, 2, 16, 8, 64),
]


@pytest.mark.parametrize("name", DIRECTIONS)
@pytest.mark.parametrize("layout", [NHD, HND])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32, np.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_row_size(name: str, layout: int, dtype: type, shape: tuple[int, ...]) -> None:
    """Any head dimension of any element size converts exactly, and nothing around the blocks is touched."""
    kv = reference.random_kv(np.random.default_rng(1), shape, dtype)
    convert(name, kv, layout, ("device", "device"), (0, 0), "device")


@pytest.mark.parametrize("name", DIRECTIONS)
@pytest.mark.parametrize("nh", [1, 2, 8, 5])
@pytest.mark.parametrize("hd", [1, 2, 4, 8])
@pytest.mark.parametrize("nt", [16, 48, 6])
@pytest.mark.parametrize("layout", [NHD, HND])
@pytest.mark.parametrize("misalign", [(0, 0), (4, 1), (0, 8)], ids=str)
def test_scales(name: str, nh: int, hd: int, nt: int, layout: int, misalign: tuple[int, int]) -> None:
    """Rows of a few bytes, as scales have, convert exactly whether or not they make whole vectors."""
    kv = reference.random_kv(np.random.default_rng(2), (3, 2, 2, nt, nh, hd), np.uint8)
    convert(name, kv, layout, ("device", "device"), misalign, "device")


@pytest.mark.parametrize("name", DIRECTIONS)
@pytest.mark.parametrize("misalign", [(2, 0), (0, 6), (2, 2), (8, 8), (1, 1), (4, 12)], ids=str)
@pytest.mark.parametrize("hd", [128, 46, 292])
def test_unaligned_pointers(name: str, misalign: tuple[int, int], hd: int) -> None:
    """Universal buffers and chunks may start anywhere, together or apart."""
    kv = reference.random_kv(np.random.default_rng(3), (2, 3, 2, 5, 3, hd), np.uint16)
    for layout in (NHD, HND):
        convert(name, kv, layout, ("device", "device"), misalign, "device")


@pytest.mark.parametrize("name", DIRECTIONS)
@pytest.mark.parametrize("places", [("pinned", "device"), ("device", "pinned"), ("pinned", "pinned")], ids=str)
@pytest.mark.parametrize("tables", ["device", "pinned"])
def test_pinned_host_memory(name: str, places: tuple[str, str], tables: str) -> None:
    """Either side, and the tables, may be pinned host memory."""
    kv = reference.random_kv(np.random.default_rng(4), (4, 3, 2, 16, 8, 128), np.uint16)
    convert(name, kv, NHD, places, (0, 0), tables)


def test_tables_in_ordinary_memory_are_refused() -> None:
    """A pointer table that a kernel cannot read is an invalid value before anything is launched."""
    bases = table([0])
    assert call("launch_universal_from_block", bases.ctypes.data, bases.ctypes.data, 1, 1, 1, 1, 1, 8, 0, 0, 0) == 1


class Layout:
    """One way to lay out kv in one allocation: the bytes, and the view of them."""

    def __init__(self, kind: str, kv: np.ndarray, ids: np.ndarray | None, pool: int, where: str, pad: int = 0) -> None:
        nb, nl, no, nt, nh, hd = kv.shape
        row = hd * kv.dtype.itemsize
        rng = np.random.default_rng(9)
        full = reference.random_kv(rng, (pool, *kv.shape[1:]), kv.dtype)
        self.where = np.arange(nb) if ids is None else ids
        full[self.where] = kv
        self.ids = ids
        self.kind = kind
        nhd, hnd = (nh * row, row), (row, nt * row)
        chunk = nt * nh * row
        if kind in ("stack NHD", "stack HND"):
            order = kind[-3:]
            chunks = [c for block in reference.block_stack(full, order) for c in block]
            self.memory, at = spread(chunks, where, pad, rng)
            self.bases = table(self.memory.address + at)
            token, head = nhd if order == "NHD" else hnd
            numbers = dict(steps=(nl * no, no, 1), token=token, head=head)
        elif kind in ("layers NHD", "layers HND"):
            # One tensor a layer and outer, [pool, nt, nh, hd], as most engines hold them.
            order = kind[-3:]
            parts = [full[:, layer, outer] for layer in range(nl) for outer in range(no)]
            parts = [p if order == "NHD" else p.transpose(0, 2, 1, 3) for p in parts]
            self.memory, at = spread([np.ascontiguousarray(p) for p in parts], where, pad, rng)
            self.bases = table(self.memory.address + at)
            token, head = nhd if order == "NHD" else hnd
            numbers = dict(steps=(0, no, 1), block=chunk, token=token, head=head)
        elif kind == "operational":
            self.memory, at = spread(flat(reference.operational(full, "NHD")), where, pad, rng)
            self.bases = table(self.memory.address + at)
            numbers = dict(steps=(1, 0, 0), layer=no * chunk, outer=chunk, token=nhd[0], head=nhd[1])
        elif kind == "universal":
            self.memory, at = spread(flat(reference.universal(full)), where, pad, rng)
            self.bases = table(self.memory.address + at)
            numbers = dict(steps=(1, 0, 0), layer=no * nt * row, outer=nt * row, token=row, head=nl * no * nt * row)
        elif kind == "packed":
            # K and V of a row side by side, [pool, nl, nt, nh, no, hd]: one base and strides for all the rest.
            image = np.ascontiguousarray(full.transpose(0, 1, 3, 4, 2, 5))
            self.memory = Memory(image.nbytes + pad, where)
            self.memory.write(np.concatenate([np.zeros(pad, np.uint8), image.reshape(-1).view(np.uint8)]))
            self.bases = table([self.memory.address])
            numbers = dict(
                offset=pad, block=nl * no * chunk, layer=no * chunk, outer=row, token=nh * no * row, head=no * row
            )
        else:
            raise AssertionError(kind)
        self.view = make_view(self.bases, ids, pool, **numbers)


LAYOUTS = ["stack NHD", "stack HND", "layers NHD", "layers HND", "operational", "universal", "packed"]


@pytest.mark.parametrize("pair", list(itertools.product(LAYOUTS, LAYOUTS)), ids=str)
@pytest.mark.parametrize("hd", [128, 40, 3])
@pytest.mark.parametrize("max_sms", [0, 2])
def test_every_pair_of_layouts(pair: tuple[str, str], hd: int, max_sms: int) -> None:
    """copy_blocks converts any layout to any other with ids on either side, and leaves other blocks alone."""
    rng = np.random.default_rng(5)
    kv = reference.random_kv(rng, (4, 3, 2, 8, 4, hd), np.uint16)
    nb, nl, no, nt, nh, _ = kv.shape
    src_ids, dst_ids = np.array([6, 0, 3, 2], np.int64), np.array([1, 5, 2, 4], np.int64)
    shape = Shape(nl, no, nh, nt, hd * 2)
    for ids in ((src_ids, None), (None, dst_ids), (src_ids, dst_ids)):
        src = Layout(pair[0], kv, ids[0], 7, "device")
        dst = Layout(pair[1], kv, ids[1], 7, "device")
        expected = dst.memory.read()
        blank = Layout(pair[1], np.zeros_like(kv), ids[1], 7, "device")
        synchronize()
        dst_view = blank.view
        copy_blocks(dst_view, src.view, shape, nb, 0, max_sms)
        synchronize()
        reference.assert_same_bytes(blank.memory.read(), expected)


@pytest.mark.parametrize("places", [("pinned", "device"), ("device", "pinned"), ("pinned", "pinned")], ids=str)
@pytest.mark.parametrize("pad", [0, 2, 8])
def test_straight_over_the_link(places: tuple[str, str], pad: int) -> None:
    """copy_blocks converts between host and device memory in one step."""
    kv = reference.random_kv(np.random.default_rng(6), (3, 4, 2, 16, 8, 64), np.uint16)
    nb, nl, no, nt, nh, hd = kv.shape
    for pair in (("stack NHD", "universal"), ("universal", "layers NHD"), ("packed", "universal")):
        src = Layout(pair[0], kv, None, 4, places[0], pad)
        dst = Layout(pair[1], kv, None, 4, places[1], pad)
        blank = Layout(pair[1], np.zeros_like(kv), None, 4, places[1], pad)
        expected = dst.memory.read()
        synchronize()
        copy_blocks(blank.view, src.view, Shape(nl, no, nh, nt, hd * 2), nb)
        synchronize()
        reference.assert_same_bytes(blank.memory.read(), expected)


@pytest.mark.parametrize("row", [1, 2, 3, 4, 6, 8, 12, 16, 20, 31, 33, 64, 100, 576, 584, 656])
def test_padded_rows(row: int) -> None:
    """Row by row between pitches, with the padding left alone: 576 used of 584 bytes and the like."""
    rng = np.random.default_rng(row)
    nb, nl, nt, nh = 2, 2, 5, 3
    for src_pitch, dst_pitch in ((row, row + 8), (row + 8, row), (row + 16, row + 32), (row + 5, row + 1)):
        rows = nb * nl * nt * nh
        src = rng.integers(0, 256, (rows, src_pitch), np.uint8)
        expected = rng.integers(0, 256, (rows, dst_pitch), np.uint8)
        dst = Memory(expected.size).write(expected)
        source = Memory(src.size).write(src)
        expected[:, :row] = src[:, :row]

        def strided(pitch: int) -> dict[str, int]:
            return dict(head=pitch, token=nh * pitch, layer=nt * nh * pitch, block=nl * nt * nh * pitch)

        src_bases, dst_bases = table([source.address]), table([dst.address])
        synchronize()
        copy_blocks(
            make_view(dst_bases, None, nb, **strided(dst_pitch)),
            make_view(src_bases, None, nb, **strided(src_pitch)),
            Shape(nl, 1, nh, nt, row),
            nb,
        )
        synchronize()
        reference.assert_same_bytes(dst.read(), expected.reshape(-1))


def test_many_blocks_with_a_pointer_each() -> None:
    """Tables too long for one launch are handed over in parts."""
    rng = np.random.default_rng(8)
    nb, nl, no, nt, nh, row = 300, 20, 2, 2, 2, 16
    chunk = nt * nh * row
    count = nb * nl * no
    data = rng.integers(0, 256, (count, chunk), np.uint8)
    source, target = Memory(data.size).write(data), Memory(data.size).fill(0)
    src_order, dst_order = rng.permutation(count), rng.permutation(count)
    src_bases = table(source.address + src_order * chunk)
    dst_bases = table(target.address + dst_order * chunk)
    expected = np.empty_like(data)
    rows = data[src_order].reshape(count, nt, nh, row).transpose(0, 2, 1, 3).reshape(count, chunk)
    expected[dst_order] = rows
    synchronize()
    steps = (nl * no, no, 1)
    copy_blocks(
        make_view(dst_bases, None, nb, steps, token=row, head=nt * row),
        make_view(src_bases, None, nb, steps, token=nh * row, head=row),
        Shape(nl, no, nh, nt, row),
        nb,
    )
    synchronize()
    reference.assert_same_bytes(target.read(), expected.reshape(-1))


def test_ordinary_memory_is_refused() -> None:
    """Rows in memory that CUDA knows nothing of are an invalid value, and nothing is launched."""
    data = np.zeros(64, np.uint8)
    target = Memory(64).fill(3)
    bases, dst_bases = table([data.ctypes.data]), table([target.address])
    view, dst_view = make_view(bases, None, 1), make_view(dst_bases, None, 1)
    assert call("copy_blocks", dst_view, view, Shape(1, 1, 1, 1, 64), 1, None, 0) == 1
    assert call("copy_blocks", view, dst_view, Shape(1, 1, 1, 1, 64), 1, None, 0) == 1
    synchronize()
    assert (target.read() == 3).all()
