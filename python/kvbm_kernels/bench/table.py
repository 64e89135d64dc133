"""The results of a run as a table, from its JSON: at the end of a run on a terminal, and by ``kvbench show``."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from kvbm_kernels._starting import is_terminal
from kvbm_kernels._wording import counted
from kvbm_kernels.bench.results import built

Result = dict[str, Any]
_LEFT = ("", "pattern", "way", "backend", "baseline", "route")


# More than any table takes.
_ANY_WIDTH = 1 << 16


def print_table(made: Table, console: Console) -> None:
    """Print a table on a terminal. One that is wider has no frame, and lines that the terminal folds: none is cut."""
    options = console.options.update(max_width=_ANY_WIDTH)
    if console.measure(made, options=options).maximum <= console.width:
        console.print(made)
    else:
        console.out(as_text(made), highlight=False)


def as_text(made: Table) -> str:
    """A table without a frame, as wide as it takes."""
    made.box = None
    wide = Console(width=_ANY_WIDTH, highlight=False, markup=False, color_system=None, force_terminal=False)
    with wide.capture() as captured:
        wide.print(made)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def table(run: dict[str, Any]) -> Table:
    """All tests that were measured, with the baseline that each was sampled in turns with."""
    results: list[Result] = [result for result in run["results"] if result["status"] == "measured"]
    has_aims = any(result["aims"] for result in results)
    has_beside = any(result.get("beside") for result in results)
    has_titles = any(result["title"] for result in results)
    columns = [""] if has_titles else []
    columns += ["tokens", "blocks", "pattern", "way", "backend", "piece", "ms", "GB/s", "baseline", "ratio"]
    columns += ["aim"] if has_aims else []
    columns += ["host ms", "route"]
    columns += ["slows the kernel", "is slowed"] if has_beside else []
    made = Table(
        title="GB/s of payload, and their ratio to the baseline's",
        title_justify="left",
        box=box.ROUNDED,
        pad_edge=False,
    )
    for name in columns:
        made.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=True)
    title = ""
    for result in results:
        # Once for the tests that share it.
        shown = "" if result["title"] == title else str(result["title"])
        title = result["title"]
        made.add_row(*([shown] if has_titles else []), *_cells(result, has_aims, has_beside))
    return made


def _cells(result: Result, has_aims: bool, has_beside: bool) -> list[str]:
    baseline = result["baseline"]
    cells = [
        *[str(result[name]) for name in ("tokens_per_block", "num_blocks", "pattern", "direction", "backend")],
        str(result["copy_size"]),
        f"{result['median_ms']:.4f}",
        f"{result['bandwidth_gbps']:.2f}",
        f"{baseline['name']} {baseline['bandwidth_gbps']:.2f}",
        f"{result['ratio']:.3f}",
    ]
    if has_aims:
        named = {name: f"{aim:g}" if name == "ratio" else f"{name} {aim:g}" for name, aim in result["aims"].items()}
        cells.append(", ".join(aim + " missed" * (name in result["missed"]) for name, aim in named.items()))
    cells += [f"{result['host_ms']:.3f}", "+".join(result["route"]) + (" (cached)" if result["cached"] else "")]
    if has_beside:
        beside = result.get("beside")
        cells += [_slowdown(beside, side) if beside else "" for side in ("compute", "transfer")]
    return cells


def _slowdown(beside: dict[str, Any], side: str) -> str:
    part = "" if beside["overlapped"] else " in part"
    return f"{beside[f'{side}_slowdown']:.3f}{part} (baseline {beside['baseline'][f'{side}_slowdown']:.3f})"


class Shown(NamedTuple):
    """A saved run: where it comes from, its table, and what has no figure."""

    head: str
    table: Table
    rest: str

    @classmethod
    def of(cls, run: dict[str, Any]) -> Shown:
        """Raises what is in BROKEN for what is none of kvbench's."""
        return cls("\n".join(_head(run)), table(run), "\n".join(_rest(run)))

    def print(self) -> None:
        print(self.head)
        if is_terminal(sys.stdout):
            print_table(self.table, Console(highlight=False, markup=False))
        else:
            print(as_text(self.table))
        print(self.rest)


def _head(run: dict[str, Any]) -> list[str]:
    provenance = run["provenance"]
    lines = [provenance["command"], f"{provenance['date']}, {built(provenance['kvbm_kernels'])}"]
    for machine in provenance["machines"].values():
        lines.append(f"{machine['device']}, {machine['array_library']}, cache {machine['cache_bytes'] >> 20} MiB")
    return lines


def _rest(run: dict[str, Any]) -> list[str]:
    lines = []
    for result in run["results"]:
        if result["status"] != "measured":
            named = " ".join(str(result[name]) for name in ("title", "pattern", "direction", "backend") if result[name])
            lines.append(f"{result['status']}: {counted(result['num_blocks'], 'block')}, {named}: {result['reason']}")
    counts = [f"{count} {status.replace('_', ' ')}" for status, count in run["counts"].items() if count]
    missed = sum(bool(result["missed"]) for result in run["results"])
    return [*lines, ", ".join([*counts, *([f"{missed} that miss an aim"] if missed else [])])]
