"""What a run consists of: its tests, one for each combination of what was asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvbm_kernels.bench.backends import usual_backends
from kvbm_kernels.bench.patterns import Pattern
from kvbm_kernels.layouts import BlockShape

# Where a direction reads, and where it writes.
DIRECTIONS = {
    "h2d": ("host", "device"),
    "d2h": ("device", "host"),
    "d2d": ("device", "device"),
    "h2h": ("host", "host"),
}


@dataclass(frozen=True)
class Case:
    """One test."""

    shape: BlockShape
    num_blocks: int
    pattern: Pattern
    direction: str
    backend: str
    baseline: str = "copy"
    """"copy", a plain copy of as many bytes; or "permute", the array library's own way."""
    max_sms: int | None = None
    beside: str | None = None
    """The kernel to run beside the transfer: "gemm" or "memory"."""
    title: str = ""
    """What the row of a suite is about."""
    aims: Mapping[str, float] = field(default_factory=dict)
    """What a suite expects: "ratio" at least, "host_ms" and "compute_slowdown" at most."""

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.shape.block_nbytes

    @property
    def copy_size(self) -> int:
        return self.pattern.run_nbytes(self.shape)

    @property
    def label(self) -> str:
        """How the per-test line names it."""
        return f"tpb={self.shape.nt} N={self.num_blocks:3} {self.pattern.name} {self.direction:<6} {self.backend:<12}"


def combinations(
    shapes: Iterable[BlockShape],
    num_blocks: Sequence[int],
    patterns: Sequence[Pattern],
    directions: Sequence[str],
    backends: Sequence[str] | None,
    *,
    baseline: str = "copy",
    max_sms: int | None = None,
    beside: str | None = None,
    title: str = "",
    aims: Mapping[str, float] | None = None,
) -> list[Case]:
    """Every combination, the first named changing slowest."""
    return [
        Case(shape, count, pattern, direction, backend, baseline, max_sms, beside, title, aims or {})
        for shape in shapes
        for count in num_blocks
        for pattern in patterns
        for direction in directions
        for backend in (usual_backends(pattern, direction) if backends is None else backends)
    ]
