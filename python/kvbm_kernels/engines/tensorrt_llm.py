"""TensorRT-LLM's pools, and what its managers make of them. docs/engines/tensorrt_llm.md has the shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, SupportsIndex, overload

from kvbm_kernels._wording import counted
from kvbm_kernels.dtypes import DTypeLike, as_dtype
from kvbm_kernels.engines.blocks import EngineBlocks
from kvbm_kernels.engines.groups import LayerGroups, beside
from kvbm_kernels.engines.reading import in_order_of, one_of, read, required
from kvbm_kernels.engines.tensors import LayerTensors, Part, Scales, Tensors
from kvbm_kernels.layouts import as_count

# The dimensions of a layer's buffer, and the order inside a pool's blob.
_LAYOUTS = {"HND": ("bohtd", "ht"), "NHD": ("bothd", "th"), "BN2HD": ("btohd", "")}


@overload
def from_tensorrt_llm(
    pool: LayerTensors | Any,
    *,
    layout: str,
    num_kv_heads: SupportsIndex,
    tokens_per_block: SupportsIndex,
    num_layers: SupportsIndex | None = None,
    no: SupportsIndex | None = None,
    part: Part | None = None,
    dtype: DTypeLike | None = None,
    scales: Scales | None = None,
    name: str = "pool",
) -> EngineBlocks: ...
@overload
def from_tensorrt_llm(
    pool: LayerTensors | Any,
    *,
    layout: str,
    num_kv_heads: SupportsIndex,
    tokens_per_block: SupportsIndex,
    num_layers: SupportsIndex | None = None,
    no: SupportsIndex | None = None,
    part: Part | None = None,
    dtype: DTypeLike | None = None,
    scales: Any,
    name: str = "pool",
) -> LayerGroups: ...
def from_tensorrt_llm(
    pool: LayerTensors | Any,
    *,
    layout: str,
    num_kv_heads: SupportsIndex,
    tokens_per_block: SupportsIndex,
    num_layers: SupportsIndex | None = None,
    no: SupportsIndex | None = None,
    part: Part | None = None,
    dtype: DTypeLike | None = None,
    scales: Any = None,
    name: str = "pool",
) -> EngineBlocks | LayerGroups:
    """The blocks of a TensorRT-LLM pool.

    ``pool`` is one of

    - the pool, ``[num_blocks, num_layers, 2, num_heads*block_size*head_size]``, with 1 in the place of 2 for MLA;
    - a region of a V2 manager, bytes ``[num_blocks, size]`` as ``KvCacheRegion.as_tensor()`` gives them, that has the
      buffers of ``num_layers`` layers one after another, ``no`` of them a layer; ``dtype`` is then needed;
    - a list with ``get_buffers(layer)`` for each layer, in the shape that was asked of it.

    ``layout`` is the order that the attention backend writes, whatever shape the buffers are given in: "HND" by the
    TRTLLM backend, "NHD" by the FlashInfer backend. ``"BN2HD"`` are buffers ``[num_blocks, block_size, 2, num_heads,
    head_size]`` of AutoDeploy. No block is reserved.

    Elements of one byte need ``scales``: "constant" for int8 and fp8, whose scales the model has; or the pool of block
    scales, for NVFP4, in the form of the data's, and then rows and scales are two views side by side.

    ``part`` and ``dtype`` are as for :func:`from_vllm`, and so are the errors.
    """
    one_of(layout, "layout", _LAYOUTS)
    heads = as_count(num_kv_heads, "num_kv_heads", 1)
    tokens = as_count(tokens_per_block, "tokens_per_block", 1)
    sizes = (heads, tokens, num_layers, no, part)
    tensors = _tensors(pool, layout, *sizes, dtype, name)
    if scales is None or isinstance(scales, str):
        return tensors.blocks(dtype, scales)  # type: ignore[arg-type]
    own = _tensors(in_order_of(scales, pool, name), layout, *sizes, "uint8", "scales")
    return beside(tensors.blocks(dtype, "constant"), own.scale_blocks(), part)


def _tensors(
    pool: Any,
    layout: str,
    heads: int,
    tokens: int,
    num_layers: SupportsIndex | None,
    no: SupportsIndex | None,
    part: Part | None,
    dtype: DTypeLike | None,
    name: str,
) -> Tensors:
    buffer, inner = _LAYOUTS[layout]
    if isinstance(pool, Mapping | list | tuple):
        tensors = read(pool, "l/" + buffer, name, t=tokens, h=heads, o=None)
        tensors.check_order([tensors.order], f"layout {layout!r}")
        _check_counts(tensors, num_layers, no)
    else:
        tensors = read(pool, "bloj|bj", name, o=None)
        if "o" not in tensors.axes:
            _split_region(tensors, num_layers, no, dtype)
        else:
            _check_counts(tensors, num_layers, no)
        tensors.check_order(["bloj"], "a pool")
        _split_blob(tensors, inner, heads, tokens, layout)
    if tensors.extent("o") > 2:
        tensors.fail(f"has {tensors.extent('o')} outer chunks, expected 2 for K and V or 1")
    if tensors.extent("o") == 1:
        tensors.index("o", 0)
    tensors.choose(part)
    return tensors


def _check_counts(tensors: Tensors, num_layers: SupportsIndex | None, no: SupportsIndex | None) -> None:
    """Refuse numbers, where they are given, that are not those of the tensors."""
    for name, number, letter in (("num_layers", num_layers, "l"), ("no", no, "o")):
        if number is not None and as_count(number, name, 1) != tensors.extent(letter):
            tensors.fail(f"is of {name} = {tensors.extent(letter)}, expected {number}")


def _split_region(
    tensors: Tensors, num_layers: SupportsIndex | None, no: SupportsIndex | None, dtype: DTypeLike | None
) -> None:
    why = "a region of bytes does not tell"
    layers = as_count(required(num_layers, "num_layers", why), "num_layers", 1)
    outer = as_count(required(no, "no", why), "no", 1)
    if tensors.itemsize == 1:
        tensors.as_elements("j", as_dtype(required(dtype, "dtype", why)))
    size = tensors.extent("j")
    if size % (layers * outer):
        of_layers = counted(layers, "layer")
        tensors.fail(f"has {counted(size, 'element')} a block, expected a multiple of {of_layers} times {outer}")
    tensors.split("j", "o", "j", size // (layers * outer))
    tensors.split("o", "l", "o", outer)


def _split_blob(tensors: Tensors, inner: str, heads: int, tokens: int, layout: str) -> None:
    size = tensors.extent("j")
    head_size, rest = divmod(size, heads * tokens)
    if rest:
        of_all = f"{counted(heads, 'head')} times {counted(tokens, 'token')}"
        tensors.fail(f"has {counted(size, 'element')} a chunk, expected a multiple of {of_all}")
    if not inner:
        tensors.fail(f"is a pool, expected a list of buffers for layout {layout!r}")
    counts = {"h": heads, "t": tokens}
    tensors.split("j", "j", "d", head_size)
    tensors.split("j", inner[0], inner[1], counts[inner[1]])
