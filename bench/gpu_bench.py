"""Speed of the CUDA engine on this machine's GPU, as ratios to one cudaMemcpyAsync of the same bytes in the same run.

    python3 bench/gpu_bench.py [--short] [--only TEXT] [--json FILE]

A line a case: GB/s of the case and of the copy (bytes read plus written inside the device, payload bytes across the
link), their ratio, the ratio to reach, and whether the bytes were right. Times are medians of samples from CUDA events.
A sample is queued behind a spinning kernel, so that the GPU never waits for the caller, and goes once through as many
sets of buffers as it takes to not fit the L2 cache. The copy is sampled in turns with the case.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from gpu_support import (
    AUTO,
    HND,
    NHD,
    Shape,
    View,
    check,
    copy_blocks,
    device_table,
    library,
    make_view,
    table,
)

MIB = 1 << 20
# Long enough to queue all of a sample behind it, so that what the host takes does not count.
SPIN_CYCLES = 8_000_000
Call = Callable[[], None]


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


def compare(cases: list[Call], copies: list[Call], samples: int) -> tuple[float, float]:
    """Median seconds of a case and of a copy, sampled in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for calls in (cases, copies):
        for call in calls:
            call()
    torch.cuda.synchronize()
    for _ in range(samples):
        for kept, calls in zip(times, (cases, copies), strict=True):
            kept.append(sample(calls))
    return statistics.median(times[0]), statistics.median(times[1])


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def random_bytes(*shape: int, device: str = "cuda") -> torch.Tensor:
    data = torch.randint(-(2**62), 2**62, (int(np.prod(shape)) // 8 + 1,), device="cuda").view(torch.uint8)
    data = data[: int(np.prod(shape))].view(*shape)
    return data.contiguous() if device == "cuda" else torch.empty(shape, dtype=torch.uint8, pin_memory=True).copy_(data)


def empty(*shape: int, device: str = "cuda") -> torch.Tensor:
    if device == "cuda":
        return torch.full(shape, 0xEE, dtype=torch.uint8, device="cuda")
    return torch.full(shape, 0xEE, dtype=torch.uint8).pin_memory()


def figure(value: float) -> str:
    return f"{value:8.1f}" if value >= 10 else f"{value:8.3f}"


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
        samples: int | None = None,
    ) -> None:
        """target is what the case writes; it is spoilt first, so that nothing an earlier case wrote passes for it."""
        target.fill_(0xEE)
        torch.cuda.synchronize()
        seconds, copy_seconds = compare(cases, copies, samples or self.samples)
        # The copy may have written the same target.
        cases[0]()
        self.line(name, nbytes / seconds / 1e9, nbytes / copy_seconds / 1e9, copy_seconds / seconds, aim, right())

    def line(self, name: str, speed: float, copy_speed: float, ratio: float, aim: float, ok: bool) -> None:
        self.rows.append({"case": name, "speed": speed, "copy": copy_speed, "ratio": ratio, "aim": aim, "ok": ok})
        mark = "" if not ok or ratio >= aim else "  below"
        print(
            f"{name:<58}{figure(speed)}{figure(copy_speed)}{ratio:7.3f}{aim:6.2f}  {'yes' if ok else 'WRONG'}{mark}",
            flush=True,
        )


def steps(nl: int, no: int) -> tuple[int, int, int]:
    return (nl * no, no, 1)


class Converted:
    """Buffers of one conversion: chunks scattered over a pool on one side, universal blocks on the other."""

    def __init__(
        self,
        nb: int,
        nl: int,
        no: int,
        nh: int,
        nt: int,
        row: int,
        layout: int,
        places: tuple[str, str],
        scattered: bool = True,
    ) -> None:
        self.dims = (nb, nl, no, nh, nt, row)
        self.layout = layout
        count, chunk = nb * nl * no, nt * nh * row
        self.order = torch.randperm(count) if scattered else torch.arange(count)
        # Both sides of one allocation where that can be: how two of them lie to each other is worth some percent.
        if places[0] == places[1]:
            both = random_bytes(2 * count, chunk, device=places[0])
            self.pool, self.universal = both[:count], both[count:].view(nb, -1)
        else:
            self.pool = random_bytes(count, chunk, device=places[0])
            self.universal = random_bytes(nb, nh * nl * no * nt * row, device=places[1])
        self.chunks = table(self.pool.data_ptr() + self.order.numpy().astype(np.uint64) * np.uint64(chunk))
        self.buffers = table(
            self.universal.data_ptr() + np.arange(nb, dtype=np.uint64) * np.uint64(nh * nl * no * nt * row)
        )
        self.device_chunks, self.device_buffers = device_table(self.chunks), device_table(self.buffers)

    def as_universal(self) -> torch.Tensor:
        nb, nl, no, nh, nt, row = self.dims
        chunks = self.pool.cuda()[self.order.cuda()]
        kv = (
            chunks.view(nb, nl, no, nt, nh, row)
            if self.layout == NHD
            else chunks.view(nb, nl, no, nh, nt, row).transpose(3, 4)
        )
        return kv.permute(0, 4, 1, 2, 3, 5).reshape(nb, -1)

    def right(self) -> bool:
        torch.cuda.synchronize()
        return torch.equal(self.as_universal(), self.universal.cuda())

    def convert(self, name: str, element: int = 2) -> Call:
        nb, nl, no, nh, nt, row = self.dims
        dtype = {1: 7, 2: 1, 4: 2, 8: 3}[element]
        function = getattr(library(), f"kvbm_kernels_launch_{name}")
        arguments = (
            self.device_buffers.address,
            self.device_chunks.address,
            nb,
            nh,
            nl,
            no,
            nt,
            row // element,
            dtype,
            self.layout,
        )

        def call() -> None:
            assert function(*arguments, stream()) == 0

        return call

    def flat_copy(self, to_universal: bool) -> Call:
        """One copy of the same bytes between the same buffers."""
        dst, src = (self.universal, self.pool) if to_universal else (self.pool, self.universal)
        return lambda: dst.view(-1).copy_(src.view(-1), non_blocking=True)

    def views(self) -> tuple[View, View, Shape]:
        nb, nl, no, nh, nt, row = self.dims
        token, head = (nh * row, row) if self.layout == NHD else (row, nt * row)
        blocks = make_view(self.chunks, None, nb, steps(nl, no), token=token, head=head)
        universal = make_view(
            self.buffers, None, nb, (1, 0, 0), layer=no * nt * row, outer=nt * row, token=row, head=nl * no * nt * row
        )
        return blocks, universal, Shape(nl, no, nh, nt, row)

    def copy_blocks(self, to_universal: bool) -> Call:
        blocks, universal, shape = self.views()
        dst, src = (universal, blocks) if to_universal else (blocks, universal)
        return lambda: copy_blocks(dst, src, shape, self.dims[0], stream())


def flat_copies(nbytes: int, sets: int, places: tuple[str, str]) -> list[Call]:
    pairs = [(random_bytes(nbytes, device=places[0]), empty(nbytes, device=places[1])) for _ in range(sets)]
    return [lambda s=s, d=d: d.copy_(s, non_blocking=True) for s, d in pairs]


def conversions(report: Report, short: bool) -> None:
    llama = dict(nl=80, no=2, nh=8, nt=16)
    cases: list[tuple[str, float, float, dict[str, int], int, int]] = []
    for layout, tag in ((NHD, "NHD"), (HND, "HND")):
        for nt in (16, 64):
            for nb in (128, 32) if nt == 16 else (128,):
                cases.append(
                    (
                        f"{tag} nt={nt} hd=128 bf16, {nb} blocks",
                        0.97,
                        0.95,
                        dict(llama, nb=nb, nt=nt, row=256),
                        layout,
                        2,
                    )
                )
    cases.append(("NHD 40 MB", 0.95, 0.95, dict(llama, nb=8, row=256), NHD, 2))
    cases.append(("NHD 5 MB, 1 block", 0.95, 0.95, dict(llama, nb=1, row=256), NHD, 2))
    for hd in (64, 96, 192, 256):
        cases.append((f"NHD hd={hd} bf16", 0.90, 0.90, dict(llama, nb=64, row=2 * hd), NHD, 2))
    cases.append(("MLA 576 bf16 nt=64", 0.90, 0.90, dict(nl=61, no=1, nh=1, nt=64, nb=64, row=1152), NHD, 2))
    # What scattered chunks cost: the same, with the chunks as they follow in memory.
    cases.append(("NHD nt=16 hd=128 bf16, 128 blocks in pool order", 0.97, 0.95, dict(llama, nb=128, row=256), NHD, 2))
    cases.append(("NHD fp8 hd=128", 0.90, 0.90, dict(llama, nb=128, row=128), NHD, 1))
    cases.append(("NHD rows of 656 bytes nt=64", 0.90, 0.90, dict(nl=61, no=1, nh=4, nt=64, nb=32, row=656), NHD, 1))
    for row, element in ((8, 8), (4, 4), (2, 2), (1, 1)):
        cases.append(
            (f"NHD rows of {row} bytes", 0.25, 0.25, dict(llama, nb=4096 // row, nt=64, row=row), NHD, element)
        )
    cases.append(("NHD rows of 2 bytes, nt=16", 0.25, 0.25, dict(llama, nb=2048, row=2), NHD, 2))
    cases.append(("NHD rows of 92 bytes", 0.0, 0.0, dict(llama, nb=64, row=92), NHD, 2))
    for name, to_aim, from_aim, dims, layout, element in cases:
        if not report.wants(name) or (short and "128 blocks" not in name and "MB" not in name and "rows" not in name):
            continue
        nbytes = int(np.prod(list(dims.values())))
        sets = 1 if nbytes > 150 * MIB else 6 if nbytes > 20 * MIB else 40
        scattered = "in pool order" not in name
        buffers = [Converted(**dims, layout=layout, places=("cuda", "cuda"), scattered=scattered) for _ in range(sets)]
        for direction, aim in (("universal_from_block", to_aim), ("block_from_universal", from_aim)):
            copies = [b.flat_copy(direction[0] == "u") for b in buffers]
            target = buffers[0].universal if direction[0] == "u" else buffers[0].pool
            report.add(
                f"{name}, {'to' if direction[0] == 'u' else 'from'} universal",
                2 * nbytes,
                aim,
                [b.convert(direction, element) for b in buffers],
                copies,
                target,
                buffers[0].right,
            )
        if "128 blocks" in name or "MB" in name:
            report.add(
                f"{name}, copy_blocks to universal",
                2 * nbytes,
                aim,
                [b.copy_blocks(True) for b in buffers],
                [b.flat_copy(True) for b in buffers],
                buffers[0].universal,
                buffers[0].right,
            )
        del buffers, copies, target
        torch.cuda.empty_cache()


def view_pairs(report: Report) -> None:
    """Per-layer pools with block ids, as engines hold them."""
    nb, nl, no, nh, nt, row, pool = 128, 80, 2, 8, 16, 256, 160
    chunk = nt * nh * row
    nbytes = nb * nl * no * chunk
    if not report.wants("pools"):
        return
    ids = [np.random.default_rng(i).permutation(pool)[:nb].astype(np.int64) for i in range(2)]
    both = random_bytes(2 * nl * no, pool, chunk)
    pools = [both[: nl * no], both[nl * no :]]
    bases = [table(p.data_ptr() + np.arange(nl * no, dtype=np.uint64) * np.uint64(pool * chunk)) for p in pools]
    nhd, hnd = dict(token=nh * row, head=row), dict(token=row, head=nt * row)
    shape = Shape(nl, no, nh, nt, row)
    copies = [lambda: pools[1].view(-1)[:nbytes].copy_(pools[0].view(-1)[:nbytes])]
    taken = [torch.from_numpy(i).cuda() for i in ids]

    def rows(which: int, order: str) -> torch.Tensor:
        chunks = pools[which][:, taken[which]]
        return chunks.view(-1, nt, nh, row) if order == "nhd" else chunks.view(-1, nh, nt, row).transpose(1, 2)

    def same_rows(src_order: str, dst_order: str) -> bool:
        return torch.equal(rows(0, src_order), rows(1, dst_order))

    def copy_between(dst: View, src: View) -> None:
        copy_blocks(dst, src, shape, nb, stream())

    for name, src_strides, dst_strides in (
        ("NHD to HND", nhd, hnd),
        ("HND to NHD", hnd, nhd),
        ("NHD to NHD", nhd, nhd),
    ):
        src = make_view(bases[0], ids[0], pool, (0, no, 1), block=chunk, **src_strides)
        dst = make_view(bases[1], ids[1], pool, (0, no, 1), block=chunk, **dst_strides)
        orders = [part.lower() for part in name.split(" to ")]
        report.add(
            f"{name}, pools of a layer with ids",
            2 * nbytes,
            0.93,
            [functools.partial(copy_between, dst, src)],
            copies,
            pools[1],
            functools.partial(same_rows, *orders),
        )
    # vLLM's packed rows, [pool, nt, nh, 2, hd] a layer, in the same memory.
    packed_bases = table(pools[0].data_ptr() + np.arange(nl, dtype=np.uint64) * np.uint64(2 * pool * chunk))
    packed = make_view(
        packed_bases, ids[0], pool, (0, 1, 0), block=2 * chunk, outer=row, token=2 * nh * row, head=2 * row
    )
    universal = random_bytes(nb, nh, nl, no, nt, row)
    buffers = table(universal.data_ptr() + np.arange(nb, dtype=np.uint64) * np.uint64(nbytes // nb))
    view = make_view(
        buffers, None, nb, (1, 0, 0), layer=no * nt * row, outer=nt * row, token=row, head=nl * no * nt * row
    )

    def right() -> bool:
        blocks = pools[0].view(nl, pool, nt, nh, no, row)[:, taken[0]]
        return torch.equal(blocks.permute(1, 3, 0, 4, 2, 5), universal)

    report.add(
        "packed K|V to universal, pools of a layer with ids",
        2 * nbytes,
        0.93,
        [functools.partial(copy_between, view, packed)],
        copies,
        universal,
        right,
    )
    report.add(
        "universal to packed K|V, pools of a layer with ids",
        2 * nbytes,
        0.93,
        [functools.partial(copy_between, packed, view)],
        copies,
        pools[0],
        right,
    )
    times = []
    for _ in range(50):
        torch.cuda.synchronize()
        start = time.perf_counter()
        copy_between(view, packed)
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    microseconds = 1e6 * statistics.median(times)
    report.line(
        "copy_blocks returns, 128 blocks x 160 chunks [us, of 60]", microseconds, 60, 60 / microseconds, 1, True
    )


def across_the_link(report: Report, short: bool) -> None:
    for places, tag in ((("cuda", "cpu"), "D2H"), (("cpu", "cuda"), "H2D")):
        name = f"{tag} conversion NHD / universal, 32 blocks"
        if report.wants(name):
            nbytes = 32 * 80 * 2 * 16 * 8 * 256
            copies = flat_copies(nbytes, 1, places)
            # The chunks are on the device in both directions, as an engine has them.
            buffers = Converted(32, 80, 2, 8, 16, 256, NHD, ("cuda", "cpu"))
            target = buffers.universal if tag == "D2H" else buffers.pool
            report.add(
                name,
                nbytes,
                0.92,
                [buffers.copy_blocks(tag == "D2H")],
                copies,
                target,
                buffers.right,
                7,
            )


class Pairs:
    """Pieces scattered over two places."""

    def __init__(self, nbytes: int, count: int, places: tuple[str, str]) -> None:
        self.nbytes, self.count = nbytes, count
        if places[0] == places[1]:
            both = random_bytes(2 * count, nbytes, device=places[0])
            self.src, self.dst = both[:count], both[count:]
        else:
            self.src = random_bytes(count, nbytes, device=places[0])
            self.dst = empty(count, nbytes, device=places[1])
        self.src_order, self.dst_order = torch.randperm(count), torch.randperm(count)
        self.src_table = table(self.src.data_ptr() + self.src_order.numpy().astype(np.uint64) * np.uint64(nbytes))
        self.dst_table = table(self.dst.data_ptr() + self.dst_order.numpy().astype(np.uint64) * np.uint64(nbytes))
        self.device_src, self.device_dst = device_table(self.src_table), device_table(self.dst_table)

    def in_order(self) -> Pairs:
        for address in (self.src_table, self.dst_table):
            address.sort()
        self.src_order = self.dst_order = torch.arange(self.count)
        return self

    def flat_copy(self) -> Call:
        """One copy of the same bytes between the same buffers."""
        return lambda: self.dst.copy_(self.src, non_blocking=True)

    def by_kernel(self) -> Call:
        arguments = (self.device_src.address, self.device_dst.address, self.nbytes, self.count)
        return lambda: check("launch_vectorized_copy", *arguments, stream())

    def by_batch(self, mode: int = AUTO) -> Call:
        arguments = (self.src_table.ctypes.data, self.dst_table.ctypes.data, self.nbytes, self.count, mode)
        return lambda: check("memcpy_batch", *arguments, stream())

    def right(self) -> bool:
        torch.cuda.synchronize()
        return torch.equal(self.src.cuda()[self.src_order.cuda()], self.dst.cuda()[self.dst_order.cuda()])


def pairs(report: Report, short: bool) -> None:
    block = 80 * 2 * 32768
    kernel = {
        (block, 1): (0.90, 1.0),
        (4 * block, 1): (0.90, 0.0),
        (block, 128): (0.0, 0.93),
        (32768, 20480): (0.92, 0.95),
        (4096, 40960): (0.92, 0.95),
        (512, 81920): (0.85, 0.0),
    }
    batch = {
        (block, 1): (0.98, 0.0),
        (block, 32): (0.98, 0.0),
        (MIB, 256): (0.98, 0.0),
        (262144, 512): (0.92, 0.0),
        (32768, 20480): (0.92, 0.90),
        (4096, 40960): (0.92, 0.90),
        (512, 81920): (0.80, 0.0),
    }
    for places, tag in ((("cuda", "cuda"), "D2D"), (("cpu", "cuda"), "H2D"), (("cuda", "cpu"), "D2H")):
        for shape in dict.fromkeys([*kernel, *batch]):
            nbytes, count = shape
            total = nbytes * count
            name = f"{tag} {count} x {nbytes // 1024 or nbytes}{' KiB' if nbytes >= 1024 else ' B'}"
            if not report.wants(name) or (short and total > 600 * MIB and tag != "D2D"):
                continue
            sets = 1 if total > 150 * MIB or tag != "D2D" else 8 if total > 20 * MIB else 40
            buffers = [Pairs(nbytes, count, places) for _ in range(sets)]
            copies = [b.flat_copy() for b in buffers]
            moved = total * (2 if tag == "D2D" else 1)
            samples = 7 if tag != "D2D" else None
            for calls, aims, how in (
                ([b.by_kernel() for b in buffers], kernel, "vectorized_copy"),
                ([b.by_batch() for b in buffers], batch, "memcpy_batch"),
            ):
                if shape in aims:
                    report.add(
                        f"{name}, {how}",
                        moved,
                        aims[shape][tag == "D2D"],
                        calls,
                        copies,
                        buffers[0].dst,
                        buffers[0].right,
                        samples,
                    )
            del buffers, copies
            torch.cuda.empty_cache()
        name = f"{tag} 20480 x 32 KiB mergeable, memcpy_batch"
        if report.wants(name) and tag != "D2D":
            buffer = Pairs(32768, 20480, places).in_order()
            report.add(
                name,
                32768 * 20480,
                0.98,
                [buffer.by_batch()],
                flat_copies(32768 * 20480, 1, places),
                buffer.dst,
                buffer.right,
                5,
            )


def returns(report: Report) -> None:
    if not report.wants("returns"):
        return
    for places in (("cpu", "cuda"), ("cuda", "cuda")):
        buffer = Pairs(32768, 20480, places)
        call = buffer.by_batch()
        times = []
        for _ in range(9):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        milliseconds = 1e3 * statistics.median(times)
        report.line(
            f"memcpy_batch returns, 20480 pieces {places[0]} to {places[1]} [ms, of 1]",
            milliseconds,
            1,
            1 / milliseconds,
            1,
            True,
        )


def beside_a_model(report: Report) -> None:
    """A loop of bf16 matrix products on another stream while pieces cross the link."""
    if not report.wants("GEMM"):
        return
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    model, mover = torch.cuda.Stream(), torch.cuda.Stream()

    def products(count: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(model):
            begin.record()
            for _ in range(count):
                torch.mm(a, b, out=out)
            end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count

    products(20)
    for places, tag in ((("cpu", "cuda"), "H2D"), (("cuda", "cpu"), "D2H")):
        buffer = Pairs(32768, 20480, places)
        converted = Converted(64, 80, 2, 8, 16, 256, NHD, ("cuda", "cpu"))
        flat = flat_copies(32768 * 20480, 1, places)[0]
        for how, call, nbytes in (
            ("memcpy_batch", buffer.by_batch(), 32768 * 20480),
            ("copy_blocks", converted.copy_blocks(tag == "D2H"), 64 * 80 * 2 * 32768),
            ("copy engine", flat, 32768 * 20480),
        ):
            alone = statistics.median([products(40) for _ in range(3)])
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            rounds = 12 if nbytes > 400 * MIB else 24
            with torch.cuda.stream(mover):
                call()
                begin.record()
                for _ in range(rounds):
                    call()
                end.record()
            beside = products(50)
            still_moving = not end.query()
            torch.cuda.synchronize()
            speed = nbytes * rounds / begin.elapsed_time(end) / 1e6
            report.line(
                f"GEMM beside {tag} {how}, {speed:.1f} GB/s{'' if still_moving else ', ended early'} [x, of 1.12]",
                beside / alone,
                1.12,
                1.12 * alone / beside,
                1.0,
                True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="fewer cases, fewer samples")
    parser.add_argument(
        "--only", default="", help="only cases whose name holds this text or, with commas, one of several"
    )
    parser.add_argument("--json", help="write the results here too")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    # Not the NULL stream, on which cudaMemcpyBatchAsync does not work.
    torch.cuda.set_stream(torch.cuda.Stream())
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"batch entry {library().kvbm_kernels_has_memcpy_batch_async()}"
    )
    report = Report(arguments.only, 5 if arguments.short else 9)
    started = time.perf_counter()
    parts: list[Callable[[], None]] = [
        lambda: conversions(report, arguments.short),
        lambda: view_pairs(report),
        lambda: pairs(report, arguments.short),
        lambda: across_the_link(report, arguments.short),
        lambda: returns(report),
        lambda: beside_a_model(report),
    ]
    for part in parts:
        try:
            part()
        except Exception as error:
            # The other parts are still worth their time.
            print(f"FAILED: {type(error).__name__}: {error}")
        torch.cuda.empty_cache()
    wrong = [row["case"] for row in report.rows if not row["ok"]]
    below = sum(1 for row in report.rows if row["ratio"] < row["aim"])  # type: ignore[operator]
    print(
        f"{len(report.rows)} cases, {len(wrong)} wrong, {below} below their aim, {time.perf_counter() - started:.0f} s"
    )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report.rows, indent=1))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
