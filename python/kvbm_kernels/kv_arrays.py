"""Where the arrays of a KV cache come from: NumPy, PyTorch on any of its devices, or CuPy."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvbm_kernels._wording import a_type
from kvbm_kernels.dtypes import DType
from kvbm_kernels.errors import KvbmTypeError, KvbmValueError
from kvbm_kernels.layouts import as_integer
from kvbm_kernels.streams import StreamLike, as_cupy_stream, as_torch_stream


class ArrayMaker(Protocol):
    """What a cache needs of an array library. One can be passed as ``arrays`` of a pool or a contiguous cache.

    All of its arrays are in host memory, or all in that of one CUDA device. ``[start:stop]``, ``reshape`` and
    ``swapaxes`` give views of them.
    """

    def on(self, stream: StreamLike | None) -> AbstractContextManager[Any]:
        """Inside it, arrays are made in the order of this stream; None is the library's current one."""

    def zeros(self, shape: tuple[int, ...], dtype: DType) -> Any:
        """A new array of zeros."""

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Any:
        """A new array whose elements do not matter."""

    def view(self, array: Any, dtype: DType) -> Any:
        """The same bytes as elements of another type, the last dimension longer or shorter for it."""

    def table(self, host: npt.NDArray[Any]) -> Any:
        """An array for kernels to read, with what the host array holds: its own memory, or CUDA memory.

        The host array may change right after. What is in CUDA memory is kept up to date by this package, on streams.
        """


class NumpyArrays:
    """Arrays of NumPy: of ml_dtypes' types for bf16 and fp8 where it is installed, else integers with their bits."""

    def on(self, stream: StreamLike | None) -> AbstractContextManager[Any]:
        return nullcontext()

    def zeros(self, shape: tuple[int, ...], dtype: DType) -> Any:
        return np.zeros(shape, _numpy_dtype(dtype))

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Any:
        return np.empty(shape, _numpy_dtype(dtype))

    def view(self, array: Any, dtype: DType) -> Any:
        return array.view(_numpy_dtype(dtype))

    def table(self, host: npt.NDArray[Any]) -> Any:
        return host


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
        if self.device.type == "cuda":
            cuda = self._torch.cuda
            if not cuda.is_available():
                raise KvbmValueError(f"device is {device!r}, expected one that is there: PyTorch finds no CUDA device")
            # That of now, whichever is current later.
            number = cuda.current_device() if self.device.index is None else self.device.index
            self.device = self._torch.device("cuda", number)

    def on(self, stream: StreamLike | None) -> AbstractContextManager[Any]:
        if stream is None or self.device.type != "cuda":
            return nullcontext()
        context: AbstractContextManager[Any] = self._torch.cuda.stream(as_torch_stream(stream, self.device.index))
        return context

    def zeros(self, shape: tuple[int, ...], dtype: DType) -> Any:
        return self._torch.zeros(shape, dtype=self._dtype(dtype), device=self.device)

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Any:
        return self._torch.empty(shape, dtype=self._dtype(dtype), device=self.device)

    def view(self, array: Any, dtype: DType) -> Any:
        return array.view(self._dtype(dtype))

    def table(self, host: npt.NDArray[Any]) -> Any:
        tensor = self._torch.from_numpy(host)
        if self.device.type != "cuda":
            return tensor
        # PyTorch keeps pinned memory until the copy is done; from pageable memory it would wait for the stream.
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def _dtype(self, dtype: DType) -> Any:
        return getattr(self._torch, _ELEMENT_NAMES[dtype])


class CupyArrays:
    """Arrays of CuPy on one device: integers with their bits for bf16 and fp8."""

    def __init__(self, device: object = None) -> None:
        try:
            self._cupy: Any = importlib.import_module("cupy")
        except ImportError as error:
            raise KvbmValueError(f'arrays is "cupy", which cannot be imported: {error}') from None
        number = None if device is None else as_integer(device)
        if number is None and device is not None:
            raise KvbmTypeError(f"device is {device!r}, expected the number of a CUDA device or None")
        self.device: Any = self._cupy.cuda.Device(number)

    @contextmanager
    def on(self, stream: StreamLike | None) -> Iterator[None]:
        with self.device, nullcontext() if stream is None else as_cupy_stream(stream):
            yield

    def zeros(self, shape: tuple[int, ...], dtype: DType) -> Any:
        with self.device:
            return self._cupy.zeros(shape, _carrier(dtype))

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Any:
        with self.device:
            return self._cupy.empty(shape, _carrier(dtype))

    def view(self, array: Any, dtype: DType) -> Any:
        return array.view(_carrier(dtype))

    def table(self, host: npt.NDArray[Any]) -> Any:
        with self.device:
            # Through pinned memory, which CuPy keeps until the copy is done.
            return self._cupy.asarray(host)


_ELEMENT_NAMES = {
    DType.F16: "float16",
    DType.BF16: "bfloat16",
    DType.F32: "float32",
    DType.FP8_E4M3: "float8_e4m3fn",
    DType.INT8: "int8",
}
_CARRIERS = {DType.BF16: np.uint16, DType.FP8_E4M3: np.uint8}


def _carrier(dtype: DType) -> np.dtype[Any]:
    """The type of NumPy's own for elements of this one, or for their bits."""
    return np.dtype(_CARRIERS.get(dtype, _ELEMENT_NAMES[dtype]))


def _numpy_dtype(dtype: DType) -> np.dtype[Any]:
    if dtype not in _CARRIERS:
        return _carrier(dtype)
    try:
        extension = importlib.import_module("ml_dtypes")
    except ImportError:
        return _carrier(dtype)
    found: np.dtype[Any] = np.dtype(getattr(extension, _ELEMENT_NAMES[dtype]))
    return found


def as_arrays(arrays: ArrayMaker | str, device: object) -> ArrayMaker:
    """The maker that ``arrays`` and ``device`` name. Raises KvbmValueError and KvbmTypeError."""
    if isinstance(arrays, str):
        if arrays == "torch":
            return TorchArrays("cpu" if device is None else device)
        if arrays == "cupy":
            return CupyArrays(device)
        if arrays == "numpy":
            if device in (None, "cpu"):
                return NumpyArrays()
            raise KvbmValueError(
                f'device is {device!r}, expected None with arrays="numpy": use arrays="torch" or arrays="cupy"'
            )
        raise KvbmValueError(f'arrays is {arrays!r}, expected "numpy", "torch" or "cupy"')
    if not all(hasattr(arrays, name) for name in ("on", "zeros", "empty", "view", "table")):
        raise KvbmTypeError(
            f'arrays is {a_type(arrays)}, expected "numpy", "torch", "cupy" or an object with on, zeros, '
            "empty, view and table"
        )
    if device is not None:
        raise KvbmValueError(f"device is {device!r}, expected None with an object as arrays")
    return arrays
