"""Rules that hold for shapes, selections, strides and alignments nobody thought of."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import kvbm_kernels as kk
import reference
from kvbm_kernels.geometry import Geometry, PerIndex
from kvbm_kernels.overlap import rows_collide, share_bytes
from memory import Guarded

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, ml_dtypes.float8_e4m3fn, np.int8]
LAYOUTS = st.sampled_from(["NHD", "HND"])
KINDS = st.sampled_from(["stack", "operational", "universal", "layers"])


@st.composite
def caches(draw):
    """A logical cache of random bits."""
    # Limits off the powers of two; rows now and then long enough for every width of access.
    nb, nl, no, nh = (draw(st.integers(1, high)) for high in (5, 3, 2, 6))
    nt = draw(st.integers(1, 9))
    hd = draw(st.one_of(st.integers(1, 70), st.sampled_from([96, 128, 192])))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    return reference.random_kv(rng, (nb, nl, no, nt, nh, hd), dtype)


def shape_of(kv):
    _, nl, no, nt, nh, hd = kv.shape
    return kk.BlockShape(nl, no, nh, nt, hd, kv.dtype)


class Place:
    """A cache in guarded memory in one of the layouts, with a view of it."""

    def __init__(self, kind: str, layout: str, kv: np.ndarray, misalignment: int) -> None:
        nb, nl, no, nt, nh, hd = kv.shape
        self.kind, self.layout, self.kv_shape = kind, layout, kv.shape
        shape = shape_of(kv)
        chunk = (nt, nh, hd) if layout == "NHD" else (nh, nt, hd)
        if kind == "stack":
            shapes = [chunk] * (nb * nl * no)
        elif kind == "operational":
            shapes = [(nl, no, nt * nh * hd)] * nb
        elif kind == "universal":
            shapes = [(nb, nh, nl, no, nt, hd)]
        else:
            shapes = [(no, nb, *chunk)] * nl
        self.guarded = [Guarded(s, kv.dtype, misalignment + 3 * i) for i, s in enumerate(shapes)]
        self.arrays = arrays = [g.array for g in self.guarded]
        if kind == "stack":
            self.view = kk.BlockStack([arrays[b * nl * no : (b + 1) * nl * no] for b in range(nb)], shape, layout)
        elif kind == "operational":
            self.view = kk.OperationalBlocks(arrays, shape, layout)
        elif kind == "universal":
            self.view = kk.UniversalBlocks(arrays[0], shape)
        else:
            self.view = kk.BlockStack.from_layers(arrays, shape, "obthd" if layout == "NHD" else "obhtd")
        self.write(kv)

    def logical(self) -> np.ndarray:
        """The arrays as a writable view [b, l, o, t, h, d] of each: a list of (index, array) to assign to."""
        nb, nl, no, nt, nh, hd = self.kv_shape
        swapped = self.layout == "HND"
        if self.kind == "stack":
            parts = [((b, i // no, i % no), self.arrays[b * nl * no + i]) for b in range(nb) for i in range(nl * no)]
            return [(at, a.swapaxes(0, 1) if swapped else a) for at, a in parts]
        if self.kind == "operational":
            inner = (nh, nt, hd) if swapped else (nt, nh, hd)
            wide = [a.reshape(nl, no, *inner) for a in self.arrays]
            return [((b,), a.swapaxes(2, 3) if swapped else a) for b, a in enumerate(wide)]
        if self.kind == "universal":
            return [((), self.arrays[0].transpose(0, 2, 3, 4, 1, 5))]
        parts = [((slice(None), layer), a.swapaxes(0, 1)) for layer, a in enumerate(self.arrays)]
        return [(at, a.swapaxes(2, 3) if swapped else a) for at, a in parts]

    def write(self, kv):
        for at, array in self.logical():
            array[...] = kv[at]

    def read(self):
        kv = np.zeros(self.kv_shape, self.arrays[0].dtype)
        for at, array in self.logical():
            kv[at] = array
        return kv

    def assert_guards(self):
        for g in self.guarded:
            g.assert_guards()


@settings(max_examples=150, deadline=None)
@given(caches(), KINDS, KINDS, LAYOUTS, LAYOUTS, st.integers(0, 63), st.integers(0, 63), st.integers(0, 4))
def test_any_layout_to_any_other(kv, to, of, to_layout, of_layout, to_misaligned, of_misaligned, threads):
    """The destination then holds the cache, and nothing beside it has changed."""
    src = Place(of, of_layout, kv, of_misaligned)
    dst = Place(to, to_layout, np.zeros_like(kv), to_misaligned)
    kk.copy_blocks(dst.view, src.view, num_threads=threads)
    reference.assert_same_bytes(dst.read(), kv)
    dst.assert_guards()
    src.assert_guards()


@settings(max_examples=150, deadline=None)
@given(caches(), KINDS, KINDS, LAYOUTS, LAYOUTS, st.data())
def test_any_part_to_any_other_of_its_shape(kv, to, of, to_layout, of_layout, data):
    """Selections and ranges pick the rows that NumPy's slices pick; all others keep their bits."""
    src = Place(of, of_layout, kv, 0)
    before = reference.random_kv(np.random.default_rng(1), kv.shape, kv.dtype)
    dst = Place(to, to_layout, before, 0)
    nb, nl, _, nt, nh, _ = kv.shape

    def two_ranges(count):
        width = data.draw(st.integers(1, count))
        starts = [data.draw(st.integers(0, count - width)) for _ in range(2)]
        return [(start, start + width) for start in starts]

    to_ids = data.draw(st.lists(st.integers(0, nb - 1), unique=True))
    of_ids = data.draw(st.lists(st.integers(0, nb - 1), min_size=len(to_ids), max_size=len(to_ids)))
    layers, tokens, heads = two_ranges(nl), two_ranges(nt), two_ranges(nh)
    kk.copy_blocks(
        dst.view[to_ids].layers(*layers[0]).tokens(*tokens[0]).heads(*heads[0]),
        src.view.heads(*heads[1]).tokens(*tokens[1]).layers(*layers[1])[of_ids],
    )
    expected = before.copy()
    for to_id, of_id in zip(to_ids, of_ids, strict=True):
        expected[to_id, slice(*layers[0]), :, slice(*tokens[0]), slice(*heads[0])] = kv[
            of_id, slice(*layers[1]), :, slice(*tokens[1]), slice(*heads[1])
        ]
    reference.assert_same_bytes(dst.read(), expected)
    dst.assert_guards()


