"""Tensors of an engine, their dimensions named, on their way to be a view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple, NoReturn, SupportsIndex, TypeAlias

import numpy as np

from kvbm_kernels._wording import counted
from kvbm_kernels.arrays import Array, Form
from kvbm_kernels.dtypes import DType, DTypeLike, as_dtype, dtype_of, element_of, holds, is_raw
from kvbm_kernels.engines.blocks import EngineBlocks
from kvbm_kernels.errors import KvbmTypeError, KvbmValueError
from kvbm_kernels.geometry import Geometry, PerIndex
from kvbm_kernels.layouts import BlockShape, as_count
from kvbm_kernels.overlap import first_sharing, rows_collide

LayerTensors: TypeAlias = Mapping[Any, Any] | Sequence[Any]
Part: TypeAlias = Literal["k", "v"]
Scales: TypeAlias = Literal["inline", "constant"]

# How a dimension is written in errors; two letters that stand for one dimension are the dimensions it is made of.
SYMBOLS = {
    "b": "num_blocks",
    "l": "num_layers",
    "o": "2",
    "t": "block_size",
    "h": "num_heads",
    "d": "head_size",
    "s": "slots",
    "c": "content",
    "i": "num_heads*head_size",
    "j": "num_heads*block_size*head_size",
    "g": "head_groups",
    "n": "sequences",
    "1": "1",
}
_ACCEPTED = ", ".join(map(str, DType))
# What may have gaps behind it, and so may what lies outside of it.
_LOOSE = frozenset("kblsn")


# Rows of this many bytes, of one head and without V, are those of a DeepSeek-V4 page, whatever the engine, and why they
# are none.
_DSV4_NBYTES = 584
DSV4 = (
    "a DeepSeek-V4 page holds the 576 bytes of all its tokens and then the 8 scale bytes of all of them, and is "
    "padded: no row of it has its scales, so only whole pages can be moved, as rows of one token a page"
)


class Axis(NamedTuple):
    """One dimension: its extent, and the bytes from one to the next."""

    extent: int
    stride: int


class Tensors:
    """Tensors that are alike, and what their dimensions are.

    ``lists`` are the counts of the nested lists they came in, outermost first, and ``axes`` their own dimensions, both
    by letter: k memory object, b block, l layer, o outer (K, V), t token, h head, d element of a row, and those that
    are still to be split: s token slots, c what is stored for a token and head, i the heads of a token side by side,
    j all of a chunk, g groups of heads, n sequences.
    """

    def __init__(
        self,
        arrays: list[Array],
        names: list[str],
        lists: dict[str, int],
        axes: dict[str, Axis],
        offset: int = 0,
        chosen: str = "",
    ) -> None:
        self.arrays = arrays
        # As they were given, for errors.
        self.forms = [array.form for array in arrays]
        self.names = names
        self.lists = lists
        self.axes = axes
        self.offset = offset
        # The letter of the list of which only one entry was taken.
        self.chosen = chosen
        # Whether a row is known to be of K and V, or of one of them, rather than of a latent.
        self.is_kv = False

    @property
    def order(self) -> str:
        """The letters of the tensors' dimensions, outermost first as their shape has them."""
        return "".join(self.axes)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.arrays[0].form.element.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the first array as it was given."""
        return self.arrays[0].form.nbytes

    def extent(self, letter: str) -> int:
        """How many there are of what the letter stands for; 1 if it is no dimension."""
        return self.lists.get(letter) or (self.axes[letter].extent if letter in self.axes else 1)

    def fail(self, problem: str, i: int = 0) -> NoReturn:
        """Raise a KvbmValueError that names a tensor, its shape and its strides."""
        form = self.forms[i]
        raise KvbmValueError(f"{self.names[i]} of shape {list(form.shape)} and strides {in_elements(form)} {problem}")

    def split(self, letter: str, outer: str, inner: str, count: int) -> None:
        """Make of one dimension an outer one and an inner one of this many; what is left over is left out."""
        extent, stride = self.axes[letter]
        replaced = {outer: Axis(extent // count, stride * count), inner: Axis(count, stride)}
        self._replace(letter, replaced)

    def split_heads(self, heads: int) -> None:
        """Read the heads of a token apart."""
        width, rest = divmod(self.extent("i"), heads)
        if rest:
            self.fail(f"has {counted(self.extent('i'), 'element')} a token, expected a multiple of {heads} heads")
        self.split("i", "h", "d", width)

    def check_heads(self, scale: int = 0, **sizes: SupportsIndex | None) -> None:
        """Refuse sizes of a head, by the name of their argument and without its scale, other than the tensors'."""
        width = self.extent("d")
        for name, size in sizes.items():
            if size is not None and as_count(size, name, 1) + scale != width:
                of_scale = f" and a scale of {scale}" if scale else ""
                self.fail(f"has heads of {counted(width, 'element')}, expected {name}, {size}{of_scale}")

    def index(self, letter: str, i: int) -> None:
        """Keep only one of a dimension, which is none any more."""
        self.offset += i * self.axes.pop(letter).stride

    def narrow(self, letter: str, start: int, count: int) -> None:
        """Keep only a range of a dimension."""
        stride = self.axes[letter].stride
        self.offset += start * stride
        self.axes[letter] = Axis(count, stride)

    def rename(self, letter: str, new: str) -> None:
        """Read a dimension as another one."""
        self._replace(letter, {new: self.axes[letter]})

    def choose(self, part: Part | None) -> None:
        """Only K, or only V, of a dimension that has both."""
        if part is None or "o" in self.chosen:
            return
        if "o" not in self.axes:
            self.fail(f"has no K and V apart, so part cannot be {part!r}")
        self.index("o", place_of(part))

    def as_elements(self, letter: str, dtype: DType) -> None:
        """Read a dimension of bytes as one of elements of this type."""
        extent, stride = self.axes[letter]
        if self.itemsize != 1 or stride != 1 or extent % dtype.itemsize:
            self.fail(f"cannot be read as elements of {dtype!s}, expected bytes, a multiple of {dtype.itemsize}")
        self.axes[letter] = Axis(extent // dtype.itemsize, dtype.itemsize)
        element = element_of(dtype)
        self.arrays = [array._replace(form=array.form._replace(element=element)) for array in self.arrays]

    def check_order(self, orders: Sequence[str], name: str, *, gaps: bool = False) -> None:
        """Refuse strides in no one of these orders, each outermost first.

        Dimensions follow each other without a gap, unless ``gaps`` allows them everywhere: only blocks, layers and
        sequences, and what is outside one of these, may lie further apart.
        """
        if not any(self._has_order(order, gaps) for order in orders):
            expected = " or ".join("[" + ", ".join(SYMBOLS[each] for each in order) + "]" for order in orders)
            layers = self._layer_axis()
            apart = ""
            if layers is not None:
                apart = f", {counted(layers.stride // self.itemsize, 'element')} from the next layer,"
            self.fail(f"lies{apart} in another order than {expected} of {name}")

    def blocks(
        self,
        dtype: DTypeLike | None = None,
        scales: Scales | None = None,
        *,
        num_reserved: int = 0,
        pieces: int = 1,
    ) -> EngineBlocks:
        """The view, once every dimension is one of b, l, o, t, h and d.

        Raises KvbmTypeError for elements that are not of the type, or of none that is known, and KvbmValueError for a
        quantised cache without its scales, rows that are not contiguous, and tensors that share memory.
        """
        element = self._element(dtype)
        is_latent = not self.is_kv and self.extent("h") == self.extent("o") == 1
        if element.itemsize == 1 and self.extent("d") == _DSV4_NBYTES and is_latent:
            self.fail(f"has {_DSV4_NBYTES} bytes a token: {DSV4}")
        self._check_scales(element, scales)
        extents = {letter: self.extent(letter) for letter in "lothd"}
        shape = BlockShape(extents["l"], extents["o"], extents["h"], extents["t"], extents["d"], element)
        hd = self.axes["d"]
        if hd.extent > 1 and hd.stride != self.itemsize:
            self.fail(f"has the elements of a row {counted(hd.stride, 'byte')} apart, expected {self.itemsize}")
        steps = {}
        inside = 1
        for letter in reversed(self.lists):
            steps[letter] = inside
            inside *= self.lists[letter]
        axes = dict(self.axes)
        num_blocks = self.extent("b") // pieces
        if num_blocks < num_reserved:
            reserved = counted(num_reserved, "reserved block")
            self.fail(f"has {counted(num_blocks, 'block')}, expected at least the {reserved}")
        starts = [0]
        if "k" in self.lists and "b" in axes:
            # The blocks of each object follow each other, and then come those of the next.
            blocks = axes.pop("b")
            starts = [i * blocks.stride for i in range(blocks.extent)]
        arrays, names = self._shifted(axes, starts)
        view = EngineBlocks._of_arrays(
            arrays,
            shape,
            "".join(axes),
            names.__getitem__,
            PerIndex(block=steps.get("k", 0), layer=steps.get("l", 0), outer=steps.get("o", 0)),
            self.lists.get("k", 1) * len(starts),
        )
        if rows_collide(view.geometry):
            self._refuse_shared(arrays, names, axes, shape.row_nbytes)
        view._reserve(num_reserved, pieces)
        return view

    def scale_blocks(self, *, num_reserved: int = 0) -> EngineBlocks:
        """The view of scales that lie in memory of their own. Raises as blocks() does."""
        element = self.arrays[0].form.element
        if dtype_of(element) is None:
            raise KvbmTypeError(
                f"{self.names[0]} has dtype {element.name}, expected one of {_ACCEPTED}; scales of another type are "
                "given as bytes"
            )
        return self.blocks(None, "constant", num_reserved=num_reserved)

    def _has_order(self, order: str, gaps: bool) -> bool:
        axes = dict(self.axes)
        layers = self._layer_axis()
        if layers is not None and order[0] != "l":
            axes["l"] = layers
        reach = self.itemsize
        for i in reversed(range(len(order))):
            extent, stride = axes.get(order[i], Axis(1, 0))
            if extent == 1:
                continue
            loose = gaps or not _LOOSE.isdisjoint(order[i:])
            if stride < reach or (stride > reach and not loose):
                return False
            reach = stride * extent
        return True

    def _layer_axis(self) -> Axis | None:
        """The list of layers as a dimension, if they are evenly apart."""
        if list(self.lists) != ["l"]:
            return None
        starts = [array.address for array in self.arrays]
        gaps = {b - a for a, b in pairwise(starts)}
        return Axis(len(starts), gaps.pop()) if len(gaps) == 1 else None

    def _replace(self, letter: str, replaced: Mapping[str, Axis]) -> None:
        axes: dict[str, Axis] = {}
        for each, axis in self.axes.items():
            axes.update(replaced if each == letter else {each: axis})
        self.axes = axes

    def _element(self, dtype: DTypeLike | None) -> DType:
        element = self.arrays[0].form.element
        if dtype is None:
            found = dtype_of(element)
            if found is not None:
                return found
            if is_raw(element):
                raise KvbmTypeError(
                    f"{self.names[0]} has dtype {element.name}, which does not say what its {8 * element.itemsize} "
                    "bits are: give dtype"
                )
            raise KvbmTypeError(
                f"{self.names[0]} has dtype {element.name}, expected one of {_ACCEPTED}, or integers with the bits of "
                "one, and dtype"
            )
        wanted = as_dtype(dtype)
        if not holds(element, wanted):
            raise KvbmTypeError(f"{self.names[0]} has dtype {element.name}, expected one that holds {wanted!s}")
        return wanted

    def _check_scales(self, dtype: DType, scales: Scales | None) -> None:
        if scales is not None and (not isinstance(scales, str) or scales not in ("inline", "constant")):
            raise KvbmValueError(f'scales is {scales!r}, expected "inline" or "constant", or None')
        if dtype.itemsize == 1 and scales is None:
            self.fail(
                f"has dtype {dtype!s}, a quantised cache, whose blocks are worth nothing without their scales: "
                'expected scales="inline" if each row holds its own, or scales="constant" if the model does'
            )

    def _shifted(self, axes: Mapping[str, Axis], starts: list[int]) -> tuple[list[Array], list[str]]:
        """The arrays as the axes are now, one for each start in each; block by block where there are lists of them."""
        shape = tuple(axis.extent for axis in axes.values())
        strides = tuple(axis.stride for axis in axes.values())
        inside = len(self.arrays) // self.lists.get("k", 1)
        arrays, names = [], []
        for first in range(0, len(self.arrays), max(inside, 1)):
            for start in starts:
                for i in range(first, first + inside):
                    array = self.arrays[i]
                    form = array.form._replace(shape=shape, strides=strides)
                    arrays.append(array._replace(address=array.address + self.offset + start, form=form))
                    names.append(self.names[i])
        return arrays, names

    def _refuse_shared(
        self, arrays: Sequence[Array], names: Sequence[str], axes: Mapping[str, Axis], row_nbytes: int
    ) -> NoReturn:
        """Say which tensors, of these dimensions, share memory."""
        order = sorted(range(len(self.arrays)), key=lambda i: self.arrays[i].address)
        for i, k in pairwise(order):
            if self.arrays[i].address == self.arrays[k].address:
                first, second = sorted((i, k))
                self.fail(
                    f"is the same memory as {self.names[first]}: layers that share a cache, or groups that lie over "
                    "each other, cannot be in one view, which would write it twice",
                    second,
                )
        strides = PerIndex(*(axes[letter].stride if letter in axes else 0 for letter in "bloth"))
        extents = PerIndex(*(axes[letter].extent if letter in axes else 1 for letter in "bloth"))
        rows = [Geometry(np.array([each.address]), PerIndex(), strides, extents, row_nbytes) for each in arrays]
        if rows_collide(rows[0]):
            self.fail("has rows that overlap each other: a copy to them would corrupt them")
        met = first_sharing(rows, [])
        first, second = (0, 0) if met is None else sorted(self.names.index(names[i]) for i in met[:2])
        self.fail(f"has rows that overlap those of {self.names[first]}: a copy to them would corrupt them", second)


def place_of(part: Part, name: str = "part") -> int:
    """Which of K and V a part is, 0 or 1. Raises KvbmTypeError and KvbmValueError for another name."""
    if not isinstance(part, str):
        raise KvbmTypeError(f'{name} is {part!r}, expected "k" or "v", or None for both')
    if part not in ("k", "v"):
        raise KvbmValueError(f'{name} is {part!r}, expected "k" or "v", or None for both')
    return int(part == "v")


def placed(form: Form) -> str:
    """What an array is, for errors: its shape, and its strides in elements."""
    return f"has shape {list(form.shape)} and strides {in_elements(form)}"


def in_elements(form: Form) -> list[int | float]:
    """The strides as array libraries write them."""
    itemsize = form.element.itemsize
    return [stride / itemsize if stride % itemsize else stride // itemsize for stride in form.strides]
