"""Programs in C, C++ and Rust that use an installed library the way its users do: through pkg-config."""

from __future__ import annotations

from pathlib import Path

import pytest

from buildtools import ROOT, attempt, environment, installed, require_program, run

PROGRAMS = ROOT / "tests/capi"
WARNINGS = ["-Wall", "-Wextra", "-pedantic", "-Werror"]
COMPILERS = {".c": ["cc", "-std=c99", *WARNINGS], ".cpp": ["c++", "-std=c++11", *WARNINGS]}
KINDS = ["stub", "cuda"]


def pkg_config(prefix: Path, *arguments: str) -> list[str]:
    env = environment(PKG_CONFIG_PATH=str(prefix / "lib/pkgconfig"))
    return run(require_program("pkg-config"), *arguments, "kvbm_kernels", env=env).split()


def build(name: str, prefix: Path, folder: Path) -> Path:
    source, program = PROGRAMS / name, folder / Path(name).stem
    if source.suffix == ".rs":
        # rustc takes -L and -l like a linker.
        libs = pkg_config(prefix, "--libs")
        rustc = require_program("rustc")
        if attempt(rustc, "--version").returncode != 0:
            # What rustup puts on PATH before a toolchain is chosen.
            pytest.skip("needs a rustc that runs")
        run(rustc, "--edition=2021", *libs, source, "-o", program)
    else:
        compiler, *flags = COMPILERS[source.suffix]
        flags += [*pkg_config(prefix, "--cflags"), str(source), *pkg_config(prefix, "--libs")]
        run(require_program(compiler), *flags, "-o", program)
    return program


def run_with(prefix: Path, program: Path) -> str:
    return run(program, env=environment(LD_LIBRARY_PATH=str(prefix / "lib")))


@pytest.mark.parametrize("kind", KINDS)
def test_c(kind, tmp_path):
    prefix = installed(kind)
    output = run_with(prefix, build("universal.c", prefix, tmp_path))
    assert "NHD -> universal -> NHD: 3 blocks equal" in output
    assert "HND -> universal -> HND: 3 blocks equal" in output
    assert "launch_universal_from_block: 1 cudaErrorInvalidValue: universal_from_block: layout_value is 7" in output
    if kind == "stub":
        assert "memcpy_batch: 34 cudaErrorStubLibrary: memcpy_batch: " in output


@pytest.mark.parametrize("kind", KINDS)
def test_cpp(kind, tmp_path):
    prefix = installed(kind)
    output = run_with(prefix, build("views.cpp", prefix, tmp_path))
    assert "NHD -> operational HND: 2 blocks equal" in output
    assert "heads 1 and 2 -> universal: equal" in output
    assert "copy_blocks: 1 cudaErrorInvalidValue: copy_blocks: " in output


@pytest.mark.parametrize("kind", KINDS)
def test_rust(kind, tmp_path):
    prefix = installed(kind)
    output = run_with(prefix, build("convert.rs", prefix, tmp_path))
    assert "NHD -> universal -> NHD: 2 blocks equal" in output
    assert "launch_vectorized_copy: 1 cudaErrorInvalidValue: vectorized_copy: num_pairs is -1" in output
    if kind == "stub":
        assert "memcpy_batch: 34 cudaErrorStubLibrary: memcpy_batch: " in output


@pytest.mark.parametrize("kind", KINDS)
def test_the_static_library(kind, tmp_path):
    """Linked as pkg-config says, a program carries the library and needs no path to it."""
    prefix = installed(kind)
    libs = [
        "-l:libkvbm_kernels.a" if flag == "-lkvbm_kernels" else flag
        for flag in pkg_config(prefix, "--static", "--libs")
    ]
    program = tmp_path / "universal"
    run(require_program("cc"), *pkg_config(prefix, "--cflags"), PROGRAMS / "universal.c", *libs, "-o", program)
    assert "HND -> universal -> HND: 3 blocks equal" in run(program)


def test_linked_with_the_stub_and_run_with_cuda(tmp_path):
    """The two builds are one library to a linked program: LD_LIBRARY_PATH alone decides."""
    program = build("six.c", installed("stub"), tmp_path)
    assert run_with(installed("stub"), program) == "stub: memcpy_batch answers 34\n"
    assert run_with(installed("cuda"), program).startswith("CUDA: ")
    program = build("universal.c", installed("stub"), tmp_path)
    assert "HND -> universal -> HND: 3 blocks equal" in run_with(installed("cuda"), program)


@pytest.mark.parametrize("kind", KINDS)
def test_linked_with_the_old_library(kind, tmp_path):
    """The library that first had the six documented functions may have no soname and no symbol versions."""
    cc = require_program("cc")
    run(cc, "-shared", "-fPIC", PROGRAMS / "old_library.c", "-o", tmp_path / "libkvbm_kernels.so")
    program = tmp_path / "six"
    run(cc, *WARNINGS, PROGRAMS / "six.c", f"-L{tmp_path}", "-lkvbm_kernels", "-o", program)
    assert run_with(installed(kind), program).startswith("stub: " if kind == "stub" else "CUDA: ")
