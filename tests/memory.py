"""Arrays in memory that a test controls to the byte."""

from __future__ import annotations

import math

import numpy as np

GUARD = 64


class Guarded:
    """An array at a chosen misalignment, between bytes that must not change."""

    def __init__(self, shape, dtype, misalignment: int = 0, fill: int = 0) -> None:
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        self._memory = np.arange(2 * GUARD + nbytes + 64, dtype=np.uint64).astype(np.uint8)
        # The address of the array is at the misalignment from a multiple of 64.
        start = GUARD + (misalignment - self._memory.ctypes.data - GUARD) % 64
        self._slice = slice(start, start + nbytes)
        self._memory[self._slice] = fill
        self._before = self._memory.copy()
        self.array = self._memory[self._slice].view(dtype).reshape(shape)
        assert not nbytes or self.array.ctypes.data % 64 == misalignment % 64

    def assert_guards(self) -> None:
        """Every byte around the array is as it was."""
        now = self._memory.copy()
        now[self._slice] = self._before[self._slice]
        assert np.array_equal(now, self._before), "bytes outside the array were written"


class CudaArray:
    """Looks like a CUDA array; there is nothing at its address."""

    def __init__(self, shape, typestr="<f2", address=0x7F0000000000, strides=None, readonly=False) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(shape),
            "typestr": typestr,
            "data": (address, readonly),
            "strides": strides,
            "version": 3,
        }


class Exporter:
    """Gives a NumPy array away through DLPack alone, as a library of today or from before DLPack 1.0."""

    def __init__(self, array: np.ndarray, *, old: bool = False) -> None:
        self.array = array
        self.old = old

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream=None, **later):
        if self.old and later:
            raise TypeError(f"unexpected keyword arguments {later}")
        return self.array.__dlpack__(stream=stream, **later)
