"""A copy drawn as SVG: the memory of both sides as two tapes, and every segment on its way from one to the other."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple
from xml.etree import ElementTree as Xml

from kvbm_kernels.cli.facts import count, describe, reasons
from kvbm_kernels.cli.places import Indices, Picture, Row, Shown, Side, outer_name, row_name, show
from kvbm_kernels.explanation import Explanation
from kvbm_kernels.layouts import BlockShape

# One a head, over and over; tokens fade.
_COLOURS = ["#4477aa", "#ee9944", "#228833", "#cc6688", "#66aacc", "#aa8855", "#9977bb", "#888888"]
_FAINTEST = 0.45
# The most layers, tokens and heads to show.
_SIZES = [(8, 16, 16), (4, 8, 8), (3, 4, 4), (2, 4, 3), (2, 3, 3), (2, 3, 2)]
_MOST_ROWS = 72

_LETTER, _CELL_HEIGHT, _LINE_GAP, _ROW_GAP = 7.5, 26, 14, 22
_MARGIN, _BETWEEN, _TEXT_LINE = 20, 190, 18


class _Span(NamedTuple):
    left: float
    right: float


def choose_picture(shape: BlockShape, picture_of: Callable[[Shown], Picture]) -> Picture:
    """The most detailed picture that can be read."""
    for layers, tokens, heads in _SIZES:
        picture = picture_of(show(shape, layers, 2, tokens, heads))
        if len(picture.src.rows) <= _MOST_ROWS:
            break
    return picture


def draw(picture: Picture, found: Explanation, num_blocks: int) -> str:
    """The picture and the explanation as the text of an SVG file."""
    shape = picture.shape
    names = {row.indices: row_name(row, 1) for row in picture.src.rows}
    cell = max(map(len, names.values())) * _LETTER + 8
    tapes = [_tape(side, cell, shape.row_nbytes) for side in (picture.src, picture.dst)]
    width = max(760.0, *(span.right for tape in tapes for span in tape.values())) + _MARGIN
    which = "a block" if num_blocks == 1 else f"the first of {num_blocks:,} blocks"
    title = f"{picture.src.kind.title} to {picture.dst.kind.title}: {which} of {shape}"
    facts = [f"{name.strip()}: {value}" for name, value in describe(found, shape)]
    notes = [
        line for text in [*facts, *reasons(found, shape)] for line in textwrap.wrap(text, int(width / _LETTER) - 6)
    ]

    tops = (_MARGIN + 90.0, _MARGIN + 90.0 + _CELL_HEIGHT + _BETWEEN)
    bottom = tops[1] + _CELL_HEIGHT + 70
    height = bottom + len(notes) * _TEXT_LINE + _MARGIN
    root = Xml.Element(
        "svg",
        {
            "xmlns": "http://www.w3.org/2000/svg",
            "viewBox": f"0 0 {width:g} {height:g}",
            "width": f"{width:g}",
            "height": f"{height:g}",
            "font-family": "ui-monospace, Menlo, Consolas, monospace",
            "font-size": "12",
        },
    )
    Xml.SubElement(root, "title").text = title
    Xml.SubElement(root, "rect", {"width": "100%", "height": "100%", "fill": "white"})
    _text(root, _MARGIN, _MARGIN + 10, title, size=15, weight="bold")
    gaps = "" if picture.shown.is_all else "; rows are left out at the dots"
    row = f"a row of {count(shape.row_nbytes, 'byte')}"
    legend = f"A box is {row}, 0A that of token 0 and head A; a band is a segment{gaps}."
    _text(root, _MARGIN, _MARGIN + 32, legend)

    for segment in picture.segments(picture.dst):
        _band(root, segment, tapes, tops)
    for which_side, side, tape, top in zip(("src", "dst"), (picture.src, picture.dst), tapes, tops, strict=True):
        _draw_tape(root, which_side, picture, side, tape, top, names)
    for i, note in enumerate(notes):
        _text(root, _MARGIN, bottom + i * _TEXT_LINE, note)
    Xml.indent(root)
    return Xml.tostring(root, encoding="unicode") + "\n"


def _tape(side: Side, cell: float, row_nbytes: int) -> dict[Indices, _Span]:
    """Where each row is, from left to right in the order of memory."""
    spans: dict[Indices, _Span] = {}
    x = float(_MARGIN)
    before: Row | None = None
    for line in side.lines:
        for row in line:
            if before is not None:
                left_out = before.buffer == row.buffer and before.byte + row_nbytes != row.byte
                x += _ROW_GAP if left_out else 0
                x += _LINE_GAP if row is line[0] else 0
            spans[row.indices] = _Span(x, x + cell)
            x += cell
            before = row
    return spans


def _draw_tape(
    root: Xml.Element,
    which: str,
    picture: Picture,
    side: Side,
    tape: dict[Indices, _Span],
    top: float,
    names: dict[Indices, str],
) -> None:
    above = which == "src"
    heading = f"{'from' if above else 'to'} {side.kind.title}: {side.kind.memory}"
    _text(root, _MARGIN, top - 32 if above else top + _CELL_HEIGHT + 40, heading, weight="bold")
    no, nt = picture.shape.no, picture.shape.nt
    mixed = "o" in side.inner
    for line in side.lines:
        first = line[0]
        chunk = f"l{first.layer} {'' if mixed else outer_name(first.outer, no)}".strip()
        # Byte 0 of every chunk says nothing that its name does not.
        place = f"{chunk} {first.byte:,}" if first.byte else chunk
        _text(root, tape[first.indices].left, top - 8 if above else top + _CELL_HEIGHT + 16, place, size=10)
    for before, row in pairwise(side.rows):
        left, right = tape[before.indices].right, tape[row.indices].left
        if right - left >= _ROW_GAP:
            _text(root, (left + right) / 2, top + 17, "...", anchor="middle")
    for row in side.rows:
        span = tape[row.indices]
        fade = 1 - (1 - _FAINTEST) * row.token / max(1, nt - 1)
        box = Xml.SubElement(
            root,
            "rect",
            {
                "class": f"row {which}",
                "x": f"{span.left:g}",
                "y": f"{top:g}",
                "width": f"{span.right - span.left:g}",
                "height": str(_CELL_HEIGHT),
                "fill": _colour(row),
                "fill-opacity": f"{fade:.2f}",
                "stroke": "white",
                **{f"data-{name}": str(value) for name, value in row._asdict().items()},
            },
        )
        outer = outer_name(row.outer, no)
        chunk = f"layer {row.layer} {outer}".rstrip()
        place = f"{side.kind.buffer.format(row.buffer)} byte {row.byte:,}".lstrip()
        Xml.SubElement(box, "title").text = f"token {row.token}, head {row.head}, {chunk}: {place}"
        name = names[row.indices] + (outer if mixed else "")
        _text(root, (span.left + span.right) / 2, top + 17, name, anchor="middle", size=12 if not mixed else 10)


def _band(root: Xml.Element, segment: list[Row], tapes: list[dict[Indices, _Span]], tops: tuple[float, float]) -> None:
    (left, right), (to_left, to_right) = (
        (tape[segment[0].indices].left, tape[segment[-1].indices].right) for tape in tapes
    )
    start, end = tops[0] + _CELL_HEIGHT, tops[1]
    middle = (start + end) / 2
    path = (
        f"M{left:g},{start:g} C{left:g},{middle:g} {to_left:g},{middle:g} {to_left:g},{end:g} "
        f"L{to_right:g},{end:g} C{to_right:g},{middle:g} {right:g},{middle:g} {right:g},{start:g} Z"
    )
    Xml.SubElement(root, "path", {"class": "segment", "d": path, "fill": _colour(segment[0]), "fill-opacity": "0.3"})


def _colour(row: Row) -> str:
    return _COLOURS[row.head % len(_COLOURS)]


def _text(
    root: Xml.Element, x: float, y: float, text: str, *, size: int = 12, weight: str = "normal", anchor: str = "start"
) -> None:
    attributes = {"x": f"{x:g}", "y": f"{y:g}", "fill": "#111111"}
    if size != 12:
        attributes["font-size"] = str(size)
    if weight != "normal":
        attributes["font-weight"] = weight
    if anchor != "start":
        attributes["text-anchor"] = anchor
    Xml.SubElement(root, "text", attributes).text = text
