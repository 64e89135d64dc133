"""copy_blocks of lists: the layer groups of a model, and other parts that go together, in one call."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvbm_kernels as kk
import reference
from kinds import KINDS, views
from memory import CudaArray


def make(rng, nb=3, nl=2, no=2, nt=4, nh=2, hd=8):
    kv = reference.random_kv(rng, (nb, nl, no, nt, nh, hd), np.uint16)
    return kv, kk.BlockShape(nl, no, nh, nt, hd, "bf16")


# As (layers, outer, heads, head dimension, blocks): sliding layers keep the blocks of their window alone.
MODELS = {
    "sliding and full attention": [(5, 2, 2, 64, 2), (1, 2, 2, 64, 6)],
    "global layers with longer rows and fewer heads": [(5, 2, 4, 32, 3), (1, 2, 2, 64, 6)],
    "K and V of different head dimensions": [(3, 1, 4, 24, 4), (3, 1, 4, 16, 4)],
    "MLA and its indexer": [(4, 1, 1, 72, 3), (4, 1, 1, 16, 3)],
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_groups_of_a_model(rng, model):
    """Off to universal blocks and back into other blocks, a call each way."""
    caches = [make(rng, nb, nl, no, 4, nh, hd) for nl, no, nh, hd, nb in model]
    engine = [views(kv, shape)["layers"][0] for kv, shape in caches]
    stores = [np.zeros_like(reference.universal(kv)) for kv, _ in caches]
    saved = [kk.UniversalBlocks(store, shape) for store, (_, shape) in zip(stores, caches, strict=True)]
    order = [rng.permutation(len(kv)) for kv, _ in caches]
    kk.copy_blocks(saved, [view[ids] for view, ids in zip(engine, order, strict=True)])
    for store, (kv, _), ids in zip(stores, caches, order, strict=True):
        reference.assert_same_bytes(store, reference.universal(kv[ids]))
    fresh = [views(np.zeros_like(kv), shape)["NHD"] for kv, shape in caches]
    kk.copy_blocks(tuple(view for view, _ in fresh), tuple(saved))
    for (_, read_back), (kv, _), ids in zip(fresh, caches, order, strict=True):
        reference.assert_same_bytes(read_back(), kv[ids])


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from(KINDS)), max_size=4), st.integers(0, 1 << 32))
def test_a_list_does_what_its_pairs_do(kinds, seed):
    rng = np.random.default_rng(seed)
    dsts, srcs, expected, read = [], [], [], []
    for to, of in kinds:
        kv, shape = make(rng, *rng.integers(1, 4, 5), 8)
        dst, read_back = views(np.zeros_like(kv), shape)[to]
        dsts.append(dst)
        srcs.append(views(kv, shape)[of][0])
        expected.append(kv)
        read.append(read_back)
    kk.copy_blocks(dsts, srcs)
    for read_back, kv in zip(read, expected, strict=True):
        reference.assert_same_bytes(read_back(), kv)


def test_parts_of_one_array_go_to_each_other(rng):
    """Heads that swap their places between two arrays: the parts of each are no overlap."""
    kv, shape = make(rng, nh=4)
    out = np.zeros_like(reference.universal(kv))
    src, dst = kk.UniversalBlocks(reference.universal(kv), shape), kk.UniversalBlocks(out, shape)
    kk.copy_blocks([dst.heads(2, 4), dst.heads(0, 2)], [src.heads(0, 2), src.heads(2, 4)])
    reference.assert_same_bytes(out, reference.universal(kv[..., [2, 3, 0, 1], :]))


def test_a_source_may_be_read_twice(rng):
    kv, shape = make(rng)
    src, (a, read_a), (b, read_b) = views(kv, shape)["NHD"][0], *[views(0 * kv, shape)["HND"] for _ in "ab"]
    kk.copy_blocks([a, b], [src, src])
    reference.assert_same_bytes(read_a(), kv)
    reference.assert_same_bytes(read_b(), kv)


class TestRefused:
    """A fault in the last pair is found before the first is copied."""

    @pytest.fixture
    def good(self, rng):
        kv, shape = make(rng)
        return views(0 * kv, shape)["universal"], views(kv, shape)["NHD"][0], shape

    def refused(self, good, dst, src, error, message):
        (first, read_first), source, _ = good
        with pytest.raises(error, match=message) as raised:
            kk.copy_blocks([first, dst], [source, src])
        assert isinstance(raised.value, kk.KvbmError)
        assert not read_first().any()

    def test_views_that_do_not_match(self, good, rng):
        kv, shape = make(rng, nl=3)
        src = views(kv, shape)["NHD"][0]
        dst, read_back = views(0 * kv, shape)["HND"]
        self.refused(good, dst[:2], src, ValueError, r"dst\[1\] has 2 blocks and src\[1\] 3, expected the same number")
        self.refused(good, dst.layers(0, 2), src, ValueError, r"dst\[1\] has blocks of nl=2 .* and src\[1\] of nl=3")
        self.refused(good, dst[[0, 0]], src[:2], ValueError, r"dst\[1\] has block 0 more than once, at 0 and 1")
        other = views(kv, dataclasses.replace(shape, dtype="f16"))["NHD"][0]
        self.refused(good, dst, other, TypeError, r"dst\[1\] has dtype bf16 and src\[1\] f16")
        self.refused(good, dst, kv, TypeError, r"src\[1\] is a ndarray, expected a view")
        self.refused(good, None, src, TypeError, r"dst\[1\] is a NoneType, expected a view")
        assert not read_back().any()

    def test_read_only(self, good, rng):
        kv, shape = make(rng)
        frozen = np.zeros_like(reference.universal(kv))
        frozen.flags.writeable = False
        dst, src = kk.UniversalBlocks(frozen, shape, name="frozen"), views(kv, shape)["NHD"][0]
        self.refused(good, dst, src, ValueError, r"dst\[1\] cannot be written: frozen is read-only")

    def test_two_pairs_that_write_the_same_bytes(self, good):
        (first, _), source, _ = good
        message = r"dst\[0\] and dst\[1\] overlap: some rows would be written twice"
        self.refused(good, first, source, ValueError, message)
        self.refused(good, first[[2]].heads(1, 2), source[[0]].heads(0, 1), ValueError, message)

    def test_groups_that_share_memory(self, good, rng):
        """Two views over the same bytes, of which different blocks are no overlap and one block in common is."""
        memory = np.zeros(4 * 512, np.uint16)
        wide = kk.UniversalBlocks(memory, kk.BlockShape(2, 2, 2, 4, 16, "bf16"))
        narrow = kk.UniversalBlocks(memory, kk.BlockShape(2, 2, 2, 8, 8, "bf16"))
        kv, shape = make(rng, nb=2, hd=16)
        other_kv, other_shape = make(rng, nb=2, nt=8)
        srcs = [views(kv, shape)["NHD"][0], views(other_kv, other_shape)["NHD"][0]]
        with pytest.raises(ValueError, match=r"dst\[0\] and dst\[1\] overlap"):
            kk.copy_blocks([wide[[3, 1]], narrow[[0, 3]]], srcs)
        assert not memory.any()
        kk.copy_blocks([wide[[3, 1]], narrow[[0, 2]]], srcs)
        blocks = memory.reshape(4, -1)
        reference.assert_same_bytes(blocks[[3, 1]], reference.universal(kv).reshape(2, -1))
        reference.assert_same_bytes(blocks[[0, 2]], reference.universal(other_kv).reshape(2, -1))

    @pytest.mark.parametrize("writer", [0, 1])
    def test_a_pair_that_reads_what_another_writes(self, rng, writer):
        kv, shape = make(rng)
        a, read_a = views(kv.copy(), shape)["universal"]
        b, read_b = views(0 * kv, shape)["NHD"]
        pairs = [(a.heads(0, 1), views(kv, shape)["HND"][0].heads(1, 2)), (b, a)]
        dsts, srcs = zip(*(pairs if writer == 0 else pairs[::-1]), strict=True)
        message = rf"dst\[{writer}\] and src\[{1 - writer}\] overlap: some of the rows to write are also read"
        with pytest.raises(ValueError, match=message):
            kk.copy_blocks(dsts, srcs)
        reference.assert_same_bytes(read_a(), kv)
        assert not read_b().any()

    def test_lists_of_different_lengths_and_other_things(self, good):
        (dst, read_back), src, _ = good
        for dsts, srcs, error, message in (
            ([dst], [src, src], ValueError, "dst is a list of 1 view and src of 2, expected the same number"),
            ([dst], src, TypeError, "dst is a list of 1 view and src one view, expected two views or two lists"),
            (dst, [src, src], TypeError, "dst is one view and src a list of 2 views, expected two views or two lists"),
            (dst, {src}, TypeError, "src is a set, expected a view$"),
            ([dst], None, TypeError, "src is a NoneType, expected a view or a list of views"),
            ({dst}, [src], TypeError, "dst is a set, expected a view or a list of views"),
            ([[dst]], [[src]], TypeError, r"dst\[0\] is a list, expected a view"),
        ):
            with pytest.raises(error, match=message):
                kk.copy_blocks(dsts, srcs)
        assert not read_back().any()

    def test_host_memory_beside_cuda_memory(self, good, rng):
        """One list goes one way; the stub says that it has no CUDA, and the CUDA build what it cannot reach."""
        _, shape = make(rng)
        cuda = kk.UniversalBlocks(CudaArray((3, 2, 2, 2, 4, 8), "<V2"), shape)
        error, message = (kk.StubBuildError, "has no CUDA") if kk.is_stub_build() else (ValueError, "pageable")
        self.refused(good, cuda, good[1], error, message)


def test_empty_lists_and_empty_pairs(rng):
    kk.copy_blocks([], [])
    kv, shape = make(rng)
    (a, read_a), (b, read_b) = (views(0 * kv, shape)["universal"] for _ in "ab")
    src = views(kv, shape)["NHD"][0]
    kk.copy_blocks([a[[]], b], [src[[]], src])
    assert not read_a().any()
    reference.assert_same_bytes(read_b(), kv)


def test_groups_of_other_layers_or_parts_are_refused(rng):
    """Where shapes fit, K would go to V, or a layer to another. Lists do not say what they hold, and are copied."""
    shape = kk.BlockShape(2, 1, 2, 4, 8, "bf16")

    def groups(layers, parts=("kv", "kv")):
        return kk.engines.LayerGroups(
            [kk.BlockStack.from_layers(np.zeros((3, 2, 1, 4, 2, 8), np.uint16), shape, "blothd") for _ in parts],
            layers,
            parts,
        )

    of = groups([(0, 2), (1, 3)])
    kk.copy_blocks(groups([(0, 2), (1, 3)]), of)
    plan = kk.tp.plan(1, 2, 2)
    shards = [groups([(0, 1), (2, 3)]).shard(rank, 2) for rank in range(2)]
    with pytest.raises(
        kk.KvbmValueError, match=r"dst has layers \(\(0, 1\), \(2, 3\)\) and src \(\(0, 2\), \(1, 3\)\)"
    ):
        kk.copy_blocks(groups([(0, 1), (2, 3)]), of)
    with pytest.raises(kk.KvbmValueError, match=r"dsts\[0\] has layers .* and srcs\[0\] .*, expected the same"):
        plan.views(shards, [of])
    k_first, v_first = (groups([(0, 1), (0, 1)], parts) for parts in (("k", "v"), ("v", "k")))
    with pytest.raises(kk.KvbmValueError, match=r"dst has parts \('k', 'v'\) and src \('v', 'k'\)"):
        kk.copy_blocks(k_first, v_first)
    kk.copy_blocks(list(k_first), v_first)
    kk.copy_blocks(*plan.views([of.shard(rank, 2) for rank in range(2)], [groups([(0, 2), (1, 3)])]))
    # Stages number their own layers.
    stages = kk.pp.plan([2], [1, 1], 2)
    one = kk.engines.LayerGroups([view.layers(0, 1) for view in of], [(4,), (5,)])
    assert len(stages.views([one, one], [of])[0]) == 4
