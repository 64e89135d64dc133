"""Speed of append and gather on this machine's GPU, as ratios to copies of the same bytes in the same run.

    python3 bench/gpu_rows.py [--short] [--only TEXT] [--json FILE]

A line a case: GB/s of the case and of the copy, both of them the bytes of the rows given, read and written, over the
time that was taken; their ratio, the ratio to reach, and whether what came out was right. A decode step is beside
kvbm_kernels_copy_blocks of the same rows to places that are known at the launch, a prefill beside one cudaMemcpyAsync
of its rows. Times are medians of samples from CUDA events. A sample is queued behind a spinning kernel, so that the GPU
never waits for the caller, and goes through as many sets of buffers as it takes to not fit the L2 cache. The copy is
sampled in turns with the case.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
from collections.abc import Callable
from ctypes import byref
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from gpu_support import Options, Shape, View, library, table
from rows_case import DTYPES, STORED, Quantization, TokenMap

NH, HD, BLOCK_SIZE = 8, 128, 16
ROW = 2 * HD
SCALES_ROW = HD + 4
L2_NBYTES = 128 << 20
# Long enough to queue all of a sample behind it, so that what the host takes does not count.
SPIN_CYCLES = 8_000_000
Call = Callable[[], object]


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def sample(calls: list[Call]) -> float:
    """Seconds a call, over a turn through the sets of buffers, or several through a few large ones."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    rounds = max(1, 4 // len(calls))
    torch.cuda._sleep(SPIN_CYCLES)
    begin.record()
    for _ in range(rounds):
        for call in calls:
            call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / len(calls) / rounds


class Report:
    def __init__(self, only: str, samples: int) -> None:
        self.only, self.samples = only, samples
        self.rows: list[dict[str, object]] = []
        print(f"{'case':<58}{'GB/s':>8}{'copy':>8}{'ratio':>7}{'aim':>6}  ok")

    def wants(self, name: str) -> bool:
        return any(text in name for text in self.only.split(","))

    def add(
        self,
        name: str,
        nbytes: int,
        aim: float,
        cases: list[Call],
        copies: list[Call],
        target: torch.Tensor,
        right: Callable[[], bool],
    ) -> None:
        """target is what the case writes; it is spoilt first, so that nothing an earlier case wrote passes for it."""
        target.fill_(0xEE)
        for call in (*cases, *copies):
            call()
        torch.cuda.synchronize()
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(self.samples):
            for kept, calls in zip(times, (cases, copies), strict=True):
                kept.append(sample(calls))
        seconds, copy_seconds = (statistics.median(kept) for kept in times)
        ratio, ok = copy_seconds / seconds, right()
        speed, copy_speed = nbytes / seconds / 1e9, nbytes / copy_seconds / 1e9
        self.rows.append({"case": name, "speed": speed, "copy": copy_speed, "ratio": ratio, "aim": aim, "ok": ok})
        mark = "WRONG" if not ok else "yes" if ratio >= aim else "yes  below"
        print(f"{name:<58}{speed:8.1f}{copy_speed:8.1f}{ratio:7.3f}{aim:6.2f}  {mark}", flush=True)


