"""kvbm-kernels layout: the drawings against the layouts of reference.py, and the explanation against kk.explain()."""

from __future__ import annotations

import io
import json
import re
from itertools import pairwise
from xml.etree import ElementTree as Xml

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kinds
import kvbm_kernels as kk
import reference
from commands import kvbm_kernels, output
from kvbm_kernels.cli.app import run_command

# The buffers of each layout, from a cache of row numbers [1, nl, no, nt, nh, 1].
BUFFERS = {
    "nhd": lambda rows: reference.block_stack(rows, "NHD")[0],
    "hnd": lambda rows: reference.block_stack(rows, "HND")[0],
    "layers": kinds.layers,
    "packed": kinds.packed,
    "operational_nhd": lambda rows: list(reference.operational(rows, "NHD")),
    "operational_hnd": lambda rows: list(reference.operational(rows, "HND")),
    "universal": lambda rows: list(reference.universal(rows)),
}
NAMES = list(BUFFERS)
SVG = "{http://www.w3.org/2000/svg}"


class Expected:
    """Where every row of one block is, by reference.py."""

    def __init__(self, kind: str, nl: int, no: int, nh: int, nt: int, row_nbytes: int) -> None:
        rows = np.arange(nl * no * nt * nh).reshape(1, nl, no, nt, nh, 1)
        self.buffers = [buffer.ravel() for buffer in BUFFERS[kind](rows)]
        # (layer, outer, token, head) to (buffer, byte), in the order of memory, and to the place in that order.
        self.places: dict[tuple[int, ...], tuple[int, int]] = {}
        for b, buffer in enumerate(self.buffers):
            indices = zip(*[of_dim.tolist() for of_dim in np.unravel_index(buffer, (nl, no, nt, nh))], strict=True)
            self.places.update((row, (b, i * row_nbytes)) for i, row in enumerate(indices))
        self.ranks = {row: i for i, row in enumerate(self.places)}


class Cell:
    """A cell of a drawing: its row, None where rows are left out, and whether a segment ends behind it."""

    def __init__(self, row: tuple[int, int, int, int] | None, ends: bool, buffer: int | None, byte: int | None) -> None:
        self.row, self.ends, self.buffer, self.byte = row, ends, buffer, byte


def cells_of(text: str, title: str) -> list[Cell]:
    """The cells of one side. Buffer and byte are those that stand before a line, for its first cell."""
    section = re.search(rf"\n{title} [^\n]*\n(.*?)\n\n", text, re.DOTALL)[1]
    cells = []
    for line in section.splitlines():
        if line == "  ..":
            cells.append(Cell(None, True, None, None))
            continue
        buffer, byte, layer, outer, cells_text = re.fullmatch(
            r"  (?:[a-z]+ (\d+) +)? *([\d,]+)  l(\d+)(?: ([KV]))? *([| ].*)", line
        ).groups()
        place = int(buffer or 0), int(byte.replace(",", ""))
        for name, end in re.findall(r"(\d+[A-J][KV]?|\.\.) *([|]?)", cells_text):
            row = None
            if name != "..":
                token, head, kv = re.fullmatch(r"(\d+)([A-J])([KV]?)", name).groups()
                row = int(layer), "KV".find(outer or kv or "K"), int(token), ord(head) - ord("A")
            cells.append(Cell(row, bool(end), *place))
            place = None, None
    return cells


def draw(*arguments: object, width: int = 80) -> str:
    return output(kvbm_kernels("layout", *arguments, COLUMNS=str(width)))


def flags(source: str, destination: str, nl: int, no: int, nh: int, nt: int, hd: int) -> list[str]:
    extents = {"nl": nl, "no": no, "nh": nh, "nt": nt, "hd": hd}
    sides = ["--from", source, "--to", destination]
    return sides + [word for name, extent in extents.items() for word in (f"--{name}", str(extent))]


