"""Keeping arrays alive for as long as CUDA may touch them, by the means that their own libraries have.

A library hands the device memory of a dropped array out again in the order of the stream it was on, so a copy on the
library's current stream needs nothing more. On another stream PyTorch can be told so, which costs nothing later. For
everything else, host memory above all, references are held until an event of PyTorch or CuPy behind the copy has
passed. Nothing here waits.

What is captured into a graph is not kept: it is for the graph's owner to keep, as long as the graph may be replayed.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from kvbm_kernels.arrays import Memory, current_stream

# For each stream, in its order: whether it has passed a copy, and what is held until then. Entries are taken out to be
# looked at, so that no lock is held while dropped arrays run code of others.
_held: dict[int, deque[tuple[Callable[[], bool], list[list[object]]]]] = {}


def keep_until_passed(stream: object, handle: int, memories: Iterable[Memory]) -> None:
    """Keep the arrays of a copy that has just been put on a stream, None for the current one, with this handle.

    What earlier calls kept is let go where the streams have passed it.
    """
    memories = list(memories)
    owners = [memory.owners for memory in memories if not _is_kept_by_its_library(memory, stream, handle)]
    if not owners:
        return
    has_passed = _mark(stream, handle, memories)
    if has_passed is not None:
        let_go()
        _held.setdefault(handle, deque()).append((has_passed, owners))


def let_go() -> None:
    """Drop what is held and the streams have passed."""
    for entries in list(_held.values()):
        while entries:
            try:
                entry = entries.popleft()
            except IndexError:  # Another thread was faster.
                break
            if not entry[0]():
                entries.appendleft(entry)
                break


def _is_kept_by_its_library(memory: Memory, stream: object, handle: int) -> bool:
    is_on_other_stream = False
    for library, device in memory.places:
        if device is None or not library:
            return False
        if stream is not None and current_stream(library, device) != handle:
            if library != "torch" or not _is_torchs_own(stream):
                return False
            is_on_other_stream = True
    if is_on_other_stream:
        _record(memory, stream, handle)
    return True


def _is_torchs_own(stream: object) -> bool:
    # PyTorch comes back to the stream when the tensor is freed. It never destroys its own, but others do.
    cuda = sys.modules["torch"].cuda
    return isinstance(stream, cuda.Stream) and not isinstance(stream, cuda.ExternalStream)


def _record(memory: Memory, stream: Any, handle: int) -> None:
    # PyTorch remembers it for as long as the memory is not freed, which is as long as `memory` is there.
    if handle in memory.recorded_on:
        return
    tensor_type = sys.modules["torch"].Tensor
    by_storage = {
        owner.untyped_storage().data_ptr(): owner for owner in memory.owners if isinstance(owner, tensor_type)
    }
    for tensor in by_storage.values():
        tensor.record_stream(stream)
    memory.recorded_on.add(handle)


def _mark(stream: object, handle: int, memories: list[Memory]) -> Callable[[], bool] | None:
    """A function that tells whether the stream has passed this point.

    None if no library is there to make one, and in a capture, where events can be neither recorded for this purpose nor
    asked for.
    """
    device = next((device for memory in memories for _, device in memory.places if device is not None), None)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return _torch_mark(torch.cuda, stream, handle, device)
    cupy = sys.modules.get("cupy")
    if cupy is not None:
        return _cupy_mark(cupy.cuda, handle, device)
    return None


def _torch_mark(cuda: Any, stream: Any, handle: int, device: int | None) -> Callable[[], bool] | None:
    current = cuda.current_stream(device)
    if isinstance(stream, cuda.Stream):
        on = stream
    elif current.cuda_stream == handle:
        on = current
    else:
        on = torch_stream(handle, cuda.current_device() if device is None else device)
    if on != current:
        with cuda.stream(on):
            if _captures(cuda.is_current_stream_capturing):
                return None
    if _captures(cuda.is_current_stream_capturing):
        return None
    event = cuda.Event()
    event.record(on)
    has_passed: Callable[[], bool] = event.query
    return has_passed


@lru_cache(maxsize=64)
def torch_stream(handle: int, device: int) -> Any:
    """PyTorch's object for a stream of anyone's."""
    cuda = sys.modules["torch"].cuda
    # ExternalStream takes CUDA's two names of the legacy stream for something else.
    return cuda.default_stream(device) if handle in (0, 1) else cuda.ExternalStream(handle, device=device)


def _cupy_mark(cuda: Any, handle: int, device: int | None) -> Callable[[], bool] | None:
    with cuda.Device(device):
        on = cupy_stream(cuda, handle)
        if _captures(on.is_capturing) or _captures(cuda.get_current_stream().is_capturing):
            return None
        event = cuda.Event(disable_timing=True)
        event.record(on)
    return lambda: bool(event.done)


class _Handle:
    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._handle


def cupy_stream(cuda: Any, handle: int) -> Any:
    """The object of ``cupy.cuda`` for a stream of anyone's."""
    # CuPy 14 deprecates the one for the other.
    if hasattr(cuda.Stream, "from_external"):
        return cuda.Stream.from_external(_Handle(handle))
    return cuda.ExternalStream(handle)


def _captures(is_capturing: Callable[[], bool]) -> bool:
    try:
        return is_capturing()
    except RuntimeError:  # It is the legacy stream, and a stream that it would wait for is being captured.
        return True
