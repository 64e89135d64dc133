"""Streams of any library as the handle that the C API takes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias

from kvbm_kernels._native import check, ffi, lib
from kvbm_kernels.arrays import Memory, current_stream, device_name
from kvbm_kernels.errors import KvbmTypeError, KvbmValueError, StubBuildError
from kvbm_kernels.lifetime import cupy_stream, keep_until_passed, torch_stream


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


# CUDA's handles up to here are streams of whichever device is current: NULL, legacy and per-thread.
_LAST_DEFAULT = 2

StreamLike: TypeAlias = int | SupportsCudaStream | TorchStream | CupyStream


def launch(
    work: Callable[[Any], int], stream: StreamLike | None, sides: dict[str, Memory], *, by_kernel: bool = True
) -> None:
    """Have ``work`` put a copy between these sides on a stream, and keep their arrays until the stream has passed it.

    ``work`` takes the stream as the C API does, and returns a status. Raises StubBuildError in the build without CUDA,
    KvbmValueError for a side that a kernel cannot reach if ``by_kernel``, and what the status stands for.
    """
    handle = None if stream is None else as_handle(stream)
    if lib.kvbm_kernels_is_stub_build():
        raise StubBuildError(
            "this build of kvbm_kernels has no CUDA: it copies only arrays in host memory, and on no stream"
        )
    places = {place for memory in sides.values() for place in memory.places}
    if handle is None:
        handle = current_handle(places)
    for name, memory in sides.items():
        if by_kernel and not memory.is_reachable:
            raise KvbmValueError(
                f"{name} is in pageable host memory, which a kernel cannot reach: use pinned memory, or memcpy_batch"
            )
    with _device_of(stream, handle, places):
        check(work(ffi.cast("kvbm_kernels_stream_t", handle)))
    keep_until_passed(stream, handle, sides.values())


def as_handle(stream: Any) -> int:
    """The ``cudaStream_t`` of a stream of any library. Raises KvbmTypeError and KvbmValueError for what is none."""
    handle = stream
    if hasattr(stream, "__cuda_stream__"):
        # Early producers made it an attribute.
        protocol = stream.__cuda_stream__
        pair = protocol() if callable(protocol) else protocol
        try:
            handle = pair[1]
        except (TypeError, LookupError):
            raise KvbmTypeError(f"stream has {pair!r} as __cuda_stream__, expected a version and a handle") from None
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


def as_torch_stream(stream: StreamLike, device: int) -> Any:
    """A stream of any library, on this device, as PyTorch's. Raises KvbmTypeError and KvbmValueError."""
    if isinstance(stream, sys.modules["torch"].cuda.Stream):
        return stream
    return torch_stream(as_handle(stream), device)


def as_cupy_stream(stream: StreamLike) -> Any:
    """A stream of any library as CuPy's. Raises KvbmTypeError and KvbmValueError."""
    return cupy_stream(sys.modules["cupy"].cuda, as_handle(stream))


def current_handle(places: Iterable[tuple[str, int | None]]) -> int:
    """The stream that the libraries of these arrays, given with their devices, would use themselves.

    Raises KvbmValueError if they would use different ones.
    """
    found: dict[tuple[int, int], str] = {}
    for library, device in places:
        if device is not None:
            current = current_stream(library, device)
            found.setdefault((device, current), f"{library or 'an array'} on {device_name(device)}")
    if len(found) > 1:
        raise KvbmValueError(
            f"stream is None, and the arrays have different current streams ({', '.join(found.values())}): "
            "say which to use"
        )
    return next(iter(found))[1] if found else 0


def _device_of(stream: Any, handle: int, places: Iterable[tuple[str, int | None]]) -> AbstractContextManager[Any]:
    """Makes the stream's device the current one where the handle does not tell it."""
    if handle > _LAST_DEFAULT:
        return nullcontext()
    torch = sys.modules.get("torch")
    if stream is not None:
        if torch is not None and isinstance(stream, torch.cuda.Stream):
            return _as_context(torch.cuda.device(stream.device))
        return nullcontext()
    # The current streams of several devices would have been refused.
    for library, device in places:
        if device is not None and library == "torch":
            return _as_context(sys.modules["torch"].cuda.device(device))
        if device is not None and library == "cupy":
            return _as_context(sys.modules["cupy"].cuda.Device(device))
    return nullcontext()


def _as_context(device: Any) -> AbstractContextManager[Any]:
    context: AbstractContextManager[Any] = device
    return context
