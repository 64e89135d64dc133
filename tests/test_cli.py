"""The command kvbm-kernels: how it starts, what it refuses, and its report for bug reports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kvbm_kernels as kk
from buildtools import require_program, write_script
from commands import kvbm_kernels, output, python

EXTRAS = ("click", "rich", "matplotlib")
WITHOUT = "import sys; sys.modules.update(dict.fromkeys({missing!r})); "


def without(missing: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    """Run Python where these modules cannot be imported."""
    return python("-c", WITHOUT.format(missing=missing) + code)


class TestStart:
    def test_the_console_script_is_the_same_command(self):
        script = require_program("kvbm-kernels")
        for arguments in (["--help"], ["layout", "--help"], ["layout", "--nl", "1"]):
            result = subprocess.run([script, *arguments], capture_output=True, text=True, check=True)
            assert result.stdout == output(kvbm_kernels(*arguments))

    def test_version(self):
        assert output(kvbm_kernels("--version")) == f"kvbm-kernels {kk.__version__}\n"

    @pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",), ("info", "--help"), ("layout", "-h")])
    def test_help_teaches_by_example_and_fits_a_terminal(self, arguments):
        text = output(kvbm_kernels(*arguments))
        assert text.startswith("Usage: kvbm-kernels")
        assert "\n  Examples:\n" in text
        assert max(map(len, text.splitlines())) <= 80

    def test_the_examples_in_the_help_run(self, tmp_path):
        examples = output(kvbm_kernels("layout", "--help")).partition("Examples:\n")[2].splitlines()
        assert len(examples) >= 5
        assert all("  " in line.strip() or "--" in line for line in examples), "an example that says nothing"
        for line in examples:
            # What stands behind two spaces is a remark.
            words = line.strip().split("  ")[0].split()
            if "layout.svg" in words:
                words[-1] = str(tmp_path / "layout.svg")
            output(kvbm_kernels(*words[1:]))
        assert (tmp_path / "layout.svg").is_file()

    @pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
    def test_completion_of_shells(self, shell):
        script = output(kvbm_kernels(_KVBM_KERNELS_COMPLETE=f"{shell}_source"))
        assert "_KVBM_KERNELS_COMPLETE" in script

    def test_completion_knows_commands_and_choices(self):
        complete = {"_KVBM_KERNELS_COMPLETE": "bash_complete"}
        assert output(kvbm_kernels(COMP_WORDS="kvbm-kernels la", COMP_CWORD="1", **complete)) == "plain,layout\n"
        kinds = output(kvbm_kernels(COMP_WORDS="kvbm-kernels layout --from op", COMP_CWORD="3", **complete))
        assert kinds.split() == ["plain,operational_nhd", "plain,operational_hnd"]

    def test_a_picture_that_cannot_be_written(self, tmp_path):
        """As any output; what was there stays."""
        (tmp_path / "old.svg").write_text("old")
        line = f"ulimit -f 1; {sys.executable} -m kvbm_kernels layout --svg old.svg"
        ran = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True)
        assert (ran.returncode, ran.stderr) == (1, "kvbm-kernels: error: old.svg: File too large\n")
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"old.svg": "old"}

    @pytest.mark.parametrize(
        "arguments", [["layout"], ["layout", "--json"], ["layout", "--svg", "-"], ["info"]], ids=" ".join
    )
    def test_output_that_nobody_takes(self, arguments):
        """A full disk is one line and a status; a program that is given no output says nothing."""
        with Path("/dev/full").open("w") as full:
            ran = subprocess.run(
                [sys.executable, "-m", "kvbm_kernels", *arguments], stdout=full, stderr=subprocess.PIPE, text=True
            )
        assert (ran.returncode, ran.stderr) == (1, "kvbm-kernels: error: No space left on device\n")
        line = f"exec {sys.executable} -m kvbm_kernels {' '.join(arguments)} >&-"
        ran = subprocess.run(["sh", "-c", line], stderr=subprocess.PIPE, text=True)
        assert (ran.returncode, ran.stderr) == (0, "")

    @pytest.mark.parametrize(
        "arguments", [["layout"], ["layout", "--json"], ["layout", "--svg", "-"], ["info"]], ids=" ".join
    )
    def test_a_reader_that_stops_reading_is_not_answered(self, arguments):
        command = [sys.executable, "-m", "kvbm_kernels", *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            process.stdout.close()
            assert process.stderr.read() == b""
        assert process.returncode == 1


class TestWithoutTheLibrary:
    """One line and status 1, whatever is asked for: nothing of the package is there without it."""

    @pytest.mark.parametrize("command", ["kvbm-kernels", "kvbench"])
    @pytest.mark.parametrize(
        ("library", "reason"),
        [
            ("/nowhere.so", "/nowhere.so {}: cannot open shared object file: No such file or directory"),
            ("/tmp", "/tmp {}: cannot read file data: Is a directory"),
            ("/etc/passwd", "/etc/passwd {}: invalid ELF header"),
            ("libm.so.6", "libm.so.6 {} has no kvbm_kernels_version: it is another library, or an old one"),
            (
                "nowhere.so",
                "nowhere.so {}: cannot open shared object file: No such file or directory; a name without a / is "
                "looked for where the system has its libraries, not in the current folder",
            ),
            (os.fsdecode(b"/tmp/\xff.so"), r"'/tmp/\udcff.so' {}: its name is no UTF-8"),
        ],
    )
    def test_says_which_one_and_why(self, command, library, reason):
        env = {**os.environ, "KVBM_KERNELS_LIBRARY": library}
        for argument in ("--help", "info"):
            script = require_program(command)
            ran = subprocess.run([script, argument], capture_output=True, text=True, env=env, check=False)
            assert (ran.returncode, ran.stdout) == (1, "")
            assert ran.stderr == (
                f"{command}: error: kvbm_kernels cannot use its library; KVBM_KERNELS_LIBRARY can name another one. "
                + reason.format("(named by KVBM_KERNELS_LIBRARY)")
                + "\n"
            )

    @pytest.mark.parametrize("module", ["kvbm_kernels", "kvbm_kernels.bench"])
    def test_as_a_module_it_is_in_the_last_lines(self, module):
        """Python imports the package before anything of the module runs."""
        ran = python("-m", module, KVBM_KERNELS_LIBRARY="/nowhere.so")
        assert (ran.returncode, ran.stdout) == (1, "")
        said, which = ran.stderr.splitlines()[-2:]
        assert "kvbm_kernels cannot use its library" in said
        assert "/nowhere.so (named by KVBM_KERNELS_LIBRARY)" in which

    def test_another_import_that_fails_is_not_hidden(self, tmp_path):
        (tmp_path / "cffi.py").write_text("raise ImportError('no good')\n")
        code = "import sys, _kvbm_commands; sys.exit(_kvbm_commands.kvbench())"
        assert "ImportError: no good" in python("-c", code, PYTHONPATH=str(tmp_path)).stderr


class TestExtras:
    def test_the_package_does_not_need_them(self):
        code = f"import kvbm_kernels; print([name for name in {EXTRAS} if sys.modules.get(name)])"
        assert output(without(EXTRAS, code)) == "[]\n"

    @pytest.mark.parametrize("missing", ["click", "rich"])
    def test_without_them_the_command_says_what_to_install(self, missing):
        result = without((missing,), "from kvbm_kernels.__main__ import main; sys.exit(main())")
        assert result.returncode == 2
        assert result.stdout == ""
        assert result.stderr == (
            f"kvbm-kernels: error: {missing} is not installed, expected the extra cli: pip install '.[cli]' in a "
            "checkout, or 'kvbm-kernels[cli]' from a package index that has it\n"
        )

    @pytest.mark.parametrize("arguments", [["info"], ["info", "--json"]])
    def test_a_report_does_not_need_them(self, arguments):
        code = f"sys.argv[1:] = {arguments}; from kvbm_kernels.__main__ import main; sys.exit(main())"
        assert output(without(EXTRAS, code)) == output(python("-c", f"import sys; {code}"))

    @pytest.mark.parametrize("module", ["kvbm_kernels", "kvbm_kernels.bench"])
    def test_an_interrupt_while_they_are_imported(self, module, tmp_path):
        (tmp_path / "click.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
        result = python("-m", module, "--help", PYTHONPATH=str(tmp_path))
        assert (result.returncode, result.stdout, result.stderr) == (130, "", "")

    @pytest.mark.parametrize("command", ["kvbm-kernels", "kvbench"])
    def test_an_interrupt_while_the_package_is_imported(self, command, tmp_path):
        (tmp_path / "cffi.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
        ran = subprocess.run([require_program(command)], capture_output=True, text=True, env=env, check=False)
        assert (ran.returncode, ran.stdout, ran.stderr) == (-signal.SIGINT, "", "")

    def test_another_missing_module_is_not_hidden(self):
        result = without(("json",), "sys.argv = ['x', 'info']; from kvbm_kernels.__main__ import main; main()")
        assert "ModuleNotFoundError" in result.stderr


class TestUsageErrors:
    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (["foo"], "kvbm-kernels: error: no command foo, expected info or layout"),
            ([""], "kvbm-kernels: error: no command '', expected info or layout"),
            (["--foo"], "kvbm-kernels: error: no option --foo, expected --version, --help"),
            (["info", "--jsn"], "kvbm-kernels info: error: no option --jsn, expected --json, --help"),
            (["info", "more"], "kvbm-kernels info: error: Got unexpected extra argument (more)"),
            (["layout", "--nl"], ": error: Option '--nl' requires an argument."),
            (["layout", "--nl", "0"], "Invalid value for '--nl': 0 is not in the range 1<=x<=9223372036854775807."),
            (["layout", "--nh", "9" * 401], " is not in the range 1<=x<=9223372036854775807."),
            (["layout", "--nb", "9" * 5000], " is not a valid integer range."),
            (["layout", *(f"--{n}={10**18}" for n in ("nl", "no", "nh", "nt", "hd"))], "bytes a block, expected less"),
            (["layout", "--nt", "9999999999999999"], "more bytes than there are addresses, which are 2**56"),
            (["layout", "--nt", str((1 << 48) + 1)], "more bytes than there are addresses"),
            (["layout", "--nt", "x"], "Invalid value for '--nt': 'x' is not a valid integer range."),
            (
                ["layout", "--from", "foo"],
                "'nhd', 'hnd', 'layers', 'packed', 'operational_nhd', 'operational_hnd', 'uni",
            ),
            (["layout", "--model", "gpt-9"], "'gpt-9' is not one of 'llama-3.1-8b', 'llama-3.1-70b'"),
            (["layout", "--dtype", "f12"], "'f16', 'bf16', 'f32', 'f64', 'fp8_e4m3', 'fp8_e5m2', 'int8', 'uint8'"),
            (["layout", "--hd", str(1 << 62)], "kvbm-kernels layout: error: nl=2 no=2 nh=4 nt=4 hd=46116"),
            (["layout", "--hd", str(1 << 52), "--nb", "64"], "a side has more bytes than there are addresses"),
            (
                ["layout", "--nb", "65537"],
                "error: --nb 65537 * --nl 2 * --no 2: 262,148 buffers on a side, expected at most 262,144",
            ),
            (["layout", "--nb", str(10**12), "--from", "layers"], "error: --nb 1000000000000: 1,000,000,000,000 buf"),
            (["layout", "--nl", "262145", "--from", "layers", "--to", "packed"], "error: --nl 262145: 262,145 buffers"),
            (["layout", "--svg", "/nowhere/layout.svg"], "--svg /nowhere/layout.svg cannot be written: No such file"),
            (["layout", "--svg", "layout.png"], "error: --svg layout.png, expected a .svg file or -"),
            (["layout", "--svg", "-", "--json"], "error: --svg - with --json, expected one of them"),
        ],
    )
    def test_are_one_line_with_what_is_allowed(self, arguments, expected):
        result = kvbm_kernels(*arguments)
        assert result.returncode == 2
        assert result.stdout == ""
        assert result.stderr.count("\n") == 1
        assert expected in result.stderr


SMI_FIELDS = ["pci.bus_id", "name", "memory.total", "compute_cap", "driver_version"]
KNOWN = "00000000:3B:00.0, NVIDIA H200, 143771, 9.0, 5, 16, 5, 16, 580.95.05"
HARDLY_KNOWN = "00000000:5E:00.0, NVIDIA GH200 480GB, [N/A], 9.0, [N/A], [N/A], [N/A], [N/A], 580.95.05"


def with_smi(folder: Path, script: str) -> dict[str, str]:
    write_script(folder / "nvidia-smi", f"#!/bin/sh\n{script}\n")
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def lines(*devices: str) -> str:
    return "\n".join(["cat <<'END'", *devices, "END"])


class TestInfo:
    def report(self, **variables: str) -> dict:
        return json.loads(output(kvbm_kernels("info", "--json", **variables)))

    def test_json_has_what_the_package_says(self):
        report = self.report()
        build = kk.build_info()
        assert report["version"] == kk.__version__
        assert report["library_version"] == build.version
        assert report["library"] == build.library
        assert report["build"] == ("stub" if build.is_stub_build else "CUDA")
        assert report["architectures"] == list(build.archs)
        assert (report["cuda_runtime"], report["cuda_driver"]) == (build.cuda, build.driver)
        assert report["visible_devices"] == build.devices
        assert report["batch_copy"] == kk.has_memcpy_batch_async()
        assert report["python"].endswith(sys.executable)
        assert report["packages"].keys() >= {"numpy", "cffi"}
        assert report["processors"] >= 1
        assert report.keys() == {
            *("version", "library", "library_version", "build", "architectures", "cuda_runtime", "cuda_driver"),
            *("driver_release", "visible_devices", "batch_copy", "batch_copy_reason", "devices", "devices_reason"),
            *("processor", "processors", "python", "platform", "packages"),
        }

    def test_text_has_the_same(self):
        report, text = self.report(), output(kvbm_kernels("info"))
        rows = dict(line.split("  ", 1) for line in text.splitlines() if not line.startswith(" "))
        assert rows["kvbm-kernels"].strip() == report["version"]
        assert rows["library"].endswith(f"{report['build']} build, {report['library']}")
        assert rows["devices"].strip().startswith(f"{report['visible_devices']} visible")
        assert report["batch_copy_reason"] in rows["batch copy"]
        assert rows["python"].strip() == report["python"]
        for name, version in report["packages"].items():
            assert f"{name} {version}" in rows["packages"]

    @pytest.mark.skipif(kk.build_info().devices > 0, reason="there is a GPU")
    def test_why_there_is_no_batch_copy_without_a_driver(self):
        report = self.report()
        assert report["batch_copy"] is False
        expected = "this is the build without CUDA" if kk.is_stub_build() else "there is no CUDA driver"
        assert report["batch_copy_reason"] == expected

    def test_without_nvidia_smi(self, tmp_path):
        report = self.report(PATH=str(tmp_path))
        assert report["driver_release"] is None
        assert report["devices_reason"].startswith("there is no nvidia-smi")
        if not kk.build_info().devices:
            assert report["devices"] == []

    @pytest.mark.skipif(kk.build_info().devices > 0, reason="there is a GPU")
    def test_devices_that_nvidia_smi_tells_of(self, tmp_path):
        """Also where the library sees none: that may be what is wrong."""
        variables = with_smi(tmp_path, lines(KNOWN, HARDLY_KNOWN))
        report = self.report(**variables)
        assert report["driver_release"] == "580.95.05"
        assert report["devices_reason"] is None
        known, hardly_known = report["devices"]
        unseen = "this process does not see the device"
        assert known == {
            "ordinal": None,
            "name": "NVIDIA H200",
            "memory_nbytes": 143771 << 20,
            "compute_capability": "9.0",
            "multiprocessors": None,
            "pci_bus_id": "0000:3b:00.0",
            "pcie_generation": 5,
            "pcie_width": 16,
            "pcie_max_generation": 5,
            "pcie_max_width": 16,
            "unknown": {"ordinal": unseen, "multiprocessors": unseen},
        }
        assert hardly_known["name"] == "NVIDIA GH200 480GB"
        assert hardly_known["memory_nbytes"] is None
        assert hardly_known["unknown"]["memory_nbytes"] == "nvidia-smi does not say"
        assert hardly_known["unknown"]["pcie_generation"] == "nvidia-smi does not say, nor does the kernel"
        text = output(kvbm_kernels("info", **variables))
        assert "NVIDIA H200, 140.4 GiB, compute capability 9.0, ? multiprocessors\n" in text
        assert "PCIe 5 x16 now, 5 x16 at most, at 0000:3b:00.0\n" in text
        assert "NVIDIA GH200 480GB, ? GiB" in text
        assert "? ordinal, multiprocessors: this process does not see the device\n" in text

    def test_what_is_asked_of_nvidia_smi(self, tmp_path):
        self.report(**with_smi(tmp_path, f'echo "$@" > {tmp_path}/asked'))
        asked = (tmp_path / "asked").read_text()
        for name in [
            *SMI_FIELDS,
            *(f"pcie.link.{what}.{when}" for what in ("gen", "width") for when in ("current", "max")),
        ]:
            assert name in asked

    def test_nvidia_smi_that_does_not_speak_utf_8(self, tmp_path):
        report = self.report(**with_smi(tmp_path, "printf 'Fehler: Ger\\344t fehlt'; exit 9"))
        assert "nvidia-smi failed: Fehler: Ger\ufffdt fehlt" in report["devices_reason"]

    def test_nvidia_smi_that_fails(self, tmp_path):
        report = self.report(**with_smi(tmp_path, "echo 'NVIDIA-SMI has failed: no driver'; exit 9"))
        assert "nvidia-smi failed: NVIDIA-SMI has failed: no driver" in report["devices_reason"]
        assert report["driver_release"] is None
