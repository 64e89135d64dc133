"""Caches that no one view can describe: a view for each group of layers, of K and V, or of rows and their scales."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

from kvbm_kernels._wording import counted
from kvbm_kernels.blocks import BlockStack
from kvbm_kernels.errors import KvbmTypeError, KvbmValueError
from kvbm_kernels.views import BlockIds

if TYPE_CHECKING:
    from typing_extensions import Self


class LayerGroups(tuple[BlockStack, ...]):
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
        groups = super().__new__(cls, views)
        groups.layers = tuple(map(tuple, layers))
        groups.parts = ("kv",) * len(groups) if parts is None else tuple(parts)
        if not len(groups) == len(groups.layers) == len(groups.parts):
            raise KvbmValueError(
                f"{len(groups)} views with layers for {len(groups.layers)} and parts for {len(groups.parts)}, "
                "expected as many of each"
            )
        named = [(part, layer) for held, part in zip(groups.layers, groups.parts, strict=True) for layer in held]
        twice = next((each for i, each in enumerate(named) if each in named[:i]), None)
        if twice is not None:
            raise KvbmValueError(f"layer {twice[1]} of {twice[0]} is in two views, expected it once")
        for view, held, part in zip(groups, groups.layers, groups.parts, strict=True):
            if view.shape.nl != len(held):
                raise KvbmValueError(f"layers {list(held)} for a view of {counted(view.shape.nl, 'layer')} of {part}")
        return groups

    def select(self, ids: SupportsIndex | slice | BlockIds) -> Self:
        """Only these blocks, the same of every view. An engine with a block table for each group selects from each."""
        return self._of([view[ids] for view in self])

    def shard(self, rank: SupportsIndex, size: SupportsIndex) -> Self:
        """Only the heads that one of ``size`` tensor-parallel ranks holds, as :meth:`View.shard` does it."""
        return self._of([view.shard(rank, size) for view in self])

    def _of(self, views: Iterable[BlockStack]) -> Self:
        return type(self)(views, self.layers, self.parts)


def beside(rows: BlockStack, scales: BlockStack) -> LayerGroups:
    """Rows, and the scales that lie in memory of their own: for each block, layer, outer, token and head, one of each.

    Raises KvbmValueError if they are not as many.
    """
    counts = [
        (len(view), *(getattr(view.shape, symbol) for symbol in ("nl", "no", "nh", "nt"))) for view in (rows, scales)
    ]
    if counts[0] != counts[1]:
        texts = [f"{counted(n, 'block')} of nl={nl} no={no} nh={nh} nt={nt}" for n, nl, no, nh, nt in counts]
        raise KvbmValueError(f"scales has {texts[1]}, expected the {texts[0]} of what they scale")
    layers = range(rows.shape.nl)
    return LayerGroups((rows, scales), (layers, layers), ("kv", "scales"))


def layer_groups(
    adapter: Callable[..., BlockStack],
    tensors: Mapping[Any, Any] | Sequence[Any],
    *,
    parts: Sequence[str] = (),
    per_layer: Mapping[str, Sequence[Any]] | None = None,
    **arguments: Any,
) -> LayerGroups:
    """The views of a cache whose layers, or whose K and V, differ in the shape of their rows.

    ``adapter`` is one of the functions of this package that take an entry of ``tensors`` for each layer, and is called
    with ``arguments``. Layers whose blocks come out alike, and as many, are one view, in the order of the model; views
    are in the order of their first layers, so that the same model gives the same groups with every engine.
    ``per_layer`` are arguments with a value for each layer. ``parts=("k", "v")`` makes K and V views of their own.

    Raises what the adapter raises, and KvbmValueError for a ``per_layer`` argument without a value for each layer.
    """
    # Under the names they have here, so that errors do not count within a group.
    entries = list(tensors.items() if isinstance(tensors, Mapping) else enumerate(tensors))
    if not entries:
        raise KvbmValueError("tensors has 0 entries, expected one for each layer")
    own = {name: list(values) for name, values in (per_layer or {}).items()}
    for name, values in own.items():
        if len(values) != len(entries):
            raise KvbmValueError(
                f"per_layer[{name!r}] has {counted(len(values), 'value')}, expected one for each of "
                f"{counted(len(entries), 'layer')}"
            )

    def call(layers: Sequence[int], part: str | None) -> BlockStack:
        keywords = dict(arguments) if part is None else {**arguments, "part": part}
        for name, values in own.items():
            keywords[name] = values[layers[0]]
        view = adapter(dict(entries[layer] for layer in layers), **keywords)
        if not isinstance(view, BlockStack):
            raise KvbmTypeError(f"the adapter returned a {type(view).__name__}, expected a BlockStack")
        return view

    views: list[BlockStack] = []
    held: list[tuple[int, ...]] = []
    kinds: list[str] = []
    for part in parts or (None,):
        alike: dict[Any, list[int]] = {}
        for layer in range(len(entries)):
            view = call([layer], part)
            alike.setdefault((view.shape, len(view), *(values[layer] for values in own.values())), []).append(layer)
        for layers in alike.values():
            views.append(call(layers, part))
            held.append(tuple(layers))
            kinds.append(part or "kv")
    return LayerGroups(views, held, kinds)
