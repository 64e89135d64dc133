"""vLLM's caches, of every version from 0.20 to 0.33. docs/engines/vllm.md says which is which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsIndex

from kvbm_kernels._wording import a_type, counted
from kvbm_kernels.dtypes import DTypeLike, as_dtype
from kvbm_kernels.engines.blocks import EngineBlocks
from kvbm_kernels.engines.content import inline_scale, read_content, row_sizes
from kvbm_kernels.engines.reading import as_optional, flat, one_of, read, required
from kvbm_kernels.engines.tensors import DSV4, Axis, LayerTensors, Part, Scales, Tensors
from kvbm_kernels.errors import KvbmTypeError, KvbmValueError
from kvbm_kernels.layouts import as_count

# The letters of KVCacheLayout, and of what came before it, as this package has them.
_LETTERS = {"L": "l", "B": "b", "H": "h", "N": "t", "C": "c", "2": "o", "D": "d"}
_CANONICAL = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
# Tensors over all layers that a connector could ask for until 0.28.
_CROSS_LAYER = ("BL2NHD", "BHL2ND", "B2HLND")

# What a layer's tensor is, whatever lies where in memory; and the orders it may have there.
_LAYERS = {
    "kv_first": ("obthd", ("lobthd", "lobhtd", "blothd", "bhlotd")),
    "blocks_first": ("bothd", ("lbothd", "lbohtd", "blothd", "bohltd")),
    "packed": ("bhtc", ("lbthc", "lbhtc", "blthc", "bhltc")),
    "mla": ("btd", ("lbtd", "bltd")),
    "planes": ("boti", ("lboti", "bloti")),
}

REFUSED = {
    "x_packed": (
        "K in [num_blocks, num_heads, head_size/x, block_size, x] and V in [num_blocks, num_heads, head_size, "
        "block_size] have no rows: the elements of one head of one token do not lie together"
    ),
    "cpu": (
        "the CPU backend keeps K of a block transposed, [head_size, block_size], or packed for its matrix units: the "
        "elements of one head of one token do not lie together"
    ),
    "nvfp4": (
        "a page is all its K, the scales of K, all its V and the scales of V, in an order of the kernel's own: no row "
        "has its scales"
    ),
    "dsv4": DSV4,
}

# What a specification of MLA has for its head size, latent and rope, whatever the row is quantised to.
_LATENT = 576


def from_vllm(
    kv_caches: LayerTensors | Any,
    *,
    layout: str,
    block_size: SupportsIndex,
    num_kv_heads: SupportsIndex | None = None,
    no: int | None = None,
    head_size: SupportsIndex | None = None,
    head_size_v: SupportsIndex | None = None,
    kernel_block_size: SupportsIndex | None = None,
    part: Part | None = None,
    dtype: DTypeLike | None = None,
    scales: Scales | None = None,
    name: str = "kv_caches",
) -> EngineBlocks:
    """The blocks of vLLM's KV cache.

    ``kv_caches`` is what ``register_kv_caches`` is given: the tensors of the layers, in a dict or list. ``layout`` says
    what they are:

    - ``"kv_first"``: ``[2, num_blocks, block_size, num_heads, head_size]``, FlashAttention to 0.20.
    - ``"blocks_first"``: ``[num_blocks, 2, block_size, num_heads, head_size]``, FlashInfer and Triton to 0.24, and
      FlashAttention in 0.24.
    - ``"packed"``: ``[num_blocks, num_heads, block_size, content]``, K and V of a token and head in one row, 0.26 to
      0.28.
    - ``"LBHNC"``, ``"LBNHC"``, ``"LHBNC"``, ``"BLHNC"``, ``"BLNHC"``, ``"BHLNC"``: the same shape, from 0.30 on, in the
      memory order of that ``KVCacheLayout``.
    - ``"mla"``: ``[num_blocks, block_size, content]``, to 0.28. From 0.30 on MLA is ``no=1`` of the names above.
    - ``"planes"``: ``[num_blocks, 2, block_size, num_heads*head_size]``, the B12X backend.

    The strides of the tensors say whether heads or tokens come first, and where pages are padded; they have to be those
    of the layout. ``kv_caches`` can also be one tensor for all layers: a 5-dimensional one in the order that one of the
    six names spells, or a 6-dimensional ``"BL2NHD"``, ``"BHL2ND"`` or ``"B2HLND"`` of 0.20 and 0.24.

    Where K and V share a row, ``no=1`` leaves them there, and ``no=2`` reads them apart, as other engines have them, so
    that blocks agree with theirs; that needs ``head_size``, in elements, and ``head_size_v`` if V's is another. K and V
    of different sizes are no one view: ``part="k"`` and ``part="v"`` are one each. Of MLA ``head_size_v`` is 0 and
    ``head_size`` the row as it is stored; where sizes are not needed, those that are given are checked.

    ``num_kv_heads`` is that of a rank, needed for all but "mla", since shapes of several backends differ in nothing
    else. ``block_size`` is what the block table counts in. If the kernels' blocks are smaller, ``kernel_block_size`` is
    theirs: a block of the view is then the tokens of a whole block where they follow each other evenly, else it is a
    kernel block, and an id stands for several, see :class:`EngineBlocks`. Block 0 is vLLM's null block, and reserved.

    Elements of one byte need ``scales``: "inline" if rows hold their own (``int8_per_token_head`` and
    ``fp8_per_token_head``, four bytes behind ``head_size`` elements; ``fp8_ds_mla`` with ``no=1``), or "constant" for
    fp8 whose scales the model has. ``dtype`` is for tensors of integers that hold the bits of another type.

    Raises KvbmValueError for a layout, shape, stride or size that is not as said, KvbmTypeError for elements that are
    not, both naming the tensor; nothing is guessed.
    """
    one_of(layout, "layout", [*_LAYERS, *_CANONICAL, *_CROSS_LAYER], REFUSED)
    tokens, ratio = _kernel_blocks(block_size, kernel_block_size)
    if num_kv_heads is None and layout == "mla":
        num_kv_heads = 1
    why = "heads and tokens, and heads and planes of other backends, are told apart by their numbers alone"
    heads = as_count(required(num_kv_heads, "num_kv_heads", why), "num_kv_heads", 1)
    if layout == "mla" and heads != 1:
        raise KvbmValueError(f"num_kv_heads is {heads}, expected 1 for layout 'mla'")
    if isinstance(kv_caches, Mapping | list | tuple):
        if layout in _CROSS_LAYER:
            raise KvbmTypeError(f"{name} is {a_type(kv_caches)}, expected one tensor for layout {layout!r}")
        order = _order_of(layout)
        axes, orders = _LAYERS.get(layout, ("bhtc", (order,)))
        tensors = read(kv_caches, "l/" + axes, name, t=tokens, h=heads)
    else:
        if layout in _LAYERS:
            raise KvbmTypeError(
                f"{name} is {a_type(kv_caches)}, expected a list or dict of layers for layout {layout!r}"
            )
        orders = (_order_of(layout),)
        tensors = read(kv_caches, orders[0], name, t=tokens, h=heads)
    tensors.check_order(orders, f"layout {layout!r}")
    if "i" in tensors.axes:
        tensors.split_heads(heads)
    _apart(tensors, layout, no, head_size, head_size_v, scales, part)
    return _blocks(tensors, ratio, dtype, scales)


def from_vllm_buffer(
    buffer: Any,
    *,
    layout: str,
    num_layers: SupportsIndex,
    num_blocks: SupportsIndex,
    num_kv_heads: SupportsIndex,
    block_size: SupportsIndex,
    head_size: SupportsIndex,
    dtype: DTypeLike,
    no: int,
    head_size_v: SupportsIndex | None = None,
    kernel_block_size: SupportsIndex | None = None,
    offset: SupportsIndex = 0,
    layer_stride: SupportsIndex | None = None,
    block_stride: SupportsIndex | None = None,
    part: Part | None = None,
    scales: Scales | None = None,
    name: str = "buffer",
) -> EngineBlocks:
    """The blocks of some layers in the one buffer that vLLM allocates from 0.30 on.

    ``layout`` is one of the six names of ``KVCacheLayout``. ``offset``, ``layer_stride`` and ``block_stride`` are those
    of the ``KVCacheTensor`` that places these layers, in bytes; without strides, layers and blocks follow each other
    without padding. ``head_size_v`` is 0 for MLA, and for other rows that are kept whole: ``head_size`` is then the row
    as it is stored, with the scales in it, 656 for ``fp8_ds_mla``. Otherwise rows hold K and V, and with
    ``scales="inline"`` neither size counts its scale. All else is as for :func:`from_vllm`.

    vLLM makes kernel blocks only of blocks that follow each other in a layer, with no padding and no other layer
    between them.

    Raises KvbmValueError for strides that are not those of the layout, a buffer that is too small or not contiguous,
    and as :func:`from_vllm` does.
    """
    one_of(layout, "layout", _CANONICAL, REFUSED)
    element = as_dtype(dtype)
    tokens, ratio = _kernel_blocks(block_size, kernel_block_size)
    scale = inline_scale(scales, element.itemsize)
    k, v = row_sizes(head_size, head_size_v, scale)
    if scale and element.itemsize == 1 and (k, v) == (_LATENT, 0):
        raise KvbmValueError(
            f"head_size is {k}, expected the row as it is stored, with the scales in it: 656 of fp8_ds_mla"
        )
    extents = {
        "l": as_count(num_layers, "num_layers", 1),
        "b": as_count(num_blocks, "num_blocks", 1),
        "h": as_count(num_kv_heads, "num_kv_heads", 1),
        "t": tokens,
        "c": k + v,
    }
    strides = {
        "l": as_optional(layer_stride, "layer_stride", 1),
        "b": as_optional(block_stride, "block_stride", 1),
    }
    axes = _placed(layout, extents, strides, ratio, element.itemsize)
    tensors = flat(buffer, name, axes, element, as_count(offset, "offset", 0))
    _apart(tensors, layout, no, head_size, head_size_v, scales, part)
    return _blocks(tensors, ratio, element, scales)


def _order_of(layout: str) -> str:
    return "".join(_LETTERS.get(letter, "") for letter in layout)


def _kernel_blocks(block_size: SupportsIndex, kernel_block_size: SupportsIndex | None) -> tuple[int, int]:
    """Tokens in a kernel block, and kernel blocks in a block."""
    size = as_count(block_size, "block_size", 1)
    if kernel_block_size is None:
        return size, 1
    tokens = as_count(kernel_block_size, "kernel_block_size", 1)
    if size % tokens:
        raise KvbmValueError(f"kernel_block_size is {tokens}, expected a divisor of block_size, {size}")
    return tokens, size // tokens


def _placed(
    layout: str, extents: Mapping[str, int], strides: Mapping[str, int | None], ratio: int, itemsize: int
) -> dict[str, Axis]:
    """The dimensions of a buffer in the order of a layout, with these bytes between layers and blocks where not None.

    Raises KvbmValueError for strides that do not step over what lies inside, and for kernel blocks that vLLM has not.
    """
    order = _order_of(layout)
    if ratio > 1 and order[0] == "b" and extents["l"] > 1:
        raise KvbmValueError(
            f"kernel_block_size is {extents['t']}, expected block_size, {extents['t'] * ratio}, for layout {layout!r} "
            f"of {extents['l']} layers: vLLM splits no blocks that have other layers between them"
        )
    axes: dict[str, Axis] = {}
    dense = itemsize
    for letter in reversed(order):
        extent = extents[letter]
        # Strides that are given step over whole blocks, those inside of a block over a kernel block's part of it.
        in_whole = ratio if letter == "b" or (letter == "l" and order[0] == "b") else 1
        stride = strides.get(letter) or dense * in_whole
        name = "layer_stride" if letter == "l" else "block_stride"
        if stride < dense * in_whole and extent > 1:
            inside = f"the bytes that layout {layout!r} has in between"
            raise KvbmValueError(f"{name} is {stride}, expected at least {dense * in_whole}, {inside}")
        if in_whole > 1 and stride != dense * in_whole:
            raise KvbmValueError(
                f"{name} is {stride}, expected {dense * in_whole} with kernel_block_size, {extents['t']}: vLLM splits "
                "no blocks that are padded"
            )
        axes[letter] = Axis(extent * ratio if letter == "b" else extent, stride // in_whole)
        reach = max(dense, axes[letter].stride)
        dense = reach if axes[letter].extent == 1 else axes[letter].stride * axes[letter].extent
    return axes


def _apart(
    tensors: Tensors,
    layout: str,
    no: int | None,
    head_size: SupportsIndex | None,
    head_size_v: SupportsIndex | None,
    scales: Scales | None,
    part: Part | None,
) -> None:
    """Read K and V apart, or together."""
    if "c" in tensors.axes:
        read_content(tensors, no, head_size, head_size_v, scales, part)
        return
    if as_optional(no, "no", 1) not in (None, tensors.extent("o")):
        raise KvbmValueError(f"no is {no!r}, expected {tensors.extent('o')} for layout {layout!r}, or none")
    if layout == "mla":
        if as_optional(head_size_v, "head_size_v", 0):
            raise KvbmValueError(f"head_size_v is {head_size_v}, expected 0 for layout 'mla', or none")
        tensors.check_heads(head_size=head_size)
    else:
        tensors.check_heads(inline_scale(scales, tensors.itemsize), head_size=head_size, head_size_v=head_size_v)
    tensors.choose(part)


def _blocks(tensors: Tensors, ratio: int, dtype: DTypeLike | None, scales: Scales | None) -> EngineBlocks:
    """The view, with kernel blocks joined to blocks where one stride steps through the tokens of all."""
    if ratio > 1:
        blocks, tokens = tensors.axes["b"], tensors.axes["t"]
        if blocks.extent % ratio:
            kernel_blocks = counted(blocks.extent, "kernel block")
            tensors.fail(f"has {kernel_blocks}, expected a multiple of {ratio}, those of a block")
        if blocks.stride == tokens.extent * tokens.stride:
            tensors.axes["b"] = Axis(blocks.extent // ratio, blocks.stride * ratio)
            tensors.axes["t"] = Axis(tokens.extent * ratio, tokens.stride)
            ratio = 1
    return tensors.blocks(dtype, scales, num_reserved=1, pieces=ratio)
