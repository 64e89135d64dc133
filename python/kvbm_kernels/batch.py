"""Copying lists of arrays, each in one piece."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from kvbm_kernels._native import check, ffi, lib
from kvbm_kernels._wording import a_type, counted
from kvbm_kernels.arrays import Array, ArrayLike, Memory, describe
from kvbm_kernels.dtypes import Element, is_bytes, is_raw
from kvbm_kernels.errors import KvbmError, KvbmTypeError, KvbmValueError
from kvbm_kernels.geometry import Addresses, Geometry, PerIndex
from kvbm_kernels.streams import StreamLike, launch

Mode: TypeAlias = Literal["auto", "async", "batch"]

_POINTERS = ffi.typeof("void *const[]")
_SIZES = ffi.typeof("size_t[]")

_MODES: dict[str, int] = {
    "auto": lib.KVBM_KERNELS_MODE_AUTO,
    "async": lib.KVBM_KERNELS_MODE_ASYNC,
    "batch": lib.KVBM_KERNELS_MODE_BATCH,
}

_ROUTES: dict[str, int] = {
    "kernel": lib.KVBM_KERNELS_ROUTE_KERNEL,
    "async": lib.KVBM_KERNELS_ROUTE_ASYNC,
    "batch": lib.KVBM_KERNELS_ROUTE_BATCH,
}


def vectorized_copy(dsts: Sequence[ArrayLike], srcs: Sequence[ArrayLike], *, stream: StreamLike | None = None) -> None:
    """Copy each array of ``srcs`` to the one at its place in ``dsts``; all have the same number of bytes.

    Arrays are contiguous, of any shape, alignment and type, the same on both sides; integers of the same size, or plain
    bytes, stand for any type. Which engine works, ``stream``, and what has to stay alive until when, are as for
    :func:`kvbm_kernels.copy_blocks`.

    Raises KvbmTypeError for types that differ; KvbmValueError for lists of different length, sizes that differ, arrays
    that are not contiguous or cannot be written, memory that would be written twice or is also read, and pageable
    memory where CUDA has to reach it; StubBuildError and CudaError as copy_blocks does.
    """
    pairs = _pairs(dsts, srcs)
    size = _common_size(pairs)
    if not size:
        return
    count = len(pairs.nbytes)
    if stream is None and pairs.dst.is_host and pairs.src.is_host:
        _copy_on_host(pairs)
        return
    # Views need no pointer tables in device memory, as the function of this name in the C API does.
    to, of = (
        Geometry(starts, PerIndex(block=1), PerIndex(), PerIndex(count, 1, 1, 1, 1), size)
        for starts in (pairs.dst_starts, pairs.src_starts)
    )
    launch(
        lambda handle: lib.kvbm_kernels_copy_blocks(to.c_view(), of.c_view(), to.c_shape(), count, ffi.NULL, handle),
        stream,
        pairs.sides,
    )


def memcpy_batch(
    dsts: Sequence[ArrayLike],
    srcs: Sequence[ArrayLike],
    *,
    mode: Mode = "auto",
    stream: StreamLike | None = None,
) -> None:
    """Copy each array of ``srcs`` to the one at its place in ``dsts``, which has as many bytes.

    With every array in host memory and no stream given, the host engine does it, whatever the mode, and the copy is
    done when this returns. Otherwise it is put on the stream: the arrays may be in CUDA memory and in pinned and
    pageable host memory, and ``mode`` says how: "auto" the fastest correct way, "async" one cudaMemcpyAsync each,
    "batch" cudaMemcpyBatchAsync or a CudaError with the code 801 where that cannot be used. Sizes may differ from pair
    to pair. Everything else is as for :func:`vectorized_copy`.
    """
    if not isinstance(mode, str):
        raise KvbmTypeError(f"mode is {mode!r}, expected a string")
    if mode not in _MODES:
        raise KvbmValueError(f"mode is {mode!r}, expected one of {', '.join(map(repr, _MODES))}")
    pairs = _pairs(dsts, srcs)
    if stream is None and pairs.dst.is_host and pairs.src.is_host:
        _copy_on_host(pairs)
        return
    launch(
        lambda handle: lib.kvbm_kernels_memcpy_batch_sized(
            ffi.from_buffer(_POINTERS, pairs.src_starts),
            ffi.from_buffer(_POINTERS, pairs.dst_starts),
            ffi.from_buffer(_SIZES, pairs.nbytes),
            len(pairs.nbytes),
            _MODES[mode],
            handle,
            ffi.NULL,
        ),
        stream,
        pairs.sides,
        by_kernel=False,
    )


def last_batch_routes() -> tuple[str, ...]:
    """Which ways this thread's last :func:`memcpy_batch` on a stream went.

    Any of "kernel" (one of this library's), "async" (cudaMemcpyAsync) and "batch" (cudaMemcpyBatchAsync).
    """
    routes = lib.kvbm_kernels_last_batch_routes()
    return tuple(name for name, bit in _ROUTES.items() if routes & bit)


class _Pairs(NamedTuple):
    dst: Memory
    src: Memory
    dst_starts: Addresses
    src_starts: Addresses
    nbytes: Addresses

    @property
    def sides(self) -> dict[str, Memory]:
        return {"dsts": self.dst, "srcs": self.src}


def _pairs(dsts: Sequence[ArrayLike], srcs: Sequence[ArrayLike]) -> _Pairs:
    to, of = _described(dsts, "dsts"), _described(srcs, "srcs")
    if len(to) != len(of):
        raise KvbmValueError(f"dsts has {len(to)} arrays and srcs {len(of)}, expected the same number")
    sizes = []
    for i, (dst, src) in enumerate(zip(to, of, strict=True)):
        if not _can_exchange(dst.form.element, src.form.element):
            raise KvbmTypeError(
                f"dsts[{i}] has dtype {dst.form.element.name} and srcs[{i}] {src.form.element.name}, "
                "expected the same: no value is converted"
            )
        size = dst.form.nbytes
        if size != src.form.nbytes:
            raise KvbmValueError(
                f"dsts[{i}] has {counted(size, 'byte')} and srcs[{i}] {src.form.nbytes}, expected as many"
            )
        if dst.readonly:
            raise KvbmValueError(f"dsts[{i}] is read-only")
        sizes.append(size)
    _check_apart(to, of, sizes)
    return _Pairs(_memory(to), _memory(of), _starts(to), _starts(of), np.array(sizes, np.int64))


def _described(arrays: Sequence[ArrayLike], name: str) -> list[Array]:
    if not isinstance(arrays, list | tuple):
        raise KvbmTypeError(f"{name} is {a_type(arrays)}, expected a list of arrays")
    described = []
    for i, obj in enumerate(arrays):
        try:
            array = describe(obj)
        except KvbmError as error:
            raise type(error)(f"{name}[{i}] {error}") from None
        if not array.form.is_contiguous:
            raise KvbmValueError(
                f"{name}[{i}] has shape {list(array.form.shape)} and strides {list(array.form.strides)} bytes, "
                "expected a contiguous array"
            )
        described.append(array)
    return described


def _can_exchange(element: Element, other: Element) -> bool:
    if element == other or is_bytes(element) or is_bytes(other):
        return True
    return element.itemsize == other.itemsize and (is_raw(element) or is_raw(other))


def _memory(arrays: list[Array]) -> Memory:
    return Memory(
        [array.owner for array in arrays],
        [array.owner for array in arrays if array.form.device is None],
        {(array.form.library, array.form.device) for array in arrays},
        "",
    )


def _starts(arrays: list[Array]) -> Addresses:
    return np.array([array.address for array in arrays], dtype=np.int64)


def _check_apart(dsts: list[Array], srcs: list[Array], sizes: list[int]) -> None:
    written = sorted((dst.address, dst.address + size) for dst, size in zip(dsts, sizes, strict=True) if size)
    if any(end > start for (_, end), (start, _) in pairwise(written)):
        raise KvbmValueError("dsts overlap: some memory would be written more than once")
    ends = [end for _, end in written]
    for src, size in zip(srcs, sizes, strict=True):
        # Of what is written, the first range that ends after this one's start is the only one that can meet it.
        at = bisect_right(ends, src.address)
        if size and at < len(written) and written[at][0] < src.address + size:
            raise KvbmValueError("dsts and srcs overlap: some memory would be both written and read")


def _common_size(pairs: _Pairs) -> int:
    if not len(pairs.nbytes):
        return 0
    size = int(pairs.nbytes[0])
    if (pairs.nbytes != size).any():
        i = int(np.flatnonzero(pairs.nbytes != size)[0])
        raise KvbmValueError(
            f"dsts[{i}] has {counted(pairs.nbytes[i], 'byte')}, expected the {size} of dsts[0]: all pairs have one "
            "size here"
        )
    return size


def _copy_on_host(pairs: _Pairs) -> None:
    check(
        lib.kvbm_kernels_host_copy_batch(
            ffi.from_buffer(_POINTERS, pairs.src_starts),
            ffi.from_buffer(_POINTERS, pairs.dst_starts),
            ffi.from_buffer(_SIZES, pairs.nbytes),
            len(pairs.nbytes),
            0,
            ffi.NULL,
        )
    )
