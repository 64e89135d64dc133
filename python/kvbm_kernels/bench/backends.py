"""The ways to carry a test out: one call of the library each, prepared so that nothing but the call is timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import kvbm_kernels as kk
from kvbm_kernels._native import check, ffi, lib
from kvbm_kernels._wording import counted
from kvbm_kernels.bench.machine import Call, CudaMachine
from kvbm_kernels.bench.patterns import Pattern
from kvbm_kernels.bench.sides import Buffers

BACKENDS = {
    "vectorized": "kvbm_kernels_launch_vectorized_copy, one kernel for all pieces",
    "batched": "cudaMemcpyBatchAsync and nothing else, by kvbm_kernels_memcpy_batch",
    "memcpy_async": "a cudaMemcpyAsync for each piece, by kvbm_kernels_memcpy_batch",
    "auto": "what the library chooses: memcpy_batch for pieces, copy_blocks where rows change their order",
    "convert": "the conversion of the C API for this pair of layouts, or copy_blocks where it has none",
}
ABBREVIATIONS = {"vec": "vectorized", "batch": "batched", "async": "memcpy_async", "memcpy": "memcpy_async"}

_MODES = {
    "batched": lib.KVBM_KERNELS_MODE_BATCH,
    "memcpy_async": lib.KVBM_KERNELS_MODE_ASYNC,
    "auto": lib.KVBM_KERNELS_MODE_AUTO,
}
_NOT_SUPPORTED = lib.KVBM_KERNELS_ERROR_NOT_SUPPORTED

_TABLE = ffi.typeof("void **")
_CONST_TABLE = ffi.typeof("void *const *")


class Waived(Exception):  # noqa: N818 - it is no error
    """A test that cannot run here; the message says why."""


class Prepared(NamedTuple):
    """A test ready to run."""

    call: Call
    function: str
    """The function of the library that the call is."""
    route: Callable[[], tuple[str, ...]]
    """Which way the last call went: "kernel", "batch", "async" or "host"."""


def usual_backends(pattern: Pattern, direction: str) -> tuple[str, ...]:
    """The backends to run where none is named: those that a pattern and a direction have."""
    if pattern.is_conversion:
        return ("convert", "auto")
    return ("auto",) if direction == "h2h" else ("vectorized", "batched", "auto")


def prepare(backend: str, pattern: Pattern, buffers: Buffers, max_sms: int | None) -> Prepared:
    """Make the call of a backend. Raises Waived where the backend cannot do it."""
    machine = buffers.machine
    converts = backend == "convert" or (backend == "auto" and pattern.is_conversion)
    if max_sms is not None and not isinstance(machine, CudaMachine):
        raise Waived("--max-sms bounds what a conversion uses of a GPU, and h2h uses none")
    if max_sms is not None and not converts:
        raise Waived("--max-sms bounds copy_blocks: backend convert, or auto where rows change their order")
    if converts:
        prepared = None
        if backend == "convert" and max_sms is None:
            prepared = _documented_conversion(pattern, buffers)
        return prepared or _copy_blocks(buffers, max_sms)
    run = pattern.run_nbytes(buffers.shape)
    if not pattern.keeps_order(buffers.shape):
        raise Waived(f"{pattern.name} reorders pieces of {counted(run, 'byte')}: convert and auto do that")
    return _pieces(backend, buffers, run)


def _pieces(backend: str, buffers: Buffers, nbytes: int) -> Prepared:
    """Pieces of one size through pointer tables."""
    machine = buffers.machine
    src, dst = buffers.src.parts(nbytes), buffers.dst.parts(nbytes)
    if not isinstance(machine, CudaMachine):
        if backend not in ("vectorized", "auto"):
            raise Waived(f"{backend} is CUDA's; h2h has vectorized, auto and convert")
        sizes = np.full(len(src), nbytes, np.uint64)
        arguments: list[Any] = [
            ffi.from_buffer("void *const[]", src),
            ffi.from_buffer("void *const[]", dst),
            ffi.from_buffer("size_t[]", sizes),
            len(src),
            0,
            ffi.NULL,
        ]
        return _made(lib.kvbm_kernels_host_copy_batch, "host_copy_batch", arguments, lambda: ("host",))
    stream = ffi.cast("kvbm_kernels_stream_t", machine.handle)
    if backend == "vectorized":
        tables = [machine.device_visible(table) for table in (src, dst)]
        arguments = [*[ffi.cast(_TABLE, machine.address(table)) for table in tables], nbytes, len(src), stream]
        return _made(
            lib.kvbm_kernels_launch_vectorized_copy, "launch_vectorized_copy", arguments, lambda: ("kernel",), tables
        )
    arguments = [
        ffi.from_buffer("void *const[]", src),
        ffi.from_buffer("void *const[]", dst),
        nbytes,
        len(src),
        _MODES[backend],
        stream,
    ]
    return _made(lib.kvbm_kernels_memcpy_batch, "memcpy_batch", arguments, kk.last_batch_routes)


def _documented_conversion(pattern: Pattern, buffers: Buffers) -> Prepared | None:
    """The conversion between chunks and universal blocks through pointer tables, or None for other layouts."""
    to_universal = pattern.dst == "universal"
    universal, stack = (buffers.dst, buffers.src) if to_universal else (buffers.src, buffers.dst)
    if universal.layout != "universal" or stack.layout not in ("nhd", "hnd"):
        return None
    machine, shape = buffers.machine, buffers.shape
    tables: list[Any] = [universal.parts(shape.block_nbytes), stack.parts(shape.chunk_nbytes)]
    name = "universal_from_block" if to_universal else "block_from_universal"
    layout = lib.KVBM_KERNELS_LAYOUT_NHD if stack.layout == "nhd" else lib.KVBM_KERNELS_LAYOUT_HND
    sizes = [buffers.num_blocks, shape.nh, shape.nl, shape.no, shape.nt, shape.hd, int(shape.dtype), layout]
    if isinstance(machine, CudaMachine):
        tables = [machine.device_visible(table) for table in tables]
        pointers = [ffi.cast(_CONST_TABLE, machine.address(table)) for table in tables]
        stream = ffi.cast("kvbm_kernels_stream_t", machine.handle)
        function = getattr(lib, f"kvbm_kernels_launch_{name}")
        return _made(function, f"launch_{name}", [*pointers, *sizes, stream], lambda: ("kernel",), tables)
    pointers = [ffi.from_buffer("void *const[]", table) for table in tables]
    function = getattr(lib, f"kvbm_kernels_host_{name}")
    return _made(function, f"host_{name}", [*pointers, *sizes, 0], lambda: ("host",))


def _copy_blocks(buffers: Buffers, max_sms: int | None) -> Prepared:
    dst, src = buffers.dst.view(), buffers.src.view()
    stream = buffers.machine.stream
    route = ("host",) if stream is None else ("kernel",)
    return Prepared(
        lambda: kk.copy_blocks(dst, src, stream=stream, max_sms=max_sms), "copy_blocks (Python)", lambda: route
    )


def _made(
    function: Any,
    name: str,
    arguments: list[Any],
    route: Callable[[], tuple[str, ...]],
    kept: list[npt.NDArray[Any]] | None = None,
) -> Prepared:
    def call(kept: Any = kept) -> None:
        check(function(*arguments))

    return Prepared(call, f"kvbm_kernels_{name}", route)


def is_not_supported(error: BaseException) -> bool:
    """Whether CUDA says that this route does not exist here."""
    return isinstance(error, kk.CudaError) and error.code == _NOT_SUPPORTED
