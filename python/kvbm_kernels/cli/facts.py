"""An explanation for people: what a copy does, and in sentences why."""

from __future__ import annotations

from kvbm_kernels.explanation import Explanation
from kvbm_kernels.layouts import BlockShape

_VECTOR_NBYTES = 16

_HOST_ROWS = {
    "fixed": "moves of a fixed size, without a call",
    "memcpy": "memcpy",
    "avx2": "AVX2 loads and stores, without a call",
    "stream_sse2": "SSE2 stores that go around the cache, which the copy would not fit in",
    "stream_avx2": "AVX2 stores that go around the cache, which the copy would not fit in",
}


def describe(found: Explanation, shape: BlockShape) -> list[tuple[str, ...]]:
    """Names and values of what the copy does."""
    route, host = found.device, found.host
    loops = ", ".join(
        f"{loop.size:,} times (+{loop.src_stride:,} in the source, +{loop.dst_stride:,} in the destination)"
        for loop in found.loops
    ).replace("+-", "-")
    ends = ["pinned host memory" if on_host else "device memory" for on_host in (route.src_on_host, route.dst_on_host)]
    access = count(route.read_nbytes, "byte")
    if route.read_nbytes != route.write_nbytes:
        access += f" read, {route.write_nbytes} written,"
    return [
        ("segments", f"{found.segments:,} of {count(found.segment_nbytes, 'byte')}, {segment_name(found, shape)}"),
        ("loops", f"{loops or 'none'}; from {count(found.items, 'pair')} of addresses"),
        ("on a GPU", f"from {ends[0]} to {ends[1]}"),
        (
            "  kernel",
            f"{route.kernel}; {count(route.launches, 'launch')}, {route.params_nbytes:,} bytes of parameters",
        ),
        ("  tiles", f"{route.tiles:,} of {count(route.tile_nbytes, 'byte')}"),
        ("  grid", f"{count(route.ctas, 'CTA')} of {route.cta_threads} threads"),
        ("  access", f"{access} a thread at a time"),
        ("on the host", f"{host.rows}; {count(host.threads, 'thread')}"),
    ]


def reasons(found: Explanation, shape: BlockShape) -> list[str]:
    """A sentence or two each about the segments, the GPU and the host. For a copy that has something to do."""
    return [_of_segments(found, shape), f"GPU: {_of_device(found, shape)}", f"Host: {_of_host(found)}"]


def segment_name(found: Explanation, shape: BlockShape) -> str:
    """What a segment is, in the words of the layouts where they have one that fits and no other does."""
    rows = found.segment_nbytes // shape.row_nbytes
    if found.segments == 1:
        return "everything"
    if rows == 1:
        return "a row"
    chunk = shape.nt * shape.nh
    names = [
        name
        for count, name in (
            (shape.nt, f"the {count(shape.nt, 'token')} of a head"),
            (shape.nh, f"the {count(shape.nh, 'head')} of a token"),
            (chunk, "a chunk"),
            (shape.nl * shape.no * chunk, "a block"),
        )
        if count == rows
    ]
    return names[0] if len(names) == 1 else f"{rows} rows"


def _of_segments(found: Explanation, shape: BlockShape) -> str:
    if found.segments == 1:
        lie = "The one byte lies" if found.total_nbytes == 1 else f"All {found.total_nbytes:,} bytes lie"
        return f"{lie} together on both sides: this is one plain copy."
    run = f"{count(found.segment_nbytes, 'byte')} ({segment_name(found, shape)})"
    runs = f"Runs of {run} are the longest that both sides share"
    if not found.loops:
        return f"{runs}; each has an address of its own on at least one side."
    inner = found.loops[-1]
    return (
        f"{runs}: the next one is {count(inner.src_stride, 'byte')} further in the source and {inner.dst_stride:,} in "
        "the destination."
    )


def _of_device(found: Explanation, shape: BlockShape) -> str:
    route = found.device
    segment, width = found.segment_nbytes, route.read_nbytes
    if width < route.write_nbytes:
        how = (
            f"segments of {count(segment, 'byte')} are too short for an access of {_VECTOR_NBYTES}, but lie side by "
            f"side in the destination: a thread reads {_VECTOR_NBYTES // segment} of them and writes {_VECTOR_NBYTES} "
            "bytes."
        )
    elif route.is_shifted:
        how = (
            f"both sides are equally far off a multiple of {width} bytes: the ends of a segment move byte by byte, and "
            f"{width} bytes at a time between them."
        )
    elif width == _VECTOR_NBYTES:
        how = f"every access moves {_VECTOR_NBYTES} bytes, the widest there is."
    else:
        step = "element by element" if width == shape.dtype.itemsize else f"{count(width, 'byte')} at a time"
        rows = (
            f"rows of {count(segment, 'byte')}"
            if segment == shape.row_nbytes
            else f"segments of {count(segment, 'byte')}"
        )
        how = (
            f"{rows} move {step}, because {width} is the largest power of two that divides every address, stride and "
            f"length; accesses of {_VECTOR_NBYTES} bytes would be {_VECTOR_NBYTES // width} times fewer."
        )
    if route.src_on_host or route.dst_on_host:
        how += (
            f" Crossing the link takes no more than {count(route.ctas, 'CTA')}, and leaves the rest of the GPU alone."
        )
    return how


def _of_host(found: Explanation) -> str:
    route = found.host
    how = f"segments are copied by {_HOST_ROWS.get(route.rows, route.rows)}"
    if route.joins_segments:
        how += ", once those that follow each other on both sides are joined"
    shared = " share each of them" if route.cuts_segments and route.threads > 1 else ""
    return f"{how}; {count(route.threads, 'thread')}{shared}."


def count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 'es' if what.endswith('h') else 's'}"
