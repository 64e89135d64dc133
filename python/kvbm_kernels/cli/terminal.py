"""A copy drawn in the terminal: where rows lie on both sides, and what the copy makes of it."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from itertools import pairwise

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbm_kernels.cli.facts import count, describe, reasons
from kvbm_kernels.cli.places import DIMS, Picture, Row, Shown, Side, outer_name, row_name, show
from kvbm_kernels.explanation import Explanation
from kvbm_kernels.layouts import BlockShape

# One a head, over and over. The labels say the same where there are no colours.
_COLOURS = ["cyan", "yellow", "green", "magenta", "blue", "red"]
_GAP = ".."
_MOST_LINES = 44
# The most layers, tokens and heads to show, from all there is to what a drawing cannot do without.
_SIZES = [(8, 16, 16), (4, 16, 8), (4, 8, 8), (3, 8, 4), (3, 4, 4), (3, 3, 3)]
_SEGMENTS = 3


def choose_picture(shape: BlockShape, picture_of: Callable[[Shown], Picture], width: int) -> Picture:
    """The most detailed picture that takes no more than a screen or two of this width."""
    for layers, tokens, heads in _SIZES:
        picture = picture_of(show(shape, layers, 4, tokens, heads))
        if sum(len(list(_lines(picture, side, width))) for side in (picture.src, picture.dst)) <= _MOST_LINES:
            break
    return picture


def draw(console: Console, picture: Picture, found: Explanation, num_blocks: int) -> None:
    """Print the picture and the explanation."""
    shape = picture.shape
    which = "A block" if num_blocks == 1 else f"The first of {num_blocks:,} blocks"
    gaps = "" if picture.shown.is_all else f", {_GAP} leaves rows out"
    _print_folded(console, f"{which} of {shape}: {count(shape.block_nbytes, 'byte')}, in rows of {shape.row_nbytes:,}")
    _print_folded(console, f"0A is the row of token 0 and head A; | ends a segment{gaps}")
    for title, side in (("From", picture.src), ("To", picture.dst)):
        _heading(console, f"{title} {side.kind.title}: {side.kind.memory}")
        for line in _lines(picture, side, console.width):
            # Not cut where it does not fit: the terminal folds it.
            console.print(line, soft_wrap=True)
    _heading(console, "Which bytes go where")
    _print_grid(console, _moves(picture))
    _heading(console, "What the copy does")
    _print_grid(console, describe(found, shape))
    _heading(console, "Why")
    for sentence in reasons(found, shape):
        _print_folded(console, sentence)


def _heading(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, style="bold"))


def _print_folded(console: Console, text: str) -> None:
    console.out("\n".join(textwrap.wrap(text, console.width)), highlight=False)


def _print_grid(console: Console, rows: list[tuple[str, ...]]) -> None:
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in max(rows, key=len):
        table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    with console.capture() as printed:
        console.print(table, highlight=False)
    # Rich fills every column up.
    console.out("\n".join(line.rstrip() for line in printed.get().splitlines()), highlight=False)


def _moves(picture: Picture) -> list[tuple[str, ...]]:
    """The first segments in the order of the destination, in bytes."""
    rows: list[tuple[str, ...]] = []
    for segment in picture.segments(picture.dst)[:_SEGMENTS]:
        first, last = segment[0], segment[-1]
        name = row_name(first, 1) + (f" to {row_name(last, 1)}" if last is not first else "")
        of, to = (_range(picture, side, first, last) for side in (picture.src, picture.dst))
        rows.append((f"  {name}", _chunk_name(first, picture.shape.no), of, "->", to))
    return rows


def _range(picture: Picture, side: Side, first: Row, last: Row) -> str:
    start, end = side.places[first.indices], side.places[last.indices]
    buffer = side.kind.buffer.format(start.buffer)
    return f"{buffer} bytes {start.byte:,} to {end.byte + picture.shape.row_nbytes - 1:,}".lstrip()


def _chunk_name(row: Row, no: int, with_outer: bool = True) -> str:
    return f"l{row.layer} {outer_name(row.outer, no) if with_outer else ''}".rstrip()


def _lines(picture: Picture, side: Side, width: int) -> Iterator[Text]:
    """Rows in the order of memory; each line starts with its buffer and its byte in that."""
    no, nbytes = picture.shape.no, picture.shape.row_nbytes
    mixed = "o" in side.inner
    names = {row.indices: row_name(row, no if mixed else 1) for row in side.rows}
    buffers = {row.buffer: side.kind.buffer.format(row.buffer) for row in side.rows}
    chunks = {row.indices: _chunk_name(row, no, not mixed) for row in side.rows}
    cell = max(map(len, [*names.values(), _GAP]))
    buffer_width, chunk_width = (max(map(len, texts.values())) for texts in (buffers, chunks))
    byte_width = max(len(f"{row.byte:,}") for row in side.rows)
    starts = {segment[0].indices for segment in picture.segments(side)}

    def prefix(row: Row) -> str:
        buffer = f"{buffers[row.buffer]:<{buffer_width}} " if buffer_width else ""
        return f"  {buffer}{row.byte:>{byte_width},}  {chunks[row.indices]:<{chunk_width}} "

    most = max(1, (width - len(prefix(side.rows[0])) - 1) // (cell + 1))
    before: Row | None = None
    for line, following in zip(side.lines, [*side.lines[1:], None], strict=True):
        if before is not None and _leaves_out(before, line[0], nbytes):
            yield Text(f"  {_GAP}")
        cells: list[tuple[Row, bool]] = [(line[0], False)]
        for one, other in pairwise(line):
            if one.byte + nbytes != other.byte:
                cells.append((other, True))
            cells.append((other, False))
        while cells:
            end = _break(side, cells, most)
            part, cells = cells[:end], cells[end:]
            text = Text(prefix(part[0][0]))
            for row, is_gap in part:
                text.append("|" if row.indices in starts else " ")
                colour = _COLOURS[row.head % len(_COLOURS)]
                text.append(_GAP.ljust(cell) if is_gap else names[row.indices].ljust(cell), None if is_gap else colour)
            after = cells[0][0] if cells else following[0] if following else None
            text.append("|" if after is None or after.indices in starts else "")
            yield text
        before = line[-1]


def _break(side: Side, cells: list[tuple[Row, bool]], most: int) -> int:
    """How many cells to put on a line: as many as fit, or a little less to end where inner dimensions do."""
    if len(cells) <= most:
        return len(cells)

    def restarts(end: int) -> int:
        row, is_gap = cells[end]
        return 0 if is_gap else sum(row.indices[DIMS.index(dim)] == 0 for dim in side.inner)

    return max(range(most // 2 + 1, most + 1), key=lambda end: (restarts(end), end))


def _leaves_out(before: Row, row: Row, nbytes: int) -> bool:
    """Whether rows between two lines are not shown."""
    if before.buffer == row.buffer:
        return before.byte + nbytes != row.byte
    return before.buffer + 1 != row.buffer