@pytest.fixture
def in_process(capsys, monkeypatch):
    """The command without a process of its own, for many of them."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> str:
        assert run_command(["layout", *arguments]) == 0
        return capsys.readouterr().out

    return run


def check_side(cells: list[Cell], expected: Expected, *, is_all: bool) -> None:
    """Lines start at the right byte of the right buffer, and have the rows that are in memory there, in its order."""
    rows = [cell.row for cell in cells if cell.row is not None]
    ranks = [expected.ranks[row] for row in rows]
    assert ranks == sorted(set(ranks))
    assert is_all == (len(rows) == len(expected.ranks))
    for cell in cells:
        if cell.row is not None and cell.byte is not None:
            assert (cell.buffer, cell.byte) == expected.places[cell.row]
    # Where a row does not follow the one before it, rows are left out, and that is said.
    for before, cell in pairwise(cells):
        if before.row is not None and cell.row is not None:
            assert expected.ranks[cell.row] == expected.ranks[before.row] + 1


PAIRS = [(source, destination) for source in NAMES for destination in NAMES]


class TestTerminal:
    @pytest.mark.parametrize(("source", "destination"), PAIRS)
    def test_rows_are_where_the_layouts_have_them(self, in_process, source, destination):
        extents = (2, 2, 4, 3)
        text = in_process(*flags(source, destination, *extents, hd=4))
        for title, kind in (("From", source), ("To", destination)):
            cells = cells_of(text, title)
            check_side(cells, Expected(kind, *extents, row_nbytes=8), is_all=True)
            lengths = reference.runs(*[Expected(k, *extents, row_nbytes=8).buffers for k in (destination, source)])
            # A bar ends a segment, and nothing else.
            assert sum(cell.ends for cell in cells) == sum(lengths) // np.gcd.reduce(lengths)

    @pytest.mark.parametrize(("source", "destination"), PAIRS)
    def test_large_shapes_are_drawn_in_part(self, in_process, source, destination):
        extents = (80, 2, 8, 16)
        text = in_process(*flags(source, destination, *extents, hd=64))
        assert len(text.splitlines()) < 100
        assert max(map(len, text.splitlines())) <= 80
        assert ", .. leaves rows out" in text
        for title, kind in (("From", source), ("To", destination)):
            check_side(cells_of(text, title), Expected(kind, *extents, row_nbytes=128), is_all=False)

    @settings(max_examples=40, deadline=None)
    @given(st.data())
    def test_any_shape_fits_any_width(self, data):
        source, destination = (data.draw(st.sampled_from(NAMES)) for _ in range(2))
        extents = [data.draw(st.integers(1, high)) for high in (70, 2, 9, 300)]
        hd, width = data.draw(st.sampled_from([1, 64, 1000])), data.draw(st.integers(80, 200))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("COLUMNS", str(width))
            written = io.StringIO()
            patch.setattr("sys.stdout", written)
            assert run_command(["layout", *flags(source, destination, *extents, hd)]) == 0
        text = written.getvalue()
        assert max(map(len, text.splitlines())) <= width
        for title, kind in (("From", source), ("To", destination)):
            expected = Expected(kind, *extents, row_nbytes=2 * hd)
            check_side(cells_of(text, title), expected, is_all=".. leaves" not in text)

    def test_it_says_which_bytes_go_where(self):
        text = draw(*flags("nhd", "universal", 2, 2, 4, 4, 8))
        assert "\n  1A  l0 K  chunk 0 bytes 64 to 79    ->  bytes 16 to 31\n" in text
        text = draw(*flags("hnd", "universal", 2, 2, 4, 4, 8))
        assert "\n  0A to 3A  l0 V  chunk 1 bytes 0 to 63  ->  bytes 64 to 127\n" in text

    def test_it_says_why(self, in_process):
        def why(*arguments: str) -> str:
            return " ".join(in_process(*arguments).partition("\nWhy\n")[2].split())

        assert (
            "Runs of 16 bytes (a row) are the longest that both sides share: the next one is 64 bytes further" in why()
        )
        assert "Runs of 256 bytes (the 16 tokens of a head)" in why("--from", "hnd", "--nt", "16")
        assert "All 1,024 bytes lie together on both sides" in why("--from", "universal")
        assert "GPU: every access moves 16 bytes, the widest there is." in why()
        short = why("--hd", "1", "--to", "operational_hnd")
        assert "GPU: segments of 2 bytes are too short for an access of 16, but lie side by side" in short
        assert "a thread reads 8 of them and writes 16 bytes." in short
        odd = why("--hd", "3")
        assert "GPU: rows of 6 bytes move element by element, because 2 is the largest power of two" in odd
        assert "accesses of 16 bytes would be 8 times fewer." in odd
        assert "GPU: rows of 24 bytes move 8 bytes at a time, because 8 is" in why("--hd", "12")
        assert "Crossing the link takes no more than 1 CTA," in why("--to-host")
        assert "each has an address of its own on at least one side." in why("--to", "operational_nhd")
        assert "Host: segments are copied by moves of a fixed size, without a call; 1 thread." in why()

    def test_a_pipe_gets_no_colours_and_a_terminal_does(self):
        assert "\x1b" not in draw()
        coloured = output(kvbm_kernels("layout", FORCE_COLOR="1", COLUMNS="80"))
        assert "\x1b[36m" in coloured
        # The drawing is the same without them.
        plain = re.sub(r"\x1b\[[\d;]*m", "", coloured)
        assert plain == draw()
        assert "\x1b[3" not in output(kvbm_kernels("layout", FORCE_COLOR="1", NO_COLOR="1", COLUMNS="80"))

    def test_a_terminal_without_columns(self):
        """As some have it that do not know: drawn as for 80."""
        assert output(kvbm_kernels("layout", COLUMNS="0")) == output(kvbm_kernels("layout", COLUMNS="80"))

    @pytest.mark.parametrize("width", [10, 20])
    def test_nothing_is_cut_in_a_narrow_terminal(self, width):
        text = draw("--nl", "1", "--nh", "2", "--nt", "3", width=width)
        assert "…" not in text
        for line in ("  chunk 0  0  l0 K |0A|", "  chunk 1 80  l0 V |2B|"):
            assert f"\n{line}\n" in text

    def test_one_is_no_plural(self):
        """Whatever there is one of."""
        ones = ["--nl", "1", "--no", "1", "--nh", "1", "--nt", "1", "--hd", "1", "--dtype", "int8"]
        text = draw(*ones) + draw(*ones[:-4], "--nt", "2", "--to", "hnd", "--hd", "1", "--dtype", "int8")
        assert not re.search(r"(?<![\d,])1 (?!is\b)[a-z]+s\b", text), text

    def test_nothing_ends_in_blanks(self):
        assert not [line for line in draw("--nt", "200").splitlines() if line != line.rstrip()]


class TestJson:
    def test_it_is_what_the_package_explains(self):
        text = output(kvbm_kernels("layout", *flags("hnd", "universal", 3, 2, 4, 16, 64), "--nb", "5", "--json"))
        shape = kk.BlockShape(3, 2, 4, 16, 64, "fp16")
        kv = np.zeros((5, 3, 2, 16, 4, 64), np.float16)
        stack = kk.BlockStack(reference.block_stack(kv, "HND"), shape, "HND")
        found = kk.explain(kk.UniversalBlocks(list(reference.universal(kv)), shape), stack)
        answer = json.loads(text)
        assert answer["copy"] == {
            "from": "hnd",
            "to": "universal",
            "nb": 5,
            "nl": 3,
            "no": 2,
            "nh": 4,
            "nt": 16,
            "hd": 64,
            "dtype": "f16",
        }
        for name in ("total_nbytes", "segments", "segment_nbytes", "items", "alignment"):
            assert answer[name] == getattr(found, name)
        assert [tuple(loop.values()) for loop in answer["loops"]] == [
            (loop.size, loop.src_stride, loop.dst_stride) for loop in found.loops
        ]
        for name in ("kernel", "launches", "tiles", "tile_nbytes", "ctas", "cta_threads", "params_nbytes"):
            assert answer["device"][name] == getattr(found.device, name)
        assert answer["host"].keys() == {"threads", "rows", "joins_segments", "cuts_segments"}
        assert len(answer["why"]) == 3

    def test_where_the_sides_are(self):
        for given_flags, sides in (
            ([], (False, False)),
            (["--from-host"], (True, False)),
            (["--to-host"], (False, True)),
        ):
            device = json.loads(output(kvbm_kernels("layout", *given_flags, "--json")))["device"]
            assert (device["src_on_host"], device["dst_on_host"]) == sides

    def test_a_model_names_what_is_not_given(self):
        answer = json.loads(output(kvbm_kernels("layout", "--model", "llama-3.1-8b", "--nh", "2", "--json")))
        extents = {name: answer["copy"][name] for name in ("nl", "no", "nh", "nt", "hd")}
        assert extents == {"nl": 32, "no": 2, "nh": 2, "nt": 4, "hd": 128}
        latent = json.loads(output(kvbm_kernels("layout", "--model", "deepseek-v3", "--json")))["copy"]
        assert (latent["no"], latent["nh"]) == (1, 1)

    def test_addresses_are_not_memory(self):
        """A cache larger than any machine is explained like any other."""
        extents = flags("nhd", "universal", 200, 2, 64, 4096, 1024)
        answer = json.loads(output(kvbm_kernels("layout", *extents, "--nb", "20", "--dtype", "f64", "--json")))
        assert answer["total_nbytes"] == 20 * 200 * 2 * 64 * 4096 * 1024 * 8


class TestSvg:
    def draw(self, tmp_path, *arguments: str) -> Xml.Element:
        file = tmp_path / "layout.svg"
        assert output(kvbm_kernels("layout", *arguments, "--svg", file)) == ""
        return Xml.parse(file).getroot()

    @staticmethod
    def boxes(root: Xml.Element, side: str) -> list[dict[str, str]]:
        return [rect.attrib for rect in root.iter(f"{SVG}rect") if rect.get("class") == f"row {side}"]

    def check_boxes(self, root: Xml.Element, side: str, expected: Expected) -> int:
        boxes = self.boxes(root, side)
        for box in boxes:
            row = tuple(int(box[f"data-{name}"]) for name in ("layer", "outer", "token", "head"))
            assert (int(box["data-buffer"]), int(box["data-byte"])) == expected.places[row]
        # From left to right in the order of memory, and not over each other.
        places = [(int(box["data-buffer"]), int(box["data-byte"])) for box in boxes]
        assert places == sorted(places)
        spans = [(float(box["x"]), float(box["x"]) + float(box["width"])) for box in boxes]
        assert all(left[1] <= right[0] for left, right in pairwise(spans))
        width = float(root.get("width"))
        assert spans[0][0] >= 0
        assert spans[-1][1] <= width
        return len(boxes)

    @pytest.mark.parametrize("source", ["nhd", "hnd", "packed", "operational_hnd"])
    def test_boxes_are_rows_and_bands_are_segments(self, tmp_path, source):
        root = self.draw(tmp_path, *flags(source, "universal", 2, 2, 3, 4, 8))
        for side, kind in (("src", source), ("dst", "universal")):
            assert self.check_boxes(root, side, Expected(kind, 2, 2, 3, 4, row_nbytes=16)) == 48
        # A band leads from the boxes whose bytes it carries to theirs on the other side: of a row, or of four tokens.
        by_row = source in ("nhd", "packed")
        rows = {
            side: {tuple(box[f"data-{name}"] for name in ("layer", "outer", "head", "token")): box for box in boxes}
            for side, boxes in ((side, self.boxes(root, side)) for side in ("src", "dst"))
        }
        expected = set()
        for first in rows["src"]:
            last = first if by_row else (*first[:3], "3")
            if by_row or first[3] == "0":
                ends = [(rows[side][first]["x"], rows[side][last]) for side in ("src", "dst")]
                expected.add(tuple((float(x), float(box["x"]) + float(box["width"])) for x, box in ends))
        number = r"(-?[\d.]+)"
        path = rf"M{number},.* {number},\S+ L{number},.* {number},\S+ Z"
        found = []
        for band in root.iter(f"{SVG}path"):
            left, to_left, to_right, right = map(float, re.fullmatch(path, band.get("d")).groups())
            found.append(((left, right), (to_left, to_right)))
        assert len(found) == len(set(found))
        assert set(found) == expected

    def test_it_says_what_it_shows(self, tmp_path):
        root = self.draw(tmp_path)
        texts = [text.text for text in root.iter(f"{SVG}text")]
        assert "NHD block stack to universal: a block of nl=2 no=2 nh=4 nt=4 hd=8 f16" in texts
        assert "GPU: every access moves 16 bytes, the widest there is." in texts
        assert texts.count("0A") == 2 * 4
        assert "l0 V 64" in texts
        titles = [title.text for title in root.iter(f"{SVG}title")]
        assert "token 1, head 1, layer 0 V: chunk 1 byte 80" in titles

    def test_large_shapes_are_drawn_in_part(self, tmp_path):
        root = self.draw(tmp_path, *flags("nhd", "universal", 80, 2, 8, 16, 128), "--nb", "100")
        for side, kind in (("src", "nhd"), ("dst", "universal")):
            assert self.check_boxes(root, side, Expected(kind, 80, 2, 8, 16, row_nbytes=256)) <= 72
        texts = [text.text for text in root.iter(f"{SVG}text")]
        assert "..." in texts
        assert any(text.endswith("; rows are left out at the dots.") for text in texts)
        assert any("the first of 100 blocks" in text for text in texts)

    def test_it_on_standard_output(self, tmp_path):
        self.draw(tmp_path)
        assert output(kvbm_kernels("layout", "--svg", "-")) == (tmp_path / "layout.svg").read_text("utf-8")

    def test_it_beside_json(self, tmp_path):
        file = tmp_path / "layout.svg"
        assert json.loads(output(kvbm_kernels("layout", "--svg", file, "--json")))["segments"] == 64
        Xml.parse(file)
