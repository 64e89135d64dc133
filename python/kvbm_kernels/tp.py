"""Tensor parallelism: which heads a rank holds, and what moves from one number of ranks to another."""

from __future__ import annotations

from typing import NamedTuple, SupportsIndex

from kvbm_kernels.errors import KvbmValueError
from kvbm_kernels.layouts import as_count
from kvbm_kernels.plans import Plan, Range, overlaps

__all__ = ["Plan", "Transfer", "heads_of_rank", "plan"]


class Transfer(NamedTuple):
    """Heads that a destination rank reads from a source rank, counted from the first that each of the two holds."""

    src_rank: int
    src_heads: Range
    dst_rank: int
    dst_heads: Range


def heads_of_rank(rank: SupportsIndex, size: SupportsIndex, nh: SupportsIndex) -> Range:
    """The first of the model's ``nh`` KV heads that a rank of ``size`` holds, and the one after the last.

    Ranks share the heads evenly, in order. With more ranks than heads, nh/size of a head each, neighbouring ranks hold
    the same head whole. Raises KvbmTypeError, and KvbmValueError if neither of nh and ``size`` divides the other, or
    ``rank`` is no rank.
    """
    nh = as_count(nh, "nh", 1)
    size = as_count(size, "size", 1)
    rank = as_count(rank, "rank", 0)
    if rank >= size:
        raise KvbmValueError(f"rank is {rank}, expected 0 to {size - 1}")
    each, alike = _share(size, nh)
    return _heads_of(rank, each, alike)


def plan(from_size: SupportsIndex, to_size: SupportsIndex, nh: SupportsIndex) -> Plan[Transfer]:
    """What the ranks of ``to_size`` read from those of ``from_size``, for a model of ``nh`` KV heads.

    Any size goes to any other that the heads allow, such as 2 to 3 with 6 heads. Every destination rank reads each of
    its heads from one rank. Where several hold it, destination ranks that hold it too are spread over them, and one
    that is alone reads from the first: so with ``to_size`` 1, a whole copy, each head has a single writer.

    The transfers come in the order of the destination ranks and of their heads, and their ranges fit
    :meth:`View.heads` of the views of the two ranks. Raises KvbmTypeError, and KvbmValueError for a size that ``nh``
    heads cannot be shared by, naming it.
    """
    nh = as_count(nh, "nh", 1)
    src, dst = (
        tuple(_heads_of_ranks(as_count(size, name, 1), nh, f"{name}: "))
        for name, size in (("from_size", from_size), ("to_size", to_size))
    )
    return Plan("heads", src, dst, tuple(Transfer(*each) for each in overlaps(src, dst)))


def _heads_of_ranks(size: int, nh: int, prefix: str) -> list[Range]:
    each, alike = _share(size, nh, prefix)
    return [_heads_of(rank, each, alike) for rank in range(size)]


def _share(size: int, nh: int, prefix: str = "") -> tuple[int, int]:
    """How many heads a rank has, and how many ranks have the same."""
    if nh % size == 0:
        return nh // size, 1
    if size % nh == 0:
        return 1, size // nh
    raise KvbmValueError(f"{prefix}{nh} heads cannot be shared by {size} ranks: neither number divides the other")


def _heads_of(rank: int, each: int, alike: int) -> Range:
    first = rank // alike * each
    return first, first + each
