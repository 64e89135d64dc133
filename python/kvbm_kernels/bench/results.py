"""What a run found: the columns of the CSV, the JSON with everything, and reading both back."""

from __future__ import annotations

import csv
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvbm_kernels.bench.cases import Case

SCHEMA = "kvbench/1"
COLUMNS = (
    "tokens_per_block",
    "num_blocks",
    "pattern",
    "direction",
    "backend",
    "total_bytes",
    "inner_bytes",
    "copy_size",
    "num_copies",
    "median_ms",
    "bandwidth_gbps",
)
KEY = COLUMNS[:5]
SHAPE = ("layers", "kv_heads", "head_dim", "dtype")
_DEVICES = {"GPU": "cuda", "processor": "host"}
STATUSES = ("measured", "waived", "wrong", "failed", "not_run")


@dataclass(frozen=True)
class Timing:
    """Samples of one call, in milliseconds."""

    samples_ms: list[float]
    total_bytes: int

    @property
    def median_ms(self) -> float:
        return statistics.median(self.samples_ms)

    @property
    def bandwidth_gbps(self) -> float:
        """Payload bytes, counted once, a second, in 10**9."""
        return self.total_bytes / self.median_ms / 1e6

    def as_dict(self) -> dict[str, Any]:
        return {
            "median_ms": self.median_ms,
            "min_ms": min(self.samples_ms),
            "max_ms": max(self.samples_ms),
            "samples_ms": self.samples_ms,
            "bandwidth_gbps": self.bandwidth_gbps,
        }


