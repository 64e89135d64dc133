"""The blocks of sequences as FlashInfer takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from kvbm_kernels.kv_arrays import ArrayMaker


class Csr(NamedTuple):
    """The blocks of sequences one after another, as FlashInfer takes them; all int32."""

    indptr: Any
    """``[batch + 1]``: where the blocks of each sequence begin in ``indices``, and where the last one's end."""
    indices: Any
    """The blocks."""
    last_page_len: Any
    """``[batch]``: tokens in the last block of each sequence, 1 to block_size; 0 for a sequence without tokens."""


def csr_of(sequences: Sequence[tuple[int, Sequence[int]]], block_size: int, arrays: ArrayMaker) -> Csr:
    """From the lengths of sequences and the blocks that they lie in; there may be more blocks than tokens need."""
    indices: list[int] = []
    indptr, last = [0], []
    for n, blocks in sequences:
        indices += blocks[: -(-n // block_size)]
        indptr.append(len(indices))
        last.append((n - 1) % block_size + 1 if n else 0)
    return Csr(*[arrays.table(np.array(numbers, np.int32)) for numbers in (indptr, indices, last)])
