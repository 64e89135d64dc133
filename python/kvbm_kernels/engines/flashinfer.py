"""The paged KV cache that FlashInfer's kernels take. docs/engines/flashinfer.md has the shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import SupportsIndex, overload

from kvbm_kernels.dtypes import DTypeLike
from kvbm_kernels.engines.blocks import EngineBlocks
from kvbm_kernels.engines.groups import LayerGroups, beside
from kvbm_kernels.engines.reading import in_order_of, one_of, read
from kvbm_kernels.engines.tensors import LayerTensors, Part, Scales, Tensors
from kvbm_kernels.errors import KvbmValueError
from kvbm_kernels.layouts import as_count

# One tensor a layer, and a pair of them.
_LAYOUTS = {"NHD": ("bothd", "bthd"), "HND": ("bohtd", "bhtd"), "MLA": ("btd", "btd")}


@overload
def from_flashinfer(
    kv_caches: LayerTensors,
    *,
    layout: str,
    page_size: SupportsIndex,
    part: Part | None = None,
    dtype: DTypeLike | None = None,
    scales: Scales | None = None,
    name: str = "kv_caches",
) -> EngineBlocks: ...
@overload
def from_flashinfer(
    kv_caches: LayerTensors,
    *,
    layout: str,
    page_size: SupportsIndex,
    part: Part | None = None,
    dtype: DTypeLike | None = None,
    scales: LayerTensors,
    name: str = "kv_caches",
) -> LayerGroups: ...
def from_flashinfer(
    kv_caches: LayerTensors,
    *,
    layout: str,
    page_size: SupportsIndex,
    part: Part | None = None,
    dtype: DTypeLike | None = None,
    scales: Scales | LayerTensors | None = None,
    name: str = "kv_caches",
) -> EngineBlocks | LayerGroups:
    """The pages of caches that FlashInfer's kernels read, an entry of ``kv_caches`` for each layer.

    - ``"NHD"``: ``[pages, 2, page_size, num_heads, head_size]``, or a pair ``(k, v)`` of ``[pages, page_size,
      num_heads, head_size]``.
    - ``"HND"``: the same with ``num_heads, page_size``.
    - ``"MLA"``: ``[pages, page_size, head_size]``, or a pair ``(ckv, kpe)``, whose views are ``part="k"`` and
      ``part="v"``, for their rows differ in length.

    Rows may lie apart, as in views of K and V that share rows; the strides are the tensors' own, as long as their
    order is that of the layout. No page is reserved.

    Elements of one byte need ``scales``: "constant" for fp8, whose scales are arguments of the kernels, or "inline"; or
    the list of ``kv_cache_sf`` of each layer, in the same form, and then rows and scales are two views side by side.

    ``part`` and ``dtype`` are as for :func:`from_vllm`, and so are the errors.
    """
    one_of(layout, "layout", _LAYOUTS)
    tokens = as_count(page_size, "page_size", 1)
    tensors = _tensors(kv_caches, layout, tokens, part, name)
    if isinstance(scales, str) and scales not in ("inline", "constant"):
        raise KvbmValueError(f'scales is {scales!r}, expected "inline", "constant", tensors or None')
    if scales is None or isinstance(scales, str):
        return tensors.blocks(dtype, scales)  # type: ignore[arg-type]
    own = _tensors(in_order_of(scales, kv_caches, name), layout, tokens, part, "scales")
    return beside(tensors.blocks(dtype, "constant"), own.scale_blocks(), part)


def _tensors(kv_caches: LayerTensors, layout: str, tokens: int, part: Part | None, name: str) -> Tensors:
    single, pair = _LAYOUTS[layout]
    entries = kv_caches.values() if isinstance(kv_caches, Mapping) else kv_caches
    first = next(iter(entries), None) if isinstance(kv_caches, Mapping | list | tuple) else None
    pairs = isinstance(first, list | tuple)
    tensors = read(kv_caches, f"l/o/{pair}" if pairs else f"l/{single}", name, part, t=tokens)
    tensors.check_order([tensors.order], f"layout {layout!r}", gaps=True)
    tensors.choose(part)
    return tensors
