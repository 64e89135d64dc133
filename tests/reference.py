"""The definition of every layout, in plain NumPy.

A logical KV cache is one array ``kv[b, l, o, t, h, :]``: block, layer, outer (K, V), token, head, and the row of hd
elements. Each function here lays the same rows out in memory the way one layout does. Nothing in this file knows the
library; tests compare the library with it bit for bit.

For nl = no = 1, nt = nh = 2 and rows of one letter, kv = [[ a b ]   (token 0, heads 0 and 1)
                                                          [ c d ]]  (token 1, heads 0 and 1)

    NHD chunk, operational NHD   a b c d
    HND chunk, operational HND   a c b d
    universal                    a c b d
"""

from __future__ import annotations

import numpy as np


def block_stack(kv: np.ndarray, layout: str) -> list[list[np.ndarray]]:
    """[nb][nl*no] separate chunks, each [nt, nh, hd] for NHD or [nh, nt, hd] for HND."""
    nb, nl, no = kv.shape[:3]
    return [[chunk(kv[b, layer, outer], layout) for layer in range(nl) for outer in range(no)] for b in range(nb)]


def chunk(rows: np.ndarray, layout: str) -> np.ndarray:
    """One chunk, from rows [nt, nh, hd]."""
    return np.array(rows if layout == "NHD" else rows.transpose(1, 0, 2), order="C")


def operational(kv: np.ndarray, inner: str) -> np.ndarray:
    """[nb, nl, no, nt*nh*hd], the last dimension in the order of an NHD or HND chunk."""
    nb, nl, no = kv.shape[:3]
    ordered = kv if inner == "NHD" else kv.transpose(0, 1, 2, 4, 3, 5)
    return np.array(ordered, order="C").reshape(nb, nl, no, -1)


def universal(kv: np.ndarray) -> np.ndarray:
    """[nb, nh, nl, no, nt, hd]."""
    return np.array(kv.transpose(0, 4, 1, 2, 3, 5), order="C")


def from_block_stack(chunks: list[list[np.ndarray]], nl: int, no: int, layout: str) -> np.ndarray:
    """The logical cache that block_stack() would lay out as these chunks."""
    rows = [[c if layout == "NHD" else c.transpose(1, 0, 2) for c in block] for block in chunks]
    stacked = np.array(rows, order="C")
    return stacked.reshape(len(chunks), nl, no, *stacked.shape[2:])


def from_operational(blocks: np.ndarray, nt: int, nh: int, inner: str) -> np.ndarray:
    """The logical cache that operational() would lay out as these blocks."""
    nb, nl, no = blocks.shape[:3]
    if inner == "NHD":
        return blocks.reshape(nb, nl, no, nt, nh, -1)
    return blocks.reshape(nb, nl, no, nh, nt, -1).transpose(0, 1, 2, 4, 3, 5)


def from_universal(blocks: np.ndarray) -> np.ndarray:
    """The logical cache that universal() would lay out as these blocks."""
    return blocks.transpose(0, 2, 3, 4, 1, 5)


def runs(dst: list[np.ndarray], src: list[np.ndarray]) -> list[int]:
    """The lengths, in rows, of the longest runs of rows that are contiguous on both sides, in the order of dst.

    Each side is its buffers of memory, one-dimensional, with the number of a row where that row lies and -1 in gaps.
    """
    places = {int(row): (b, i) for b, buffer in enumerate(src) for i, row in enumerate(buffer)}
    lengths: list[int] = []
    for buffer in dst:
        follows = None
        for row in buffer:
            if row < 0:
                follows = None
                continue
            b, i = places[int(row)]
            if follows == (b, i):
                lengths[-1] += 1
            else:
                lengths.append(1)
            follows = (b, i + 1)
    return lengths


