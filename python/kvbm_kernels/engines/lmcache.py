"""LMCache's memory objects. docs/engines/lmcache.md has the shapes."""

from __future__ import annotations

from typing import Any, SupportsIndex

from kvbm_kernels._wording import counted
from kvbm_kernels.dtypes import DTypeLike
from kvbm_kernels.engines.blocks import EngineBlocks
from kvbm_kernels.engines.content import inline_scale, read_content
from kvbm_kernels.engines.reading import as_optional, one_of, read
from kvbm_kernels.engines.tensors import Part, Scales, Tensors
from kvbm_kernels.errors import KvbmValueError
from kvbm_kernels.layouts import as_count

_FORMATS = {"KV_2LTD": "k/olsi|lsi", "KV_T2D": "k/l/soi", "KV_2TD": "k/l/osi", "KV_MLA_FMT": "k/1lsd"}

REFUSED = {
    "BINARY": "what it holds is compressed, and has no rows",
    "BINARY_BUFFER": "what it holds is compressed, and has no rows",
    "EC_TD": "it holds what an encoder has put out, and no K and V",
    "HS_TD": "it holds hidden states, and no K and V",
}


def from_lmcache(
    objects: Any,
    *,
    fmt: str,
    block_size: SupportsIndex,
    num_kv_heads: SupportsIndex,
    no: int | None = None,
    head_size: SupportsIndex | None = None,
    head_size_v: SupportsIndex | None = None,
    part: Part | None = None,
    dtype: DTypeLike | None = None,
    scales: Scales | None = None,
    name: str = "objects",
) -> EngineBlocks:
    """The tokens of LMCache's memory objects, as blocks of ``block_size``, those of the first object first.

    ``objects`` are the tensors of memory objects, one or a list, which all hold as many tokens; what is left of them
    after the last whole block is left out. ``fmt`` is the name of their ``MemoryFormat``:

    - ``"KV_2LTD"``: ``[2, num_layers, tokens, num_heads*head_size]``. Of engines that keep K and V in one row it is
      ``[1, num_layers, tokens, num_heads*content]``, or the same without the 1, and read as :func:`from_vllm` does it,
      with ``no``, ``head_size`` and ``head_size_v``
    - ``"KV_T2D"``: a list of ``[tokens, 2, num_heads*head_size]`` for each layer, and ``"KV_2TD"``: of ``[2, tokens,
      num_heads*head_size]``; ``objects`` is then a list of such lists
    - ``"KV_MLA_FMT"``: ``[1, num_layers, tokens, aligned_head_size]``; ``head_size`` is what of a row is used

    Other formats are refused with the reason. ``part``, ``dtype`` and ``scales`` are as for :func:`from_vllm`, and so
    are the errors. No block is reserved.
    """
    one_of(fmt, "fmt", _FORMATS, REFUSED)
    tokens = as_count(block_size, "block_size", 1)
    heads = as_count(num_kv_heads, "num_kv_heads", 1)
    single = fmt in ("KV_2LTD", "KV_MLA_FMT") and not isinstance(objects, list | tuple)
    tensors = read([objects] if single else objects, _FORMATS[fmt], name, o=None if fmt == "KV_2LTD" else 2)
    tensors.check_order([tensors.order], f"format {fmt!r}")
    if fmt == "KV_MLA_FMT":
        if heads != 1:
            raise KvbmValueError(f"num_kv_heads is {heads}, expected 1 for format {fmt!r}")
        if as_optional(no, "no", 1) not in (None, 1) or head_size_v is not None:
            raise KvbmValueError(
                f"no is {no!r} and head_size_v {head_size_v!r}, expected none for format {fmt!r}: K and V are one row"
            )
        if head_size is not None:
            used = as_count(head_size, "head_size", 1)
            if used > tensors.extent("d"):
                row = counted(tensors.extent("d"), "element")
                tensors.fail(f"has rows of {row}, expected at least head_size, {used}")
            tensors.narrow("d", 0, used)
        tensors.choose(part)
    else:
        tensors.split_heads(heads)
        _read_planes(tensors, no, head_size, head_size_v, scales, part)
    tensors.split("s", "b", "t", tokens)
    return tensors.blocks(dtype, scales)


def _read_planes(
    tensors: Tensors,
    no: int | None,
    head_size: SupportsIndex | None,
    head_size_v: SupportsIndex | None,
    scales: Scales | None,
    part: Part | None,
) -> None:
    """K and V in a plane each, or both in rows of one."""
    planes = tensors.extent("o")
    if planes > 2:
        tensors.fail(f"has {planes} planes, expected 2 for K and V or 1")
    if planes == 1:
        if "o" in tensors.axes:
            tensors.index("o", 0)
        tensors.rename("d", "c")
        read_content(tensors, no, head_size, head_size_v, scales, part)
        return
    if as_optional(no, "no", 1) not in (None, 2):
        raise KvbmValueError(f"no is {no!r}, expected 2 for K and V in a plane each, or none")
    tensors.check_heads(inline_scale(scales, tensors.itemsize), head_size=head_size, head_size_v=head_size_v)
    tensors.choose(part)
