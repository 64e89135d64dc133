"""What caches have to do, in plain Python: a sequence is a list of tokens, and its rows follow from them.

The rows of a token are a function of that token and of all before it, as in a model. Two sequences with the same
beginning then have the same rows there, whoever wrote them.
"""

from __future__ import annotations

import zlib

import numpy as np


def rows(tokens: list[int], num_layers: int, num_heads: int, dims: tuple[int, int]) -> list[np.ndarray]:
    """K and V of all tokens, ``[num_layers, n, num_heads, dim]``, as 16 random-looking bits an element."""
    state = 0
    seeds = np.empty(len(tokens), np.uint32)
    for i, token in enumerate(tokens):
        state = seeds[i] = zlib.crc32(token.to_bytes(8, "little"), state)
    made = []
    for which, dim in enumerate(dims):
        place = np.arange(num_layers * num_heads * dim, dtype=np.uint32) * 2654435761 + which
        mixed = (seeds[:, None] ^ place.astype(np.uint32)) * np.uint32(0x9E3779B1)
        made.append(
            (mixed >> 16).astype(np.uint16).reshape(-1, num_layers, num_heads, dim).transpose(1, 0, 2, 3).copy()
        )
    return made


class Pool:
    """Which blocks each sequence holds, as lists of ids told by the allocator under test."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.sequences: list[Sequence] = []

    def references(self) -> list[int]:
        """How many sequences hold each block."""
        counts = [0] * self.num_blocks
        for sequence in self.sequences:
            for block in sequence.blocks:
                counts[block] += 1
        return counts

    def num_free(self) -> int:
        return self.references().count(0)

    def needed(self, sequence: Sequence, n: int) -> int:
        """Blocks it takes to add ``n`` tokens: new ones, and a copy of the last if it is not full and shared."""
        if not n:
            return 0
        length = len(sequence.tokens)
        total = -(-(length + n) // self.block_size)
        shared = length % self.block_size and self.references()[sequence.blocks[length // self.block_size]] > 1
        return max(total - len(sequence.blocks), 0) + bool(shared)


class Sequence:
    """Tokens, and the blocks that hold them."""

    def __init__(self, tokens: list[int], blocks: list[int]) -> None:
        self.tokens = tokens
        self.blocks = blocks
