"""Copying blocks from one view to another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsIndex, TypeAlias

from kvbm_kernels._native import check, ffi, lib
from kvbm_kernels._wording import a_type, counted
from kvbm_kernels.arrays import Memory
from kvbm_kernels.errors import KvbmError, KvbmTypeError, KvbmValueError
from kvbm_kernels.layouts import as_c_int
from kvbm_kernels.overlap import first_sharing, rows_collide, share_bytes
from kvbm_kernels.plans import check_groups
from kvbm_kernels.streams import StreamLike, launch
from kvbm_kernels.views import View


def copy_blocks(
    dst: View | Sequence[View],
    src: View | Sequence[View],
    *,
    stream: StreamLike | None = None,
    max_sms: SupportsIndex | None = None,
    num_threads: SupportsIndex = 0,
) -> None:
    """Copy all blocks of one view to another, from any layout to any.

    Block i of ``src`` goes to block i of ``dst``; both have the same number of blocks and the same shape. No value is
    converted.

    Two lists of views are copied pair by pair, such as the groups of a model whose layers differ in head dimension or
    window, or the parts of a :class:`kvbm_kernels.plans.Plan`. Pairs may differ in all but the kind of memory: they are
    either all in host memory, or all copied on the one stream. All of them are checked before the first is copied. Two
    :class:`kvbm_kernels.engines.LayerGroups` have to have the same layers and parts.

    With both in host memory and no stream given, ``num_threads`` threads do it, 0 to let the library choose, and the
    copy is done when this returns. With CUDA memory on either side, or a stream given, it is put on the stream; the
    other side can be CUDA memory or pinned host memory. ``stream`` is a handle, a stream of PyTorch or CuPy, or an
    object with ``__cuda_stream__``; None is the current stream of the arrays' library. ``max_sms`` is the largest
    number of multiprocessors to keep busy, None to let the library choose.

    Pinned host memory is what ``torch.empty(..., pin_memory=True)`` and ``cupyx.empty_pinned(...)`` allocate, NumPy
    arrays over it (a tensor's ``.numpy()``, what cupyx returns), and memory registered with cudaHostRegister.

    Until the stream has passed the copy, the caller leaves the contents of the arrays alone, or orders what changes
    them behind it. The arrays may be dropped right away, if PyTorch or CuPy has set CUDA up in this process: theirs on
    their current stream are as safe as in their own operations, and what else is needed is held until a later call
    finds the stream past it. Not so in a capture: a graph's arrays have to live as long as it may be replayed, and
    where copies run on other threads during a capture, its mode has to be thread-local or relaxed.

    Raises KvbmTypeError for other things than views and for element types that differ; KvbmValueError for views that do
    not match, a destination that cannot be written, rows that would be written twice or are also read, and pageable
    memory where CUDA has to reach it; StubBuildError for CUDA work in the build without it; CudaError for what CUDA
    reports.
    """
    if isinstance(dst, View) and not isinstance(src, list | tuple):
        pairs = [(dst, as_view(src, "src"), "dst", "src")]
    else:
        pairs = _as_pairs(dst, src)
    threads = as_c_int(num_threads, "num_threads", 0)
    options = ffi.NULL if max_sms is None else _options(max_sms)
    _copy_pairs(pairs, stream, threads, options)


def copy_views(dst: View, src: View, stream: StreamLike | None, dst_name: str, src_name: str) -> None:
    """copy_blocks() for two views, with these names in errors."""
    _copy_pairs([(dst, src, dst_name, src_name)], stream)


# Two views, and what errors call them.
_Pair: TypeAlias = tuple[View, View, str, str]


def _copy_pairs(pairs: list[_Pair], stream: StreamLike | None, threads: int = 0, options: Any = ffi.NULL) -> None:
    is_host = stream is None
    for dst, src, dst_name, src_name in pairs:
        _check(dst, src, dst_name, src_name)
        is_host = is_host and dst.memory.is_host and src.memory.is_host
    if len(pairs) > 1:
        _check_apart(pairs)
    if is_host:
        for dst, src, _, _ in pairs:
            to, of = dst.geometry, src.geometry
            check(lib.kvbm_kernels_host_copy_blocks(to.c_view(), of.c_view(), to.c_shape(), to.num_blocks, threads))
        return

    def work(handle: Any) -> int:
        status = 0
        for dst, src, _, _ in pairs:
            to, of = dst.geometry, src.geometry
            status = lib.kvbm_kernels_copy_blocks(
                to.c_view(), of.c_view(), to.c_shape(), to.num_blocks, options, handle
            )
            if status:
                break
        return status

    # Parts of one view have one memory, to be looked at once.
    names: dict[Memory, str] = {}
    for dst, src, dst_name, src_name in pairs:
        names.setdefault(dst.memory, dst_name)
        names.setdefault(src.memory, src_name)
    launch(work, stream, {name: memory for memory, name in names.items()})


def as_view(obj: object, name: str) -> View:
    """Raises KvbmTypeError for anything but a view."""
    if not isinstance(obj, View):
        raise KvbmTypeError(f"{name} is {a_type(obj)}, expected a view")
    return obj


def _as_pairs(dsts: object, srcs: object) -> list[_Pair]:
    for views, name in ((dsts, "dst"), (srcs, "src")):
        if not isinstance(views, View | list | tuple):
            raise KvbmTypeError(f"{name} is {a_type(views)}, expected a view or a list of views")
    if not isinstance(dsts, list | tuple) or not isinstance(srcs, list | tuple):
        found = f"dst is {_one_or_several(dsts)} and src {_one_or_several(srcs)}"
        raise KvbmTypeError(f"{found}, expected two views or two lists")
    if len(dsts) != len(srcs):
        raise KvbmValueError(f"dst is {_one_or_several(dsts)} and src of {len(srcs)}, expected the same number")
    check_groups(dsts, srcs, "dst", "src", ("parts", "layers"))
    return [
        (as_view(dst, f"dst[{i}]"), as_view(src, f"src[{i}]"), f"dst[{i}]", f"src[{i}]")
        for i, (dst, src) in enumerate(zip(dsts, srcs, strict=True))
    ]


def _one_or_several(views: Any) -> str:
    return f"a list of {counted(len(views), 'view')}" if isinstance(views, list | tuple) else "one view"


def _check(dst: View, src: View, dst_name: str, src_name: str) -> None:
    wrong = mismatch(dst, src, dst_name, src_name)
    if wrong is not None:
        raise wrong
    if dst.memory.readonly:
        raise KvbmValueError(f"{dst_name} cannot be written: {dst.memory.readonly} is read-only")
    to, of = dst.geometry, src.geometry
    if rows_collide(to):
        twice = dst._repeated()
        if twice:
            block, first, second = twice
            raise KvbmValueError(f"{dst_name} has block {block} more than once, at {first} and {second}")
        raise KvbmValueError(f"{dst_name} has rows that overlap each other, in one array or between arrays")
    if share_bytes(to, of):
        raise _overlap(dst_name, src_name)


def _check_apart(pairs: list[_Pair]) -> None:
    """The copies of a list have no order: no two write the same bytes, and none reads what another writes."""
    met = first_sharing([dst.geometry for dst, _, _, _ in pairs], [src.geometry for _, src, _, _ in pairs])
    if met is not None:
        i, j, is_written = met
        _, _, dst_name, _ = pairs[i]
        _, _, other_dst_name, src_name = pairs[j]
        if is_written:
            raise KvbmValueError(f"{dst_name} and {other_dst_name} overlap: some rows would be written twice")
        raise _overlap(dst_name, src_name)


def _overlap(dst_name: str, src_name: str) -> KvbmValueError:
    return KvbmValueError(f"{dst_name} and {src_name} overlap: some of the rows to write are also read")


def mismatch(dst: View, src: View, dst_name: str, src_name: str) -> KvbmError | None:
    """Why blocks of the one cannot be copied to the other, if they cannot."""
    if len(dst) != len(src):
        return KvbmValueError(
            f"{dst_name} has {counted(len(dst), 'block')} and {src_name} {len(src)}, expected the same number"
        )
    if dst.shape is src.shape:
        return None
    if dst.shape == src.shape:
        to, of = dst.shape.quantised, src.shape.quantised
        if to is None or of is None or to == of:
            return None
        return KvbmValueError(
            f"{dst_name} has quantised rows of {to!s} and {src_name} of {of!s}, expected the same: no value is "
            "converted"
        )
    if dst.shape.dtype is not src.shape.dtype:
        return KvbmTypeError(
            f"{dst_name} has dtype {dst.shape.dtype!s} and {src_name} {src.shape.dtype!s}, expected the same: "
            "no value is converted"
        )
    return KvbmValueError(f"{dst_name} has blocks of {dst.shape} and {src_name} of {src.shape}, expected the same")


def _options(max_sms: SupportsIndex) -> Any:
    count = as_c_int(max_sms, "max_sms", 1)
    return ffi.new("kvbm_kernels_copy_options *", (ffi.sizeof("kvbm_kernels_copy_options"), count))
