"""Two runs, compared test by test."""

from __future__ import annotations

import csv
import io
import statistics
import sys
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from kvbm_kernels._starting import is_terminal, say
from kvbm_kernels._wording import counted
from kvbm_kernels.bench.results import KEY, Row
from kvbm_kernels.bench.table import print_table


class Matched(NamedTuple):
    """The tests that both runs have, and how many only one of them has."""

    pairs: list[tuple[Row, Row]]
    only_before: int
    only_after: int


def match(before: list[Row], after: list[Row]) -> Matched:
    """Bring together what is the same test, in the order of the first run."""
    # JSON tells more tests apart than CSV: what one of them does not know is no difference.
    by_shape = all(all(row.shape) for row in [*before, *after])

    def key(row: Row) -> tuple[Any, ...]:
        return (*row.key, *(row.shape if by_shape else ()))

    found = {key(row): row for row in after}
    pairs = [(row, found[key(row)]) for row in before if key(row) in found]
    return Matched(pairs, len(before) - len(pairs), len(found) - len({key(row) for row, _ in pairs}))


def show(matched: Matched, before: str, after: str) -> None:
    """A table for a terminal, CSV for a pipe; the summary is on standard error."""
    ratios = [b.bandwidth_gbps / a.bandwidth_gbps for a, b in matched.pairs]
    header = [*KEY, "copy_size", "before_gbps", "after_gbps", "ratio"]
    lines = [
        [
            *[str(getattr(a, name)) for name in (*KEY, "copy_size")],
            *[f"{a.bandwidth_gbps:.2f}", f"{b.bandwidth_gbps:.2f}", f"{ratio:.3f}"],
        ]
        for (a, b), ratio in zip(matched.pairs, ratios, strict=True)
    ]
    if is_terminal(sys.stdout):
        table = Table(title=f"{after} over {before}")
        for name in header:
            left = name in ("pattern", "direction", "backend")
            table.add_column(name, justify="left" if left else "right", no_wrap=True)
        for line in lines:
            table.add_row(*line)
        print_table(table, Console(markup=False))
    else:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([header, *lines])
        print(text.getvalue(), end="")
    say(
        f"{counted(len(ratios), 'test')}: ratio {min(ratios):.3f} to {max(ratios):.3f}, "
        f"geometric mean {statistics.geometric_mean(ratios):.3f}"
    )
    for count, name in ((matched.only_before, before), (matched.only_after, after)):
        if count:
            say(f"{count} more only in {name}")
