"""An engine's cache in the arrays of another library: same shapes, strides and sharing of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gpu_arrays import EmulatedArray
from gpu_support import emulated_memory
from reference_engines import Cache


class Moved:
    """The memory of a cache as bytes of another library, and its tensors as views of them.

    ``put(bytes)`` makes an array of the other library; ``view(array, itemsize, shape, strides, offset)``, all but the
    first in elements, is a view of one; ``get(array)`` gives the bytes back.
    """

    def __init__(
        self,
        cache: Cache,
        put: Callable[[np.ndarray], Any],
        view: Callable[[Any, int, tuple[int, ...], tuple[int, ...], int], Any],
        get: Callable[[Any], np.ndarray],
    ) -> None:
        self._memory = [array.reshape(-1).view(np.uint8) for array in cache.memory]
        self._placed = [put(array) for array in self._memory]
        self._view = view
        self._get = get
        self.tensors = self._move(cache.tensors)

    def fetch(self) -> None:
        """Bring the bytes back to the cache's own memory."""
        for array, placed in zip(self._memory, self._placed, strict=True):
            array[...] = self._get(placed)

    def _move(self, tensors: Any) -> Any:
        if isinstance(tensors, dict):
            return {name: self._move(each) for name, each in tensors.items()}
        if isinstance(tensors, list | tuple):
            return type(tensors)(self._move(each) for each in tensors)
        itemsize = tensors.itemsize
        strides = tuple(stride // itemsize for stride in tensors.strides)
        for array, placed in zip(self._memory, self._placed, strict=True):
            offset = tensors.ctypes.data - array.ctypes.data
            if 0 <= offset < array.nbytes:
                return self._view(placed, itemsize, tensors.shape, strides, offset // itemsize)
        raise AssertionError("a tensor of a cache is in none of its memory")


def to_torch(cache: Cache, device: str) -> Moved:
    """In PyTorch, where 16 bits are bf16."""
    import torch

    def view(array: Any, itemsize: int, *place: Any) -> Any:
        return torch.as_strided(array.view(torch.bfloat16) if itemsize == 2 else array, *place)

    return Moved(
        cache,
        lambda array: torch.from_numpy(array).clone().to(device),
        view,
        lambda tensor: tensor.cpu().numpy(),
    )


def to_emulated(cache: Cache) -> Moved:
    """In device memory of the emulated GPU, as integers."""

    def view(memory: Any, itemsize: int, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Any:
        return EmulatedArray(
            memory, np.dtype(f"u{itemsize}"), shape, tuple(stride * itemsize for stride in strides), offset * itemsize
        )

    def put(array: np.ndarray) -> Any:
        memory = emulated_memory(array.nbytes, "device")
        memory[:] = array.tobytes()
        return memory

    return Moved(cache, put, view, lambda memory: np.frombuffer(memory, np.uint8))


def to_cupy(cache: Cache) -> Moved:
    """In CuPy, as integers."""
    import cupy
    from cupy.lib.stride_tricks import as_strided

    def view(array: Any, itemsize: int, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Any:
        elements = array.view(f"u{itemsize}")[offset:]
        return as_strided(elements, shape, tuple(stride * itemsize for stride in strides))

    return Moved(cache, cupy.asarray, view, cupy.asnumpy)
