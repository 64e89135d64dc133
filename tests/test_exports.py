"""What the built library shows to the outside, and that the header stands on its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

import buildtools
from buildtools import HEADER, ROOT, installed, require_program, run

KINDS = ["stub", "cuda"]


def library(kind: str) -> str:
    return str(installed(kind) / "lib" / "libkvbm_kernels.so")


def names(text: str, before: str) -> set[str]:
    """The library's names outside comments that stand before this character."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    return set(re.findall(rf"\b(kvbm_kernels_\w+){re.escape(before)}", text))


def header_functions() -> set[str]:
    return names(HEADER.read_text(), before="(")


def dynamic(kind: str, tag: str) -> list[str]:
    """The values of one tag of the library's dynamic section."""
    section = run(require_program("readelf"), "-dW", library(kind))
    return re.findall(rf"\({tag}\).*\[(.*)\]", section)


def test_the_map_lists_the_functions_of_the_header():
    assert names((ROOT / "native/kvbm_kernels.map").read_text(), before=";") == header_functions()
    assert len(header_functions()) >= 19


@pytest.mark.parametrize("kind", KINDS)
def test_the_library_exports_the_functions_of_the_header_and_nothing_else(kind):
    output = run(require_program("nm"), "-D", "--defined-only", library(kind))
    symbols = {line.split()[2].split("@")[0] for line in output.splitlines() if " A " not in line}
    assert symbols == header_functions()


@pytest.mark.parametrize("kind", KINDS)
def test_the_library_needs_the_c_library_and_nothing_else(kind):
    """No CUDA, no driver, no C++ runtime."""
    allowed = r"(libc|libm|libpthread|libdl|librt|ld-linux.*)\.so\.\d+"
    assert [name for name in dynamic(kind, "NEEDED") if not re.fullmatch(allowed, name)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_library_is_versioned(kind):
    version = run(*buildtools.meson("introspect", "--projectinfo", ROOT / "meson.build"))
    number = json.loads(version)["version"]
    folder = installed(kind) / "lib"
    assert dynamic(kind, "SONAME") == ["libkvbm_kernels.so.0"]
    assert (folder / f"libkvbm_kernels.so.{number}").is_file()
    for name in ("libkvbm_kernels.so", "libkvbm_kernels.so.0"):
        assert (folder / name).resolve().name == f"libkvbm_kernels.so.{number}"


@pytest.mark.parametrize("kind", KINDS)
def test_the_library_loads_and_knows_what_it_is(kind):
    """In the CUDA build too, whether there is a driver or not."""
    program = (
        "import ctypes, sys\n"
        "library = ctypes.CDLL(sys.argv[1])\n"
        "library.kvbm_kernels_is_stub_build.restype = ctypes.c_bool\n"
        "print(library.kvbm_kernels_is_stub_build())\n"
    )
    assert run(sys.executable, "-c", program, library(kind)).strip() == str(kind == "stub")


STANDARDS = [("cc", "c99"), ("cc", "c17"), ("c++", "c++11"), ("c++", "c++20")]


def compile_only(compiler: str, standard: str, *arguments: str, source: str) -> None:
    language = "c++" if compiler == "c++" else "c"
    warnings = ["-Wall", "-Wextra", "-pedantic", "-Werror"]
    command = [require_program(compiler), f"-std={standard}", *warnings, f"-I{HEADER.parent}"]
    result = subprocess.run(
        [*command, *arguments, "-fsyntax-only", "-x", language, "-"],
        input=source,
        text=True,
        capture_output=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("compiler", "standard"), STANDARDS)
def test_the_header_compiles_alone(compiler, standard):
    compile_only(compiler, standard, source='#include "kvbm_kernels.h"\n' * 2)


@pytest.mark.parametrize(("compiler", "standard"), STANDARDS)
@pytest.mark.parametrize("order", ["before", "after"])
def test_the_header_compiles_beside_cuda(compiler, standard, order):
    """A cudaStream_t is then a kvbm_kernels_stream_t."""
    nvcc = buildtools.require_nvcc()
    output = run(nvcc, "--dryrun", "-x", "cu", "/dev/null", "-c", "-o", "/dev/null")
    folders = [f"-isystem{path}" for path in re.findall(r'"-I([^"]+)"', output)]
    includes = ['#include "kvbm_kernels.h"', "#include <cuda_runtime.h>"]
    if order == "after":
        includes.reverse()
    use = (
        "int use(cudaStream_t stream);\n"
        "int use(cudaStream_t stream) {\n"
        "  return kvbm_kernels_launch_vectorized_copy(NULL, NULL, 0, 0, stream);\n"
        "}\n"
    )
    compile_only(compiler, standard, *folders, source="\n".join([*includes, use]))