@settings(max_examples=60, deadline=None)
@given(caches(), LAYOUTS)
def test_conversions_are_undone_by_their_inverse(kv, layout):
    nb, nl, no, nt, nh, hd = kv.shape
    universals = list(np.zeros((nb, nh, nl, no, nt, hd), kv.dtype))
    kk.universal_from_block(universals, reference.block_stack(kv, layout), layout)
    reference.assert_same_bytes(np.stack(universals), reference.universal(kv))
    blocks = reference.block_stack(np.zeros_like(kv), layout)
    kk.block_from_universal(blocks, universals, layout)
    operationals = list(np.zeros((nb, nl, no, nt * nh * hd), kv.dtype))
    kk.operational_from_block(operationals, blocks)
    reference.assert_same_bytes(np.stack(operationals), reference.operational(kv, layout))
    back = reference.block_stack(np.zeros_like(kv), layout)
    kk.block_from_operational(back, operationals)
    reference.assert_same_bytes(reference.from_block_stack(back, nl, no, layout), kv)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 63), st.integers(0, 63)), max_size=12))
def test_batches_of_any_sizes_and_alignments(pieces):
    rng = np.random.default_rng(len(pieces))
    sources = [Guarded((size,), np.uint8, of) for size, of, _ in pieces]
    outs = [Guarded((size,), np.uint8, to) for size, _, to in pieces]
    for source in sources:
        source.array[:] = reference.random_kv(rng, source.array.shape, np.uint8)
    kk.memcpy_batch([out.array for out in outs], [source.array for source in sources])
    for source, out in zip(sources, outs, strict=True):
        reference.assert_same_bytes(out.array, source.array)
        out.assert_guards()


# Far from zero, so that negative strides stay above it.
BASE = 1 << 20


@st.composite
def geometries(draw, row_nbytes=None):
    """Rows in a small space, in which many of them meet."""
    count = st.integers(1, 3)
    extents = PerIndex(draw(st.integers(1, 4)), draw(count), draw(st.integers(1, 2)), draw(count), draw(count))
    table = draw(st.sampled_from(["one", "layers", "layers and outers", "blocks", "chunks"]))
    steps = {
        "one": PerIndex(),
        "layers": PerIndex(layer=1),
        "layers and outers": PerIndex(layer=extents.outer, outer=1),
        "blocks": PerIndex(block=1),
        "chunks": PerIndex(extents.layer * extents.outer, extents.outer, 1),
    }[table]
    # Multiples of a unit: that neighbours meet exactly, and strides nest, is no rare chance.
    unit = draw(st.sampled_from([1, 4]))
    stride = st.integers(-24, 48).map(lambda n: n * unit)
    strides = PerIndex(*[0 if step else draw(stride) for step in steps])
    size = 1 + sum((extent - 1) * step for extent, step in zip(extents, steps, strict=True))
    if draw(st.booleans()):
        bases = [BASE + unit * draw(st.integers(0, 400)) for _ in range(size)]
    else:
        distance = draw(stride)
        bases = [BASE + i * distance for i in range(size)]
    ids = draw(st.none() | st.lists(st.integers(0, extents.block - 1), max_size=4))
    return Geometry(
        np.array(bases, np.int64),
        steps,
        strides,
        extents,
        row_nbytes or draw(st.integers(1, 9)) * unit,
        draw(st.integers(-3, 3)) * unit,
        None if ids is None else np.array(ids, np.int64),
    )


