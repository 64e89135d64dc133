"""Where the arrays of any library lie in memory, without importing that library."""

from __future__ import annotations

import math
import operator
import sys
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvbm_kernels import dlpack
from kvbm_kernels._native import check, ffi, lib
from kvbm_kernels._wording import a_type, counted
from kvbm_kernels.dtypes import Element
from kvbm_kernels.errors import KvbmError, KvbmTypeError, KvbmValueError, Uncopied
from kvbm_kernels.layouts import contiguous_strides


class SupportsDLPack(Protocol):
    """An array of PyTorch, CuPy, JAX and others."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


class SupportsCudaArrayInterface(Protocol):
    """A CUDA array of CuPy, Numba, PyTorch and others."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


class SupportsBuffer(Protocol):
    """A bytearray, memoryview, mmap, array.array or another object with the buffer protocol."""

    def __buffer__(self, flags: int, /) -> memoryview: ...


ArrayLike: TypeAlias = npt.NDArray[Any] | SupportsDLPack | SupportsCudaArrayInterface | SupportsBuffer


class Form(NamedTuple):
    """All that arrays which may stand in one table have in common."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    element: Element
    device: int | None
    """The number of the CUDA device, or None for host memory."""
    library: str
    """Which library's current stream the array belongs to: "torch", "cupy" or "" for none."""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.element.itemsize

    @property
    def is_contiguous(self) -> bool:
        expected = contiguous_strides(self.shape, self.element.itemsize)
        return (
            self.strides == expected
            or 0 in self.shape
            or all(
                extent == 1 or stride == tight
                for extent, stride, tight in zip(self.shape, self.strides, expected, strict=True)
            )
        )


class Array(NamedTuple):
    """One array: where it starts, what it is, and the object whose life it depends on."""

    address: int
    form: Form
    readonly: bool
    owner: object


def describe(obj: Any) -> Array:
    """Describe an array of any kind; nothing is copied. What is described already stays as it is.

    Raises KvbmTypeError, without a name in front, for an object that is no array, an array in memory that is neither
    the host's nor CUDA's, and elements whose bits need the array library to be understood.
    """
    if isinstance(obj, np.ndarray):
        return _describe_numpy(obj, obj)
    if isinstance(obj, Array):
        return obj
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(obj, torch.Tensor):
        return _describe_torch(torch, obj)
    # PyTorch raises here for a tensor of another device, hence after PyTorch.
    interface = _cuda_array_interface(obj)
    if interface is not None:
        return _describe_cuda_array(obj, interface)
    if hasattr(obj, "__dlpack__"):
        return _describe_dlpack(obj)
    try:
        view = memoryview(obj)
    except TypeError:
        raise KvbmTypeError(f"is {a_type(obj)}, expected an array or a buffer") from None
    try:
        array = np.asarray(view)
    except ValueError as error:
        raise KvbmTypeError(f"is a buffer of format {view.format!r}: {error}") from None
    return _describe_numpy(array, array)


_UINTPTR = ffi.typeof("uintptr_t")

_numpy_elements: dict[np.dtype[Any], Element] = {}
_torch_elements: dict[object, Element] = {}


def _numpy_element(dtype: np.dtype[Any]) -> Element:
    if dtype.hasobject:
        raise KvbmTypeError(f"has dtype {dtype}, whose elements are Python objects")
    # The name leaves the byte order out; no other library's name has one.
    name = dtype.name if dtype.isnative else dtype.str
    element = _numpy_elements[dtype] = Element(name, dtype.itemsize)
    return element


def _describe_numpy(array: npt.NDArray[Any], owner: object) -> Array:
    if type(array) is not np.ndarray and isinstance(array, np.ma.MaskedArray):
        raise KvbmTypeError("is a masked array")
    element = _numpy_elements.get(array.dtype) or _numpy_element(array.dtype)
    form = Form(array.shape, array.strides, element, None, "")
    flags = array.flags
    # Half the time of array.ctypes, and cffi can have it only of contiguous arrays.
    address = int(ffi.cast(_UINTPTR, ffi.from_buffer(array))) if flags.c_contiguous else array.ctypes.data
    return Array(address, form, not flags.writeable, owner)


