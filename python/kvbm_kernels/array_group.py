"""Arrays that have to be alike, as a table of their addresses needs them, and what each of them is expected to be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from kvbm_kernels._wording import counted
from kvbm_kernels.arrays import Form, Memory, describe, device_name
from kvbm_kernels.dtypes import DType, Element, holds, is_bytes
from kvbm_kernels.errors import KvbmError, KvbmTypeError, KvbmValueError
from kvbm_kernels.layouts import contiguous_strides


class Group(NamedTuple):
    """Arrays of one form, as a table of addresses needs them."""

    addresses: list[int]
    form: Form
    memory: Memory


class Expected(NamedTuple):
    """What each array of a group has to be."""

    symbols: str
    """The names of the dimensions, separated by spaces."""
    shape: tuple[int | None, ...]
    """Their extents; None is free, but the same for all."""
    dtype: DType

    def __str__(self) -> str:
        extents = ", ".join("any" if extent is None else str(extent) for extent in self.shape)
        return f"[{', '.join(self.symbols.split())}] = [{extents}]"


def gather(objects: Sequence[Any], expected: Expected, name: Callable[[int], str]) -> Group:
    """Describe arrays that have to be alike; ``name(i)`` is what to call the one at i in an error.

    Raises KvbmTypeError and KvbmValueError for an array that is not as expected or not like the first.
    """
    addresses = []
    owners: list[object] = []
    libraries = set()
    readonly = ""
    first: Form | None = None
    form: Form | None = None
    for i, obj in enumerate(objects):
        try:
            array = describe(obj)
            if array.form != first:
                conformed = conform(array.form, expected)
                libraries.add(conformed.library)
                if form is None:
                    first, form = array.form, conformed
                elif conformed[:2] != form[:2] or conformed.device != form.device:
                    raise KvbmValueError(f"{_difference(conformed, form)} of {name(0)}")
        except KvbmError as error:
            raise type(error)(f"{name(i)} {error}") from None
        addresses.append(array.address)
        owners.append(array.owner)
        if array.readonly and not readonly:
            readonly = name(i)
    if form is None:
        shape = tuple(extent or 0 for extent in expected.shape)
        itemsize = expected.dtype.itemsize
        form = Form(shape, contiguous_strides(shape, itemsize), Element("", itemsize), None, "")
    places = {(library, form.device) for library in libraries}
    return Group(addresses, form, Memory(owners, owners if form.device is None else [], places, readonly))


@lru_cache(maxsize=256)
def conform(form: Form, expected: Expected) -> Form:
    """The form under which an array is what was expected, with strides of 0 where there is nothing to step over.

    A flat array of bytes, or of the right type, is memory for anything of its size. Raises without a name in front.
    """
    if form.ndim == 1 and len(expected.shape) > 1 and _is_memory(form, expected.dtype):
        flat = _shape_of_memory(form, expected)
        form = form._replace(shape=flat, strides=contiguous_strides(flat, expected.dtype.itemsize))
    elif not holds(form.element, expected.dtype):
        bits = 8 * expected.dtype.itemsize
        raise KvbmTypeError(
            f"has dtype {form.element.name}, expected {expected.dtype!s} or integers of {bits} bits that hold its bits"
        )
    if form.ndim != len(expected.shape) or any(
        wanted is not None and extent != wanted for extent, wanted in zip(form.shape, expected.shape, strict=True)
    ):
        raise KvbmValueError(f"has shape {list(form.shape)}, expected {expected}")
    if 0 in form.shape:
        # Libraries differ in what they give as strides where there is nothing to step over at all.
        return form._replace(strides=contiguous_strides(form.shape, expected.dtype.itemsize))
    strides = tuple(stride if extent > 1 else 0 for extent, stride in zip(form.shape, form.strides, strict=True))
    return form._replace(strides=strides)


def _is_memory(form: Form, dtype: DType) -> bool:
    return (is_bytes(form.element) or holds(form.element, dtype)) and form.is_contiguous


def _shape_of_memory(form: Form, expected: Expected) -> tuple[int, ...]:
    nbytes = expected.dtype.itemsize
    for extent in expected.shape:
        nbytes *= 1 if extent is None else extent
    count, rest = divmod(form.nbytes, nbytes)
    if rest or (count != 1 and None not in expected.shape):
        each = f"a multiple of {nbytes}" if None in expected.shape else str(nbytes)
        raise KvbmValueError(f"has {counted(form.nbytes, 'byte')}, expected {each} for {expected}")
    return tuple(count if extent is None else extent for extent in expected.shape)


def _difference(form: Form, other: Form) -> str:
    if form.shape != other.shape:
        return f"has shape {list(form.shape)}, expected the {list(other.shape)}"
    if form.device != other.device:
        return f"is on {device_name(form.device)}, expected the {device_name(other.device)}"
    return f"has strides {list(form.strides)} bytes, expected the {list(other.strides)}"
