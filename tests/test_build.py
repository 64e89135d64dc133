"""The build's options and environment variables: what each does, and the sentence when it cannot.

Most of these only configure. A toolkit with a made-up nvcc stands in for the real one where the question is which nvcc
is taken and what it is told; tests/test_exports.py looks at a library that the real one built.
"""

from __future__ import annotations

import json
import re
import shutil
import sys

import pytest

import buildtools
from buildtools import ROOT, attempt, environment, meson, run, setup, write_script

NO_NVCC = "but there is no nvcc on PATH, and neither CUDA_PATH nor CUDA_HOME is set."

# Knows two architectures and two options, and compiles everything to an empty file.
FAKE_NVCC = """#!/bin/sh
case "$*" in
  *--list-gpu-code*) echo sm_80; echo sm_90 ;;
  *--help*) echo "--threads <number> --compress-mode [default,size]" ;;
  *--dryrun*) echo '#$ TOP={root}/bin/..' >&2 ;;
  *--version*) echo "Cuda compilation tools, release 12.9, V12.9.1" ;;
  *) while [ $# -gt 1 ]; do [ "$1" = -o ] && : > "$2"; shift; done ;;
esac
"""


@pytest.fixture
def toolkit(tmp_path):
    """The root of a CUDA toolkit that is not on PATH."""
    root = tmp_path / "toolkit"
    (root / "lib64").mkdir(parents=True)
    run("ar", "rcs", root / "lib64" / "libcudart_static.a")
    write_script(root / "bin/nvcc", FAKE_NVCC.replace("{root}", str(root)))
    return root


def summary(result) -> dict[str, str]:
    """The build summary that meson printed at the end."""
    assert result.returncode == 0, result.stdout
    return dict(re.findall(r"^ +(\w[\w ]*?) *: (.*)$", result.stdout, re.MULTILINE))


def error(result) -> str:
    """The one sentence of a configuration that failed."""
    assert result.returncode != 0, result.stdout
    (sentence,) = re.findall(r"ERROR: (.*)", result.stdout)
    return sentence


def ask_toolkit(**variables: str) -> dict[str, str]:
    """What meson.build is told about the CUDA toolkit."""
    script = ROOT / "tools/cuda_toolkit.py"
    output = run(sys.executable, script, "enabled", env=environment(**variables))
    return dict(line.split("\t") for line in output.splitlines())


def test_without_nvcc_the_build_is_the_stub_and_says_so(tmp_path):
    found = summary(setup(tmp_path / "b"))
    assert found["Build"].startswith("stub")
    assert found["CUDA architectures"] == "none"


@pytest.mark.parametrize("value", ["", "0", "false"])
def test_require_cuda_turned_off_allows_the_stub(tmp_path, value):
    assert summary(setup(tmp_path / "b", KVBM_REQUIRE_CUDA=value))["Build"].startswith("stub")


def test_require_cuda_without_nvcc_fails(tmp_path):
    assert error(setup(tmp_path / "b", KVBM_REQUIRE_CUDA="1")).endswith(f"KVBM_REQUIRE_CUDA is set, {NO_NVCC}")


def test_require_cuda_contradicts_cuda_disabled(tmp_path):
    result = setup(tmp_path / "b", "-Dcuda=disabled", KVBM_REQUIRE_CUDA="1")
    assert error(result).endswith("KVBM_REQUIRE_CUDA is set, but -Dcuda=disabled asks for the build without CUDA.")


def test_cuda_enabled_without_nvcc_fails(tmp_path):
    assert error(setup(tmp_path / "b", "-Dcuda=enabled")).endswith(f"-Dcuda=enabled is given, {NO_NVCC}")


def test_cuda_disabled_wins_over_an_nvcc(tmp_path, toolkit):
    result = setup(tmp_path / "b", "-Dcuda=disabled", CUDA_HOME=str(toolkit))
    assert summary(result)["Build"].startswith("stub")


@pytest.mark.parametrize("variable", ["CUDA_PATH", "CUDA_HOME"])
def test_nvcc_is_found_through_the_toolkit_root(tmp_path, toolkit, variable):
    found = summary(setup(tmp_path / "b", "-Dcuda=enabled", **{variable: str(toolkit)}))
    assert found["Build"] == "CUDA"
    assert found["nvcc"] == f"{toolkit}/bin/nvcc (12.9)"


def test_nvcc_is_found_on_path(tmp_path, toolkit):
    path = f"{toolkit}/bin:{environment()['PATH']}"
    found = summary(setup(tmp_path / "b", PATH=path, KVBM_REQUIRE_CUDA="1"))
    assert found["nvcc"].startswith(f"{toolkit}/bin/nvcc")


def test_the_toolkit_root_wins_over_path(tmp_path, toolkit):
    write_script(tmp_path / "other/bin/nvcc", "#!/bin/sh\nexit 1\n")
    path = f"{tmp_path}/other/bin:{environment()['PATH']}"
    found = summary(setup(tmp_path / "b", PATH=path, CUDA_PATH=str(toolkit)))
    assert found["nvcc"].startswith(f"{toolkit}/bin/nvcc")


