"""The caches of Hugging Face transformers. docs/engines/transformers.md has the shapes."""

from __future__ import annotations

from typing import Any, SupportsIndex

from kvbm_kernels._wording import counted
from kvbm_kernels.dtypes import DTypeLike, as_dtype
from kvbm_kernels.engines.blocks import EngineBlocks
from kvbm_kernels.engines.reading import dense, flat, read, required
from kvbm_kernels.engines.tensors import LayerTensors, Part, Scales
from kvbm_kernels.errors import KvbmIndexError, KvbmValueError
from kvbm_kernels.layouts import as_count

# Sectors at the start of a paged cache that padding is read from and written to.
_TRASH_SECTORS = 2


def from_transformers(
    layers: LayerTensors,
    *,
    block_size: SupportsIndex,
    sequence: SupportsIndex | None = None,
    start: SupportsIndex = 0,
    part: Part | None = None,
    dtype: DTypeLike | None = None,
    scales: Scales | None = None,
    name: str = "layers",
) -> EngineBlocks:
    """The tokens of one sequence in a ``DynamicCache`` or ``StaticCache``, as blocks of ``block_size``.

    ``layers`` is a list with ``(layer.keys, layer.values)`` for each of ``cache.layers``, each ``[batch, num_heads,
    length, head_size]``. ``sequence`` is its place in the batch, needed where there are several. Block i is the tokens
    from ``start + i * block_size`` on; what is left at the end is no block, and ``start`` with a smaller ``block_size``
    makes one of it. A StaticCache has room for more tokens than it holds: blocks past its length are room.

    A DynamicCache makes new tensors with every token, and what a view refers to is then no longer the cache. Layers
    with a sliding window hold other tokens than the rest, and are a view of their own, see :func:`layer_groups`.

    ``part``, ``dtype`` and ``scales`` are as for :func:`from_vllm`, and so are the errors.
    """
    tokens = as_count(block_size, "block_size", 1)
    first = as_count(start, "start", 0)
    tensors = read(layers, "l/o/nhsd", name, part)
    batch, length = tensors.extent("n"), tensors.extent("s")
    if sequence is None and batch != 1:
        required(None, "sequence", f"the cache has {batch}, and nothing tells which one is meant")
    which = 0 if sequence is None else as_count(sequence, "sequence", 0)
    if which >= batch:
        raise KvbmIndexError(f"sequence is {which}, expected 0 to {batch - 1}")
    if first > length:
        raise KvbmIndexError(f"start is {first}, expected 0 to {length}, the tokens of the cache")
    tensors.index("n", which)
    tensors.narrow("s", first, length - first)
    tensors.split("s", "b", "t", tokens)
    return tensors.blocks(dtype, scales)


def from_transformers_paged(
    cache_tensor: Any,
    *,
    num_layers: SupportsIndex,
    page_size: SupportsIndex,
    num_kv_heads: SupportsIndex,
    head_size: SupportsIndex,
    blocks_per_sector: SupportsIndex,
    dtype: DTypeLike,
    part: Part | None = None,
    scales: Scales | None = None,
    name: str = "cache_tensor",
) -> EngineBlocks:
    """The blocks of the paged cache of continuous batching, of one group of full-attention layers.

    ``cache_tensor`` is that of the group's allocator, or of the ``PagedAttentionCache``; ``page_size`` its
    ``tokens_per_page``, and ``blocks_per_sector`` its own. A block is ``[num_layers, 2, page_size, num_heads,
    head_size]``, which is operational NHD. Ids are those of the allocator's block tables, which count over the whole
    tensor; the blocks of the first two sectors are there for padding, and reserved.

    Raises KvbmValueError for a tensor that is not contiguous or is no whole number of blocks, and as :func:`from_vllm`.
    """
    element = as_dtype(dtype)
    extents = {
        "l": as_count(num_layers, "num_layers", 1),
        "o": 2,
        "t": as_count(page_size, "page_size", 1),
        "h": as_count(num_kv_heads, "num_kv_heads", 1),
        "d": as_count(head_size, "head_size", 1),
    }
    tensors = flat(cache_tensor, name, dense({"b": 1, **extents}, element.itemsize), element)
    nbytes = tensors.axes["b"].stride
    count, rest = divmod(tensors.nbytes, nbytes)
    if rest:
        has = counted(tensors.nbytes, "byte")
        raise KvbmValueError(f"{name} has {has}, expected a multiple of {nbytes}, those of a block")
    tensors.axes["b"] = tensors.axes["b"]._replace(extent=count)
    tensors.choose(part)
    reserved = _TRASH_SECTORS * as_count(blocks_per_sector, "blocks_per_sector", 1)
    return tensors.blocks(element, scales, num_reserved=reserved)
