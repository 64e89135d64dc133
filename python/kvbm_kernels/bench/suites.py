"""The project's own tables of tests, with what each is to reach: ``--suite``.

``ratio`` is to one plain copy of as many bytes, sampled in turns. The names are those of the page of results.
"""

from __future__ import annotations

from kvbm_kernels.bench.cases import Case, combinations
from kvbm_kernels.bench.patterns import as_pattern
from kvbm_kernels.layouts import BlockShape


def _rows(
    title: str,
    shape: BlockShape,
    num_blocks: int,
    patterns: str,
    backends: str,
    directions: str = "d2d",
    *,
    ratio: float | None = None,
    host_ms: float | None = None,
    compute_slowdown: float | None = None,
) -> list[Case]:
    """The tests of one line of a table; lists are written with spaces. Aims beside a GEMM make it run."""
    aims = {"ratio": ratio, "host_ms": host_ms, "compute_slowdown": compute_slowdown}
    return combinations(
        [shape],
        [num_blocks],
        [as_pattern(name) for name in patterns.split()],
        directions.split(),
        backends.split(),
        beside=None if compute_slowdown is None else "gemm",
        title=title,
        aims={name: aim for name, aim in aims.items() if aim is not None},
    )


def _llama(nt: int = 16, hd: int = 128, dtype: str = "bf16") -> BlockShape:
    """The cache of Llama 3.1 70B, or one with other rows."""
    return BlockShape(80, 2, 8, nt, hd, dtype)


def _pieces(nbytes: int) -> BlockShape:
    """Blocks of 160 pieces of a size."""
    return BlockShape(80, 2, 1, 1, nbytes, "uint8")


def _block(nbytes: int) -> BlockShape:
    """Blocks that are one piece."""
    return BlockShape(1, 1, 1, 1, nbytes, "uint8")


def _universal(
    title: str, shape: BlockShape, num_blocks: int, backends: str, to: float, back: float, layout: str = "nhd"
) -> list[Case]:
    """Chunks to universal blocks and back, as they follow in memory and anywhere in it."""
    rows: list[Case] = []
    for placement, where in (("", "as they follow"), ("_shuffled", "anywhere")):
        for pattern, aim in ((f"{layout}_to_universal", to), (f"universal_to_{layout}", back)):
            rows += _rows(f"{title}, {where}", shape, num_blocks, pattern + placement, backends, ratio=aim)
    return rows


def conversion() -> list[Case]:
    """Layout to layout on the device."""
    rows: list[Case] = []
    for layout, nt, count in (("nhd", 16, 128), ("nhd", 16, 32), ("nhd", 64, 128), ("hnd", 16, 128), ("hnd", 64, 128)):
        title = f"{layout.upper()} hd=128 bf16 nt={nt}, {count} blocks"
        rows += _universal(title, _llama(nt), count, "convert auto", 0.97, 0.95, layout)
    title = "pools of a layer, blocks anywhere"
    rows += _rows(
        title, _llama(), 128, "nhd_to_universal_pools hnd_to_universal_pools", "auto", ratio=0.97, host_ms=0.06
    )
    rows += _rows(
        title, _llama(), 128, "universal_to_nhd_pools universal_to_hnd_pools", "auto", ratio=0.95, host_ms=0.06
    )
    others = "nhd_to_hnd_pools hnd_to_nhd_pools packed_to_universal_pools universal_to_packed_pools"
    rows += _rows(title, _llama(), 128, others, "auto", ratio=0.93, host_ms=0.06)
    rows += _universal("NHD 40 MB", _llama(), 8, "convert auto", 0.95, 0.95)
    rows += _universal("NHD 5 MB, one block", _llama(), 1, "convert auto", 0.95, 0.95)
    for hd in (64, 96, 192, 256):
        rows += _universal(f"NHD hd={hd} bf16", _llama(hd=hd), 64, "convert", 0.90, 0.90)
    rows += _universal("MLA 576 bf16 nt=64", BlockShape(61, 1, 1, 64, 576, "bf16"), 64, "convert", 0.90, 0.90)
    rows += _universal("NHD fp8 hd=128", _llama(dtype="fp8_e4m3"), 128, "convert", 0.90, 0.90)
    rows += _universal("rows of 656 bytes", BlockShape(61, 1, 4, 64, 656, "uint8"), 32, "convert", 0.90, 0.90)
    for nbytes in (8, 4, 2, 1):
        shape, count = _llama(64, nbytes, "uint8"), 4096 // nbytes
        rows += _universal(f"rows of {nbytes} bytes", shape, count, "convert", 0.25, 0.25)
    rows += _rows(
        "rows of 92 bytes", _llama(hd=46), 64, "nhd_to_universal_shuffled universal_to_nhd_shuffled", "convert"
    )
    return rows


