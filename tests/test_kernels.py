"""What nvcc makes of the kernels, for an old, the measured and a new architecture. Needs no GPU."""

from __future__ import annotations

import functools
import itertools
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

import buildtools
from buildtools import ROOT, environment, run, scratch

ARCHS = ("80", "90", "120")
# Kernels, and the 16-byte reads and writes that each has to have in flight at a time.
WIDE = {"move_tile": (2, 2), "move": (2, 2), "gather": (0, 1)}


@functools.cache
def compiled(source: Path) -> tuple[Path, str]:
    """The object file of a source, and what ptxas said about its kernels."""
    target = scratch() / f"{source.stem}.o"
    gencode = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in ARCHS]
    flags = ["-std=c++17", "-O3", "--threads=0", "-Xptxas=-v", f"-I{ROOT / 'include'}", f"-I{ROOT / 'native'}"]
    flags += ['-DKVBM_CUDA_ARCHS=""']
    return target, run(buildtools.require_nvcc(), *flags, *gencode, "-c", source, "-o", target)


def sources_with_kernels() -> list[Path]:
    """Those that define kernels or bring them from a header."""
    sources = sorted((ROOT / "native/cuda").glob("*.cu"))
    return [source for source in sources if re.search(r"__global__|\.cuh\"", source.read_text())]


def kernel_of(symbol: str) -> str:
    """The plain name in a mangled one: _ZN4kvbm6device9move_tileI... is move_tile."""
    name = ""
    match = re.match(r"_ZN?", symbol)
    at = match.end() if match else 0
    while found := re.compile(r"\d+").match(symbol, at):
        at = found.end() + int(found[0])
        name = symbol[found.end() : at]
    return name


def reports() -> list[tuple[str, str, dict[str, int]]]:
    """(architecture, kernel, what it uses) of everything that was compiled."""
    found = []
    pattern = (
        r"Compiling entry function '(\w+)' for 'sm_(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, "
        r"(\d+) bytes spill loads.*?Used (\d+) registers"
    )
    for source in sources_with_kernels():
        for symbol, arch, *numbers in re.findall(pattern, compiled(source)[1], re.DOTALL):
            uses = dict(zip(("stack", "spill stores", "spill loads", "registers"), map(int, numbers), strict=True))
            found.append((arch, kernel_of(symbol), uses))
    return found


def test_no_kernel_spills():
    """What a thread works with is in registers, and that of a copy has nothing in memory of its own at all."""
    found = reports()
    assert {(arch, kernel) for arch in ARCHS for kernel in WIDE} <= {(arch, kernel) for arch, kernel, _ in found}
    assert [report for report in found if report[2]["spill stores"] or report[2]["spill loads"]] == []
    assert [report for report in found if report[1] in WIDE and report[2]["stack"]] == []


def test_a_multiprocessor_is_filled_by_the_tiles_of_ctas():
    """2,048 threads of up to 32 registers: with three quarters of them, a copy loses 4 percent."""
    assert [report for report in reports() if report[1] == "move_tile" and report[2]["registers"] > 32] == []


@functools.cache
def disassembled(source: Path, arch: str) -> list[tuple[str, str]]:
    """(symbol, instructions) of a source's kernels; skips the test where there is no disassembler."""
    bundled = [Path(folder, "nvidia", "cu13", "bin") for folder in sys.path if folder]
    folders = [Path(buildtools.require_nvcc()).parent, *(folder for folder in bundled if folder.is_dir())]
    path = os.pathsep.join([*map(str, folders), environment()["PATH"]])
    program = shutil.which("cuobjdump", path=path)
    if program is None or shutil.which("nvdisasm", path=path) is None:
        pytest.skip("needs cuobjdump and nvdisasm")
    text = run(program, "-sass", "-arch", f"sm_{arch}", compiled(source)[0], env=environment(PATH=path))
    return re.findall(r"Function : (\w+)(.*?)(?=Function : |\Z)", text, re.DOTALL)


@pytest.mark.parametrize("kernel", WIDE)
def test_whole_vectors_move_in_accesses_of_16_bytes(kernel):
    """As many as are to be in flight are read before the first is written."""
    reads, writes = WIDE[kernel]
    checked = set()
    for source, arch in itertools.product(sources_with_kernels(), ARCHS):
        for symbol, body in disassembled(source, arch):
            if kernel_of(symbol) != kernel:
                continue
            wide = re.findall(r"\b(LDG|STG)\.E(?:\.\w+)*\.128\b", body)
            most = max(map(len, re.findall("L+", "".join(name[0] for name in wide))), default=0)
            assert most >= reads, (arch, symbol)
            assert wide.count("STG") >= writes, (arch, symbol)
            checked.add(arch)
    assert checked == set(ARCHS)


def test_only_bounded_copies_ask_the_l2_to_let_go():
    """Where a copy has the GPU for itself this costs speed; beside a model it is what leaves the model its cache."""
    checked = set()
    for source, arch in itertools.product(sources_with_kernels(), ARCHS):
        for symbol, body in disassembled(source, arch):
            hints = re.findall(r"\bLDG\.E(?:\.\w+)*\.(?:NA|EF)(?:\.\w+)*\.128\b", body)
            is_bounded = "PassingAccess" in symbol
            assert len(hints) >= 4 if is_bounded else not hints, (arch, symbol)
            if is_bounded:
                checked.add(arch)
    assert checked == set(ARCHS)