def heads_of_rank(nh: int, rank: int, size: int) -> slice:
    """The heads that one of ``size`` tensor-parallel ranks holds; with more ranks than heads, heads are replicated."""
    if nh % size == 0:
        return slice(rank * (nh // size), (rank + 1) * (nh // size))
    if size % nh == 0:
        head = rank // (size // nh)
        return slice(head, head + 1)
    raise ValueError(f"{nh} heads cannot be shared by {size} ranks")


def assert_same_bytes(actual: np.ndarray, expected: np.ndarray) -> None:
    """Bit equality, NaNs included; a failure names the first coordinate that differs and how many do."""
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    assert actual.dtype.itemsize == expected.dtype.itemsize, f"{actual.dtype}, expected {expected.dtype}"
    raw = f"V{actual.dtype.itemsize}"
    differ = np.ascontiguousarray(actual).view(raw) != np.ascontiguousarray(expected).view(raw)
    if differ.any():
        first = tuple(int(i) for i in np.argwhere(differ)[0])
        raise AssertionError(
            f"{int(differ.sum())} of {differ.size} elements differ, first at {first}: "
            f"{actual[first]!r}, expected {expected[first]!r}"
        )


def random_kv(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype | type | str) -> np.ndarray:
    """Random bits as elements of dtype: NaN payloads, negative zeros and denormals among them."""
    dtype = np.dtype(dtype)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(rng.bytes(nbytes), dtype=np.uint8).view(dtype).reshape(shape).copy()


# Rows of tokens in a paged cache.


def token_places(
    num_tokens: int,
    block_size: int,
    num_blocks: int,
    slots: np.ndarray | None,
    tables: np.ndarray,
    starts: np.ndarray | None,
) -> list[tuple[int, int] | None]:
    """The block and the place in it of each token; None for a token that has none.

    By slots, or by tables [num_sequences, stride] and the positions at which the sequences start.
    """
    places: list[tuple[int, int] | None] = []
    each = num_tokens // len(tables)
    for token in range(num_tokens):
        if slots is not None:
            block, inside = divmod(int(slots[token]), block_size)
        else:
            sequence, position = divmod(token, each)
            position += 0 if starts is None else int(starts[sequence])
            entry, inside = divmod(position, block_size)
            block = int(tables[sequence, entry]) if entry < tables.shape[1] else -1
        places.append((block, inside) if 0 <= block < num_blocks else None)
    return places


# Rows of int8 and fp8, each with its scale behind it. With amax the largest magnitude in a row, all in float32 with
# every operation rounded to nearest even:
#
#     scale = amax / limit             limit is 127 for int8, and 448, the largest number of E4M3, for fp8
#     stored = round(x / scale)        to nearest even, at most limit in magnitude; 0 where the scale is 0
#     x' = stored * scale
#
# A scale that is kept as float16 is rounded to it first, to at most 65504. A row with a NaN or an infinity in it is
# stored as zeros with a NaN for a scale.

LIMITS = {"int8": np.float32(127), "fp8": np.float32(448)}
FP16_LARGEST = np.float32(65504)


def scale_offset(head_dim: int, scale: np.dtype | type) -> int:
    """Where in a stored row the scale is."""
    size = np.dtype(scale).itemsize
    return -(-head_dim // size) * size


@np.errstate(all="ignore")
def quantised(x: np.ndarray, stored: str, scale: np.dtype | type) -> np.ndarray:
    """Rows of float32 [..., head_dim] as rows of bytes [..., stored size]."""
    head_dim = x.shape[-1]
    at = scale_offset(head_dim, scale)
    rows = np.zeros((*x.shape[:-1], at + np.dtype(scale).itemsize), np.uint8)
    amax = np.abs(x).max(-1, keepdims=True)
    broken = ~np.isfinite(amax)
    scales = amax / LIMITS[stored]
    if np.dtype(scale) == np.float16:
        scales = np.minimum(scales, FP16_LARGEST).astype(np.float16).astype(np.float32)
    quotients = np.divide(x, scales, out=np.zeros_like(x), where=(scales > 0) & ~broken)
    if stored == "int8":
        codes = np.clip(np.rint(quotients), -127, 127).astype(np.int8).view(np.uint8)
    else:
        codes = _nearest_fp8(quotients)
    rows[..., :head_dim] = codes
    scales[broken] = np.nan
    rows[..., at:] = scales.astype(scale).view(np.uint8)
    return rows


@np.errstate(all="ignore")
def dequantised(rows: np.ndarray, head_dim: int, stored: str, scale: np.dtype | type) -> np.ndarray:
    """The float32 numbers of stored rows; every NaN is the canonical one."""
    kept = np.ascontiguousarray(rows[..., scale_offset(head_dim, scale) :]).view(scale).astype(np.float32)
    codes = rows[..., :head_dim]
    numbers = codes.view(np.int8).astype(np.float32) if stored == "int8" else FP8_VALUES[codes]
    products = numbers * kept
    return np.where(np.isnan(products), np.float32(np.nan), products)


def _fp8_value(code: int) -> float:
    exponent, fraction = code >> 3 & 15, code & 7
    magnitude = (8 + fraction) * 2.0 ** (exponent - 10) if exponent else fraction * 2.0**-9
    return -magnitude if code & 0x80 else magnitude


FP8_VALUES = np.array([np.nan if code & 0x7F == 0x7F else _fp8_value(code) for code in range(256)], np.float32)


def _nearest_fp8(x: np.ndarray) -> np.ndarray:
    """The code of the nearest number of E4M3, of two as near the even one; past the largest, the largest."""
    ladder = FP8_VALUES[:127].astype(np.float64)
    magnitude = np.minimum(np.abs(x.astype(np.float64)), 448)
    above = np.searchsorted(ladder, magnitude).clip(1, 126)
    low, high = magnitude - ladder[above - 1], ladder[above] - magnitude
    nearer = np.where(low == high, above - above % 2, np.where(low < high, above - 1, above))
    return (nearer | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def numbers_of(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Numbers given as the bits of "f32", "f16" or "bf16", in float32."""
    if dtype == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(np.float32 if dtype == "f32" else np.float16).astype(np.float32)


@np.errstate(all="ignore")
def bits_of(numbers: np.ndarray, dtype: str) -> np.ndarray:
    """float32 numbers, rounded to nearest even, as the bits of "f32", "f16" or "bf16"."""
    if dtype == "bf16":
        bits = numbers.view(np.uint32)
        return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(
            np.uint16
        )
    return numbers.view(np.uint32) if dtype == "f32" else numbers.astype(np.float16).view(np.uint16)
