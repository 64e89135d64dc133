"""What moves between two ways of dividing heads or layers: who reads what from whom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from kvbm_kernels._wording import a_type, counted
from kvbm_kernels.errors import KvbmTypeError, KvbmValueError
from kvbm_kernels.layouts import as_count

if TYPE_CHECKING:
    from kvbm_kernels.views import View

    # What one destination or source has: a view, or several.
    Views: TypeAlias = View | Sequence[View]

Range: TypeAlias = tuple[int, int]
"""The first index, and the one after the last."""

# (source, its range, destination, its range), each range counted from the first index that its holder has.
T = TypeVar("T", bound=tuple[int, Range, int, Range])

# What heads and layers are counted as, and who holds them.
_COUNTED = {"heads": "nh", "layers": "nl"}
_HOLDER = {"heads": "rank", "layers": "stage"}


@dataclass(frozen=True)
class Plan(Generic[T]):
    """Who reads what from whom: a sequence of transfers that together give every destination all it holds, once.

    ``what`` is "heads" or "layers". ``src`` and ``dst`` are the range of the model's heads or layers that each source
    and each destination holds.
    """

    what: str
    src: tuple[Range, ...]
    dst: tuple[Range, ...]
    transfers: tuple[T, ...]

    def __iter__(self) -> Iterator[T]:
        return iter(self.transfers)

    def __len__(self) -> int:
        return len(self.transfers)

    def of(self, src: int) -> tuple[T, ...]:
        """What one source is read for; nothing, if another that holds the same is read in its place."""
        return self._of(0, "src", src, self.src)

    def to(self, dst: int) -> tuple[T, ...]:
        """What one destination reads."""
        return self._of(2, "dst", dst, self.dst)

    def views(self, dsts: Sequence[Views], srcs: Sequence[Views]) -> tuple[list[View], list[View]]:
        """The parts of these views that the transfers are between, for ``copy_blocks(*plan.views(dsts, srcs))``.

        There is a view for each destination and each source, of the heads or layers that it holds; or a list of views,
        such as its groups of layers, as many for each. Raises KvbmTypeError and KvbmValueError for others.
        """
        to, of = self._lists("dsts", dsts, self.dst), self._lists("srcs", srcs, self.src)
        for name, lists in (("dsts", to), ("srcs", of)):
            for i, views in enumerate(lists):
                if len(views) != len(to[0]):
                    raise KvbmValueError(
                        f"{name}[{i}] is a list of {counted(len(views), 'view')}, dsts[0] of {len(to[0])}"
                    )
        # Ranks all have the model's layers; a stage may number its own.
        fields = ("parts", "layers") if self.what == "heads" else ("parts",)
        for src, _, dst, _ in self.transfers:
            check_groups(dsts[dst], srcs[src], f"dsts[{dst}]", f"srcs[{src}]", fields)
        pairs = [
            (self._part(dst_view, dst_range), self._part(src_view, src_range))
            for src, src_range, dst, dst_range in self.transfers
            for dst_view, src_view in zip(to[dst], of[src], strict=True)
        ]
        return [dst for dst, _ in pairs], [src for _, src in pairs]

    def __str__(self) -> str:
        holder = _HOLDER[self.what]
        lines = [
            f"{holder} {src} {self.what} {src_range[0]}:{src_range[1]} -> "
            f"{holder} {dst} {self.what} {dst_range[0]}:{dst_range[1]}"
            for src, src_range, dst, dst_range in self.transfers
        ]
        total = counted(max(stop for _, stop in self.src), self.what[:-1])
        return "\n".join([f"{total}, {counted(len(self.src), holder)} to {len(self.dst)}", *lines])

    def _of(self, place: int, name: str, number: int, held: tuple[Range, ...]) -> tuple[T, ...]:
        if as_count(number, name, 0) >= len(held):
            raise KvbmValueError(f"{name} is {number}, expected 0 to {len(held) - 1}")
        return tuple(transfer for transfer in self.transfers if transfer[place] == number)

    def _lists(self, name: str, views: Any, held: tuple[Range, ...]) -> list[list[View]]:
        """The views of each destination or source, which have to be of what it holds."""
        if not isinstance(views, list | tuple):
            raise KvbmTypeError(f"{name} is {a_type(views)}, expected a list of {counted(len(held), 'view')}")
        if len(views) != len(held):
            raise KvbmValueError(f"{name} is a list of {len(views)}, expected {counted(len(held), 'view')}")
        symbol = _COUNTED[self.what]
        lists = []
        for i, (each, (start, stop)) in enumerate(zip(views, held, strict=True)):
            several = isinstance(each, list | tuple)
            lists.append(list(each) if several else [each])
            for j, view in enumerate(lists[-1]):
                where = f"{name}[{i}][{j}]" if several else f"{name}[{i}]"
                shape = getattr(view, "shape", None)
                if not hasattr(shape, symbol):
                    raise KvbmTypeError(f"{where} is {a_type(view)}, expected a view")
                count = getattr(shape, symbol)
                if count != stop - start:
                    raise KvbmValueError(f"{where} has {symbol} = {count}, expected {stop - start}")
        return lists

    def _part(self, view: View, part: Range) -> View:
        return view.heads(*part) if self.what == "heads" else view.layers(*part)


def check_groups(dsts: object, srcs: object, dst_name: str, src_name: str, fields: Sequence[str]) -> None:
    """Views that say what they have of a model, as engines.LayerGroups does, have to say the same on both sides.

    Their shapes alone would let K go to V, or one layer to another. Raises KvbmValueError; lists that say nothing pass.
    """
    if not isinstance(dsts, list | tuple) or not isinstance(srcs, list | tuple):
        return
    for field in fields:
        of_dsts, of_srcs = getattr(dsts, field, None), getattr(srcs, field, None)
        if of_dsts is not None and of_srcs is not None and of_dsts != of_srcs:
            raise KvbmValueError(
                f"{dst_name} has {field} {of_dsts} and {src_name} {of_srcs}, expected the same in the same order, or "
                "plain lists of views"
            )


def overlaps(src: Sequence[Range], dst: Sequence[Range]) -> Iterator[tuple[int, Range, int, Range]]:
    """What each destination reads from which source, as the transfers of a plan are.

    Sources that share anything have to hold the same. The destinations that hold the same are then spread over the
    sources that have it, in order, and a destination that nobody else doubles reads from the first of them.
    """
    holders = _by_range(src)
    readers = _by_range(dst)
    for dst_rank, dst_range in enumerate(dst):
        alike = readers[dst_range]
        for src_range, ranks in holders.items():
            start, stop = max(src_range[0], dst_range[0]), min(src_range[1], dst_range[1])
            if start < stop:
                rank = ranks[alike.index(dst_rank) * len(ranks) // len(alike)]
                yield rank, _within(src_range, start, stop), dst_rank, _within(dst_range, start, stop)


def _by_range(ranges: Sequence[Range]) -> dict[Range, list[int]]:
    found: dict[Range, list[int]] = {}
    for rank, each in enumerate(ranges):
        found.setdefault(each, []).append(rank)
    return found


def _within(outer: Range, start: int, stop: int) -> Range:
    return start - outer[0], stop - outer[0]
