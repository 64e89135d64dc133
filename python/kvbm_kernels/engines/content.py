"""Rows that hold K and V of a token and head side by side: left together, or read apart."""

from __future__ import annotations

from typing import SupportsIndex

from kvbm_kernels._wording import counted
from kvbm_kernels.engines.reading import required
from kvbm_kernels.engines.tensors import Part, Scales, Tensors
from kvbm_kernels.errors import KvbmValueError
from kvbm_kernels.layouts import as_count

# fp32, behind K and behind V.
_INLINE_SCALE_NBYTES = 4


def inline_scale(scales: Scales | None, itemsize: int) -> int:
    """How many elements the scale in a row of K or V takes."""
    return _INLINE_SCALE_NBYTES // itemsize if isinstance(scales, str) and scales == "inline" else 0


def read_content(
    tensors: Tensors,
    no: int | None,
    head_size: SupportsIndex | None,
    head_size_v: SupportsIndex | None,
    scales: Scales | None,
    part: Part | None,
) -> None:
    """Read the dimension c as rows, of K|V with ``no`` 1, of K and of V with 2.

    Raises KvbmValueError for what is missing to tell K from V, and for sizes that are not those of the tensors.
    """
    if no not in (1, 2):
        raise KvbmValueError(
            f"no is {no!r}, expected 2 to read K and V of a row apart, or 1 to leave them together, as in MLA"
        )
    content = tensors.extent("c")
    if no == 1:
        if part is not None:
            raise KvbmValueError(f"part is {part!r}, expected none with no=1, which leaves K and V together")
        tensors.rename("c", "d")
        return
    why = f"nothing tells where in a content of {counted(content, 'element')} K ends and V begins"
    scale = inline_scale(scales, tensors.itemsize)
    k = as_count(required(head_size, "head_size", why), "head_size", 1) + scale
    v = k if head_size_v is None else as_count(head_size_v, "head_size_v", 1) + scale
    if k + v != content:
        of_scales = f", each with a scale of {scale}" if scale else ""
        tensors.fail(f"has a content of {content}, expected {k} + {v} elements of K and V{of_scales}")
    if k == v:
        tensors.split("c", "o", "d", k)
        tensors.choose(part)
    elif part is None:
        raise KvbmValueError(
            f'K has rows of {k} elements and V of {v}, which are no one view: part="k" and part="v" are a view each, '
            'and layer_groups(..., parts=("k", "v")) makes both'
        )
    else:
        tensors.narrow("c", 0 if part == "k" else k, k if part == "k" else v)
        tensors.rename("c", "d")