@dataclass
class Result:
    """What became of one test."""

    case: Case
    status: str
    reason: str = ""
    """Why it is not measured."""
    timing: Timing | None = None
    baseline: Timing | None = None
    baseline_name: str = ""
    measured: dict[str, Any] = field(default_factory=dict)
    """The rest of what is in the JSON."""

    @property
    def ratio(self) -> float | None:
        """The speed, of the baseline's."""
        if self.timing is None or self.baseline is None:
            return None
        return self.baseline.median_ms / self.timing.median_ms

    @property
    def missed(self) -> list[str]:
        """Which aims of a suite were not reached."""
        beside = self.measured.get("beside") or {}
        got = {
            "ratio": self.ratio,
            "host_ms": self.measured.get("host_ms"),
            "compute_slowdown": beside.get("compute_slowdown"),
        }
        missed = []
        for name, aim in self.case.aims.items():
            value = got[name]
            if value is not None and (value < aim if name == "ratio" else value > aim):
                missed.append(name)
        return missed

    def columns(self) -> list[str]:
        """The fields of the CSV row."""
        case = self.case
        if self.timing is None:
            raise ValueError(f"a test that is {self.status} has no row")
        return [
            *map(str, (case.shape.nt, case.num_blocks, case.pattern.name, case.direction, case.backend)),
            *map(str, (case.total_bytes, case.shape.chunk_nbytes, case.copy_size, case.total_bytes // case.copy_size)),
            f"{self.timing.median_ms:.4f}",
            f"{self.timing.bandwidth_gbps:.2f}",
        ]

    def as_dict(self) -> dict[str, Any]:
        case, shape = self.case, self.case.shape
        columns: dict[str, Any] = {
            "tokens_per_block": shape.nt,
            "num_blocks": case.num_blocks,
            "pattern": case.pattern.name,
            "direction": case.direction,
            "backend": case.backend,
            "total_bytes": case.total_bytes,
            "inner_bytes": shape.chunk_nbytes,
            "copy_size": case.copy_size,
            "num_copies": case.total_bytes // case.copy_size,
            "title": case.title,
            "layers": shape.nl,
            "outer_dim": shape.no,
            "kv_heads": shape.nh,
            "head_dim": shape.hd,
            "dtype": str(shape.dtype),
            "status": self.status,
            "reason": self.reason,
        }
        if self.timing is not None and self.baseline is not None:
            columns |= self.timing.as_dict()
            columns["baseline"] = {"name": self.baseline_name, **self.baseline.as_dict()}
            columns["ratio"] = self.ratio
            columns |= self.measured
        return columns | {"aims": dict(case.aims), "missed": self.missed}


@dataclass
class Run:
    """All results of a run, and what it ran on."""

    settings: dict[str, Any]
    provenance: dict[str, Any]
    results: list[Result] = field(default_factory=list)
    interrupted: bool = False

    @property
    def counts(self) -> dict[str, int]:
        return {status: sum(result.status == status for result in self.results) for status in STATUSES}

    def as_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "provenance": self.provenance,
            "settings": self.settings,
            "interrupted": self.interrupted,
            "counts": self.counts,
            "results": [result.as_dict() for result in self.results],
        }


@dataclass(frozen=True)
class Row:
    """A measured test of a saved run, from a CSV or a JSON file."""

    tokens_per_block: int
    num_blocks: int
    pattern: str
    direction: str
    backend: str
    total_bytes: int
    copy_size: int
    median_ms: float
    bandwidth_gbps: float
    shape: tuple[Any, ...]
    """The SHAPE, which tells rows apart too; empty strings from a CSV."""
    spread_ms: tuple[float, float] | None
    """The fastest sample and the slowest; only JSON has them."""
    baseline: tuple[str, float] | None
    """The baseline's name and GB/s; only JSON has it."""

    def field(self, name: str) -> Any:
        """A column, or one of the SHAPE."""
        return self.shape[SHAPE.index(name)] if name in SHAPE else getattr(self, name)


class Saved(NamedTuple):
    """A saved run: its measured tests, and where they were measured."""

    rows: list[Row]
    facts: dict[str, str]
    """The GPU, the processor and the library, by these names; nothing from a CSV."""


def as_rows(results: Sequence[dict[str, Any]]) -> list[Row]:
    """The measured ones of results as in the JSON. Raises what is in BROKEN for what is none of kvbench's."""
    rows = []
    for result in results:
        if "median_ms" not in result:
            continue
        baseline = result.get("baseline")
        shape = [_count(result, name) if name in result else "" for name in SHAPE[:-1]]
        has_spread = "min_ms" in result and "max_ms" in result
        rows.append(
            Row(
                _count(result, "tokens_per_block"),
                _count(result, "num_blocks"),
                _name(result, "pattern"),
                _name(result, "direction"),
                _name(result, "backend"),
                _count(result, "total_bytes"),
                _count(result, "copy_size"),
                _number(result, "median_ms", or_zero=True),
                _number(result, "bandwidth_gbps"),
                (*shape, _name(result, "dtype") if "dtype" in result else ""),
                (_number(result, "min_ms", or_zero=True), _number(result, "max_ms")) if has_spread else None,
                (_name(baseline, "name"), _number(baseline, "bandwidth_gbps")) if baseline else None,
            )
        )
    return rows


def _more_digits(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a CSV with its bandwidth from the time, where that has more digits: for slow copies of few bytes."""
    time, bandwidth = _number(row, "median_ms", or_zero=True), _number(row, "bandwidth_gbps", or_zero=True)
    # Half of the last digit of each, over the whole.
    if time > 0 and 0.005 * time > 0.00005 * bandwidth:
        return {**row, "bandwidth_gbps": _count(row, "total_bytes") / time / 1e6}
    return row


def _count(fields: Mapping[str, Any], name: str) -> int:
    """A whole number that 63 bits hold, as JSON or CSV has it."""
    given = fields[name]
    # Python refuses to read very long ones, and not in these words.
    is_text = isinstance(given, str) and given.isascii() and given.isdecimal() and len(given) < 20
    value = int(given) if is_text or type(given) is int else 0
    if not 0 < value < 1 << 63:
        raise ValueError(f"{name} is {_short(given)}, expected a whole number from 1 to 2**63 - 1")
    return value


def _number(fields: Mapping[str, Any], name: str, *, or_zero: bool = False) -> float:
    value = float(fields[name])
    if not (0 < value < 1 << 63 or (or_zero and value == 0)):
        raise ValueError(f"{name} is {_short(fields[name])}, expected a positive number less than 2**63")
    return value


def _name(fields: Mapping[str, Any], name: str) -> str:
    given = fields[name]
    if not isinstance(given, str) or not re.fullmatch(r"[A-Za-z0-9_. -]{1,100}", given):
        raise ValueError(f"{name} is {_short(given)}, expected a name of letters and digits")
    return given


def _short(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


BROKEN = (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError, csv.Error)
"""What reading raises where a file has something else than kvbench writes."""


def broken(path: Path, error: Exception, what: str = "result") -> ValueError:
    """The error for a file that has."""
    reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
    return ValueError(f"{path} is no {what} of kvbench: {reason}")


def read_saved(path: Path) -> Saved:
    """A saved run. Raises OSError, and ValueError for what is neither CSV nor JSON of kvbench."""
    try:
        text = _read(path)
        if text.lstrip().startswith("{"):
            run = _document(text)
            return Saved(as_rows(run["results"]), _facts(run["provenance"]) if "provenance" in run else {})
        reader = csv.DictReader(text.splitlines())
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(f"the first line is not {','.join(COLUMNS)}")
        return Saved(as_rows([_more_digits(row) for row in reader]), {})
    except BROKEN as error:
        raise broken(path, error) from None


def _facts(provenance: Mapping[str, Any]) -> dict[str, str]:
    machines = provenance["machines"]
    facts = {what: machines[name]["device"] for what, name in _DEVICES.items() if name in machines}
    facts["library"] = built(provenance["kvbm_kernels"])
    # In one line each, whatever is in the file.
    return {what: " ".join(str(text).split()) for what, text in facts.items()}


def read_json(path: Path) -> dict[str, Any]:
    """The JSON of a saved run. Raises OSError, and ValueError for anything else."""
    try:
        text = _read(path)
        if text.startswith(",".join(COLUMNS)):
            raise ValueError("it is the CSV of a run, expected what --json FILE wrote")
        return _document(text)
    except BROKEN as error:
        raise broken(path, error, "JSON") from None


def _read(path: Path) -> str:
    # A spreadsheet may have put the mark in front that only this codec knows.
    return path.read_text(encoding="utf-8-sig")


def _document(text: str) -> dict[str, Any]:
    run = json.loads(text)
    if not isinstance(run, dict) or run.get("schema") != SCHEMA:
        raise ValueError(f"its schema is not {SCHEMA}")
    return run


def built(library: Mapping[str, Any]) -> str:
    """The library of a run, as its provenance has it: the version, and what CUDA it has."""
    name = f"kvbm_kernels {library['version']}"
    if library["is_stub_build"]:
        return f"{name}, stub build"
    driver = "no driver" if library["driver"] is None else f"driver for {library['driver']}"
    return f"{name}, CUDA {library['cuda']}, {driver}"


def as_json(run: Run) -> bytes:
    return (json.dumps(run.as_dict(), indent=1) + "\n").encode()