def _describe_torch(torch: Any, tensor: Any) -> Array:
    device = tensor.device
    if device.type == "cpu":
        index = None
    elif device.type == "cuda":
        index = device.index
    else:
        raise KvbmTypeError(f"is on device {device}, expected CPU or CUDA memory")
    element = _torch_elements.get(tensor.dtype)
    if element is None:
        name = str(tensor.dtype).removeprefix("torch.")
        element = _torch_elements[tensor.dtype] = Element(name, tensor.element_size())
    try:
        strides = tensor.stride()
        storage = tensor.untyped_storage()
        # A fake tensor's is on the meta device, and warns of being asked for its address.
        has_memory = type(tensor) is torch.Tensor or storage.device.type != "meta"
        start = storage.data_ptr() if has_memory else 0
        address = tensor.data_ptr() if start else 0
        nbytes = storage.nbytes()
    except RuntimeError as error:
        if tensor.layout == torch.strided:
            raise KvbmTypeError(f"is {a_type(tensor)} without memory of its own: {error}") from None
        raise KvbmTypeError(f"is a {tensor.layout} tensor, expected a strided one: {error}") from None
    if tensor.is_neg() or tensor.is_conj():
        # Its values are not what its memory holds.
        raise KvbmTypeError(
            "is a lazy negative or conjugate, expected a tensor in memory: resolve_neg and resolve_conj"
        )
    itemsize = element.itemsize
    shape = tuple(tensor.shape)
    form = Form(shape, tuple([s * itemsize for s in strides]), element, index, "torch")
    if not start or address + _span(form) > start + nbytes:
        _check_has_memory(tensor, form, start, nbytes)
    return Array(address, form, False, tensor)


@lru_cache(maxsize=256)
def _span(form: Form) -> int:
    """Bytes from the first element to the end of the last, with strides that are not negative."""
    if 0 in form.shape:
        return 0
    distances = [(extent - 1) * stride for extent, stride in zip(form.shape, form.strides, strict=True)]
    return sum(distances) + form.element.itemsize


def _check_has_memory(tensor: Any, form: Form, start: int, nbytes: int) -> None:
    """Fake tensors have no memory, and a storage may be smaller than its tensors, such as one resized to 0."""
    span = _span(form)
    if span and not start:
        raise KvbmTypeError(f"is {a_type(tensor)} without memory, expected a tensor with a storage")
    if span:
        offset = tensor.storage_offset() * form.element.itemsize
        raise KvbmValueError(f"needs {counted(offset + span, 'byte')}, and its storage has {nbytes}")


def _cuda_array_interface(obj: Any) -> dict[str, Any] | None:
    try:
        interface: dict[str, Any] = obj.__cuda_array_interface__
    except AttributeError:
        return None
    except Exception as error:
        # JAX has it, and raises errors of its own for bf16; through DLPack it gives that as well.
        if hasattr(obj, "__dlpack__"):
            return None
        raise KvbmTypeError(f"has a __cuda_array_interface__ that fails: {error}") from error
    return interface


def _describe_cuda_array(obj: Any, interface: dict[str, Any]) -> Array:
    try:
        if interface.get("mask") is not None:
            raise KvbmTypeError("is a masked array")
        pointer, readonly = interface["data"]
        address = operator.index(pointer or 0)
        shape = tuple(map(operator.index, interface["shape"]))
        typestr = interface["typestr"]
        if not isinstance(typestr, str):  # NumPy takes None for float64.
            raise TypeError(f"typestr is {typestr!r}")
        element = _numpy_element(np.dtype(typestr))
        given = interface.get("strides")
        strides = contiguous_strides(shape, element.itemsize) if given is None else tuple(map(operator.index, given))
    except KvbmError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise KvbmTypeError(f"has a malformed __cuda_array_interface__: {error!r}") from None
    if len(strides) != len(shape) or min(shape, default=0) < 0 or not 0 <= address < 1 << 63:
        raise KvbmValueError(
            f"has a __cuda_array_interface__ with address {address}, shape {list(shape)} and strides {list(strides)}, "
            "which describe no array"
        )
    device = obj.__dlpack_device__()[1] if hasattr(obj, "__dlpack_device__") else 0
    library = "cupy" if type(obj).__module__.split(".")[0] == "cupy" else ""
    form = Form(shape, strides, element, int(device), library)
    return Array(address, form, bool(readonly) or _is_constant(obj), obj)