def rows_of(geometry: Geometry) -> list[range]:
    """The bytes of each row, straight from the formula."""
    ids = range(geometry.extents.block) if geometry.ids is None else geometry.ids.tolist()
    steps, strides = geometry.steps, geometry.strides
    rows = []
    for block in ids:
        for index in np.ndindex(*geometry.extents[1:]):
            at = (block, *index)
            base = geometry.bases[sum(i * step for i, step in zip(at, steps, strict=True))]
            start = int(base) + geometry.offset + sum(i * s for i, s in zip(at, strides, strict=True))
            rows.append(range(start, start + geometry.row_nbytes))
    return rows


@settings(max_examples=600, deadline=None)
@given(geometries())
def test_overlapping_rows_are_found_and_only_they(geometry):
    rows = rows_of(geometry)
    nbytes = sum(map(len, rows))
    assert rows_collide(geometry) == (len({byte for row in rows for byte in row}) < nbytes)


@settings(max_examples=400, deadline=None)
@given(geometries(), geometries())
def test_memory_shared_by_two_views_is_found_and_only_it(geometry, other):
    shared = {b for row in rows_of(geometry) for b in row} & {b for row in rows_of(other) for b in row}
    assert share_bytes(geometry, other) == bool(shared)
    # What is remembered about the pair is still right the second time.
    assert share_bytes(geometry, other) == bool(shared)


@settings(max_examples=400, deadline=None)
@given(geometries(), st.data())
def test_memory_shared_by_two_parts_of_a_view_is_found_and_only_it(geometry, data):
    def part():
        narrow = geometry
        for name, count in (("layers", "layer"), ("tokens", "token"), ("heads", "head")):
            start = data.draw(st.integers(0, getattr(geometry.extents, count) - 1))
            narrow = getattr(narrow, name)(start, data.draw(st.integers(start + 1, getattr(geometry.extents, count))))
        ids = data.draw(st.lists(st.integers(0, max(0, narrow.num_blocks - 1)), max_size=3))
        return narrow.select(np.array(ids, np.int64)) if narrow.num_blocks else narrow

    one, two = part(), part()
    shared = {b for row in rows_of(one) for b in row} & {b for row in rows_of(two) for b in row}
    assert share_bytes(one, two) == bool(shared)
    rows = rows_of(one)
    assert rows_collide(one) == (len({b for row in rows for b in row}) < sum(map(len, rows)))


@st.composite
def in_cells(draw):
    """Two sets of rows whose blocks are as far from each other: layers of one buffer, behind or inside each other."""
    cell, num_blocks = draw(st.integers(2, 12)), draw(st.integers(1, 4))

    def layers():
        tokens, row_nbytes = draw(st.integers(1, 3)), draw(st.integers(1, 5))
        places = st.tuples(st.integers(0, 3), st.integers(0, cell))
        bases = [
            BASE + region * cell * num_blocks + at for region, at in draw(st.lists(places, min_size=1, max_size=3))
        ]
        return Geometry(
            np.array(bases, np.int64),
            PerIndex(layer=1),
            PerIndex(block=cell, token=row_nbytes),
            PerIndex(num_blocks, len(bases), 1, tokens, 1),
            row_nbytes,
            draw(st.integers(0, 2)),
            np.array(draw(st.lists(st.integers(0, num_blocks - 1), max_size=3)), np.int64),
        )

    return layers(), layers()


@settings(max_examples=800, deadline=None)
@given(in_cells())
def test_memory_shared_within_a_buffer_is_found_and_only_it(pair):
    one, two = pair
    shared = {b for row in rows_of(one) for b in row} & {b for row in rows_of(two) for b in row}
    assert share_bytes(one, two) == bool(shared)
    assert share_bytes(two, one) == bool(shared)
