"""The definition of quantised rows, a row at a time and element by element, and rows to try it on."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

import kvbm_kernels as kk
import reference
from kv_support import HD, NH, NL

MARKERS = [kk.KvInt8, kk.KvFp8]


def stored_row(x: list[float], marker, scale_dtype: str) -> tuple[list[float], float]:
    """What is stored of a row, as numbers, and its scale."""
    limit = {"int8": 127.0, "fp8": 448.0}[marker.NAME]
    if not all(map(math.isfinite, x)):
        return [0.0] * len(x), math.nan
    scale = np.float32(max(map(abs, x))) / np.float32(limit)
    if scale_dtype == "fp16":
        scale = np.float32(np.float16(min(scale, np.float32(65504))))
    stored = []
    for value in x:
        quotient = float(np.float32(value) / scale) if scale > 0 else 0.0
        quotient = max(-limit, min(limit, quotient))
        # Python rounds to even, and ml_dtypes too.
        stored.append(float(round(quotient) if marker is kk.KvInt8 else ml_dtypes.float8_e4m3fn(quotient)))
    return stored, float(scale)


def expected(x: np.ndarray, marker, scale_dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What is stored of rows, their scales, and what reads back as float32."""
    rows = x.astype(np.float32).reshape(-1, x.shape[-1])
    pairs = [stored_row(row.tolist(), marker, scale_dtype) for row in rows]
    stored = np.array([row for row, _ in pairs], np.float32).reshape(x.shape)
    scales = np.array([scale for _, scale in pairs], np.float32).reshape(x.shape[:-1])
    return stored, scales, stored * scales[..., None]


def rows(rng, n, dtype=np.float32, hd=HD):
    """Rows of very different magnitudes, some of them zero, some of them on ties."""
    magnitudes = 10.0 ** rng.integers(-6, 5, (NL, n, NH, 1))
    x = rng.standard_normal((NL, n, NH, hd)) * magnitudes
    x[rng.random((NL, n, NH)) < 0.1] = 0
    # Ties: halves of a step.
    steps = rng.integers(-254, 255, x.shape) / 2
    steps[..., 0] = 127
    x = np.where(rng.random((NL, n, NH, 1)) < 0.3, steps, x)
    return x.astype(np.float32).astype(dtype)


def same(actual, wanted):
    """Bit equality, but any NaN is as good as another."""
    actual, wanted = np.array(actual), np.array(wanted)
    reference.assert_same_bytes(
        np.where(np.isnan(actual), np.float32(1), actual), np.where(np.isnan(wanted), 1, wanted)
    )
    assert np.array_equal(np.isnan(actual), np.isnan(wanted))
