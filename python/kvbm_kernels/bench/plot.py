"""Pictures of runs: bandwidth against the size of a piece, a panel for each direction and batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from kvbm_kernels.bench.cases import DIRECTIONS
from kvbm_kernels.bench.patterns import PATTERNS
from kvbm_kernels.bench.results import Row

# Distinct also for readers who see no red and green apart.
_COLORS = {
    "vectorized": "#0072B2",
    "batched": "#D55E00",
    "memcpy_async": "#CC79A7",
    "auto": "#009E73",
    "convert": "#9A6A00",
}
_CEILING = "#555555"
_MARKERS = "osD^vP*X"
_PANEL = (5.2, 3.4)
_COLUMNS = 3
_LINE_HEIGHT = 0.062


class Line(NamedTuple):
    """Points that belong together, and what stands at their end."""

    label: str
    color: str
    marker: str
    points: list[tuple[int, float]]


def draw(rows: Sequence[Row], image: Path) -> None:
    """Write a picture of measured tests; the suffix of the file says in which format."""
    shown = sorted({(row.direction, row.num_blocks) for row in rows}, key=lambda panel: (_rank(panel[0]), panel[1]))
    columns = min(_COLUMNS, max(sum(direction == each for each, _ in shown) for direction, _ in shown))
    lines = -(-len(shown) // columns)
    figure = Figure(figsize=(_PANEL[0] * columns, _PANEL[1] * lines + 0.4), layout="constrained")
    patterns = list(dict.fromkeys(row.pattern for row in rows))
    for number, (direction, count) in enumerate(shown):
        panel = figure.add_subplot(lines, columns, number + 1)
        _panel(panel, [row for row in rows if (row.direction, row.num_blocks) == (direction, count)], patterns)
        panel.set_title(f"{direction}, {count} block{'s' if count > 1 else ''}", fontsize=11, loc="left")
        panel.set_xlabel("size of a piece")
        panel.set_ylabel("payload, GB/s")
    figure.suptitle(
        "Bandwidth by size of a piece and by batch"
        + ("; dashed: the baseline of the same run" if any(row.baseline for row in rows) else ""),
        fontsize=12,
        x=0.01,
        ha="left",
    )
    # Text stays text: it can be searched and read aloud.
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(image, dpi=150)


def _rank(direction: str) -> int:
    return list(DIRECTIONS).index(direction) if direction in DIRECTIONS else len(DIRECTIONS)


def _panel(panel: Axes, rows: Sequence[Row], patterns: list[str]) -> None:
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    lines = [*_lines(rows, patterns), *_ceilings(rows)]
    for line in lines:
        dashed = "--" if line.color == _CEILING else "-"
        panel.plot(*zip(*line.points, strict=True), dashed, marker=line.marker, color=line.color, markersize=5)
    sizes = sorted({size for line in lines for size, _ in line.points})
    panel.set_xscale("log", base=2)
    panel.set_xticks(_spread(sizes), [_size(size) for size in _spread(sizes)])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.grid(alpha=0.25)
    # Room on the right for the names of the lines: nearly half of the width.
    span = max(sizes[-1] / sizes[0], 4)
    panel.set_xlim(sizes[0] / span**0.08, sizes[-1] * span**0.85)
    panel.set_ylim(0, 1.12 * max(value for line in lines for _, value in line.points))
    _name(panel, lines, sizes[-1] * span**0.06)


def _spread(sizes: list[int]) -> list[int]:
    """Those sizes that can be written below the axis without meeting."""
    room = max(sizes[-1] / sizes[0], 4) ** (1 / 4)
    kept: list[int] = []
    for size in sizes:
        if not kept or size / kept[-1] >= room:
            kept.append(size)
    return kept


def _lines(rows: Sequence[Row], patterns: list[str]) -> list[Line]:
    """A line for each backend; also for each pattern where a piece can have one size in several of them."""
    piece_patterns = {name for name in patterns if name in PATTERNS and PATTERNS[name].placement == "adjacent"}
    apart = bool(set(patterns) - piece_patterns) or any(PATTERNS[name].is_conversion for name in piece_patterns)
    grouped: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        key = (row.backend, row.pattern if apart else "")
        grouped.setdefault(key, []).append((row.copy_size, row.bandwidth_gbps))
    return [
        Line(
            f"{backend} {pattern}".strip(),
            _COLORS.get(backend, "#000000"),
            _MARKERS[patterns.index(pattern) % len(_MARKERS)] if pattern else "o",
            sorted(points),
        )
        for (backend, pattern), points in grouped.items()
    ]


def _ceilings(rows: Sequence[Row]) -> list[Line]:
    """What the baseline reached beside the tests, the fastest where several were."""
    grouped: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.baseline:
            name, bandwidth = row.baseline
            at = grouped.setdefault(name, {})
            at[row.copy_size] = max(bandwidth, at.get(row.copy_size, 0))
    return [Line(name, _CEILING, "", sorted(points.items())) for name, points in grouped.items()]


def _name(panel: Axes, lines: Sequence[Line], right: float) -> None:
    """Write each line's name, and its last figure, at its right end, moved apart where they would meet."""
    top = panel.get_ylim()[1]
    step = _LINE_HEIGHT * top
    ends = sorted(((line.points[-1][1], line) for line in lines), key=lambda end: end[0])
    heights: list[float] = []
    for value, _ in ends:
        heights.append(max(value, heights[-1] + step) if heights else value)
    # Down again by what the last one stands too high, as far as there is room.
    excess = max(0.0, heights[-1] - 0.97 * top)
    heights = [max(height - excess, i * step) for i, height in enumerate(heights)]
    for height, (value, line) in zip(heights, ends, strict=True):
        panel.annotate(
            f"{line.label}  {value:.3g}",
            xy=(line.points[-1][0], value),
            xytext=(right, height),
            textcoords="data",
            color=line.color,
            fontsize=8.5,
            va="center",
            arrowprops={"arrowstyle": "-", "color": line.color, "alpha": 0.35, "linewidth": 0.7, "relpos": (0, 0.5)},
        )


def _size(nbytes: float) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:g} B"
