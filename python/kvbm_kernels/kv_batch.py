"""A step of several sequences at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, SupportsIndex

import numpy as np

from kvbm_kernels.arrays import ArrayLike
from kvbm_kernels.block_allocator import OutOfBlocks
from kvbm_kernels.errors import KvbmTypeError, KvbmValueError, Uncopied
from kvbm_kernels.layouts import Layout, as_count
from kvbm_kernels.paged_cache import Csr, PagedKvCache, csr_of


class BatchTables(NamedTuple):
    """The tables of several sequences, for an attention kernel."""

    block_table: Any
    """u32 ``[batch, max_blocks]``, padded with the null block."""
    context_lens: Any
    """u32 ``[batch]``."""


class KvBatch(Uncopied):
    """Paged caches of one pool, no cache twice: a batch of a decode step.

    Raises KvbmTypeError and KvbmValueError for anything else.
    """

    __slots__ = ("caches",)

    def __init__(self, caches: Sequence[PagedKvCache]) -> None:
        self.caches = tuple(caches)
        if not self.caches:
            raise KvbmValueError("caches has no entries, expected one or more")
        for i, cache in enumerate(self.caches):
            if not isinstance(cache, PagedKvCache):
                raise KvbmTypeError(f"caches[{i}] is a {type(cache).__name__}, expected a paged KvCache")
            if cache.pool is not self.caches[0].pool:
                raise KvbmValueError(f"caches[{i}] is of another pool than caches[0], expected the same")
        if len(set(map(id, self.caches))) < len(self.caches):
            raise KvbmValueError("caches has the same cache twice, expected different ones")

    def __len__(self) -> int:
        return len(self.caches)

    def tables(self, max_blocks: SupportsIndex | None = None) -> BatchTables:
        """One block table and the lengths, as they are now.

        ``max_blocks`` is the width of the table, None for the most blocks that one of the caches holds, and 1 at least.
        Raises KvbmValueError if a cache holds more.
        """
        pool = self.caches[0].pool
        most = max(len(cache._blocks) for cache in self.caches)
        width = max(most, 1) if max_blocks is None else as_count(max_blocks, "max_blocks", 1)
        if width < most:
            raise KvbmValueError(f"max_blocks is {width}, expected at least {most}: what one of the caches holds")
        table = np.full((len(self), width), pool.null_block, np.uint32)
        for row, cache in zip(table, self.caches, strict=True):
            row[: len(cache._blocks)] = cache._blocks
        lens = np.array([len(cache) for cache in self.caches], np.uint32)
        return BatchTables(pool.rows.arrays.table(table), pool.rows.arrays.table(lens))

    def csr(self) -> Csr:
        """The blocks with tokens, as FlashInfer takes them."""
        return csr_of(self.caches)

    def append(self, k: ArrayLike, v: ArrayLike, *, layer: SupportsIndex | None = None) -> None:
        """Add one token to each cache, in one copy, all or nothing.

        K and V are ``[num_layers, batch, num_kv_heads, head_dim]`` for all layers, or without the first for one layer.
        Raises what :meth:`KvCache.append` raises.
        """
        first = self.caches[0]
        for cache in self.caches:
            cache._check_usable()
        layers = first._spec.layer_range(layer)
        rows = first._rows().incoming(k, v, layer, Layout.NHD)
        if rows.num_tokens != len(self):
            raise KvbmValueError(f"k has rows for {rows.num_tokens} caches, expected {len(self)}")
        starts = [
            cache._even_len("append without a layer") if layer is None else cache._lens[layers[0]]
            for cache in self.caches
        ]
        missing = sum(cache._missing(start, start + 1) for cache, start in zip(self.caches, starts, strict=True))
        allocator = first.pool.allocator
        if missing > allocator.num_free:
            raise OutOfBlocks(missing, allocator.num_free)
        undos: list[tuple[PagedKvCache, Any]] = []
        try:
            for cache, start in zip(self.caches, starts, strict=True):
                undos.append((cache, cache._make_room(start, start + 1)))
            size = first.block_size
            slots = [(cache._blocks[s // size], s % size) for cache, s in zip(self.caches, starts, strict=True)]
            first._rows().write_slots(slots, rows, layers)
        except BaseException:
            for cache, undo in reversed(undos):
                cache._take_back(undo)
            raise
        for (cache, undo), start in zip(undos, starts, strict=True):
            cache._room_is_taken(undo)
            cache._set_lens(layers, start + 1)
