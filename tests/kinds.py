"""The same cache in every kind of place that a view can describe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import kvbm_kernels as kk
import reference


def layers(kv: np.ndarray) -> list[np.ndarray]:
    """Per-layer tensors, blocks first."""
    return list(kv.swapaxes(0, 1).copy())


def packed(kv: np.ndarray) -> list[np.ndarray]:
    """Per-layer tensors [nb, nt, nh, 2*hd], the rows of K and V side by side."""
    nb, nl, no, nt, nh, hd = kv.shape
    return list(kv.transpose(1, 0, 3, 4, 2, 5).copy().reshape(nl, nb, nt, nh, no * hd))


def padded(kv: np.ndarray) -> np.ndarray:
    """Universal blocks whose rows lie a third further apart than they are long."""
    wide = np.zeros((*reference.universal(kv).shape[:-1], kv.shape[-1] // 3 * 4 + 1), kv.dtype)
    wide[..., : kv.shape[-1]] = reference.universal(kv)
    return wide


def _same(array: Any) -> Any:
    return array


def _each(function: Callable[[Any], Any], arrays: Any) -> Any:
    return [_each(function, array) for array in arrays] if isinstance(arrays, list) else function(arrays)


def views(
    kv: np.ndarray,
    shape: kk.BlockShape,
    put: Callable[[np.ndarray], Any] = _same,
    get: Callable[[Any], np.ndarray] = _same,
) -> dict[str, tuple[kk.View, Callable[[], np.ndarray]]]:
    """A view of each kind that holds this cache, and how to read the cache back from its arrays.

    ``put`` makes another library's array of NumPy's, and ``get`` a NumPy array of that.
    """
    made = {}

    def add(name, arrays, view_of, back):
        placed = _each(put, arrays)
        made[name] = view_of(placed), lambda: back(_each(get, placed))

    nl, no, nt, nh, hd = shape.nl, shape.no, shape.nt, shape.nh, shape.hd
    for layout in ("NHD", "HND"):
        add(
            layout,
            reference.block_stack(kv, layout),
            lambda chunks, lo=layout: kk.BlockStack(chunks, shape, lo),
            lambda chunks, lo=layout: reference.from_block_stack(chunks, nl, no, lo),
        )
        add(
            f"operational {layout}",
            reference.operational(kv, layout),
            lambda ops, lo=layout: kk.OperationalBlocks(list(ops), shape, lo),
            lambda ops, lo=layout: reference.from_operational(ops, nt, nh, lo),
        )
    add("universal", reference.universal(kv), lambda a: kk.UniversalBlocks(a, shape), reference.from_universal)
    add(
        "padded rows",
        padded(kv),
        lambda wide: kk.UniversalBlocks(wide[..., :hd], shape),
        lambda wide: reference.from_universal(wide[..., :hd]),
    )
    add(
        "layers",
        layers(kv),
        lambda per_layer: kk.BlockStack.from_layers(per_layer, shape),
        lambda per_layer: np.stack(per_layer).swapaxes(0, 1),
    )
    add(
        "packed K|V",
        packed(kv),
        lambda rows: kk.BlockStack.from_layers(
            [layer.reshape(*layer.shape[:3], no, hd) for layer in rows], shape, "bthod"
        ),
        lambda rows: np.stack(rows).reshape(nl, -1, nt, nh, no, hd).transpose(1, 0, 4, 2, 3, 5),
    )
    return made


KINDS = ["NHD", "HND", "operational NHD", "operational HND", "universal", "padded rows", "layers", "packed K|V"]
