"""Where the arrays of a KV cache come from: NumPy, or PyTorch on any of its devices."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvbm_kernels.dtypes import DType
from kvbm_kernels.errors import KvbmTypeError, KvbmValueError


class ArrayMaker(Protocol):
    """What a cache needs of an array library. One can be passed as ``arrays`` of a pool or a contiguous cache."""

    def zeros(self, shape: tuple[int, ...], dtype: DType) -> Any:
        """A new array of zeros, which ``[start:stop]`` and ``swapaxes`` give views of."""

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Any:
        """A new array whose elements do not matter."""

    def view(self, array: Any, dtype: DType) -> Any:
        """The same bytes as elements of another type, the last dimension longer or shorter for it."""

    def table(self, host: npt.NDArray[Any]) -> Any:
        """An array for kernels to read, with what the host array holds; its memory where that can be shared."""

    def publish(self, table: Any, host: npt.NDArray[Any]) -> None:
        """Bring an array of :meth:`table`, or a part of it, up to date with the host's."""


class NumpyArrays:
    """Arrays of NumPy: of ml_dtypes' types for bf16 and fp8 where it is installed, else integers with their bits."""

    def zeros(self, shape: tuple[int, ...], dtype: DType) -> Any:
        return np.zeros(shape, _numpy_dtype(dtype))

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Any:
        return np.empty(shape, _numpy_dtype(dtype))

    def view(self, array: Any, dtype: DType) -> Any:
        return array.view(_numpy_dtype(dtype))

    def table(self, host: npt.NDArray[Any]) -> Any:
        return host

    def publish(self, table: Any, host: npt.NDArray[Any]) -> None:
        pass


class TorchArrays:
    """Tensors of PyTorch on one device."""

    def __init__(self, device: object = "cpu") -> None:
        try:
            self._torch: Any = importlib.import_module("torch")
        except ImportError as error:
            raise KvbmValueError(f'arrays is "torch", which cannot be imported: {error}') from None
        try:
            self.device: Any = self._torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise KvbmValueError(f"device is {device!r}, expected one of PyTorch: {error}") from None

    def zeros(self, shape: tuple[int, ...], dtype: DType) -> Any:
        return self._torch.zeros(shape, dtype=self._dtype(dtype), device=self.device)

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Any:
        return self._torch.empty(shape, dtype=self._dtype(dtype), device=self.device)

    def view(self, array: Any, dtype: DType) -> Any:
        return array.view(self._dtype(dtype))

    def table(self, host: npt.NDArray[Any]) -> Any:
        tensor = self._torch.from_numpy(host)
        return tensor if self.device.type == "cpu" else tensor.to(self.device)

    def publish(self, table: Any, host: npt.NDArray[Any]) -> None:
        if self.device.type != "cpu":
            # From pageable memory: read before this returns, and written in the order of the current stream.
            table.copy_(self._torch.from_numpy(host))

    def _dtype(self, dtype: DType) -> Any:
        return getattr(self._torch, _ELEMENT_NAMES[dtype])


_ELEMENT_NAMES = {
    DType.F16: "float16",
    DType.BF16: "bfloat16",
    DType.F32: "float32",
    DType.FP8_E4M3: "float8_e4m3fn",
    DType.INT8: "int8",
}
_CARRIERS = {DType.BF16: np.uint16, DType.FP8_E4M3: np.uint8}


def _numpy_dtype(dtype: DType) -> np.dtype[Any]:
    carrier = _CARRIERS.get(dtype)
    if carrier is None:
        return np.dtype(_ELEMENT_NAMES[dtype])
    try:
        extension = importlib.import_module("ml_dtypes")
    except ImportError:
        return np.dtype(carrier)
    found: np.dtype[Any] = np.dtype(getattr(extension, _ELEMENT_NAMES[dtype]))
    return found


def as_arrays(arrays: ArrayMaker | str, device: object) -> ArrayMaker:
    """The maker that ``arrays`` and ``device`` name. Raises KvbmValueError and KvbmTypeError."""
    if isinstance(arrays, str):
        if arrays == "torch":
            return TorchArrays("cpu" if device is None else device)
        if arrays == "numpy":
            if device in (None, "cpu"):
                return NumpyArrays()
            raise KvbmValueError(f'device is {device!r}, expected None with arrays="numpy": use arrays="torch"')
        raise KvbmValueError(f'arrays is {arrays!r}, expected "numpy" or "torch"')
    if not all(hasattr(arrays, name) for name in ("zeros", "empty", "view", "table", "publish")):
        raise KvbmTypeError(
            f'arrays is a {type(arrays).__name__}, expected "numpy", "torch" or an object with zeros, empty, view, '
            "table and publish"
        )
    if device is not None:
        raise KvbmValueError(f"device is {device!r}, expected None with an object as arrays")
    return arrays
