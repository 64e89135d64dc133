"""Reading what an engine hands over: lists, shapes and arguments, checked before a view is made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvbm_kernels._wording import a_type, counted
from kvbm_kernels.arrays import Array, Form, describe
from kvbm_kernels.dtypes import DType, element_of, holds, is_bytes
from kvbm_kernels.engines.tensors import SYMBOLS, Axis, Part, Tensors, in_elements, place_of, placed
from kvbm_kernels.errors import KvbmError, KvbmTypeError, KvbmValueError
from kvbm_kernels.layouts import as_count, contiguous_strides

_LISTS = {"k": "an entry for each object", "l": "an entry for each layer", "o": "two entries, K and V"}


def read(tensors: Any, axes: str, name: str, part: Part | None = None, **known: int | None) -> Tensors:
    """Describe an engine's tensors.

    ``axes`` are the letters of the lists they come in, each with a slash behind it, and then those of a tensor's
    dimensions: ``"l/o/shd"`` is a list with a pair of tensors ``[slots, heads, head_size]`` for each layer. Of pairs,
    ``part`` takes only K or V. Dimensions of several numbers, ``"olshd|ls1d"``, are told by how many a tensor has.
    ``known`` are extents, by letter, that the caller has said.

    Raises KvbmTypeError for what is no list or no array, and KvbmValueError for lists and shapes other than these.
    """
    _check_name(name)
    *levels, last = axes.split("/")
    entries, names, counts = [tensors], [name], {}
    for level in levels:
        entries, names, counts[level] = _opened(entries, names, level)
    chosen = ""
    if part is not None and "o" in counts:
        # Pairs are the innermost list.
        place, chosen = place_of(part), "o"
        entries, names = entries[place::2], names[place::2]
        del counts["o"]
    arrays = []
    for entry, label in zip(entries, names, strict=True):
        arrays.append(_described(entry, label))
    first = arrays[0].form
    choices = last.split("|")
    letters = next((each for each in choices if len(each) == first.ndim), choices[0])
    expected = _expected(letters, known)
    if len(first.shape) != len(letters) or any(
        wanted is not None and extent != wanted for extent, (_, wanted) in zip(first.shape, expected, strict=True)
    ):
        written = [", ".join(text for text, _ in _expected(each, known)) for each in choices]
        raise KvbmValueError(f"{names[0]} {placed(first)}, expected [{'] or ['.join(written)}]")
    _check_extents(letters, first, names[0])
    for array, label in zip(arrays, names, strict=True):
        _check_alike(array.form, first, label, names[0], _hint_of(levels))
    shape = {
        letter: Axis(*each) for letter, each in zip(letters, zip(first.shape, first.strides, strict=True), strict=True)
    }
    shape.pop("1", None)
    return Tensors(arrays, names, counts, shape, chosen=chosen)


def flat(buffer: Any, name: str, axes: Mapping[str, Axis], dtype: DType, offset: int = 0) -> Tensors:
    """Name the dimensions of elements that lie in one array which has none of its own, from ``offset`` bytes on.

    Raises KvbmTypeError for an array that is neither of bytes nor of this type, and KvbmValueError for one that is not
    contiguous, or too small for them.
    """
    _check_name(name)
    array = _described(buffer, name)
    form = array.form
    if not is_bytes(form.element) and not holds(form.element, dtype):
        raise KvbmTypeError(f"{name} has dtype {form.element.name}, expected bytes, or one that holds {dtype!s}")
    if not form.is_contiguous:
        raise KvbmValueError(f"{name} {placed(form)}, expected a contiguous buffer")
    reach = offset + sum((axis.extent - 1) * axis.stride for axis in axes.values()) + dtype.itemsize
    if reach > form.nbytes:
        raise KvbmValueError(f"{name} has {counted(form.nbytes, 'byte')}, expected at least {reach} for these blocks")
    elements = form._replace(
        shape=(form.nbytes // dtype.itemsize,), strides=(dtype.itemsize,), element=element_of(dtype)
    )
    return Tensors([array._replace(form=elements)], [name], {}, dict(axes), offset)


def dense(extents: Mapping[str, int], itemsize: int) -> dict[str, Axis]:
    """Dimensions without gaps, outermost first."""
    strides = contiguous_strides(tuple(extents.values()), itemsize)
    return {letter: Axis(*each) for letter, *each in zip(extents, extents.values(), strides, strict=True)}


def required(value: Any, name: str, why: str) -> Any:
    """An argument that nothing else tells. Raises KvbmValueError, saying why, if it is missing."""
    if value is None:
        raise KvbmValueError(f"{name} is missing: {why}")
    return value


def as_optional(value: Any, name: str, least: int) -> int | None:
    """An integer argument that may be left out. Raises as as_count() does."""
    return None if value is None else as_count(value, name, least)


def in_order_of(scales: Any, tensors: Any, name: str) -> Any:
    """Scales of layers in the order of these, the tensors of the argument ``name``, for each to have its own.

    Where both are by name each is found by its name, and of layers without one by its place.

    Raises KvbmValueError for names other than those of the layers.
    """
    if not isinstance(scales, Mapping):
        return scales
    is_named = isinstance(tensors, Mapping)
    keys = list(tensors) if is_named else list(range(len(tensors if isinstance(tensors, list | tuple) else scales)))
    held = set(keys)
    problems = [
        f"{verb} {_some(those)}"
        for verb, those in (
            ("lacks", [key for key in keys if key not in scales]),
            ("has also", [key for key in scales if key not in held]),
        )
        if those
    ]
    if problems:
        expected = f"the keys of {name}" if is_named else f"the places of layers, 0 to {len(keys) - 1}"
        raise KvbmValueError(f"scales {' and '.join(problems)}, expected {expected}")
    return {key: scales[key] for key in keys}


def _some(keys: Sequence[Any], most: int = 3) -> str:
    """The first of these, and how many more there are."""
    more = len(keys) - most
    return ", ".join(map(repr, keys[:most])) + (f" and {more} more" if more > 0 else "")


def one_of(value: object, name: str, choices: Iterable[str], refused: Mapping[str, str] | None = None) -> str:
    """A name among those there are.

    Raises KvbmTypeError, and KvbmValueError, which says why where a name is known and ``refused``.
    """
    if not isinstance(value, str):
        raise KvbmTypeError(f"{name} is {value!r}, expected one of {', '.join(choices)}")
    if refused and value in refused:
        raise KvbmValueError(f"{name} is {value!r}: {refused[value]}")
    if value not in choices:
        raise KvbmValueError(f"{name} is {value!r}, expected one of {', '.join(choices)}")
    return value


def _described(obj: Any, name: str) -> Array:
    try:
        array = describe(obj)
    except KvbmError as error:
        raise type(error)(f"{name} {error}") from None
    form = array.form
    if 0 not in form.shape:
        return array
    # Libraries differ in what they give as strides where there is nothing to step over.
    return array._replace(form=form._replace(strides=contiguous_strides(form.shape, form.element.itemsize)))


def _opened(entries: list[Any], names: list[str], level: str) -> tuple[list[Any], list[str], int]:
    """The entries of a list of lists, their names, and how many each has."""
    inner: list[Any] = []
    inner_names: list[str] = []
    count = 2 if level == "o" else None
    for entry, label in zip(entries, names, strict=True):
        # Only layers and objects have names: under which of them K is would be a guess.
        if isinstance(entry, Mapping) and level != "o":
            keys, values = [f"[{key!r}]" for key in entry], list(entry.values())
        elif isinstance(entry, list | tuple) and not isinstance(entry, Array):
            keys, values = [f"[{i}]" for i in range(len(entry))], list(entry)
        else:
            what = "pair" if level == "o" else "list or dict"
            raise KvbmTypeError(f"{label} is {a_type(entry)}, expected a {what} with {_LISTS[level]}")
        if not values or (count is not None and len(values) != count):
            of_same = "" if level == "o" or not count else f", {count} as in {names[0]}"
            found = counted(len(values), "entry", "entries")
            raise KvbmValueError(f"{label} has {found}, expected {_LISTS[level]}{of_same}")
        count = len(values)
        inner += values
        inner_names += [label + key for key in keys]
    return inner, inner_names, count or 0


def _expected(letters: str, known: Mapping[str, int | None]) -> list[tuple[str, int | None]]:
    fixed: dict[str, int | None] = {"o": 2, "1": 1, **known}
    dims: list[tuple[str, int | None]] = []
    for letter in letters:
        extent = fixed.get(letter)
        symbol = SYMBOLS[letter]
        dims.append((symbol if extent is None or symbol == str(extent) else f"{symbol} = {extent}", extent))
    return dims


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise KvbmTypeError(f"name is {name!r}, expected a string")


def _check_extents(letters: str, form: Form, label: str) -> None:
    """Refuse dimensions of 0: only blocks, or the tokens they are made of, may be none at all."""
    for letter, extent in zip(letters, form.shape, strict=True):
        if not extent and letter not in "bs":
            free = next((SYMBOLS[each] for each in letters if each in "bs"), "")
            raise KvbmValueError(f"{label} {placed(form)}, expected no dimension of 0{free and ' but ' + free}")


def _hint_of(levels: Sequence[str]) -> str:
    """What to do with tensors in such lists that have not one shape."""
    if "k" in levels:
        return "the objects of one call are alike, and a shorter one is a call of its own"
    parts = 'part="k" and part="v" are a view each, and ' if "o" in levels else ""
    return f"blocks of one view have one shape; {parts}layer_groups() makes a view for each kind of layer"


def _check_alike(form: Form, first: Form, label: str, first_label: str, hint: str) -> None:
    if form == first:
        return
    if form.element != first.element:
        raise KvbmTypeError(
            f"{label} has dtype {form.element.name}, expected the {first.element.name} of {first_label}"
        )
    if form.shape != first.shape:
        raise KvbmValueError(f"{label} {placed(form)}, expected the shape {list(first.shape)} of {first_label}: {hint}")
    steps = [(a, b) for a, b, extent in zip(form.strides, first.strides, form.shape, strict=True) if extent > 1]
    if any(a != b for a, b in steps):
        raise KvbmValueError(f"{label} {placed(form)}, expected the strides {in_elements(first)} of {first_label}")
