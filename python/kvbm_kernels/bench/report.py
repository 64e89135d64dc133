"""What a run shows while it goes: the CSV on standard output, and everything for people on standard error."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvbm_kernels._starting import drop, is_terminal, reason
from kvbm_kernels._wording import counted
from kvbm_kernels.bench.cases import Case
from kvbm_kernels.bench.results import COLUMNS, Result, Run
from kvbm_kernels.bench.table import print_table, table


class Report:
    """Plain lines for a pipe; on a terminal a bar with the time left below them, and a table at the end."""

    def __init__(self, banner: list[str], cases: list[Case], cost: float, *, keeps_on: bool) -> None:
        """``cost`` is how many turns through its bytes each case takes.

        With ``keeps_on`` rows that standard output does not take are lost, and ``has_lost`` says so; without, OSError
        is raised.
        """
        self._cases = cases
        self._keeps_on = keeps_on
        self.has_lost = False
        self._console = _Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self._is_live = self._console.is_terminal
        self._bar = Progress(
            TextColumn("{task.completed:.0f}%"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=self._console,
            redirect_stdout=False,
            redirect_stderr=False,
            transient=True,
            disable=not self._is_live,
        )
        # A test costs what it moves, and something for its buffers.
        self._weights = [case.total_bytes * cost + (64 << 20) for case in cases]
        self._task = self._bar.add_task("", total=100.0)
        self._title = ""
        self._section = ""
        self._number = 0
        for line in banner:
            self._line(line)
        self._line("")
        self._row(",".join(COLUMNS))

    def __enter__(self) -> Report:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, case: Case) -> None:
        """Say which test comes next."""
        shape = case.shape
        section = (
            f"--- tokens_per_block={shape.nt}, inner={shape.chunk_nbytes} bytes ({shape.chunk_nbytes / 1024:.4g} KB), "
            f"block={shape.block_nbytes} bytes ({shape.block_nbytes / (1 << 20):.1f} MB) ---"
        )
        if case.title != self._title:
            self._line(f"# {case.title}")
        if section != self._section:
            self._line(section)
        self._title, self._section = case.title, section
        self._number += 1
        self._bar.update(self._task, description=f"{case.pattern.name} {case.direction} {case.backend}")

    def tick(self, part: float) -> None:
        """Say that a part of the present test is done."""
        self._bar.advance(self._task, 100 * part * self._weights[self._number - 1] / sum(self._weights))

    def end(self, result: Result) -> None:
        """Show what became of the test."""
        prefix = f"  [{self._number}/{len(self._cases)}] {result.case.label} ... "
        if result.timing is None:
            self._line(f"{prefix}{result.status.upper()}: {result.reason}")
        else:
            timed = f"{result.timing.bandwidth_gbps:.2f} GB/s ({result.timing.median_ms:.4f} ms)"
            ratio = "" if result.ratio is None else f", {result.ratio:.2f} of {result.baseline_name}"
            self._line(f"{prefix}{timed}{ratio}")
            self._row(",".join(result.columns()))
            if beside := result.measured.get("beside"):
                self._line(f"        {_beside(result.baseline_name, beside)}")
        done = sum(self._weights[: self._number]) / sum(self._weights)
        self._bar.update(self._task, completed=100 * done)

    def finish(self, run: Run) -> None:
        """Show the whole, after the bar is gone."""
        if self._is_live and run.counts["measured"]:
            print_table(table(run.as_dict()), self._console)
        for result in run.results:
            if result.status in ("wrong", "failed"):
                self._line(f"{result.status.upper()}: {' '.join(result.case.label.split())}: {result.reason}")
        self._line("")
        named = {"not_run": "not run"}
        counts = [f"{count} {named.get(status, status)}" for status, count in run.counts.items() if count]
        missed = sum(bool(result.missed) for result in run.results)
        if missed:
            counts.append(f"{missed} that miss an aim")
        self._line(f"{counted(len(self._cases), 'test')}: {', '.join(counts)}")
        self._line("Interrupted." if run.interrupted else "Done.")

    def _line(self, text: str) -> None:
        try:
            self._console.print(text)
        except OSError:
            # The results are elsewhere.
            drop(sys.stderr)

    def _row(self, text: str) -> None:
        if self._is_live and is_terminal(sys.stdout):
            # The bar is on the same terminal, and has to make room.
            self._console.print(text)
            return
        try:
            print(text, flush=True)
        except OSError as error:
            if not self._keeps_on:
                raise
            self.has_lost = True
            drop(sys.stdout)
            if not isinstance(error, BrokenPipeError):
                self._line(f"kvbench: error: standard output: {reason(error)}")


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise it, where Rich would end the process."""
        raise


def _beside(baseline: str, beside: dict[str, Any]) -> str:
    def slowdowns(of: dict[str, Any]) -> str:
        part = "" if of["overlapped"] else " (not all of it ran beside)"
        return f"{of['compute_slowdown']:.3f} and {of['transfer_slowdown']:.3f}{part}"

    return (
        f"beside {beside['kernel']}, times over those alone: kernel and transfer {slowdowns(beside)}; "
        f"kernel and {baseline} {slowdowns(beside['baseline'])}"
    )
