"""The examples on a GPU."""

from __future__ import annotations

import pytest

from test_examples import VERIFIED, offload

pytestmark = pytest.mark.gpu


def test_offload() -> None:
    """Pinned memory, a stream for the copies, and the sizes of Llama-3.1-8B in bf16."""
    done = offload("--device", "cuda", "--prompt", "2000")
    assert done.returncode == 0, done.stderr
    assert "127 blocks of nl=32 no=2 nh=8 nt=16 hd=128 bf16" in done.stdout
    assert done.stdout.endswith(VERIFIED)
