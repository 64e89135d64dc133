"""What is said of each layer: which layers go together, and arguments with a value for each."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvbm_kernels._wording import a_type, counted
from kvbm_kernels.errors import KvbmIndexError, KvbmTypeError, KvbmValueError
from kvbm_kernels.layouts import as_count, as_integer


def listed(values: Any, name: str, what: str) -> list[Any]:
    """The items of what has an order. Raises KvbmTypeError, saying what was expected, for all else."""
    has_order = isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping | set | frozenset)
    # Arrays of no dimension say only here that they have no items; what a generator raises later is its caller's.
    try:
        items = iter(values if has_order else None)  # type: ignore[arg-type]
    except TypeError:
        raise KvbmTypeError(f"{name} is {a_type(values)}, expected {what}") from None
    return list(items)


def as_values(
    per_layer: Any, adapter: Callable[..., Any], arguments: Mapping[str, Any], count: int
) -> dict[str, list[Any]]:
    """The arguments of an adapter that have a value for each layer, plain values that compare as a whole.

    Raises KvbmTypeError for other values and for what the adapter has no argument for, and KvbmValueError for a wrong
    number of them and for arguments that are given for all layers, too, or as ``part`` is.
    """
    if per_layer is None:
        return {}
    if not isinstance(per_layer, Mapping):
        raise KvbmTypeError(f"per_layer is {a_type(per_layer)}, expected a dict")
    own: dict[str, list[Any]] = {}
    for name, values in per_layer.items():
        label = f"per_layer[{name!r}]"
        if not isinstance(name, str):
            raise KvbmTypeError(f"{label} is given, expected the name of an argument")
        if name in ("part", "parts"):
            raise KvbmValueError(f"{label} is given, expected part or parts, which are the same for all layers")
        if name in arguments:
            raise KvbmValueError(f"{label} is given and so is {name}, expected one of them")
        own[name] = [
            _plain(value, name, f"{label}[{i}]")
            for i, value in enumerate(listed(values, label, "a list with a value for each layer"))
        ]
        if len(own[name]) != count:
            raise KvbmValueError(
                f"{label} has {counted(len(own[name]), 'value')}, expected one for each of {counted(count, 'layer')}"
            )
        _check_argument(adapter, name, label)
    return own


def as_groups(groups: Any, own: Mapping[str, Sequence[Any]], keys: Sequence[Any]) -> list[list[int]]:
    """The layers of each group, every one of those with these keys once, by its number or, if that is a name, its key.

    Raises KvbmTypeError for what are no lists of integers and names, KvbmIndexError for a layer that there is not, and
    KvbmValueError for one that is in no group or in two, and for groups whose layers have not the same ``own`` values.
    """
    count = len(keys)
    numbers = {key: i for i, key in enumerate(keys) if isinstance(key, str)}
    found: dict[int, int] = {}
    together: list[list[int]] = []
    for i, group in enumerate(listed(groups, "groups", "a list with the layers of each group")):
        name = f"groups[{i}]"
        named = listed(group, name, "a list of layers")
        if not named:
            raise KvbmValueError(f"{name} has no layers, expected at least 1")
        layers = [_number(layer, f"{name}[{j}]", numbers, count) for j, layer in enumerate(named)]
        for j, layer in enumerate(layers):
            if layer in found:
                raise KvbmValueError(f"{name}[{j}] is {named[j]!r}, which is in groups[{found[layer]}] already")
            found[layer] = i
            for argument, values in own.items():
                first = layers[0]
                if values[layer] != values[first]:
                    raise KvbmValueError(
                        f"per_layer[{argument!r}] is {values[first]!r} for layer {first} and {values[layer]!r} for "
                        f"layer {layer}, expected the same for all of {name}"
                    )
        together.append(layers)
    missing = next((layer for layer in range(count) if layer not in found), None)
    if missing is not None:
        name = f"{missing} ({keys[missing]!r})" if keys[missing] in numbers else str(missing)
        raise KvbmValueError(f"groups has no layer {name}, expected each of {counted(count, 'layer')} in one group")
    return together


def _number(layer: Any, name: str, numbers: Mapping[str, int], count: int) -> int:
    if isinstance(layer, str) and numbers:
        if layer not in numbers:
            raise KvbmIndexError(f"{name} is {layer!r}, expected a key of tensors, or 0 to {count - 1}")
        return numbers[layer]
    number = as_count(layer, name, 0)
    if number >= count:
        raise KvbmIndexError(f"{name} is {number}, expected 0 to {count - 1}")
    return number


def _check_argument(adapter: Callable[..., Any], name: str, label: str) -> None:
    """Refuse what an adapter, called with tensors, cannot be given by this name, as far as it says what it takes."""
    try:
        signature = inspect.signature(adapter)
    except (TypeError, ValueError):
        return
    try:
        signature.bind_partial(None, **{name: None})
    except TypeError:
        raise KvbmTypeError(f"{label} is given, expected a keyword argument of the adapter") from None


def _plain(value: Any, argument: str, label: str) -> Any:
    """A value that compares as a whole, of an argument with a value for each layer."""
    # Members of an enumeration are integers and have to stay what they are.
    if value is None or isinstance(value, int | str):
        return value
    number = as_integer(value)
    if number is not None:
        return number
    # Arrays, of which some have a hash, do not compare as a whole; types of elements, np.float16 among them, do.
    is_array = hasattr(value, "__array__") or hasattr(value, "__dlpack__")
    is_plain = isinstance(value, type) or not is_array
    try:
        hash(value if is_plain else None)
    except TypeError:
        is_plain = False
    if not is_plain:
        hint = "; tensors are given as scales, an entry for each layer" if argument == "scales" else ""
        raise KvbmTypeError(f"{label} is {a_type(value)}, expected a plain value{hint}")
    return value
