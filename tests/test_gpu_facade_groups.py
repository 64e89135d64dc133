"""copy_blocks of lists on a GPU: groups and parts in one call, on one stream, all of them checked first."""

from __future__ import annotations

import numpy as np
import pytest

import kvbm_kernels as kk
import reference
from gpu_arrays import make, place, sleep
from kinds import KINDS, views

pytestmark = pytest.mark.gpu

# As (blocks, layers, outer, tokens, heads, row): what groups of a model differ in.
GROUPS = [(3, 5, 2, 4, 2, 16), (5, 1, 2, 4, 2, 16), (4, 2, 1, 4, 1, 72)]


def sides(rng, to, of, into, outof):
    """Destinations in one layout and place, sources in another, what they hold, and how to read the destinations."""
    dsts, srcs, caches, read = [], [], [], []
    for extents in GROUPS:
        kv, shape = make(rng, extents=extents)
        dst, read_back = views(np.zeros_like(kv), shape, *into)[to]
        dsts.append(dst)
        srcs.append(views(kv, shape, *outof)[of][0])
        caches.append(kv)
        read.append(read_back)
    return dsts, srcs, caches, read


def assert_read(read, caches):
    for read_back, kv in zip(read, caches, strict=True):
        reference.assert_same_bytes(read_back(), kv)


@pytest.mark.parametrize(("into", "outof"), [("torch", "torch"), ("torch pinned", "torch"), ("torch", "torch pinned")])
@pytest.mark.parametrize("of", KINDS)
def test_groups(rng, of, into, outof):
    dsts, srcs, caches, read = sides(rng, "universal", of, place(into), place(outof))
    kk.copy_blocks(dsts, srcs)
    assert_read(read, caches)


def test_on_the_stream_given(rng, torch):
    """All behind a slow producer there."""
    stream = torch.cuda.Stream()
    dsts, srcs, caches, read = sides(rng, "universal", "layers", place("torch"), place("torch"))
    kk.copy_blocks(dsts, srcs, stream=stream)
    stream.synchronize()
    owners = [dst.memory.owners[0] for dst in dsts]
    for owner in owners:
        owner.zero_()
    # The first use of a kernel loads it, which may take longer than the producer.
    assert not any(owner.any() for owner in owners)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        sleep(30)
    kk.copy_blocks(dsts, srcs, stream=stream)
    seen = [bool(owner.any()) for owner in owners]
    assert not stream.query()
    assert not any(seen)
    stream.synchronize()
    assert_read(read, caches)


def test_in_a_graph(rng, torch):
    """Captured once, all of them are copied at each replay, with what the sources hold then."""
    dsts, srcs, caches, read = sides(rng, "universal", "layers", place("torch"), place("torch"))
    kk.copy_blocks(dsts, srcs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kk.copy_blocks(dsts, srcs)
    for src in srcs:
        for tensor in src.memory.owners:
            tensor.bitwise_not_()
    graph.replay()
    assert_read(read, [~kv for kv in caches])


def test_a_plan_between_ranks(rng, torch):
    """2 ranks to 3, of which each has tensors of its own."""
    kv, _ = make(rng, extents=(3, 2, 2, 4, 6, 16))
    where = place("torch")

    def ranks(cache, size):
        made = []
        for rank in range(size):
            part = np.ascontiguousarray(cache[..., reference.heads_of_rank(6, rank, size), :])
            shape = kk.BlockShape(2, 2, part.shape[4], 4, 16, "bf16")
            made.append(views(part, shape, *where)["layers"])
        return made

    two, three = ranks(kv, 2), ranks(np.zeros_like(kv), 3)
    plan = kk.tp.plan(2, 3, 6)
    kk.copy_blocks(*plan.views([view for view, _ in three], [view for view, _ in two]))
    for rank, (_, read_back) in enumerate(three):
        reference.assert_same_bytes(read_back(), kv[..., reference.heads_of_rank(6, rank, 3), :])


def test_pageable_memory_in_the_last_pair_is_refused_first(rng):
    dsts, srcs, _, read = sides(rng, "universal", "layers", place("torch"), place("torch"))
    kv, shape = make(rng, extents=GROUPS[-1])
    srcs[-1] = views(kv, shape)["layers"][0]
    with pytest.raises(ValueError, match=r"src\[2\] is in pageable host memory, which a kernel cannot reach"):
        kk.copy_blocks(dsts, srcs)
    assert not any(read_back().any() for read_back in read)
