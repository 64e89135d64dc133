"""kk.explain(): the plan against an independent definition of it, and what the facade adds to the C function."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kinds
import kvbm_kernels as kk
import reference
from memory import CudaArray

# The memory of each kind of place, from a cache of row numbers [nb, nl, no, nt, nh, 1].
BUFFERS = {
    "NHD": lambda rows: [chunk for block in reference.block_stack(rows, "NHD") for chunk in block],
    "HND": lambda rows: [chunk for block in reference.block_stack(rows, "HND") for chunk in block],
    "operational NHD": lambda rows: list(reference.operational(rows, "NHD")),
    "operational HND": lambda rows: list(reference.operational(rows, "HND")),
    "universal": lambda rows: [reference.universal(rows)],
    "padded rows": lambda rows: [
        np.stack([reference.universal(rows), np.full_like(reference.universal(rows), -1)], -1)
    ],
    "layers": kinds.layers,
    "packed K|V": kinds.packed,
}


def memory(kind: str, extents: tuple[int, ...]) -> list[np.ndarray]:
    rows = np.arange(np.prod(extents)).reshape(*extents, 1)
    return [buffer.ravel() for buffer in BUFFERS[kind](rows)]


def made_up(kind: str, extents: tuple[int, ...], hd: int) -> kk.View:
    """A view of that kind over arrays that never lie next to each other."""
    nb, nl, no, nt, nh = extents
    shape = kk.BlockShape(nl, no, nh, nt, hd, "int8")
    kv = np.zeros((*extents, hd), np.int8)

    def apart(array: np.ndarray) -> np.ndarray:
        wide = np.empty(array.nbytes + 128, np.uint8)
        return wide[64:-64].view(array.dtype).reshape(array.shape)

    assert nb == len(kv)
    return kinds.views(kv, shape, put=apart)[kind][0]


KIND = st.sampled_from(kinds.KINDS)
ROW_NBYTES = st.sampled_from([3, 4, 8, 16, 48, 100, 128])  # with room for a gap in "padded rows"
EXTENTS = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(1, 5), st.integers(1, 4))


@given(KIND, KIND, EXTENTS, ROW_NBYTES)
def test_segments_are_the_longest_runs_that_both_sides_share(to, of, extents, hd):
    found = kk.explain(made_up(to, extents, hd), made_up(of, extents, hd))
    assert found.total_nbytes == np.prod(extents) * hd
    assert found.segments * found.segment_nbytes == found.total_nbytes
    lengths = reference.runs(memory(to, extents), memory(of, extents))
    # All segments are of one length, though the last row of a chunk may by chance be followed alike on both sides.
    assert math.gcd(*lengths) * hd == found.segment_nbytes
    # Loops and addresses lead to every segment once.
    assert found.items * np.prod([loop.size for loop in found.loops], dtype=int) == found.segments
    for nbytes in (found.segment_nbytes, *[s for loop in found.loops for s in (loop.src_stride, loop.dst_stride)]):
        assert nbytes % found.alignment == 0


@given(KIND, KIND, EXTENTS, ROW_NBYTES, st.integers(0, 9), st.booleans(), st.booleans())
def test_tiles_hold_all_bytes_and_ctas_all_tiles(to, of, extents, hd, max_sms, src_on_host, dst_on_host):
    found = kk.explain(
        made_up(to, extents, hd),
        made_up(of, extents, hd),
        max_sms=max_sms or None,
        src_on_host=src_on_host,
        dst_on_host=dst_on_host,
    )
    route = found.device
    assert route.launches == 1
    assert route.tiles * route.tile_nbytes >= found.total_nbytes
    # A tile more than needed at the most, for each item.
    assert (route.tiles - found.items) * route.tile_nbytes < found.total_nbytes
    assert 1 <= route.ctas <= route.tiles
    if max_sms:
        assert route.ctas <= max_sms
    assert (route.src_on_host, route.dst_on_host) == (src_on_host, dst_on_host)
    assert route.kernel in ("move", "move_tile", "gather")
    assert found.segment_nbytes % route.read_nbytes == 0 or route.is_shifted or found.items == found.segments


def stack(count: int = 1) -> kk.BlockStack:
    shape = kk.BlockShape(2, 2, 4, 16, 64, "fp16")
    return kk.BlockStack([[np.zeros((16, 4, 64), np.float16) for _ in range(4)] for _ in range(count)], shape)


def universal(count: int = 1, on_device: bool = False) -> kk.UniversalBlocks:
    shape = kk.BlockShape(2, 2, 4, 16, 64, "fp16")
    extents = (count, 4, 2, 2, 16, 64)
    return kk.UniversalBlocks(CudaArray(extents) if on_device else np.zeros(extents, np.float16), shape)


def test_nothing_is_read_or_written(rng):
    blocks, out = stack(), np.zeros((1, 4, 2, 2, 16, 64), np.float16)
    kk.explain(kk.UniversalBlocks(out, blocks.shape), blocks)
    assert not out.any()
    readonly = out.copy()
    readonly.flags.writeable = False
    kk.explain(kk.UniversalBlocks(readonly, blocks.shape), blocks)


def test_sides_are_where_their_arrays_are():
    inside = kk.explain(universal(), stack()).device
    assert (inside.src_on_host, inside.dst_on_host) == (False, False)
    up = kk.explain(universal(on_device=True), stack()).device
    assert (up.src_on_host, up.dst_on_host) == (True, False)
    assert up.ctas <= 6
    down = kk.explain(stack(), universal(on_device=True)).device
    assert (down.src_on_host, down.dst_on_host) == (False, True)
    both = kk.explain(universal(), stack(), src_on_host=True, dst_on_host=True).device
    assert (both.src_on_host, both.dst_on_host) == (True, True)


def test_selected_blocks_count():
    assert kk.explain(universal(5)[[4, 1]], stack(2)).total_nbytes == 2 * stack().shape.block_nbytes


def test_no_blocks_are_nothing_to_do():
    found = kk.explain(universal(5)[[]], stack(2)[[]])
    assert (found.total_nbytes, found.segments, found.loops, found.device.launches) == (0, 0, (), 0)
    assert (found.device.kernel, found.host.rows) == ("", "")


def test_what_is_refused():
    with pytest.raises(kk.KvbmTypeError, match="^src is a list, expected a view$"):
        kk.explain(universal(), [])  # type: ignore[arg-type]
    with pytest.raises(kk.KvbmValueError, match="^dst has 1 block and src 2, expected the same number$"):
        kk.explain(universal(), stack(2))
    with pytest.raises(kk.KvbmValueError, match="^dst has blocks of nl=2 no=2 nh=1 .* expected the same$"):
        kk.explain(universal().heads(0, 1), stack())
    with pytest.raises(kk.KvbmValueError, match="^max_sms is 0, expected 1 or more$"):
        kk.explain(universal(), stack(), max_sms=0)
    with pytest.raises(kk.KvbmValueError, match="^num_threads is -1, expected 0 or more$"):
        kk.explain(universal(), stack(), num_threads=-1)


def test_an_explanation_is_a_value():
    first, second = kk.explain(universal(), stack()), kk.explain(universal(), stack())
    assert first == second
    assert dataclasses.asdict(first)["loops"][0].keys() == {"size", "src_stride", "dst_stride"}
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.segments = 3  # type: ignore[misc]
