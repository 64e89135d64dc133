"""Conversions on the GPU, bit for bit against the reference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import reference
from gpu_layouts import LAYOUTS, Layout, convert
from gpu_support import HND, NHD, Memory, Shape, call, copy_blocks, make_view, synchronize, table

pytestmark = pytest.mark.gpu

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
    convert(name, kv, layout)


@pytest.mark.parametrize("name", DIRECTIONS)
@pytest.mark.parametrize("nh", [1, 2, 8, 5])
@pytest.mark.parametrize("hd", [1, 2, 4, 8])
@pytest.mark.parametrize("nt", [16, 48, 6])
@pytest.mark.parametrize("layout", [NHD, HND])
@pytest.mark.parametrize("misalign", [(0, 0), (4, 1), (0, 8)], ids=str)
def test_scales(name: str, nh: int, hd: int, nt: int, layout: int, misalign: tuple[int, int]) -> None:
    """Rows of a few bytes, as scales have, convert exactly whether or not they make whole vectors."""
    kv = reference.random_kv(np.random.default_rng(2), (3, 2, 2, nt, nh, hd), np.uint8)
    convert(name, kv, layout, misalign=misalign)


@pytest.mark.parametrize("name", DIRECTIONS)
@pytest.mark.parametrize("misalign", [(2, 0), (0, 6), (2, 2), (8, 8), (1, 1), (4, 12)], ids=str)
@pytest.mark.parametrize("hd", [128, 46, 292])
def test_unaligned_pointers(name: str, misalign: tuple[int, int], hd: int) -> None:
    """Universal buffers and chunks may start anywhere, together or apart."""
    kv = reference.random_kv(np.random.default_rng(3), (2, 3, 2, 5, 3, hd), np.uint16)
    for layout in (NHD, HND):
        convert(name, kv, layout, misalign=misalign)


@pytest.mark.parametrize("name", DIRECTIONS)
@pytest.mark.parametrize("places", [("pinned", "device"), ("device", "pinned"), ("pinned", "pinned")], ids=str)
@pytest.mark.parametrize("tables", ["device", "pinned"])
def test_pinned_host_memory(name: str, places: tuple[str, str], tables: str) -> None:
    """Either side, and the tables, may be pinned host memory."""
    kv = reference.random_kv(np.random.default_rng(4), (4, 3, 2, 16, 8, 128), np.uint16)
    convert(name, kv, NHD, places, tables=tables)


def test_tables_in_ordinary_memory_are_refused() -> None:
    """A pointer table that a kernel cannot read is an invalid value before anything is launched."""
    bases = table([0])
    assert call("launch_universal_from_block", bases.ctypes.data, bases.ctypes.data, 1, 1, 1, 1, 1, 8, 0, 0, 0) == 1


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
