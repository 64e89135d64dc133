"""The examples run, and what they verify holds."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from buildtools import ROOT

VERIFIED = "verified: the next logits are those of the engine that kept its cache, bit for bit\n"


def offload(*arguments: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("torch")
    command = [sys.executable, str(ROOT / "examples/offload.py"), *arguments]
    # PyTorch's threads would wait for each other, spinning, where other tests run beside this one.
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)


def test_offload() -> None:
    """A prompt of four blocks and some tokens grows by two blocks; all six are found by two ranks and by four."""
    done = offload("--prompt", "70", "--generate", "30")
    assert done.returncode == 0, done.stderr
    assert "6 blocks of nl=8 no=2 nh=4 nt=16 hd=64 f32: 96 tokens" in done.stdout
    assert "6 saved while 2 ranks generated" in done.stdout
    assert [line.split()[2] for line in re.findall("^restored to .*", done.stdout, re.MULTILINE)] == ["2", "4"]
    assert done.stdout.endswith(VERIFIED)


def test_offload_says_what_it_expects() -> None:
    done = offload("--prompt", "15")
    assert done.returncode == 2
    assert "expected --prompt 16 or more" in done.stderr
