"""Streams of any library as the handle that the C API takes."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, Protocol, TypeAlias

from kvbm_kernels._native import ffi, lib
from kvbm_kernels.arrays import Memory, device_name
from kvbm_kernels.errors import KvbmTypeError, KvbmValueError, StubBuildError


class SupportsCudaStream(Protocol):
    """A stream of CuPy, cuda.core and others."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


class TorchStream(Protocol):
    """A ``torch.cuda.Stream``."""

    @property
    def cuda_stream(self) -> int: ...


class CupyStream(Protocol):
    """A ``cupy.cuda.Stream``."""

    @property
    def ptr(self) -> int: ...


StreamLike: TypeAlias = int | SupportsCudaStream | TorchStream | CupyStream


def kernel_stream(stream: StreamLike | None, sides: dict[str, Memory]) -> Any:
    """The stream for a kernel between these sides, as the C API takes it.

    Raises StubBuildError in the build without CUDA, and KvbmValueError for a side that a kernel cannot reach.
    """
    handle = cuda_stream(stream, sides.values())
    for name, memory in sides.items():
        if not memory.is_reachable:
            raise KvbmValueError(
                f"{name} is in pageable host memory, which a kernel cannot reach: use pinned memory, or memcpy_batch"
            )
    return handle


def cuda_stream(stream: StreamLike | None, memories: Iterable[Memory]) -> Any:
    """The stream for CUDA work on this memory, as the C API takes it: the one given, or the arrays' own.

    Raises StubBuildError in the build without CUDA.
    """
    handle = None if stream is None else as_handle(stream)
    if lib.kvbm_kernels_is_stub_build():
        raise StubBuildError(
            "this build of kvbm_kernels has no CUDA: it copies only arrays in host memory, and on no stream"
        )
    if handle is None:
        handle = current_handle(place for memory in memories for place in memory.places)
    return ffi.cast("kvbm_kernels_stream_t", handle)


def as_handle(stream: Any) -> int:
    """The ``cudaStream_t`` of a stream of any library. Raises KvbmTypeError and KvbmValueError for what is none."""
    handle = stream
    if hasattr(stream, "__cuda_stream__"):
        # Early producers made it an attribute.
        protocol = stream.__cuda_stream__
        handle = (protocol() if callable(protocol) else protocol)[1]
    elif hasattr(stream, "cuda_stream"):
        handle = stream.cuda_stream
    elif hasattr(stream, "ptr"):
        handle = stream.ptr
    if not isinstance(handle, int) or isinstance(handle, bool):
        raise KvbmTypeError(
            f"stream is {stream!r}, expected a handle, a stream of PyTorch or CuPy, or an object with __cuda_stream__"
        )
    if not 0 <= handle < 1 << 64:
        raise KvbmValueError(f"stream is {handle}, expected a handle")
    return handle


def current_handle(places: Iterable[tuple[str, int | None]]) -> int:
    """The stream that the libraries of these arrays, given with their devices, would use themselves.

    Raises KvbmValueError if they would use different ones.
    """
    found: dict[tuple[int, int], str] = {}
    for library, device in places:
        if device is not None:
            current = _current(library, device)
            found.setdefault((device, current), f"{library or 'an array'} on {device_name(device)}")
    if len(found) > 1:
        raise KvbmValueError(
            f"stream is None, and the arrays have different current streams ({', '.join(found.values())}): "
            "say which to use"
        )
    return next(iter(found))[1] if found else 0


def _current(library: str, device: int) -> int:
    if library == "torch":
        return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)
    if library == "cupy":
        cuda = sys.modules["cupy"].cuda
        with cuda.Device(device):
            return int(cuda.get_current_stream().ptr)
    # An array without such a notion is ordered with everything on the NULL stream.
    return 0
