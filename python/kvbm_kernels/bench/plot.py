"""Pictures of runs: bandwidth against the size of a piece, a panel for each direction and batch."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from kvbm_kernels.bench.cases import DIRECTIONS
from kvbm_kernels.bench.outputs import write_output
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
# In inches: a panel at least, and what a name takes of its height.
_WIDTH, _HEIGHT, _NAME_HEIGHT = 5.2, 3.4, 0.19
_COLUMNS = 3


class Line(NamedTuple):
    """Points that belong together, and what stands at their end."""

    label: str
    color: str
    marker: str
    points: list[tuple[int, float]]


def draw(rows: Sequence[Row], image: Path) -> None:
    """Write a picture of measured tests; the suffix of the file says in which format."""
    drawn = io.BytesIO()
    # Text stays text: it can be searched and read aloud. Whatever the user's own settings are, it is no formula.
    with matplotlib.rc_context({"svg.fonttype": "none", "text.usetex": False, "text.parse_math": False}):
        _figure_of(rows).savefig(drawn, dpi=150, format=image.suffix[1:])
    write_output(image, drawn.getvalue())


def _figure_of(rows: Sequence[Row]) -> Figure:
    shown = sorted({(row.direction, row.num_blocks) for row in rows}, key=lambda panel: (_rank(panel[0]), panel[1]))
    columns = min(_COLUMNS, max(sum(direction == each for each, _ in shown) for direction, _ in shown))
    by_pattern = _needs_patterns(rows)
    patterns = list(dict.fromkeys(row.pattern for row in rows))
    panels = []
    for direction, count in shown:
        inside = [row for row in rows if (row.direction, row.num_blocks) == (direction, count)]
        lines = [*_lines(inside, patterns if by_pattern else []), *_ceilings(inside)]
        panels.append((f"{direction}, {count} block{'s' if count > 1 else ''}", lines))
    # As high as the names of the fullest panel need.
    height = max(_HEIGHT, _NAME_HEIGHT * max(len(lines) for _, lines in panels) + 1)
    in_column = -(-len(panels) // columns)
    figure = Figure(figsize=(_WIDTH * columns, height * in_column + 0.4), layout="constrained")
    for number, (title, lines) in enumerate(panels):
        panel = figure.add_subplot(in_column, columns, number + 1)
        _panel(panel, lines, _NAME_HEIGHT / (height - 0.8))
        panel.set_title(title, fontsize=11, loc="left")
        panel.set_xlabel("size of a piece")
        panel.set_ylabel("payload, GB/s")
    title = "Bandwidth by size of a piece and by batch"
    if any(row.baseline for row in rows):
        # In one line it is wider than a single panel.
        title += ("\n" if columns == 1 else "; ") + "dashed: the baseline of the same run"
    figure.suptitle(
        title,
        fontsize=12,
        x=0.01,
        ha="left",
    )
    return figure


def _rank(direction: str) -> int:
    return list(DIRECTIONS).index(direction) if direction in DIRECTIONS else len(DIRECTIONS)


def _needs_patterns(rows: Sequence[Row]) -> bool:
    """Whether lines are for a backend and a pattern: for conversions, and where one size of a piece is in several."""
    if any(row.pattern in PATTERNS and PATTERNS[row.pattern].is_conversion for row in rows):
        return True
    found: dict[tuple[str, int, str, int], str] = {}
    return any(
        found.setdefault((row.direction, row.num_blocks, row.backend, row.copy_size), row.pattern) != row.pattern
        for row in rows
    )


def _panel(panel: Axes, lines: Sequence[Line], name_height: float) -> None:
    """Draw lines; ``name_height`` is what a name takes of the panel's height."""
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    sizes = sorted({size for line in lines for size, _ in line.points})
    span = max(sizes[-1] / sizes[0], 4)
    # Room on the right for the names of the lines: nearly half of the width.
    left, right = sizes[0] / span**0.08, sizes[-1] * span**0.06
    for line in lines:
        points: list[tuple[float, float]] = list(line.points)
        if line.color == _CEILING:
            # It is one for all sizes, or nearly.
            points = [(left, points[0][1]), *points, (sizes[-1] * span**0.045, points[-1][1])]
        dashed = "--" if line.color == _CEILING else "-"
        panel.plot(*zip(*points, strict=True), dashed, marker=line.marker, color=line.color, markersize=5)
    panel.set_xscale("log", base=2)
    panel.set_xticks(_spread(sizes), [_size(size) for size in _spread(sizes)], fontsize=8.5)
    panel.xaxis.set_minor_locator(NullLocator())
    panel.grid(alpha=0.25)
    panel.set_xlim(left, sizes[-1] * span**0.85)
    panel.set_ylim(0, 1.12 * max(value for line in lines for _, value in line.points))
    _name(panel, lines, right, name_height)


def _spread(sizes: list[int]) -> list[int]:
    """Those sizes that can be written below the axis without meeting."""
    room = max(sizes[-1] / sizes[0], 4) ** 0.21
    kept: list[int] = []
    for size in sizes:
        if not kept or size / kept[-1] >= room:
            kept.append(size)
    return kept


def _lines(rows: Sequence[Row], patterns: list[str]) -> list[Line]:
    """A line for each backend, and each of the patterns if there are any."""
    grouped: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        key = (row.backend, row.pattern if patterns else "")
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


def _name(panel: Axes, lines: Sequence[Line], right: float, name_height: float) -> None:
    """Write each line's name, and its last figure, at its right end, moved apart where they would meet."""
    top = panel.get_ylim()[1]
    step = name_height * top
    ends = sorted(((line.points[-1][1], line) for line in lines), key=lambda end: end[0])
    heights: list[float] = []
    for value, _ in ends:
        heights.append(max(value, heights[-1] + step) if heights else value)
    # Down again by what the last one stands too high, as far as there is room.
    excess = max(0.0, heights[-1] - 0.97 * top)
    heights = [max(height - excess, i * step) for i, height in enumerate(heights)]
    for height, (value, line) in zip(heights, ends, strict=True):
        panel.annotate(
            f"{line.label}  {_figure(value)}",
            xy=(line.points[-1][0], value),
            xytext=(right, height),
            textcoords="data",
            color=line.color,
            fontsize=8.5,
            va="center",
            arrowprops={"arrowstyle": "-", "color": line.color, "alpha": 0.35, "linewidth": 0.7, "relpos": (0, 0.5)},
        )


def _figure(value: float) -> str:
    """Three digits that count, or all before the point: 9.50, 10.0, 1,234."""
    whole = math.floor(math.log10(float(f"{value:.2e}")))
    return f"{value:,.{max(0, 2 - whole)}f}"


def _size(nbytes: float) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes:g} B"
