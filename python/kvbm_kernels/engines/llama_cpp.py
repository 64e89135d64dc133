"""llama.cpp's cache, as far as it has rows. docs/engines/llama_cpp.md says what it has instead."""

from __future__ import annotations

from typing import SupportsIndex

from kvbm_kernels.dtypes import DTypeLike
from kvbm_kernels.engines.blocks import EngineBlocks
from kvbm_kernels.engines.reading import read, required
from kvbm_kernels.engines.tensors import LayerTensors, Part, Scales
from kvbm_kernels.errors import KvbmIndexError, KvbmTypeError, KvbmValueError
from kvbm_kernels.layouts import as_count


def from_llama_cpp(
    layers: LayerTensors,
    *,
    v_trans: bool,
    num_kv_heads: SupportsIndex,
    block_size: SupportsIndex = 1,
    stream: SupportsIndex | None = None,
    part: Part | None = None,
    dtype: DTypeLike | None = None,
    scales: Scales | None = None,
    name: str = "layers",
) -> EngineBlocks:
    """The cells of llama.cpp's cache, as blocks of ``block_size`` neighbouring ones.

    ``layers`` is a list with a pair ``(k, v)`` for each layer, ``[cells, num_heads*head_size]`` or ``[streams, cells,
    num_heads*head_size]``, and with several streams ``stream`` is which. Cells are handed out one by one and in any
    order, so blocks of more than one are of use only to who has placed tokens so.

    ``v_trans`` is the cache's own: without flash attention V is transposed, ``[num_heads*head_size, cells]``, and the
    elements of a row lie a cache apart. Such V is refused, and ``part="k"`` is all that can be moved. A quantised cache
    is one of bytes, whose blocks of 32 elements hold their scale: ``scales="inline"``, with a head dimension that is a
    multiple of 32.

    ``part``, ``dtype`` and ``scales`` are as for :func:`from_vllm`, and so are the errors. No cell is reserved.
    """
    if not isinstance(v_trans, bool):
        raise KvbmTypeError(f"v_trans is {v_trans!r}, expected True or False")
    if v_trans and part != "k":
        raise KvbmValueError(
            "v_trans is True: V is transposed, [num_heads*head_size, cells], so the elements of a row do not lie "
            'together, and only part="k" has rows'
        )
    tokens = as_count(block_size, "block_size", 1)
    heads = as_count(num_kv_heads, "num_kv_heads", 1)
    tensors = read(layers, "l/o/si|nsi", name, part)
    tensors.check_order([tensors.order], "a cache of cells")
    if "n" in tensors.axes:
        streams = tensors.extent("n")
        if stream is None and streams != 1:
            required(None, "stream", f"the cache has {streams}, and nothing tells which one is meant")
        which = 0 if stream is None else as_count(stream, "stream", 0)
        if which >= streams:
            raise KvbmIndexError(f"stream is {which}, expected 0 to {streams - 1}")
        tensors.index("n", which)
    tensors.split_heads(heads)
    tensors.split("s", "b", "t", tokens)
    return tensors.blocks(dtype, scales)