class Step:
    """Rows of K and V of some layers, bf16, for the next tokens of some sequences, and a cache with a base a layer."""

    def __init__(self, sequences: int, each: int, nl: int, layout: str, stored: str | None) -> None:
        self.shape = Shape(nl, 2, NH, sequences * each, ROW)
        self.layout, self.stored, self.nl, self.n = layout, stored, nl, sequences * each
        self.row = ROW if stored is None else SCALES_ROW
        per_sequence = each // BLOCK_SIZE + 2
        self.num_blocks = sequences * per_sequence
        self.rows = torch.randn(nl, 2, self.n, NH, HD, device="cuda", dtype=torch.bfloat16)
        self.cache = torch.full(
            (nl, 2, self.num_blocks, BLOCK_SIZE * NH * self.row), 0xEE, dtype=torch.uint8, device="cuda"
        )
        self.tables = torch.randperm(self.num_blocks, device="cuda").to(torch.int32).view(sequences, per_sequence)
        self.starts = torch.randint(0, BLOCK_SIZE, (sequences,), device="cuda", dtype=torch.int32)
        positions = self.starts[:, None].long() + torch.arange(each, device="cuda")
        blocks = torch.gather(self.tables.long(), 1, positions // BLOCK_SIZE)
        self.slots = (blocks * BLOCK_SIZE + positions % BLOCK_SIZE).view(-1)
        self.host_slots = self.slots.cpu().numpy()
        self.map = TokenMap(
            ctypes.sizeof(TokenMap), BLOCK_SIZE, None, self.tables.data_ptr(), per_sequence, self.starts.data_ptr(),
            sequences,
        )  # fmt: skip
        self.quantization = None
        if stored is not None:
            values = STORED[stored], DTYPES["bf16"], DTYPES["f32"]
            self.quantization = Quantization(ctypes.sizeof(Quantization), *values)
        self.kept: list[object] = []

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def _bases(self, tensor: torch.Tensor, layers: range) -> np.ndarray:
        bases = table([tensor[layer, outer].data_ptr() for layer in layers for outer in range(2)])
        self.kept.append(bases)
        return bases

    def _strides(self) -> tuple[int, int]:
        """From a token to the next in a block, and from a head."""
        return (NH * self.row, self.row) if self.layout == "NHD" else (self.row, BLOCK_SIZE * self.row)

    def _views(self, layers: range) -> tuple[View, View]:
        cache, rows = self._bases(self.cache, layers), self._bases(self.rows, layers)
        block = BLOCK_SIZE * NH * self.row
        of_cache = View(cache.ctypes.data, len(cache), 0, 2, 1, None, self.num_blocks, 0, block, 0, 0, *self._strides())
        of_rows = View(rows.ctypes.data, len(rows), 0, 2, 1, None, 1, 0, 0, 0, 0, NH * ROW, ROW)
        return of_cache, of_rows

    def move(self, name: str, layers: range) -> Call:
        cache, rows = self._views(layers)
        shape = Shape(len(layers), 2, NH, self.n, ROW)
        views = (cache, rows) if name == "launch_append" else (rows, cache)
        quantization = None if self.quantization is None else byref(self.quantization)
        function = getattr(library(), f"kvbm_kernels_{name}")
        arguments = (byref(views[0]), byref(views[1]), byref(shape), byref(self.map), quantization)
        self.kept.append((views, shape))

        def call() -> None:
            assert function(*arguments, ctypes.c_void_p(stream())) == 0, library().kvbm_kernels_last_error_message()

        return call

    def copy_rows(self, layers: range) -> Call:
        """copy_blocks of the same rows, a block a token: each slot of an NHD cache is one."""
        cache, rows = self._bases(self.cache, layers), self._bases(self.rows, layers)
        ids = self.host_slots.astype(np.int64)
        token = NH * ROW
        slots = self.num_blocks * BLOCK_SIZE
        of_cache = View(cache.ctypes.data, len(cache), 0, 2, 1, ids.ctypes.data, slots, 0, token, 0, 0, 0, ROW)
        of_rows = View(rows.ctypes.data, len(rows), 0, 2, 1, None, self.n, 0, token, 0, 0, 0, ROW)
        shape, options = Shape(len(layers), 2, NH, 1, ROW), Options(ctypes.sizeof(Options), 0)
        arguments = (byref(of_cache), byref(of_rows), byref(shape), ctypes.c_size_t(self.n), byref(options))
        self.kept.append((ids, of_cache, of_rows, shape, options))

        def call() -> None:
            assert library().kvbm_kernels_copy_blocks(*arguments, stream()) == 0

        return call

    def appended(self) -> bool:
        torch.cuda.synchronize()
        for layer in range(self.nl):
            part = self._stored_rows(layer)
            given = self.rows[layer]
            if self.stored is None:
                if not torch.equal(part.reshape(given.shape[0], self.n, NH, ROW), given.view(torch.uint8)):
                    return False
                continue
            limit = 127.0 if self.stored == "int8" else 448.0
            x = given.float()
            # By a tensor: torch multiplies by the reciprocal of a number.
            scale = x.abs().amax(-1, keepdim=True) / torch.full((1,), limit, device="cuda")
            codes = (x / scale).clamp(-limit, limit)
            codes = codes.round().to(torch.int8) if self.stored == "int8" else codes.to(torch.float8_e4m3fn)
            if not torch.equal(part[..., :HD], codes.view(torch.uint8)):
                return False
            if not torch.equal(part[..., HD:].contiguous().view(torch.float32), scale):
                return False
        return True

    def _stored_rows(self, layer: int) -> torch.Tensor:
        """[2, n, nh, row] out of the cache."""
        blocks = self.cache[layer].view(2, self.num_blocks, -1)
        if self.layout == "NHD":
            blocks = blocks.view(2, self.num_blocks, BLOCK_SIZE, NH, self.row)
        else:
            blocks = blocks.view(2, self.num_blocks, NH, BLOCK_SIZE, self.row).transpose(2, 3)
        return blocks[:, self.slots // BLOCK_SIZE, self.slots % BLOCK_SIZE]


def in_graph(calls: list[Call]) -> Call:
    """All of them as one graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def decode(report: Report, stored: str | None, layout: str, sequences: int = 64, nl: int = 80) -> None:
    name = f"decode step, {sequences} x {nl} layers, {stored or 'bf16'}, {layout}"
    if not report.wants(name):
        return
    rows_nbytes = sequences * nl * 2 * NH * ROW
    steps = [Step(sequences, 1, nl, layout, stored) for _ in range(L2_NBYTES // (2 * rows_nbytes) + 2)]
    plain = [Step(sequences, 1, nl, "NHD", None) for _ in steps]
    every = range(nl)
    aim = 1 / 1.15 if stored is None else 0.6
    report.add(
        f"{name}: one launch", 2 * rows_nbytes, aim, [step.move("launch_append", every) for step in steps],
        [step.copy_rows(every) for step in plain], steps[0].cache, steps[0].appended,
    )  # fmt: skip
    by_layer = [in_graph([step.move("launch_append", range(i, i + 1)) for i in every]) for step in steps]
    copies = [in_graph([step.copy_rows(range(i, i + 1)) for i in every]) for step in plain]
    report.add(f"{name}: {nl} launches", 2 * rows_nbytes, aim, by_layer, copies, steps[0].cache, steps[0].appended)
    if stored is None and layout == "NHD":
        spare = torch.empty_like(steps[0].rows)
        memcpys = [in_graph([lambda i=i, step=step: spare[i].copy_(step.rows[i]) for i in every]) for step in steps]
        report.add(
            f"{name}: {nl}, beside memcpy", 2 * rows_nbytes, aim, by_layer, memcpys, steps[0].cache, steps[0].appended
        )


def prefill(report: Report, stored: str | None, layout: str, nl: int, n: int = 4096) -> None:
    name = f"{n} tokens x {nl} layers, {stored or 'bf16'}, {layout}"
    if not report.wants(name):
        return
    step = Step(1, n, nl, layout, stored)
    sets = [step] + [Step(1, n, nl, layout, stored) for _ in range(L2_NBYTES // (2 * step.nbytes))]
    spares = [torch.empty_like(one.rows) for one in sets]
    every = range(nl)
    copies: list[Call] = [
        lambda one=one, spare=spare: spare.copy_(one.rows) for one, spare in zip(sets, spares, strict=True)
    ]
    report.add(
        f"append {name}", 2 * step.nbytes, 0.85 if stored is None else 0.6,
        [one.move("launch_append", every) for one in sets], copies, step.cache, step.appended,
    )  # fmt: skip
    if stored is None:
        given = step.rows.clone()
        report.add(
            f"gather {name}", 2 * step.nbytes, 0.85, [one.move("launch_gather", every) for one in sets], copies,
            step.rows.view(torch.uint8), lambda: torch.equal(given, step.rows),
        )  # fmt: skip
    else:
        report.add(
            f"gather {name}", 2 * step.nbytes, 0.6, [one.move("launch_gather", every) for one in sets], copies,
            step.rows.view(torch.uint8), lambda: bool(step.rows.isfinite().all()),
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="fewer samples")
    parser.add_argument(
        "--only", default="", help="only cases whose name holds this text or, with commas, one of several"
    )
    parser.add_argument("--json", help="also write the results to this file")
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    torch.manual_seed(0)
    torch.cuda.set_stream(torch.cuda.Stream())
    report = Report(arguments.only, 7 if arguments.short else 21)
    for stored in (None, "int8", "fp8"):
        for layout in ("NHD", "HND"):
            decode(report, stored, layout)
    for nl in (1, 32):
        for stored in (None, "int8", "fp8"):
            for layout in ("NHD", "HND"):
                prefill(report, stored, layout, nl)
    wrong = [row["case"] for row in report.rows if not row["ok"]]
    below = sum(1 for row in report.rows if row["ratio"] < row["aim"])  # type: ignore[operator]
    print(f"{len(report.rows)} cases, {len(wrong)} wrong, {below} below their aim")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report.rows, indent=1))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
