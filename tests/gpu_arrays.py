"""What the tests of the Python package on a GPU share: arrays and streams of every library, and caches in them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import kvbm_kernels as kk
import reference
from gpu_support import emulated_memory, is_emulated
from kvbm_kernels import lifetime

NB, NL, NO, NT, NH, HD = 3, 2, 2, 5, 4, 16


class Place(NamedTuple):
    """A kind of array: how the bits of a NumPy array get into one, and how they come back when the GPU is done."""

    put: Callable[[np.ndarray], Any]
    get: Callable[[Any], np.ndarray]


def place(name: str, dtype: str | None = None) -> Place:
    """One of ON_DEVICE, one of PINNED, or "pageable".

    Tensors of PyTorch on the device have the dtype of this name, or are integers. On an emulated GPU, the two places of
    PyTorch are its own.
    """
    if is_emulated():
        return {
            "torch": Place(EmulatedArray.of, EmulatedArray.get),
            "torch pinned": Place(emulated_pinned, np.copy),
        }[name]
    import torch

    def as_tensor(array: np.ndarray) -> Any:
        return torch.from_numpy(np.ascontiguousarray(array).view(f"i{array.itemsize}"))

    def to_torch(array: np.ndarray) -> Any:
        tensor = as_tensor(array).cuda()
        return tensor if dtype is None else tensor.view(getattr(torch, dtype))

    def from_torch(tensor: Any) -> np.ndarray:
        torch.cuda.synchronize()
        return tensor.cpu().view(getattr(torch, f"int{8 * tensor.element_size()}")).numpy().copy()

    def to_cupy(array: np.ndarray) -> Any:
        return pytest.importorskip("cupy").asarray(array)

    def from_cupy(array: Any) -> np.ndarray:
        torch.cuda.synchronize()
        return array.get()

    def to_cupyx(array: np.ndarray) -> Any:
        pinned = pytest.importorskip("cupyx").empty_pinned(array.shape, array.dtype)
        pinned[...] = array
        return pinned

    def from_host(array: np.ndarray) -> np.ndarray:
        torch.cuda.synchronize()
        return array.copy()

    return {
        "torch": Place(to_torch, from_torch),
        "cupy": Place(to_cupy, from_cupy),
        "torch through DLPack": Place(lambda array: OnlyDLPack(to_torch(array)), lambda a: from_torch(a.array)),
        "cupy through DLPack": Place(lambda array: OnlyDLPack(to_cupy(array)), lambda a: from_cupy(a.array)),
        "torch pinned": Place(lambda array: as_tensor(array).pin_memory(), from_torch),
        "numpy over torch pinned": Place(lambda array: as_tensor(array).pin_memory().numpy(), from_host),
        "cupyx pinned": Place(to_cupyx, from_host),
        "pageable": Place(np.copy, from_host),
    }[name]


ON_DEVICE = ["torch", "cupy", "torch through DLPack", "cupy through DLPack"]
PINNED = ["torch pinned", "numpy over torch pinned", "cupyx pinned"]


class OnlyDLPack:
    """An array of a library that has nothing but DLPack."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.array.__dlpack__(**arguments)


class EmulatedArray:
    """An array in device memory of the emulated GPU, as CUDA libraries show theirs.

    ``memory`` are bytes from emulated_memory(), and ``offset`` is where in them the first element lies.
    """

    def __init__(self, memory: Any, dtype: np.dtype, shape: tuple[int, ...], strides: Any = None, offset: int = 0):
        self._memory, self._dtype = memory, dtype
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": dtype.str,
            "data": (ctypes.addressof(memory) + offset, False),
            "strides": strides,
            "version": 3,
        }

    @classmethod
    def of(cls, array: np.ndarray) -> EmulatedArray:
        memory = emulated_memory(array.nbytes, "device")
        memory[:] = array.tobytes()
        return cls(memory, array.dtype, array.shape)

    def get(self) -> np.ndarray:
        """A copy of an array that fills its memory."""
        shape = self.__cuda_array_interface__["shape"]
        return np.frombuffer(self._memory, self._dtype).reshape(shape).copy()


def emulated_pinned(array: np.ndarray) -> np.ndarray:
    """The array in pinned memory of the emulated GPU."""
    pinned = np.frombuffer(emulated_memory(array.nbytes, "pinned"), array.dtype).reshape(array.shape)
    pinned[...] = array
    return pinned


class WithProtocol:
    """A stream of a library that has only the protocol."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


STREAMS: dict[str, Callable[[Any], Any]] = {
    "torch": lambda stream: stream,
    "handle": lambda stream: stream.cuda_stream,
    "cupy": lambda stream: pytest.importorskip("cupy").cuda.ExternalStream(stream.cuda_stream),
    "protocol": lambda stream: WithProtocol(stream.cuda_stream),
}


def sleep(milliseconds: float) -> None:
    """Keep PyTorch's current stream busy for about this long."""
    import torch

    torch.cuda._sleep(int(milliseconds * 1.9e6))


def num_held() -> int:
    """Of how many calls the arrays are kept alive."""
    return sum(map(len, lifetime._held.values()))


def make(rng, dtype="bf16", extents=(NB, NL, NO, NT, NH, HD)):
    """A cache of random bits, and its shape."""
    _, nl, no, nt, nh, hd = extents
    shape = kk.BlockShape(nl, no, nh, nt, hd, dtype)
    return reference.random_kv(rng, extents, f"u{shape.dtype.itemsize}"), shape


def put_chunks(where, kv, layout):
    return [[where.put(chunk) for chunk in block] for block in reference.block_stack(kv, layout)]


def get_stack(where, blocks, shape, layout):
    return reference.from_block_stack([[where.get(c) for c in block] for block in blocks], shape.nl, shape.no, layout)


def code_of(call):
    """The code of the CudaError that a call raises, or 0."""
    try:
        call()
    except kk.CudaError as error:
        return error.code
    return 0
