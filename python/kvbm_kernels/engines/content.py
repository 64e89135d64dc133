"""Rows that hold K and V of a token and head side by side: left together, or read apart."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex

from kvbm_kernels._wording import counted
from kvbm_kernels.engines.reading import as_optional, required
from kvbm_kernels.engines.tensors import Part, Scales, Tensors, place_of
from kvbm_kernels.errors import KvbmValueError
from kvbm_kernels.layouts import as_count

# fp32, behind K and behind V.
_INLINE_SCALE_NBYTES = 4


def inline_scale(scales: Scales | None, itemsize: int) -> int:
    """How many elements the scale in a row of K or V takes."""
    return _INLINE_SCALE_NBYTES // itemsize if isinstance(scales, str) and scales == "inline" else 0


def row_sizes(head_size: SupportsIndex, head_size_v: SupportsIndex | None, scale: int) -> tuple[int, int]:
    """Elements of K and of V in a row, each with its scale. Without V, as in MLA, K is the row as it is stored."""
    k = as_count(head_size, "head_size", 1)
    v = k if head_size_v is None else as_count(head_size_v, "head_size_v", 0)
    return (k + scale, v + scale) if v else (k, 0)


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
    outers = as_optional(no, "no", 1)
    if outers not in (1, 2):
        raise KvbmValueError(
            f"no is {no!r}, expected 2 to read K and V of a row apart, or 1 to leave them together, as in MLA"
        )
    content = tensors.extent("c")
    is_sized = head_size is not None or head_size_v is not None
    k = v = 0
    if outers == 2 or is_sized:
        why = f"nothing tells where in a content of {counted(content, 'element')} K ends and V begins"
        scale = inline_scale(scales, tensors.itemsize)
        k, v = row_sizes(required(head_size, "head_size", why), head_size_v, scale)
        if k + v != content:
            _refuse_sizes(tensors, k, v, scale, is_said=head_size_v is not None)
        if outers == 2 and not v:
            raise KvbmValueError(f"no is {no!r}, expected 1 for rows without V: head_size_v is 0")
        tensors.is_kv = v > 0
    if outers == 1:
        if part is not None:
            raise KvbmValueError(f"part is {part!r}, expected none with no=1, which leaves K and V together")
        tensors.rename("c", "d")
        return
    if k == v:
        tensors.split("c", "o", "d", k)
        tensors.choose(part)
    elif part is None:
        of_layers = list(tensors.lists) == ["l"]
        both = 'and layer_groups(..., parts=("k", "v")) makes both' if of_layers else "which LayerGroups puts together"
        raise KvbmValueError(
            f"K has rows of {counted(k, 'element')} and V of {v}, which are no one view: "
            f'part="k" and part="v" are a view each, {both}'
        )
    else:
        tensors.narrow("c", *((0, k), (k, v))[place_of(part)])
        tensors.rename("c", "d")


def _refuse_sizes(tensors: Tensors, k: int, v: int, scale: int, *, is_said: bool) -> NoReturn:
    content = tensors.extent("c")
    if not v:
        tensors.fail(f"has a content of {content}, expected head_size, {k}, which without V is the row as it is stored")
    of_scales = f", each with a scale of {scale}" if scale else ""
    hint = "" if is_said else "; of rows without V, as in MLA, head_size_v is 0"
    tensors.fail(f"has a content of {content}, expected {k} + {v} elements of K and V{of_scales}{hint}")
