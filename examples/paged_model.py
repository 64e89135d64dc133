"""The engine of offload.py: a decoder of the Llama kind with random weights, and its paged cache in several ranks.

All ranks are in this process: each has its heads of K and V in tensors of its own, one for each layer, as engines keep
them, and attention reads the heads of all. What a real engine does besides is left out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

import kvbm_kernels as kk


class Config(NamedTuple):
    """The sizes of a model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    dtype: torch.dtype


class Model:
    """Weights, and one pass over new tokens of a sequence."""

    def __init__(self, config: Config, device: str) -> None:
        self.config = c = config
        self.device = device
        torch.manual_seed(0)

        def weight(rows: int, columns: int) -> torch.Tensor:
            return torch.empty(rows, columns, dtype=c.dtype, device=device).normal_(std=columns**-0.5)

        qkv = (c.heads + 2 * c.kv_heads) * c.head_dim
        self.embedding = weight(c.vocabulary, c.hidden)
        self.layers = [
            (
                weight(qkv, c.hidden),
                weight(c.hidden, c.heads * c.head_dim),
                weight(2 * c.intermediate, c.hidden),
                weight(c.hidden, c.intermediate),
            )
            for _ in range(c.layers)
        ]
        self.head = weight(c.vocabulary, c.hidden)
        self.frequencies = 10_000 ** (-torch.arange(0, c.head_dim, 2, device=device) / c.head_dim)

    @torch.no_grad()
    def forward(self, tokens: list[int], cache: Cache) -> torch.Tensor:
        """The logits behind the last of these tokens, which follow those that the cache has and are added to it."""
        c = self.config
        n, first = len(tokens), cache.length
        cache.grow(n)
        x = self.embedding[torch.tensor(tokens, device=self.device)]
        angles = torch.arange(first, first + n, device=self.device)[:, None, None] * self.frequencies
        turn = torch.polar(torch.ones_like(angles), angles)
        # A chunk that follows others sees all of them; from the beginning, the plain causal mask is faster.
        mask = None
        if first and n > 1:
            mask = torch.ones(n, first + n, dtype=torch.bool, device=self.device).tril(first)
        for layer, (qkv, out, up, down) in enumerate(self.layers):
            h = functional.rms_norm(x, (c.hidden,)) @ qkv.T
            q, k, v = h.view(n, -1, c.head_dim).split([c.heads, c.kv_heads, c.kv_heads], 1)
            cache.write(layer, first, rotated(k, turn), v)
            keys, values = cache.read(layer)
            attended = functional.scaled_dot_product_attention(
                *(t.transpose(0, 1)[None] for t in (rotated(q, turn), keys, values)),
                attn_mask=mask,
                is_causal=first == 0,
                enable_gqa=True,
            )
            x = x + attended[0].transpose(0, 1).reshape(n, -1) @ out.T
            gate, value = (functional.rms_norm(x, (c.hidden,)) @ up.T).chunk(2, 1)
            x = x + (functional.silu(gate) * value) @ down.T
        return functional.rms_norm(x[-1], (c.hidden,)) @ self.head.T


def rotated(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Rotary positions: pairs of elements as complex numbers, turned."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


class Cache:
    """One sequence in the paged caches of ``size`` ranks, [num_blocks, 2, nt, nh / size, hd] a layer."""

    def __init__(self, model: Model, size: int, num_blocks: int, block_size: int) -> None:
        c = model.config
        self.block_size = block_size
        self.shape = kk.BlockShape(c.layers, 2, c.kv_heads, block_size, c.head_dim, c.dtype)
        own = kk.BlockShape(c.layers, 2, c.kv_heads // size, block_size, c.head_dim, c.dtype)
        self.tensors = [
            [
                torch.zeros(num_blocks, 2, own.nt, own.nh, own.hd, dtype=c.dtype, device=model.device)
                for _ in range(c.layers)
            ]
            for _ in range(size)
        ]
        self.ranks = [kk.BlockStack.from_layers(layers, own, axes="bothd") for layers in self.tensors]
        self.allocator = kk.BlockAllocator(num_blocks)
        self.blocks: list[int] = []
        self.length = 0
        self.device = model.device

    def grow(self, n: int) -> None:
        """Room for n more tokens."""
        self.length += n
        self.blocks += self.allocator.allocate(-(-self.length // self.block_size) - len(self.blocks))
        self.table = torch.tensor(self.blocks, device=self.device)

    def truncate(self, n: int) -> None:
        """Forget the tokens from n on."""
        keep = -(-n // self.block_size)
        self.allocator.free(self.blocks[keep:])
        del self.blocks[keep:]
        self.length = n

    def write(self, layer: int, first: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """K and V of new tokens, [n, nh, hd]; each rank takes its heads."""
        at = torch.arange(first, self.length, device=self.device)
        block, place = self.table[at // self.block_size], at % self.block_size
        for rank, both in enumerate(torch.stack([keys, values], 1).chunk(len(self.ranks), 2)):
            self.tensors[rank][layer][block, :, place] = both

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of all tokens and heads, [length, nh, hd] each."""
        parts = [layers[layer][self.table].transpose(1, 2) for layers in self.tensors]
        rows = torch.cat(parts, 3).flatten(0, 1)[: self.length]
        return rows[:, 0], rows[:, 1]
