"""One logical cache, laid out as each engine does: the same universal blocks from all, and back into each."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvbm_kernels as kk
import reference
from engine_kinds import EVERY, IDS, KINDS, MLA_KINDS, SIZE, assert_same_memory, copy, laid_out, logical, shape_of
from reference_engines import Size


@pytest.mark.parametrize("name", EVERY)
class TestEachEngine:
    def test_universal_blocks_are_the_same_whichever_engine_they_came_from(self, rng, name):
        kind, size = EVERY[name]
        kv = logical(rng, size, len(IDS))
        cache = laid_out(kind, size, kv, IDS)
        before = [array.copy() for array in cache.memory]
        out = np.zeros((len(IDS), size.H, size.L, size.no, size.N, size.D), size.dtype)
        copy(kk.UniversalBlocks(out, shape_of(size)), kind.view(cache.tensors, size)[IDS])
        reference.assert_same_bytes(out, reference.universal(kv))
        for array, was in zip(cache.memory, before, strict=True):
            reference.assert_same_bytes(array, was)

    def test_restores_its_rows_and_touches_nothing_else(self, rng, name):
        kind, size = EVERY[name]
        kv = logical(rng, size, len(IDS))
        cache = laid_out(kind, size, None, IDS)
        saved = reference.universal(kv)
        copy(kind.view(cache.tensors, size)[IDS], kk.UniversalBlocks(saved, shape_of(size)))
        assert_same_memory(cache, laid_out(kind, size, kv, IDS))

    def test_heads_layers_and_ranks_are_those_of_the_cache(self, rng, name):
        kind, size = EVERY[name]
        kv = logical(rng, size, len(IDS))
        view = kind.view(laid_out(kind, size, kv, IDS).tensors, size)
        part = kv[:, 1:3]
        if size.H > 1:
            view, part = view.heads(1, 4), part[..., 1:4, :]
            view, part = view.shard(2, 3), part[..., 2:3, :]
        view = view.layers(1, 3)[IDS]
        out = np.zeros(reference.universal(part).shape, size.dtype)
        shape = kk.BlockShape(2, size.no, part.shape[4], size.N, size.D, "bf16")
        copy(kk.UniversalBlocks(out, shape), view)
        reference.assert_same_bytes(out, reference.universal(part))

    def test_reserved_blocks_are_never_moved(self, rng, name):
        """The null block and its like cannot be named, and are no part of a whole cache."""
        kind, size = EVERY[name]
        cache = laid_out(kind, size, None, [])
        view = kind.view(cache.tensors, size)
        assert view.num_reserved == cache.first
        assert view.num_blocks == size.B
        assert len(view) == len(view[:]) == (size.B - cache.first) * view.pieces
        for reserved in range(cache.first):
            with pytest.raises(IndexError, match=f"block id {reserved} is reserved .* expected {cache.first} to 7"):
                view[[5, reserved]]
        with pytest.raises(IndexError, match=f"block id 8, expected {cache.first} to 7: "):
            view[[8]]
        everything = list(range(cache.first, size.B))
        kv = logical(rng, size, len(everything))
        copy(view, kk.UniversalBlocks(reference.universal(kv), shape_of(size)))
        assert_same_memory(cache, laid_out(kind, size, kv, everything))


@pytest.mark.parametrize("src_name", EVERY)
def test_from_each_engine_to_each(rng, src_name):
    """The full matrix, without a universal block between."""
    src_kind, size = EVERY[src_name]
    kv = logical(rng, size, len(IDS))
    src = src_kind.view(laid_out(src_kind, size, kv, IDS).tensors, size)[IDS]
    others = [3, 6, 4]
    for name, (kind, its_size) in EVERY.items():
        if its_size is size:
            cache = laid_out(kind, size, None, others)
            copy(kind.view(cache.tensors, size)[others], src)
            assert_same_memory(cache, laid_out(kind, size, kv, others), name)


def sizes(no: int) -> st.SearchStrategy[Size]:
    """Sizes of every oddness: K and V of 1 to 3 heads, or MLA."""
    small = st.integers(1, 3)
    return st.builds(
        lambda blocks, layers, tokens, heads, width, dtype: Size(
            B=4 + 2 * blocks, L=layers, N=tokens, H=heads if no == 2 else 1, D=width, no=no, dtype=dtype
        ),
        small,
        small,
        st.sampled_from([1, 2, 3, 4, 16]),
        st.integers(1, 10),
        st.integers(1, 9),
        st.just(np.uint16),
    )


@pytest.mark.parametrize(("kinds", "no"), [(KINDS, 2), (MLA_KINDS, 1)])
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_size_from_any_engine_to_any(kinds, no, data):
    size = data.draw(sizes(no))
    fitting = [name for name, kind in kinds.items() if kind.fits(size)]
    src_kind, dst_kind = (kinds[data.draw(st.sampled_from(fitting))] for _ in range(2))
    available = list(range(2, size.B))
    ids, others = (data.draw(st.permutations(available))[: size.B - 3] for _ in range(2))
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    kv = logical(rng, size, len(ids))
    src = src_kind.view(laid_out(src_kind, size, kv, ids, 1).tensors, size)[ids]
    cache = laid_out(dst_kind, size, None, others, 2)
    copy(dst_kind.view(cache.tensors, size)[others], src)
    assert_same_memory(cache, laid_out(dst_kind, size, kv, others, 2))


def test_kinds_differ():
    """No two kinds lay the same cache out alike by mistake of the reference: memory or what is handed over differs."""
    kv = logical(np.random.default_rng(0), SIZE, len(IDS))
    memories = {}
    for name, kind in KINDS.items():
        cache = laid_out(kind, SIZE, kv, IDS)
        memories[name] = b"".join(array.tobytes() for array in cache.memory), cache.first
    distinct = len(set(memories.values()))
    assert distinct >= 30, [
        pair for pair in itertools.combinations(memories, 2) if memories[pair[0]] == memories[pair[1]]
    ]