def link() -> list[Case]:
    """Conversion straight between pinned host memory and the device."""
    title = "conversion over the link, 32 blocks"
    rows = _rows(title, _llama(), 32, "nhd_to_universal_shuffled", "auto", "d2h", ratio=0.92)
    return rows + _rows(title, _llama(), 32, "universal_to_nhd_shuffled", "auto", "h2d", ratio=0.92)


def transfer() -> list[Case]:
    """Pieces as they are: blocks, and chunks anywhere on both sides."""
    rows: list[Case] = []
    both = "h2d d2h"
    mib = 1 << 20
    # The first aim is for the link, the second for the device.
    for nbytes, count, *aims in ((5 * mib, 1, 0.90, 1.0), (20 * mib, 1, 0.90, None), (5 * mib, 128, None, 0.93)):
        title, shape = f"{count} x {nbytes // mib} MiB", _block(nbytes)
        rows += _rows(title, shape, count, "fc_to_fc_shuffled", "vectorized", both, ratio=aims[0])
        rows += _rows(title, shape, count, "fc_to_fc_shuffled", "vectorized", ratio=aims[1])
        rows += _rows(title, shape, count, "fc_to_fc_shuffled", "auto", both, ratio=0.98)
    for nbytes, count, of_batch in ((mib, 256, 0.98), (mib // 4, 512, 0.92)):
        title = f"{count} x {nbytes >> 10} KiB"
        rows += _rows(title, _block(nbytes), count, "fc_to_fc_shuffled", "auto", both, ratio=of_batch)
        rows += _rows(title, _block(nbytes), count, "fc_to_fc_shuffled", "auto")
    rows += _rows("20480 x 32 KiB, mergeable", _pieces(32768), 128, "lw_to_lw", "auto", both, ratio=0.98)
    # Of vectorized and auto over the link, then of both on the device.
    small: tuple[float | None, ...] = (0.85, 0.80, None, None)
    large = (0.92, 0.92, 0.95, 0.90)
    for nbytes, count in ((32768, 20480), (4096, 40960), (512, 81920)):
        title, shape, blocks = f"{count} x {nbytes} bytes", _pieces(nbytes), count // 160
        aim = small if nbytes < 4096 else large
        limit = 1.0 if count == 20480 else None
        rows += _rows(title, shape, blocks, "lw_to_lw_shuffled", "vectorized", both, ratio=aim[0])
        rows += _rows(title, shape, blocks, "lw_to_lw_shuffled", "auto", both, ratio=aim[1], host_ms=limit)
        rows += _rows(title, shape, blocks, "lw_to_lw_shuffled", "vectorized", ratio=aim[2])
        rows += _rows(title, shape, blocks, "lw_to_lw_shuffled", "auto", ratio=aim[3], host_ms=limit)
    return rows


def beside() -> list[Case]:
    """What pieces and conversions that cross the link cost matrix products on the same GPU."""
    title = "20480 x 32 KiB beside a GEMM"
    rows = _rows(title, _pieces(32768), 128, "lw_to_lw_shuffled", "auto", "h2d d2h", compute_slowdown=1.12)
    title = "conversion over the link beside a GEMM"
    rows += _rows(title, _llama(), 64, "universal_to_nhd_shuffled", "auto", "h2d", compute_slowdown=1.12)
    return rows + _rows(title, _llama(), 64, "nhd_to_universal_shuffled", "auto", "d2h", compute_slowdown=1.12)


SUITES = {"conversion": conversion, "link": link, "transfer": transfer, "beside": beside}


def suite(name: str) -> list[Case]:
    """The tests of a suite, or of all of them."""
    return [case for each in SUITES if name in (each, "all") for case in SUITES[each]()]
