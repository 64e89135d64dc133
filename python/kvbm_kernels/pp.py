"""Pipeline parallelism: what moves from one division of the layers into stages to another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, SupportsIndex, TypeAlias

from kvbm_kernels._wording import counted
from kvbm_kernels.errors import KvbmTypeError, KvbmValueError
from kvbm_kernels.layouts import as_count, as_integer
from kvbm_kernels.plans import Plan, Range, overlaps

__all__ = ["Plan", "Stages", "Transfer", "plan"]

Stages: TypeAlias = SupportsIndex | Sequence[int]


class Transfer(NamedTuple):
    """Layers that a destination stage reads from a source stage, counted from the first that each of the two holds."""

    src_stage: int
    src_layers: Range
    dst_stage: int
    dst_layers: Range


def plan(from_stages: Stages, to_stages: Stages, nl: SupportsIndex) -> Plan[Transfer]:
    """What the stages of one division of ``nl`` layers read from those of another.

    Stages are their number, if they are of one size, or a list with the layers of each: engines differ in where they
    put what is left over, and nothing is guessed. The transfers come in the order of the destination stages and of
    their layers, and their ranges fit :meth:`View.layers` of the views of the two stages. Raises KvbmTypeError, and
    KvbmValueError for stages that ``nl`` layers cannot be divided into, naming them.
    """
    nl = as_count(nl, "nl", 1)
    src, dst = (
        tuple(_layers_of_stages(stages, nl, name))
        for name, stages in (("from_stages", from_stages), ("to_stages", to_stages))
    )
    return Plan("layers", src, dst, tuple(Transfer(*each) for each in overlaps(src, dst)))


def _layers_of_stages(stages: Any, nl: int, name: str) -> list[Range]:
    number = as_integer(stages)
    if number is not None:
        count = as_count(number, name, 1)
        if nl % count:
            raise KvbmValueError(
                f"{name}: {counted(nl, 'layer')} cannot be divided into {count} equal stages; expected a list with the "
                "layers of each"
            )
        sizes = [nl // count] * count
    elif isinstance(stages, list | tuple):
        sizes = [as_count(size, f"{name}[{i}]", 1) for i, size in enumerate(stages)]
    else:
        raise KvbmTypeError(f"{name} is {stages!r}, expected a number of stages or a list with the layers of each")
    if sum(sizes) != nl:
        raise KvbmValueError(f"{name} has {counted(sum(sizes), 'layer')} in all, expected nl = {nl}")
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [(end - size, end) for size, end in zip(sizes, ends, strict=True)]
