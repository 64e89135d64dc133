"""The same cache in every kind of place that a view can describe."""

from __future__ import annotations

from collections.abc import Callable

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


def views(kv: np.ndarray, shape: kk.BlockShape) -> dict[str, tuple[kk.View, Callable[[], np.ndarray]]]:
    """A view of each kind that holds this cache, and how to read the cache back from its arrays."""
    made = {}

    def add(name, arrays, view, back):
        made[name] = view, lambda: back(arrays)

    nl, no, nt, nh, hd = shape.nl, shape.no, shape.nt, shape.nh, shape.hd
    for layout in ("NHD", "HND"):
        chunks = reference.block_stack(kv, layout)
        add(
            layout,
            chunks,
            kk.BlockStack(chunks, shape, layout),
            lambda c, lo=layout: reference.from_block_stack(c, nl, no, lo),
        )
        ops = reference.operational(kv, layout)
        add(
            f"operational {layout}",
            ops,
            kk.OperationalBlocks(list(ops), shape, layout),
            lambda a, lo=layout: reference.from_operational(a, nt, nh, lo),
        )
    universal = reference.universal(kv)
    add("universal", universal, kk.UniversalBlocks(universal, shape), reference.from_universal)
    wide = padded(kv)
    add("padded rows", wide, kk.UniversalBlocks(wide[..., :hd], shape), lambda a: reference.from_universal(a[..., :hd]))
    per_layer = layers(kv)
    add("layers", per_layer, kk.BlockStack.from_layers(per_layer, shape), lambda a: np.stack(a).swapaxes(0, 1))
    rows = packed(kv)
    add(
        "packed K|V",
        rows,
        kk.BlockStack.from_layers([layer.reshape(*layer.shape[:3], no, hd) for layer in rows], shape, "bthod"),
        lambda a: np.stack(a).reshape(nl, -1, nt, nh, no, hd).transpose(1, 0, 4, 2, 3, 5),
    )
    return made


KINDS = ["NHD", "HND", "operational NHD", "operational HND", "universal", "padded rows", "layers", "packed K|V"]
