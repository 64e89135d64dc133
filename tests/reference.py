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
