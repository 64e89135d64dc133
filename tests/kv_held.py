"""Caches with the rows that they were given and have to hold: one by itself, or those in the slots of a batch."""

from __future__ import annotations

import ml_dtypes
import numpy as np

import kvbm_kernels as kk
import reference
from kv_support import NL

FLOATS = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}


class Held:
    """A cache and what it has to hold, as the rows that were given."""

    def __init__(self, place, cache, scale=np.float32) -> None:
        self.place, self.cache, self.scale = place, cache, scale
        self.rows = [
            np.empty((NL, 0, cache.num_kv_heads, dim), np.float32) for dim in (cache.head_dim, cache.v_head_dim)
        ]

    def given(self, rng, n, dtype=None):
        """K and V of n more tokens, now to be held: bits of any kind, or numbers if they are to be quantised."""
        marker = self.cache.kv_dtype
        made = []
        for old in self.rows:
            shape = (NL, n, *old.shape[2:])
            if marker.IS_QUANTISED:
                new = (rng.standard_normal(shape) * 10.0 ** rng.integers(-4, 4, (NL, n, 1, 1))).astype(np.float32)
                new[rng.random(shape) < 0.02] = np.nan
                made.append(new.astype(dtype or np.float32))
            else:
                made.append(reference.random_kv(rng, shape, FLOATS[marker.NAME]))
        self.hold(*made)
        return made

    def hold(self, *new):
        self.rows = [np.concatenate([old.astype(a.dtype), a], 1) for old, a in zip(self.rows, new, strict=True)]

    def stored(self):
        marker = self.cache.kv_dtype
        if not marker.IS_QUANTISED:
            return self.rows
        return [
            reference.dequantised(
                reference.quantised(a.astype(np.float32), marker.NAME, self.scale), a.shape[-1], marker.NAME, self.scale
            )
            for a in self.rows
        ]

    def check(self):
        get, cache = self.place.get, self.cache
        for i, expected in enumerate(self.stored()):
            reference.assert_same_bytes(get(cache.gather()[i]), expected)
            reference.assert_same_bytes(get(cache.gather(order="HND")[i]), expected.swapaxes(1, 2))
            reference.assert_same_bytes(get(cache.gather(1)[i]), expected[1])
        assert len(cache) == self.rows[0].shape[1]
        if cache.block_size:
            blocks = cache.paged_block_indices
            null = [cache.pool.null_block] * (cache.max_blocks - len(blocks))
            assert get(cache.block_table).tolist() == blocks + null
            assert get(cache.context_lens).tolist() == [len(cache)]
            cache.pool.allocator.check()


class HeldSlots:
    """A batch of the pool whose slots are empty at first, and the cache in each with what it has to hold."""

    def __init__(self, place, pool, num_slots=4, max_blocks=7) -> None:
        self.place, self.pool, self.max_blocks = place, pool, max_blocks
        self.batch = kk.KvBatch([None] * num_slots, pool=pool, max_blocks=max_blocks)
        self.slots: list[Held | None] = [None] * num_slots

    @property
    def taken(self):
        return [held for held in self.slots if held is not None]

    def enter(self, rng, slot, n):
        """Put a new cache with n tokens in a slot, and give back what was there."""
        held = Held(self.place, kk.KvCache.paged(self.pool, max_blocks=self.max_blocks))
        held.cache.append(*map(self.place.put, held.given(rng, n)))
        old = self.batch.replace(slot, held.cache)
        if old is not None:
            old.release()
        self.slots[slot] = held

    def leave(self, slot):
        self.batch.replace(slot, None).release()
        self.slots[slot] = None

    def given(self, rng, n):
        """K and V of n more tokens for each slot, now to be held; for an empty one they are anything."""
        junk = Held(self.place, self.taken[0].cache)
        new = [(held or junk).given(rng, n) for held in self.slots]
        return [np.concatenate([each[i] for each in new], 1) for i in (0, 1)]

    def check(self):
        get, batch = self.place.get, self.batch
        for held, blocks, length in zip(self.slots, get(batch.block_table), get(batch.context_lens), strict=True):
            ids = [] if held is None else held.cache.paged_block_indices
            assert blocks.tolist() == ids + [self.pool.null_block] * (self.max_blocks - len(ids))
            assert length == (0 if held is None else len(held.cache))
            if held is not None:
                held.check()