def _describe_dlpack(obj: Any) -> Array:
    exported = dlpack.export(obj)
    kind = exported.device_type
    if kind in (dlpack.CPU, dlpack.CUDA_HOST):
        device = None
    elif kind in (dlpack.CUDA, dlpack.CUDA_MANAGED):
        device = exported.device_id
    else:
        raise KvbmTypeError(f"is on DLPack device type {kind}, expected CPU or CUDA memory")
    form = Form(exported.shape, exported.strides, exported.element, device, "")
    return Array(exported.address, form, exported.readonly or _is_constant(obj), exported)


def _is_constant(obj: object) -> bool:
    # JAX exports as writable what the rest of a program may share and takes for constant.
    return type(obj).__module__.split(".")[0] in ("jax", "jaxlib")


def is_pinned(owner: object) -> bool:
    """Whether CUDA says that the host memory of an array's owner is pinned, by allocation or by registration."""
    if isinstance(owner, dlpack.Exported):
        address = owner.address
    elif isinstance(owner, np.ndarray):
        address = owner.__array_interface__["data"][0]
    elif hasattr(owner, "data_ptr"):
        address = owner.data_ptr()
    else:
        address = int(ffi.cast("uintptr_t", ffi.from_buffer(owner)))
    if not address:
        return True  # Nothing there that would have to be reached.
    kind = ffi.new("int *")
    check(lib.kvbm_kernels_get_memory_kind(ffi.cast("void *", address), kind, ffi.NULL))
    return bool(kind[0] == lib.KVBM_KERNELS_MEMORY_PINNED)


def current_stream(library: str, device: int) -> int:
    """The handle of the stream that a library uses on a device; of the NULL stream for "", which has no such notion."""
    if library == "torch":
        return int(sys.modules["torch"].cuda.current_stream(device).cuda_stream)
    if library == "cupy":
        cuda = sys.modules["cupy"].cuda
        with cuda.Device(device):
            return int(cuda.get_current_stream().ptr)
    return 0


def device_name(device: int | None) -> str:
    """How a device number is written: "cpu" or "cuda:0"."""
    return "cpu" if device is None else f"cuda:{device}"


class Memory(Uncopied):
    """What has to be known of the arrays of one side of a copy, beside where they lie.

    ``owners`` keep them alive, and ``host_owners`` are those of them in host memory. ``places`` are the libraries and
    devices among them. ``readonly`` is the name of the first that cannot be written, or "". ``recorded_on`` are the
    streams that PyTorch knows its tensors to be used on.
    """

    __slots__ = ("_reachable", "host_owners", "is_host", "owners", "places", "readonly", "recorded_on")

    def __init__(
        self, owners: list[object], host_owners: list[object], places: set[tuple[str, int | None]], readonly: str
    ) -> None:
        self.owners = owners
        self.host_owners = host_owners
        self.places = places
        self.readonly = readonly
        self.is_host = len(host_owners) == len(owners)
        self.recorded_on: set[int] = set()
        self._reachable: bool | None = None

    @property
    def is_reachable(self) -> bool:
        """Whether a kernel can reach all of it: it is CUDA memory, or host memory known to be pinned."""
        if self._reachable is None:
            self._reachable = all(map(is_pinned, self.host_owners))
        return self._reachable

    @property
    def device(self) -> str:
        """Where it is: "cpu", or "cuda:0" and so on."""
        return ", ".join(sorted({device_name(device) for _, device in self.places})) or "cpu"


def memory_of(array: Array, name: str) -> Memory:
    """One array as a side of a copy; ``name`` is what to call it if it cannot be written."""
    owners, device = [array.owner], array.form.device
    places = {(array.form.library, device)}
    return Memory(owners, owners if device is None else [], places, name if array.readonly else "")