@pytest.mark.parametrize("variable", ["CUDA_PATH", "CUDA_HOME"])
def test_a_toolkit_root_without_nvcc_fails(tmp_path, variable):
    result = setup(tmp_path / "b", **{variable: str(tmp_path)})
    assert error(result).endswith(f"{variable} is {tmp_path}, but there is no program {tmp_path}/bin/nvcc.")


def test_an_nvcc_that_cannot_compile_is_noticed_at_once(tmp_path, toolkit):
    script = (toolkit / "bin/nvcc").read_text()
    write_script(toolkit / "bin/nvcc", script.replace("*) while", "*) exit 3; while"))
    result = setup(tmp_path / "b", CUDA_HOME=str(toolkit))
    assert "is there but does not work" in error(result)


def test_a_toolkit_without_the_static_runtime_is_noticed_at_once(tmp_path, toolkit):
    (toolkit / "lib64" / "libcudart_static.a").unlink()
    assert "no libcudart_static.a" in error(setup(tmp_path / "b", CUDA_HOME=str(toolkit)))


def test_unknown_architectures_are_left_out_with_a_warning(tmp_path, toolkit):
    result = setup(tmp_path / "b", CUDA_HOME=str(toolkit))
    assert summary(result)["CUDA architectures"] == "80,90"
    warned = re.findall(r"WARNING: CUDA_ARCHS: this nvcc does not know '(\w+)'", result.stdout)
    assert warned == ["86", "89", "100", "120"]


def test_nvcc_is_told_what_was_chosen(tmp_path, toolkit):
    summary(setup(tmp_path / "b", CUDA_HOME=str(toolkit), CUDA_ARCHS="90"))
    (command,) = re.findall(r"COMMAND = (.*copy\.cu.*)", (tmp_path / "b/build.ninja").read_text())
    assert "-gencode=arch=compute_90,code=sm_90 " in command
    assert 'KVBM_CUDA_ARCHS="90"' in command
    assert "--compress-mode=size" in command


@pytest.mark.parametrize(
    ("value", "archs"),
    [
        ("90", "90"),
        ("80, 90", "80,90"),
        (" 90 80,", "90,80"),
        ("80,80", "80"),
        ("80,90a", "80,90a"),
        ("75,80,sm_90", "80"),
    ],
)
def test_cuda_archs_chooses_the_architectures(toolkit, value, archs):
    found = ask_toolkit(CUDA_HOME=str(toolkit), CUDA_ARCHS=value)
    assert found["archs"] == archs
    assert re.findall(r"code=sm_(\w+)", found["flags"]) == archs.split(",")


def test_a_variant_that_does_not_exist_is_left_out(tmp_path):
    """nvcc lists architectures, but none of their variants: only trying tells."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").symlink_to(buildtools.require_nvcc())
    assert ask_toolkit(CUDA_HOME=str(tmp_path), CUDA_ARCHS="80a,90a")["archs"] == "90a"


@pytest.mark.parametrize(("value", "newest"), [("90,80", "90"), ("80", "80"), ("80,90a", "80"), ("90a", "90a")])
def test_the_newest_architecture_is_also_there_as_ptx(toolkit, value, newest):
    flags = ask_toolkit(CUDA_HOME=str(toolkit), CUDA_ARCHS=value)["flags"]
    assert re.findall(r"arch=compute_(\w+),code=compute_(\w+)", flags) == [(newest, newest)]


def test_only_unknown_architectures_fail(tmp_path, toolkit):
    result = setup(tmp_path / "b", CUDA_HOME=str(toolkit), CUDA_ARCHS="70,sm_90,999")
    assert error(result).endswith("CUDA_ARCHS: this nvcc knows none of 70, sm_90, 999; it knows 80, 90.")


def test_an_older_nvcc_is_not_told_options_it_does_not_know(toolkit):
    script = (toolkit / "bin/nvcc").read_text()
    write_script(toolkit / "bin/nvcc", script.replace("--compress-mode [default,size]", ""))
    flags = ask_toolkit(CUDA_HOME=str(toolkit))["flags"].split()
    assert "--threads=0" in flags
    assert "--compress-mode=size" not in flags


def test_the_real_nvcc_off_path_builds_what_it_knows():
    buildtools.require_nvcc()
    log = buildtools.setup_log("cuda")
    assert "Build             : CUDA" in log
    assert "CUDA architectures: 90\n" in log
    assert "CUDA_ARCHS: this nvcc does not know '999', so it is left out" in log


@pytest.mark.parametrize(("option", "built"), [("-Dtests=true", True), ("-Dtests=false", False)])
def test_the_tests_option_decides_about_test_programs(tmp_path, option, built):
    summary(setup(tmp_path / "b", option))
    tests = json.loads(run(*meson("introspect", "--tests", tmp_path / "b")))
    assert bool(tests) == built


def test_header_and_project_must_agree_on_the_version(tmp_path):
    for name in ("meson.build", "meson.options", "include", "native", "tools"):
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tmp_path / name)
    header = tmp_path / "include" / "kvbm_kernels.h"
    text = header.read_text()
    header.write_text(re.sub(r"(VERSION_MINOR) \d+", r"\1 99", text))
    assert "0.99.0" in error(attempt(*meson("setup", tmp_path / "b", tmp_path)))
