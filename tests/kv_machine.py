"""Many sequences in one small pool, driven at random and compared with the model after every step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kv_cache_model as model
import kvbm_kernels as kk
import reference
from kv_places import PLACES

NUM_LAYERS, NUM_HEADS, HEAD_DIM = 2, 2, 4
NUM_BLOCKS = 9
# Few tokens, so that sequences begin alike by chance.
TOKENS = st.integers(0, 9).flatmap(lambda n: st.lists(st.integers(0, 1), min_size=n, max_size=n))
INDEX = st.integers(0, 63)
NUM_SLOTS = 3


class Caches(RuleBasedStateMachine):
    """Paged caches of one pool, each with the model's sequence it has to equal, some of them in a batch that stays."""

    place_name = "numpy"
    # In how many steps contents are looked at once: to look waits for the stream.
    look_every = 1

    @initialize(
        layout=st.sampled_from(["HND", "NHD"]),
        block_size=st.integers(1, 4),
        v_head_dim=st.sampled_from([HEAD_DIM, 3]),
        kv_dtype=st.sampled_from([kk.KvFp16, kk.KvInt8, kk.KvFp8]),
    )
    def build(self, layout: str, block_size: int, v_head_dim: int, kv_dtype: type[kk.KvDtype]) -> None:
        self.dims = HEAD_DIM, v_head_dim
        self.place = PLACES[self.place_name]()
        self.pool = kk.BlockPool(
            NUM_BLOCKS,
            block_size,
            NUM_LAYERS,
            NUM_HEADS,
            HEAD_DIM,
            v_head_dim=v_head_dim,
            kv_dtype=kv_dtype,
            layout=layout,
            **self.place.options,
        )
        self.allocator = self.pool.allocator
        self.model = model.Pool(NUM_BLOCKS, block_size)
        self.caches: list[tuple[kk.PagedKvCache, model.Sequence]] = []
        self.saved: list[tuple[dict[str, kk.UniversalBlocks], list[int]]] = []
        self.registered: list[list[int]] = [[]]
        self.released: list[kk.PagedKvCache] = []
        self.batch = kk.KvBatch([None] * NUM_SLOTS, pool=self.pool)
        self.num_steps = 0

    # Help for the rules.

    def pick(self, index: int) -> tuple[kk.PagedKvCache, model.Sequence]:
        return self.caches[index % len(self.caches)]

    def rows(self, tokens: list[int]) -> list[np.ndarray]:
        """K and V of all tokens, as they are appended."""
        bits = model.rows(tokens, NUM_LAYERS, NUM_HEADS, self.dims)
        return [a.view(np.float16) if self.pool.kv_dtype is kk.KvFp16 else a.astype(np.float32) for a in bits]

    def stored(self, tokens: list[int]) -> list[np.ndarray]:
        """K and V of all tokens, as they read back. test_kv_quant.py shows that quantisation is as defined."""
        if self.pool.kv_dtype is kk.KvFp16:
            return self.rows(tokens)
        name = self.pool.kv_dtype.NAME
        return [
            reference.dequantised(reference.quantised(a, name, np.float32), a.shape[-1], name, np.float32)
            for a in self.rows(tokens)
        ]

    def begin(self, cache: kk.PagedKvCache, tokens: list[int]) -> model.Sequence:
        sequence = model.Sequence(tokens, cache.paged_block_indices)
        self.model.sequences.append(sequence)
        self.caches.append((cache, sequence))
        return sequence

    def expect_room(self, needed: int, call, longest: int = 0, in_a_step: bool = False) -> bool:
        """Make a call that takes ``needed`` blocks for a sequence that gets this long. Whether there were as many."""
        free = self.model.num_free()
        capacity = NUM_BLOCKS * self.pool.block_size
        if longest > capacity:
            with pytest.raises(kk.CapacityError) as raised:
                call()
            assert (raised.value.needed, raised.value.capacity) == (longest, capacity)
            return False
        if needed > free:
            with pytest.raises(kk.OutOfBlocks) as raised:
                call()
            assert (raised.value.needed, raised.value.free) == (needed, free)
            return False
        call()
        # In a step, a block that all who shared it have copied is free again.
        taken = free - self.allocator.num_free
        assert taken == needed or (in_a_step and taken <= needed)
        return True

    has_caches = precondition(lambda self: self.caches)

    # The rules.

    @rule()
    @precondition(lambda self: len(self.caches) < 6)
    def new(self) -> None:
        self.begin(kk.KvCache.paged(self.pool), [])

    @has_caches
    @rule(index=INDEX, more=TOKENS, how=st.sampled_from(["NHD", "HND", "layers"]))
    def append(self, index: int, more: list[int], how: str) -> None:
        cache, sequence = self.pick(index)
        start = len(sequence.tokens)
        new = [a[:, start:] for a in self.rows(sequence.tokens + more)]
        k, v = (self.place.put(a.swapaxes(1, 2) if how == "HND" else a) for a in new)

        def call() -> None:
            if how == "layers":
                for i in range(NUM_LAYERS):
                    cache.append(k[i], v[i], layer=i)
            else:
                cache.append(k, v, order="HND" if how == "HND" else "NHD")

        if self.expect_room(self.model.needed(sequence, len(more)), call, start + len(more)):
            sequence.tokens = sequence.tokens + more
            sequence.blocks = cache.paged_block_indices

    @has_caches
    @rule(index=INDEX, n=st.integers(0, 9))
    def reserve(self, index: int, n: int) -> None:
        cache, sequence = self.pick(index)
        longest = len(sequence.tokens) + n
        if self.expect_room(self.model.needed(sequence, n), lambda: cache.reserve(n), longest):
            sequence.blocks = cache.paged_block_indices

    @has_caches
    @rule(index=INDEX, more=TOKENS, reserve=st.booleans())
    def write_elsewhere(self, index: int, more: list[int], reserve: bool) -> None:
        """Rows that are written and then counted: allowed where nobody else sees them."""
        cache, sequence = self.pick(index)
        start, size = len(sequence.tokens), self.pool.block_size
        stop = start + len(more)
        if reserve:
            self.reserve(index, len(more))
        references = self.model.references()
        blocks = sequence.blocks[start // size : -(-stop // size)] if more else []
        if stop > len(sequence.blocks) * size or any(
            references[block] > 1 or self.allocator.digest_of(block) for block in blocks
        ):
            with pytest.raises((kk.KvbmValueError, kk.KvbmIndexError)):
                cache.slot_mapping(start, len(more))
            with pytest.raises(kk.KvbmValueError):
                cache.advance(len(more))
            return
        slots = self.place.get(cache.slot_mapping(start, len(more))).tolist()
        assert slots == [sequence.blocks[n // size] * size + n % size for n in range(start, stop)]
        k, v = (self.place.put(a[:, start:]) for a in self.rows(sequence.tokens + more))
        cache.write(k, v)
        assert len(cache) == start
        cache.advance(len(more))
        sequence.tokens = sequence.tokens + more

    @has_caches
    @rule(index=INDEX, n=st.integers(0, 20))
    def truncate(self, index: int, n: int) -> None:
        cache, sequence = self.pick(index)
        n = min(n, len(sequence.tokens))
        cache.truncate(n)
        sequence.tokens = sequence.tokens[:n]
        sequence.blocks = sequence.blocks[: -(-n // self.pool.block_size)]

    @has_caches
    @rule(index=INDEX)
    def release(self, index: int) -> None:
        cache, sequence = self.pick(index)
        self.caches.remove((cache, sequence))
        self.model.sequences.remove(sequence)
        if cache in self.batch.caches:
            assert self.batch.replace(self.batch.caches.index(cache), None) is cache
        cache.release()
        cache.release()
        self.released.append(cache)

    @precondition(lambda self: self.caches and len(self.caches) < 6)
    @rule(index=INDEX)
    def fork(self, index: int) -> None:
        cache, sequence = self.pick(index)
        full, rest = divmod(len(sequence.tokens), self.pool.block_size)
        forks: list[kk.PagedKvCache] = []
        if self.expect_room(bool(rest), lambda: forks.append(cache.fork())):
            blocks = forks[0].paged_block_indices
            assert blocks[:full] == sequence.blocks[:full]
            assert len(blocks) == full + bool(rest)
            self.begin(forks[0], list(sequence.tokens))

    @has_caches
    @rule(index=INDEX, cut=st.integers(1, 3), more=TOKENS)
    def diverge(self, index: int, cut: int, more: list[int]) -> None:
        """Cut a sequence a little and go on with something else: over blocks that others share, or have registered."""
        _, sequence = self.pick(index)
        n = max(len(sequence.tokens) - cut, 0)
        other = [1 - token for token in sequence.tokens[n : n + 1]]
        self.truncate(index, n)
        self.append(index, other + more, "NHD")

    @has_caches
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """A decode step of some sequences at once."""
        chosen = data.draw(st.lists(st.sampled_from(range(len(self.caches))), min_size=1, unique=True))
        token = data.draw(st.integers(0, 1))
        picked = [self.caches[i] for i in chosen]
        rows = [self.rows([*sequence.tokens, token]) for _, sequence in picked]
        k, v = (self.place.put(np.concatenate([each[which][:, -1:] for each in rows], 1)) for which in (0, 1))
        needed = sum(self.model.needed(sequence, 1) for _, sequence in picked)
        batch = kk.KvBatch([cache for cache, _ in picked])
        longest = max(len(sequence.tokens) for _, sequence in picked) + 1
        if self.expect_room(needed, lambda: batch.append(k, v), longest, in_a_step=True):
            for cache, sequence in picked:
                sequence.tokens = [*sequence.tokens, token]
                sequence.blocks = cache.paged_block_indices
        tables = batch.tables(NUM_BLOCKS)
        for (_, sequence), table, length in zip(picked, *map(self.place.get, tables), strict=True):
            assert table.tolist() == self.padded(sequence.blocks)
            assert length == len(sequence.tokens)

    @has_caches
    @rule(slot=st.integers(0, NUM_SLOTS - 1), index=st.none() | INDEX)
    def replace(self, slot: int, index: int | None) -> None:
        """Another sequence in a slot of the batch that stays, or none."""
        cache = None if index is None else self.pick(index)[0]
        if cache is not None and cache in self.batch.caches and self.batch.caches[slot] is not cache:
            with pytest.raises(kk.KvbmValueError, match="already"):
                self.batch.replace(slot, cache)
        else:
            before = self.batch.caches[slot]
            assert self.batch.replace(slot, cache) is before

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=3), how=st.sampled_from(["append", "write", "layers"])
    )
    def step_of_the_batch(self, tokens: list[int], how: str) -> None:
        """Some tokens more for whatever is in its slots, at once or in parts."""
        of = {id(cache): sequence for cache, sequence in self.caches}
        sequences = [None if cache is None else of[id(cache)] for cache in self.batch.caches]
        live = [sequence for sequence in sequences if sequence is not None]
        n = len(tokens)
        made = [self.rows(([] if sequence is None else sequence.tokens) + tokens) for sequence in sequences]
        k, v = (self.place.put(np.concatenate([each[which][:, -n:] for each in made], 1)) for which in (0, 1))

        def call() -> None:
            if how == "append":
                self.batch.append(k, v)
                return
            self.batch.reserve(n)
            if how == "write":
                self.batch.write(k, v)
            else:
                for i in (1, 0):
                    self.batch.write(k[i], v[i], layer=i)
            self.batch.advance(n)

        needed = sum(self.model.needed(sequence, n) for sequence in live)
        longest = next((m for m in (len(s.tokens) + n for s in live) if m > NUM_BLOCKS * self.pool.block_size), 0)
        if self.expect_room(needed, call, longest, in_a_step=True):
            for cache, sequence in zip(self.batch.caches, sequences, strict=True):
                if sequence is not None:
                    sequence.tokens = sequence.tokens + tokens
                    sequence.blocks = cache.paged_block_indices

    def padded(self, blocks: list[int]) -> list[int]:
        return blocks + [self.pool.null_block] * (NUM_BLOCKS - len(blocks))

    @has_caches
    @rule(index=INDEX)
    def register(self, index: int) -> None:
        cache, sequence = self.pick(index)
        cache.register_prefix([*sequence.tokens, 0])
        self.registered.append(list(sequence.tokens))
        # Whatever else was registered: these tokens are found now, as far as they fill blocks.
        full = len(sequence.tokens) // self.pool.block_size
        hashes = kk.block_hashes(sequence.tokens, self.pool.block_size)
        found = self.allocator.lookup(hashes)
        assert len(found) == full
        self.allocator.free(found)

    @precondition(lambda self: len(self.caches) < 6)
    @rule(index=INDEX, more=TOKENS)
    def attach(self, index: int, more: list[int]) -> None:
        tokens = self.registered[index % len(self.registered)] + more
        cache = kk.KvCache.paged(self.pool)
        n = cache.attach_prefix(tokens)
        assert n % self.pool.block_size == 0
        assert n <= max(len(tokens) - 1, 0)
        self.begin(cache, tokens[:n])

    @has_caches
    @rule(index=INDEX)
    def offload(self, index: int) -> None:
        cache, sequence = self.pick(index)
        if sequence.tokens and len(self.saved) < 3:
            saved = {}
            for of in ("kv",) if self.dims[0] == self.dims[1] else ("k", "v"):
                view = cache.blocks(of=of)
                s = view.shape
                empty = np.zeros((len(view), s.nh, s.nl, s.no, s.nt, s.hd), f"i{s.dtype.itemsize}")
                saved[of] = kk.UniversalBlocks(self.place.put(empty), s)
                kk.copy_blocks(saved[of], view)
            self.saved.append((saved, list(sequence.tokens)))

    @precondition(lambda self: self.saved and len(self.caches) < 6)
    @rule()
    def restore(self) -> None:
        saved, tokens = self.saved.pop()
        cache = kk.KvCache.paged(self.pool)
        sequence = self.begin(cache, [])
        views = tuple(saved.values())
        needed = -(-len(tokens) // self.pool.block_size)
        if self.expect_room(needed, lambda: cache.restore(views if len(views) == 2 else views[0], len(tokens))):
            sequence.tokens = tokens
            sequence.blocks = cache.paged_block_indices

    @has_caches
    @rule(index=INDEX)
    def misuse(self, index: int) -> None:
        """Wrong calls, none of which may do anything."""
        cache, sequence = self.pick(index)
        k, v = map(self.place.put, self.rows([0]))
        raw = self.place.put(np.zeros(k.shape, np.int8))
        for call, error in (
            (lambda: cache.truncate(len(sequence.tokens) + 1), ValueError),
            (lambda: cache.append(k[:1], v[:1]), ValueError),
            (lambda: cache.append(k, v[..., :2]), ValueError),
            (lambda: cache.append(raw, v), TypeError),
            (lambda: self.allocator.free([*sequence.blocks, NUM_BLOCKS]), ValueError),
            (lambda: self.allocator.free(sequence.blocks * (NUM_BLOCKS + 1) or [-1]), ValueError),
            (lambda: self.allocator.acquire([-1]), ValueError),
        ):
            with pytest.raises(error):
                call()

    # What holds after every step.

    @invariant()
    def the_books_balance(self) -> None:
        self.allocator.check()
        counted = [self.allocator.refcount(block) for block in range(NUM_BLOCKS)]
        assert counted == self.model.references()
        assert self.allocator.num_free == self.model.num_free()

    @invariant()
    def tables_and_lengths_agree(self) -> None:
        for cache, sequence in self.caches:
            assert cache.paged_block_indices == sequence.blocks
            assert len(cache) == len(sequence.tokens) <= len(sequence.blocks) * self.pool.block_size

    @invariant()
    def kernels_see_what_is_so(self) -> None:
        self.num_steps += 1
        if self.num_steps % self.look_every == 0:
            self.look()

    def look(self) -> None:
        """Wait for the device, and look at all that a kernel would read."""
        get = self.place.get
        for cache, sequence in self.caches:
            assert get(cache.block_table).tolist() == self.padded(sequence.blocks)
            assert get(cache.context_lens).tolist() == [len(sequence.tokens)]
            for actual, expected in zip(map(get, cache.gather()), self.stored(sequence.tokens), strict=True):
                reference.assert_same_bytes(actual, expected)
        for cache in self.released:
            assert get(cache.block_table).tolist() == self.padded([])
            assert get(cache.context_lens).tolist() == [0]
        of = {id(cache): sequence for cache, sequence in self.caches}
        for cache, table, n in zip(
            self.batch.caches, get(self.batch.block_table), get(self.batch.context_lens), strict=True
        ):
            sequence = model.Sequence([], []) if cache is None else of[id(cache)]
            assert table.tolist() == self.padded(sequence.blocks)
            assert n == len(sequence.tokens)
        for tokens in self.registered[-2:]:
            with kk.KvCache.paged(self.pool) as cache:
                n = cache.attach_prefix([*tokens, 0])
                for actual, expected in zip(map(get, cache.gather()), self.stored(tokens[:n]), strict=True):
                    reference.assert_same_bytes(actual, expected)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.look()
        for slot in range(NUM_SLOTS):
            self.batch.replace(slot, None)
        for cache, _ in self.caches:
            cache.release()
        assert self.pool.num_free == NUM_BLOCKS
        self.allocator.check()
        self.place.close()
