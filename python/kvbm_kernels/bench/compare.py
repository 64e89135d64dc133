"""Two runs, compared test by test."""

from __future__ import annotations

import csv
import io
import statistics
import sys
from collections.abc import Iterable
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from kvbm_kernels._starting import is_terminal, say
from kvbm_kernels._wording import counted
from kvbm_kernels.bench.results import KEY, SHAPE, Row, Saved
from kvbm_kernels.bench.table import print_table

# Values of a field in an error.
_MOST = 3


class Matched(NamedTuple):
    """The tests that both runs have, and how many only one of them has."""

    pairs: list[tuple[Row, Row]]
    only_before: int
    only_after: int


def match(before: list[Row], after: list[Row]) -> Matched:
    """Bring together what is the same test, in the order of the first run."""
    before_keys, after_keys = _keys(before, after)
    found = dict(zip(after_keys, after, strict=True))
    pairs = [(row, found[key]) for row, key in zip(before, before_keys, strict=True) if key in found]
    return Matched(pairs, len(before) - len(pairs), len(found.keys() - set(before_keys)))


def difference(before: list[Row], after: list[Row], before_name: str, after_name: str) -> str:
    """Of runs without a test in common, the first field that keeps any two tests apart, and what it is in each."""
    keys = _keys(before, after)
    shared: set[tuple[Any, ...]] = {()}
    for i, name in enumerate(_names(before, after)):
        first, second = ([key for key in of if key[:i] in shared] for of in keys)
        shared = {key[: i + 1] for key in first} & {key[: i + 1] for key in second}
        if not shared:
            values = [_listed(key[i] for key in of) for of in (first, second)]
            return f"{name} is {values[0]} in {before_name}, {values[1]} in {after_name}"
    raise ValueError("the runs have a test in common")


def _names(before: list[Row], after: list[Row]) -> list[str]:
    """The fields that tell tests apart."""
    # JSON tells more tests apart than CSV: what one of them does not know is no difference.
    has_shapes = all(all(row.shape) for row in [*before, *after])
    return [*KEY, *(SHAPE if has_shapes else ()), "total_bytes", "copy_size"]


def _keys(before: list[Row], after: list[Row]) -> list[list[tuple[Any, ...]]]:
    """The values of these fields, of the tests of both runs."""
    names = _names(before, after)
    return [[tuple(row.field(name) for name in names) for row in rows] for rows in (before, after)]


def _listed(values: Iterable[object]) -> str:
    different = [str(value) for value in dict.fromkeys(values)]
    return ", ".join([*different[:_MOST], *(["..."] if len(different) > _MOST else [])])


def show_facts(before: Saved, after: Saved, before_name: str, after_name: str) -> None:
    """Where each run was measured, and in what that differs."""
    if not before.facts and not after.facts:
        return
    for name, saved in ((before_name, before), (after_name, after)):
        say(f"{name}: {'; '.join(saved.facts.values()) or 'it does not tell its machine'}")
    common = [what for what in before.facts if what in after.facts]
    differing = [what for what in common if before.facts[what] != after.facts[what]]
    if differing:
        say(f"The runs differ in: {', '.join(differing)}")


def _is_within_spread(before: Row, after: Row) -> bool | None:
    """Whether each median is between the fastest and the slowest sample of the other run; None for a CSV."""
    if before.spread_ms is None or after.spread_ms is None:
        return None
    pairs = ((before.median_ms, after.spread_ms), (after.median_ms, before.spread_ms))
    return all(fastest <= median <= slowest for median, (fastest, slowest) in pairs)


def show(matched: Matched, before: str, after: str) -> None:
    """A table for a terminal, CSV for a pipe; the summary is on standard error."""
    ratios = [b.bandwidth_gbps / a.bandwidth_gbps for a, b in matched.pairs]
    within = [_is_within_spread(a, b) for a, b in matched.pairs]
    header = [*KEY, "copy_size", "before_gbps", "after_gbps", "ratio"]
    lines = [
        [
            *[str(getattr(a, name)) for name in (*KEY, "copy_size")],
            *[f"{a.bandwidth_gbps:.2f}", f"{b.bandwidth_gbps:.2f}", f"{ratio:.3f}"],
        ]
        for (a, b), ratio in zip(matched.pairs, ratios, strict=True)
    ]
    is_shown = is_terminal(sys.stdout)
    if is_shown:
        table = Table(title=f"{after} over {before}")
        for name in header:
            left = name in ("pattern", "direction", "backend")
            table.add_column(name, justify="left" if left else "right", no_wrap=True)
        for line, is_within in zip(lines, within, strict=True):
            # Figures stay below each other.
            mark = ("~" if is_within else " ") if any(within) else ""
            table.add_row(*line[:-1], line[-1] + mark)
        print_table(table, Console(markup=False))
    else:
        words = {True: "yes", False: "no", None: ""}
        marked = [[*line, words[is_within]] for line, is_within in zip(lines, within, strict=True)]
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([[*header, "within_spread"], *marked])
        print(text.getvalue(), end="")
    if any(within):
        say(
            f"{'~' if is_shown else 'within_spread'}: {within.count(True)} of {counted(len(within), 'ratio')}; "
            "each median is between the fastest and the slowest sample of the other run"
        )
    say(
        f"{counted(len(ratios), 'test')}: ratio {min(ratios):.3f} to {max(ratios):.3f}, "
        f"geometric mean {statistics.geometric_mean(ratios):.3f}"
    )
    for count, name in ((matched.only_before, before), (matched.only_after, after)):
        if count:
            say(f"{count} more only in {name}")
