"""What a copy between two views would do, told without doing it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, SupportsIndex

from kvbm_kernels._native import check, ffi, lib, text
from kvbm_kernels.copy import as_view, mismatch
from kvbm_kernels.layouts import as_c_int
from kvbm_kernels.views import View


@dataclass(frozen=True)
class Loop:
    """A dimension that both sides step through with fixed strides, in bytes."""

    size: int
    src_stride: int
    dst_stride: int


@dataclass(frozen=True)
class HostRoute:
    """What the host engine would do, on this machine."""

    threads: int
    """Threads at work, the caller's among them."""
    rows: str
    """The code that copies a segment: "fixed" (moves of 1, 2, 4, 8 or 16 bytes), "memcpy", "avx2", "stream_sse2" or
    "stream_avx2", whose stores go around the cache; "" where there is nothing to do."""
    joins_segments: bool
    """Segments that follow each other on both sides are found while copying, and moved as one."""
    cuts_segments: bool
    """Threads share single segments, which are long; else each takes whole ones."""


@dataclass(frozen=True)
class DeviceRoute:
    """What the CUDA engine would launch."""

    src_on_host: bool
    """Whether the source was taken to be in pinned host memory; else on the device."""
    dst_on_host: bool
    """The same of the destination."""
    kernel: str
    """The kernel as a profiler shows it, without template arguments: "move_tile" (a CTA a tile), "move" (up to a warp a
    tile; CTAs stride over the tiles), "gather" (as move; a thread makes 16 bytes of several short rows)."""
    launches: int
    tiles: int
    """Tiles of all launches."""
    tile_nbytes: int
    """Bytes of a full tile."""
    ctas: int
    """Of the first launch, as all that follows here."""
    cta_threads: int
    """Threads of a CTA."""
    params_nbytes: int
    """Bytes of a launch's parameters, which carry the addresses."""
    read_nbytes: int
    """Bytes that a thread reads at a time, where they are fewest."""
    write_nbytes: int
    """Bytes that it writes at a time there."""
    is_shifted: bool
    """Source and destination are equally far off alignment: the ends of segments move byte by byte."""


@dataclass(frozen=True)
class Explanation:
    """What a copy comes down to: ``segments`` runs of ``segment_nbytes`` bytes, each contiguous on both sides.

    They are reached by ``loops``, outermost first, from ``items`` pairs of addresses: 1 where strides reach everything.
    """

    total_nbytes: int
    """Bytes that are read, and as many written."""
    segments: int
    segment_nbytes: int
    items: int
    loops: tuple[Loop, ...]
    alignment: int
    """The largest power of two, 16 at most, that divides every stride, every offset and the length of a segment."""
    host: HostRoute
    device: DeviceRoute


def explain(
    dst: View,
    src: View,
    *,
    src_on_host: bool | None = None,
    dst_on_host: bool | None = None,
    max_sms: SupportsIndex | None = None,
    num_threads: SupportsIndex = 0,
) -> Explanation:
    """Say what :func:`kvbm_kernels.copy_blocks` would do with these views, in host memory and on a GPU.

    It is told by the code that decides it, in every build and without a driver; no block is read or written. The two
    flags say where a copy on a stream is to find each side, in pinned host memory or on the device. None is where the
    arrays are, but both sides on the device if neither array is. ``max_sms`` and ``num_threads`` are as for
    copy_blocks.

    Raises KvbmTypeError and KvbmValueError as copy_blocks does for views that do not match. Overlap is not looked for,
    nor whether a side can be written.
    """
    wrong = mismatch(as_view(dst, "dst"), as_view(src, "src"), "dst", "src")
    if wrong is not None:
        raise wrong
    neither = dst.memory.is_host and src.memory.is_host
    options: Any = ffi.new("kvbm_kernels_explain_options *")
    options.struct_nbytes = ffi.sizeof("kvbm_kernels_explain_options")
    options.max_sms = 0 if max_sms is None else as_c_int(max_sms, "max_sms", 1)
    options.num_threads = as_c_int(num_threads, "num_threads", 0)
    options.src_on_host = src.memory.is_host and not neither if src_on_host is None else src_on_host
    options.dst_on_host = dst.memory.is_host and not neither if dst_on_host is None else dst_on_host
    found: Any = ffi.new("kvbm_kernels_copy_explanation *")
    found.struct_nbytes = ffi.sizeof("kvbm_kernels_copy_explanation")
    to, of = dst.geometry, src.geometry
    check(lib.kvbm_kernels_explain_copy(to.c_view(), of.c_view(), to.c_shape(), len(dst), options, found))
    return Explanation(
        total_nbytes=found.total_nbytes,
        segments=found.num_segments,
        segment_nbytes=found.segment_nbytes,
        items=found.num_items,
        loops=tuple(
            Loop(found.loop_sizes[i], found.loop_src_strides[i], found.loop_dst_strides[i])
            for i in range(found.num_loops)
        ),
        alignment=found.alignment,
        host=HostRoute(
            threads=found.host_threads,
            rows=text(found.host_rows),
            joins_segments=found.host_joins_segments,
            cuts_segments=found.host_cuts_segments,
        ),
        device=DeviceRoute(
            src_on_host=options.src_on_host,
            dst_on_host=options.dst_on_host,
            kernel=text(found.kernel),
            launches=found.num_launches,
            tiles=found.num_tiles,
            tile_nbytes=found.tile_nbytes,
            ctas=found.num_ctas,
            cta_threads=found.cta_threads,
            params_nbytes=found.params_nbytes,
            read_nbytes=found.read_nbytes,
            write_nbytes=found.write_nbytes,
            is_shifted=found.is_shifted,
        ),
    )
