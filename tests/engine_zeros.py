"""Tensors of zeros, as an engine's, for what is refused of them whatever they hold."""

from __future__ import annotations

import numpy as np
import pytest

from kvbm_kernels.engines import from_vllm

B, L, N, H, D = 4, 2, 8, 3, 6


def zeros(*shape, dtype=np.float16):
    return np.zeros(shape, dtype)


def layers(*shape, dtype=np.float16):
    return [zeros(*shape, dtype=dtype) for _ in range(L)]


def vllm(tensors, **arguments):
    """from_vllm, with the heads that tensors here have if nothing else is said."""
    return from_vllm(tensors, **{"num_kv_heads": 1 if arguments["layout"] == "mla" else H, **arguments})


def raises(error, message):
    return pytest.raises(error, match=message)
