"""SGLang's token pools on the device, and its hierarchical cache on the host. docs/engines/sglang.md has the shapes."""

from __future__ import annotations

from typing import Any, SupportsIndex, overload

from kvbm_kernels.dtypes import DTypeLike
from kvbm_kernels.engines.blocks import EngineBlocks
from kvbm_kernels.engines.groups import LayerGroups, beside
from kvbm_kernels.engines.reading import in_order_of, one_of, read, required
from kvbm_kernels.engines.tensors import LayerTensors, Part, Scales, Tensors
from kvbm_kernels.errors import KvbmValueError
from kvbm_kernels.layouts import as_count, as_integer

# By layout. On the host the dimensions with K and V, or those of MLA.
_DEVICE = {"NHD": "l/o/shd", "HND": "l/o/bhtd", "MLA": "l/s1d"}
_HOST = {
    "layer_first": "olshd|ls1d",
    "page_first": "oslhd|sl1d",
    "page_first_direct": "oblthd|blt1d",
    "page_head": "obhtld",
    "page_unified": "bglothd|bltd",
}

REFUSED = {
    "vectorized_5d": (
        "K in [num_pages, num_heads, head_size/x, page_size, x] and V in [num_pages, num_heads, page_size/x, "
        "head_size, x] have no rows: the elements of one head of one token do not lie together"
    ),
    "page_first_kv_split": "the latent and the rope part of a row lie in pools of their own; make a view of each",
    "mxfp8_interleaved": "its scales stand in chunks of the kernel's own order, which belong to no single row",
}

_DUMMY_PAGES = 1


@overload
def from_sglang(
    buffers: LayerTensors | Any,
    *,
    layout: str,
    page_size: SupportsIndex,
    head_group: SupportsIndex | None = None,
    part: Part | None = None,
    dtype: DTypeLike | None = None,
    scales: Scales | None = None,
    name: str = "buffers",
) -> EngineBlocks: ...
@overload
def from_sglang(
    buffers: LayerTensors,
    *,
    layout: str,
    page_size: SupportsIndex,
    part: Part | None = None,
    dtype: DTypeLike | None = None,
    scales: LayerTensors,
    name: str = "buffers",
) -> LayerGroups: ...
def from_sglang(
    buffers: LayerTensors | Any,
    *,
    layout: str,
    page_size: SupportsIndex,
    head_group: SupportsIndex | None = None,
    part: Part | None = None,
    dtype: DTypeLike | None = None,
    scales: Scales | LayerTensors | None = None,
    name: str = "buffers",
) -> EngineBlocks | LayerGroups:
    """The pages of an SGLang pool, as blocks of ``page_size`` tokens.

    On the device ``buffers`` is a list with an entry for each layer:

    - ``"NHD"``: pairs ``[slots, num_heads, head_size]``, ``list(zip(pool.k_buffer, pool.v_buffer))``.
    - ``"HND"``: pairs ``[num_pages, num_heads, page_size, head_size]``.
    - ``"MLA"``: ``[slots, 1, kv_cache_dim]``, ``pool.kv_buffer``.

    An id is a page, ``slot // page_size``. Page 0 is the one that padded tokens are written to, and reserved; slots
    after the last whole page are left out.

    On the host ``buffers`` is the one tensor ``kv_buffer`` of a HiCache pool, and ``layout`` its: ``"layer_first"``,
    ``"page_first"``, ``"page_first_direct"``, ``"page_head"`` or ``"page_unified"``, with K and V or of MLA, which the
    number of dimensions tells. No page is reserved there. In "page_unified" with several heads in each of several
    groups the heads of all are no one view; ``head_group`` is which.

    Elements of one byte need ``scales``: "constant" for fp8 whose scales the model has; "inline" for MLA rows that hold
    their own; or, on the device, the list of scale tensors ``[slots, num_heads * scales of a row]`` of a pool with
    scales of its own (``list(zip(pool.k_scale_buffer, pool.v_scale_buffer))``), and then rows and scales are two views
    side by side.

    ``part`` is as for :func:`from_vllm`, for pools whose K and V have different head dimensions, and so is ``dtype``.

    Raises KvbmValueError and KvbmTypeError as :func:`from_vllm` does.
    """
    one_of(layout, "layout", [*_DEVICE, *_HOST], REFUSED)
    tokens = as_count(page_size, "page_size", 1)
    if layout in _HOST:
        tensors, num_reserved = _on_host(buffers, layout, part, tokens, head_group, name), 0
    else:
        _refuse_group(head_group, layout)
        tensors, num_reserved = _on_device(buffers, layout, part, tokens, name), _DUMMY_PAGES
    if isinstance(scales, str) and scales not in ("inline", "constant"):
        raise KvbmValueError(f'scales is {scales!r}, expected "inline", "constant", tensors or None')
    if scales is None or isinstance(scales, str):
        return tensors.blocks(dtype, scales, num_reserved=num_reserved)  # type: ignore[arg-type]
    if layout not in ("NHD", "MLA"):
        raise KvbmValueError(f'scales are tensors for layout {layout!r}, expected that for "NHD" and "MLA" alone')
    own = read(in_order_of(scales, buffers, name), "l/si" if layout == "MLA" else "l/o/si", "scales", part)
    own.split_heads(tensors.extent("h"))
    own.split("s", "b", "t", tokens)
    rows = tensors.blocks(dtype, "constant", num_reserved=num_reserved)
    return beside(rows, own.scale_blocks(num_reserved=num_reserved), part)


def _on_device(buffers: Any, layout: str, part: Part | None, tokens: int, name: str) -> Tensors:
    if layout == "MLA" and part is not None:
        raise KvbmValueError(f"part is {part!r}, expected none for MLA, which has no K and V apart")
    tensors = read(buffers, _DEVICE[layout], name, part, t=tokens)
    return _paged(tensors, layout, tokens)


def _on_host(
    buffer: Any, layout: str, part: Part | None, tokens: int, head_group: SupportsIndex | None, name: str
) -> Tensors:
    tensors = _paged(read(buffer, _HOST[layout], name, t=tokens), layout, tokens)
    if "g" in tensors.axes:
        _join_groups(tensors, head_group)
    else:
        _refuse_group(head_group, layout)
    tensors.choose(part)
    return tensors


def _paged(tensors: Tensors, layout: str, tokens: int) -> Tensors:
    tensors.check_order([tensors.order], f"layout {layout!r}")
    if "s" in tensors.axes:
        tensors.split("s", "b", "t", tokens)
    return tensors


def _refuse_group(head_group: SupportsIndex | None, layout: str) -> None:
    if head_group is not None:
        raise KvbmValueError(f"head_group is {head_group!r}, expected none for layout {layout!r} without groups")


def _join_groups(tensors: Tensors, head_group: SupportsIndex | None) -> None:
    groups, heads = tensors.extent("g"), tensors.extent("h")
    if head_group is not None:
        which = as_integer(head_group)
        if which is None or not 0 <= which < groups:
            raise KvbmValueError(f"head_group is {head_group!r}, expected 0 to {groups - 1}")
        tensors.index("g", which)
    elif groups == 1:
        tensors.index("g", 0)
    elif heads == 1:
        tensors.index("h", 0)
        tensors.rename("g", "h")
    else:
        required(
            None,
            "head_group",
            f"{groups} groups of {heads} heads each are no one view, for no single stride steps through their heads",
        )
