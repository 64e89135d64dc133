"""Caches that no one view can describe: a view for each group of layers, of K and V, or of rows and their scales."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

from kvbm_kernels._wording import a_type, counted
from kvbm_kernels.blocks import BlockStack
from kvbm_kernels.engines.per_layer import as_groups, as_values, listed
from kvbm_kernels.engines.reading import in_order_of
from kvbm_kernels.engines.tensors import LayerTensors, Part, place_of
from kvbm_kernels.errors import KvbmError, KvbmIndexError, KvbmTypeError, KvbmValueError, Uncopied
from kvbm_kernels.layouts import as_count, as_integer
from kvbm_kernels.views import BlockIds, View

if TYPE_CHECKING:
    from typing_extensions import Self


class LayerGroups(Uncopied, tuple[BlockStack, ...]):
    """Views that together are one cache: a tuple of block stacks, to be copied one for one to another such tuple.

    All rows of a view have one length, so a cache whose layers have different head dimensions or numbers of heads is
    several views, and so is one with K and V of different head dimensions, or with its scales in memory of their own.
    ``layers[i]`` are the layers that view i has, numbered as in the model; ``parts[i]`` is what it has of them: "kv"
    for K and V or what is stored for both, "k", "v", "scales", "k_scales" or "v_scales". Each layer and part is there
    once.
    """

    layers: tuple[tuple[int, ...], ...]
    parts: tuple[str, ...]

    def __new__(
        cls, views: Iterable[BlockStack], layers: Iterable[Sequence[int]], parts: Iterable[str] | None = None
    ) -> Self:
        groups = super().__new__(cls, listed(views, "views", "a list of views"))
        for i, view in enumerate(groups):
            if not isinstance(view, View):
                raise KvbmTypeError(f"views[{i}] is {a_type(view)}, expected a view")
        groups.layers = tuple(
            tuple(
                as_count(layer, f"layers[{i}][{j}]", 0)
                for j, layer in enumerate(listed(held, f"layers[{i}]", "a list of layers"))
            )
            for i, held in enumerate(listed(layers, "layers", "a list with the layers of each view"))
        )
        named_parts = ("kv",) * len(groups) if parts is None else listed(parts, "parts", "a list of names")
        for i, part in enumerate(named_parts):
            if not isinstance(part, str):
                raise KvbmTypeError(f"parts[{i}] is {part!r}, expected a name")
        groups.parts = tuple(named_parts)
        if not len(groups) == len(groups.layers) == len(groups.parts):
            made = counted(len(groups), "view")
            raise KvbmValueError(
                f"{made} with layers for {len(groups.layers)} and parts for {len(groups.parts)}, "
                "expected as many of each"
            )
        named = [(part, layer) for held, part in zip(groups.layers, groups.parts, strict=True) for layer in held]
        if len(set(named)) < len(named):
            part, layer = next(each for i, each in enumerate(named) if each in named[:i])
            raise KvbmValueError(f"layer {layer} of {part} is in two views, expected it once")
        for view, held, part in zip(groups, groups.layers, groups.parts, strict=True):
            if view.shape.nl != len(held):
                raise KvbmValueError(f"layers {list(held)} for a view of {counted(view.shape.nl, 'layer')} of {part}")
        return groups

    def select(self, ids: SupportsIndex | slice | BlockIds | Sequence[slice | BlockIds]) -> Self:
        """Only these blocks, the same of every view; or, with a list of ids for each group of layers, those of each.

        A group's views, such as K and V apart or rows and their scales, all take its ids. Groups are in the order in
        which ``layers`` first has them. Raises what ``view[ids]`` raises, and KvbmValueError for fewer or more lists
        than groups.
        """
        if not isinstance(ids, list | tuple) or not ids or not all(map(_is_table, ids)):
            return self._of([view[ids] for view in self])  # type: ignore[index]
        groups = list(dict.fromkeys(self.layers))
        if len(ids) != len(groups):
            found = counted(len(ids), "list")
            raise KvbmValueError(f"ids has {found}, expected {len(groups)}: one for each group of layers, {groups}")
        views = []
        for view, layers in zip(self, self.layers, strict=True):
            i = groups.index(layers)
            try:
                views.append(view[ids[i]])
            except KvbmError as error:
                raise type(error)(f"ids[{i}]: {error}") from None
        return self._of(views)

    def layer(self, layer: SupportsIndex) -> Self:
        """Only one of the layers, by the number that ``layers`` has for it: one view, or one for each part.

        Raises KvbmIndexError for a layer that no view has.
        """
        number = as_count(layer, "layer", 0)
        views, parts = [], []
        for view, layers, part in zip(self, self.layers, self.parts, strict=True):
            if number in layers:
                place = layers.index(number)
                views.append(view.layers(place, place + 1))
                parts.append(part)
        if not views:
            held = sorted(layer for layers in self.layers for layer in layers)
            there = f"the groups have {held[0]} to {held[-1]}" if held else "there are no groups"
            raise KvbmIndexError(f"layer {number} is in no group: {there}")
        return type(self)(views, [(number,)] * len(views), parts)

    def shard(self, rank: SupportsIndex, size: SupportsIndex) -> Self:
        """Only the heads that one of ``size`` tensor-parallel ranks holds, as :meth:`View.shard` does it."""
        return self._of([view.shard(rank, size) for view in self])

    def _of(self, views: Iterable[BlockStack]) -> Self:
        return type(self)(views, self.layers, self.parts)


def _is_table(ids: object) -> bool:
    return isinstance(ids, slice) or (hasattr(ids, "__len__") and as_integer(ids) is None)


def beside(rows: BlockStack, scales: BlockStack, part: Part | None) -> LayerGroups:
    """Rows, and the scales that lie in memory of their own: for each block, layer, outer, token and head, one of each.

    ``part`` is what both were made of. Raises KvbmValueError if they are not as many.
    """
    counts = [
        (len(view), *(getattr(view.shape, symbol) for symbol in ("nl", "no", "nh", "nt"))) for view in (rows, scales)
    ]
    if counts[0] != counts[1]:
        texts = [f"{counted(n, 'block')} of nl={nl} no={no} nh={nh} nt={nt}" for n, nl, no, nh, nt in counts]
        raise KvbmValueError(f"scales has {texts[1]}, expected the {texts[0]} of what they scale")
    layers = range(rows.shape.nl)
    parts = ("kv", "scales") if part is None else (part, f"{part}_scales")
    return LayerGroups((rows, scales), (layers, layers), parts)


def layer_groups(
    adapter: Callable[..., BlockStack | LayerGroups],
    tensors: LayerTensors,
    *,
    groups: Sequence[Sequence[SupportsIndex | str]] | None = None,
    part: Part | None = None,
    parts: Sequence[str] = (),
    per_layer: Mapping[str, Sequence[Any]] | None = None,
    **arguments: Any,
) -> LayerGroups:
    """The views of a cache whose layers, or whose K and V, differ: in the shape of their rows, or in their blocks.

    ``adapter`` is one of the functions of this package that take an entry of ``tensors`` for each layer, and is called
    with ``arguments``. ``groups`` are the layers that go together, each layer in one of them: those that an engine has
    a block table for, such as layers with a window and layers without. They are views in that order. A layer is its
    place in ``tensors``, or its name where these are a dict by name; ``layers`` has places. Without groups layers
    whose blocks come out alike, and as many, are one view, in the order of the model, and views are in the order of
    their first layers; so layers that differ in their block table alone are not told apart.

    ``part`` is K or V alone, and ``parts=("k", "v")`` makes K and V views of their own, the groups of K first.
    ``per_layer`` are arguments with a value for each layer. ``scales`` may be tensors where the adapter takes them, an
    entry for each layer: behind the view of each group's rows comes that of its scales. Where both are by name, so are
    they paired.

    Raises what the adapter raises, KvbmValueError and KvbmIndexError for groups without every layer once, and
    KvbmTypeError and KvbmValueError for a ``per_layer`` argument that the adapter has not, or without a plain value for
    each layer.
    """
    if not callable(adapter):
        raise KvbmTypeError(f"adapter is {a_type(adapter)}, expected a function such as from_vllm")
    # Under the names they have here, so that errors do not count within a group.
    entries = _entries(tensors)
    count = len(entries)
    if not entries:
        raise KvbmValueError("tensors has 0 entries, expected one for each layer")
    own = as_values(per_layer, adapter, arguments, count)
    scales = arguments.pop("scales") if isinstance(arguments.get("scales"), Mapping | list | tuple) else None
    of_layers = None if scales is None else [each for _, each in _entries(in_order_of(scales, tensors, "tensors"))]
    if of_layers is not None and len(of_layers) != count:
        found = counted(len(of_layers), "entry", "entries")
        raise KvbmValueError(f"scales has {found}, expected one for each of {counted(count, 'layer')}")

    def call(layers: Sequence[int], of: str | None) -> list[tuple[BlockStack, str]]:
        keywords = dict(arguments) if of is None else {**arguments, "part": of}
        keywords.update({name: values[layers[0]] for name, values in own.items()})
        if of_layers is not None:
            keywords["scales"] = {entries[layer][0]: of_layers[layer] for layer in layers}
        made = adapter(dict(entries[layer] for layer in layers), **keywords)
        if isinstance(made, LayerGroups):
            return list(zip(made, made.parts, strict=True))
        if not isinstance(made, BlockStack):
            raise KvbmTypeError(f"the adapter returned {a_type(made)}, expected a BlockStack")
        return [(made, of or "kv")]

    together = None if groups is None else as_groups(groups, own, [key for key, _ in entries])
    views: list[BlockStack] = []
    held: list[tuple[int, ...]] = []
    kinds: list[str] = []
    for of in _chosen(part, parts):
        alike: dict[Any, list[int]] = {}
        for layer in range(count) if together is None else ():
            forms = [(view.shape, len(view)) for view, _ in call([layer], of)]
            alike.setdefault((*forms, *(values[layer] for values in own.values())), []).append(layer)
        for layers in together or alike.values():
            for view, kind in call(layers, of):
                views.append(view)
                held.append(tuple(layers))
                kinds.append(kind)
    return LayerGroups(views, held, kinds)


def _entries(tensors: Any) -> list[tuple[Any, Any]]:
    if isinstance(tensors, Mapping):
        return list(tensors.items())
    return list(enumerate(listed(tensors, "tensors", "a list or dict with an entry for each layer")))


def _chosen(part: Part | None, parts: Sequence[str]) -> Sequence[str | None]:
    names = listed(parts, "parts", 'a list, such as ("k", "v")')
    if part is not None:
        place_of(part)
        if names:
            raise KvbmValueError(f"part is {part!r} and parts {names!r}, expected one of them")
        return [part]
    for i, each in enumerate(names):
        place_of(each, f"parts[{i}]")
    return names or [None]
