"""Who reads what from whom: plans between tensor-parallel sizes and between divisions into stages."""

from __future__ import annotations

import copy
import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvbm_kernels as kk
import reference

HEADS = [1, 2, 3, 4, 6, 8, 10, 12, 16]


@st.composite
def head_plans(draw):
    """A number of heads and two sizes that can share them: divisors of it, and multiples."""
    nh = draw(st.sampled_from(HEADS))
    sizes = [n for n in range(1, 4 * nh + 1) if nh % n == 0 or n % nh == 0]
    return draw(st.sampled_from(sizes)), draw(st.sampled_from(sizes)), nh


@st.composite
def divisions(draw):
    """Layers in two divisions, some of them given by the number of equal stages."""
    nl = draw(st.integers(1, 24))

    def stages():
        equal = draw(st.sampled_from([n for n in range(1, nl + 1) if nl % n == 0]))
        if draw(st.booleans()):
            return equal, [nl // equal] * equal
        cuts = sorted(draw(st.sets(st.integers(1, nl - 1)))) if nl > 1 else []
        sizes = np.diff([0, *cuts, nl]).tolist()
        return sizes, sizes

    return stages(), stages(), nl


def apply(plan, held, wanted):
    """What the destinations hold in the end, and how often each entry was written; all in NumPy along one axis."""
    got = [np.full(entries.shape, -1) for entries in wanted]
    writes = [np.zeros(entries.shape, int) for entries in wanted]
    for src, (first, end), dst, (start, stop) in plan:
        got[dst][start:stop] = held[src][first:end]
        writes[dst][start:stop] += 1
    return got, writes


@given(head_plans())
def test_every_rank_gets_the_heads_it_holds_each_once(case):
    from_size, to_size, nh = case
    plan = kk.tp.plan(from_size, to_size, nh)
    held, wanted = (
        [np.arange(nh)[reference.heads_of_rank(nh, rank, size)] for rank in range(size)]
        for size in (from_size, to_size)
    )
    got, writes = apply(plan, held, wanted)
    for i, heads in enumerate(wanted):
        assert got[i].tolist() == heads.tolist()
        assert (writes[i] == 1).all()


@given(head_plans())
def test_a_whole_copy_has_one_writer_for_each_head(case):
    """With more ranks than heads, one of those that hold a head writes it: the first."""
    from_size, _, nh = case
    plan = kk.tp.plan(from_size, 1, nh)
    written = [head for t in plan for head in range(*t.dst_heads)]
    assert written == list(range(nh))
    alike = max(1, from_size // nh)
    assert [t.src_rank for t in plan] == list(range(0, from_size, alike))
    for rank in range(from_size):
        assert len(plan.of(rank)) == (rank % alike == 0)


@given(head_plans())
def test_replicas_are_read_evenly(case):
    """Ranks that hold the same head share the work of those that read it."""
    from_size, to_size, nh = case
    plan = kk.tp.plan(from_size, to_size, nh)
    if from_size < nh or to_size < nh:
        return
    readers = [len(plan.of(rank)) for rank in range(from_size)]
    assert max(readers) - min(readers) <= 1
    if from_size == to_size:
        assert [(t.src_rank, t.dst_rank) for t in plan] == [(rank, rank) for rank in range(from_size)]


@given(divisions())
def test_every_stage_gets_the_layers_it_holds_each_once(case):
    (from_stages, from_sizes), (to_stages, to_sizes), nl = case
    plan = kk.pp.plan(from_stages, to_stages, nl)
    held, wanted = (np.split(np.arange(nl), np.cumsum(sizes)[:-1]) for sizes in (from_sizes, to_sizes))
    got, writes = apply(plan, held, wanted)
    for i, layers in enumerate(wanted):
        assert got[i].tolist() == layers.tolist()
        assert (writes[i] == 1).all()


def test_of_and_to_are_the_transfers_of_one():
    plan = kk.tp.plan(2, 3, 6)
    assert sorted(t for rank in range(2) for t in plan.of(rank)) == sorted(plan)
    assert tuple(t for rank in range(3) for t in plan.to(rank)) == plan.transfers
    assert plan.to(1) == (kk.tp.Transfer(0, (2, 3), 1, (0, 1)), kk.tp.Transfer(1, (0, 1), 1, (1, 2)))
    for wrong in (plan.of, plan.to):
        with pytest.raises(kk.KvbmValueError, match=r"is 3, expected 0 to [12]"):
            wrong(3)


def test_a_plan_reads_well_and_stays_as_it_is():
    plan = kk.tp.plan(2, 3, 6)
    assert str(plan).splitlines() == [
        "6 heads, 2 ranks to 3",
        "rank 0 heads 0:2 -> rank 0 heads 0:2",
        "rank 0 heads 2:3 -> rank 1 heads 0:1",
        "rank 1 heads 0:1 -> rank 1 heads 1:2",
        "rank 1 heads 1:3 -> rank 2 heads 0:2",
    ]
    assert str(kk.pp.plan(1, [1, 2], 3)).splitlines() == [
        "3 layers, 1 stage to 2",
        "stage 0 layers 0:1 -> stage 0 layers 0:1",
        "stage 0 layers 1:3 -> stage 1 layers 0:2",
    ]
    assert str(kk.tp.plan(2, 1, 1)).splitlines()[0] == "1 head, 2 ranks to 1"
    assert plan == kk.tp.plan(np.int32(2), 3, nh=6)
    assert hash(plan) == hash(pickle.loads(pickle.dumps(copy.deepcopy(plan))))
    with pytest.raises(AttributeError):
        plan.transfers = ()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((4, 2, 10), ValueError, "from_size: 10 heads cannot be shared by 4 ranks: neither number divides the other"),
        ((2, 4, 10), ValueError, "to_size: 10 heads cannot be shared by 4 ranks"),
        ((0, 1, 2), ValueError, "from_size is 0, expected 1 or more"),
        ((1, 1, 0), ValueError, "nh is 0, expected 1 or more"),
        ((1, 2.0, 2), TypeError, "to_size is 2.0, expected an integer"),
        ((True, 2, 2), TypeError, "from_size is True, expected an integer"),
    ],
)
def test_sizes_that_cannot_be(arguments, error, message):
    with pytest.raises(error, match=message) as raised:
        kk.tp.plan(*arguments)
    assert isinstance(raised.value, kk.KvbmError)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3, 1, 80), ValueError, "from_stages: 80 layers cannot be divided into 3 equal stages; expected a list"),
        ((1, [40, 41], 80), ValueError, "to_stages has 81 layers in all, expected nl = 80"),
        ((1, [], 80), ValueError, "to_stages has 0 layers in all"),
        ((1, [80, 0], 80), ValueError, r"to_stages\[1\] is 0, expected 1 or more"),
        ((1, [True], 1), TypeError, r"to_stages\[0\] is True, expected an integer"),
        (("2", 1, 2), TypeError, "from_stages is '2', expected a number of stages or a list"),
        ((0, 1, 2), ValueError, "from_stages is 0, expected 1 or more"),
        ((1, 1, 0), ValueError, "nl is 0, expected 1 or more"),
    ],
)
def test_stages_that_cannot_be(arguments, error, message):
    with pytest.raises(error, match=message) as raised:
        kk.pp.plan(*arguments)
    assert isinstance(raised.value, kk.KvbmError)


def test_heads_of_rank():
    for nh in HEADS:
        for size in (n for n in range(1, 3 * nh + 1) if nh % n == 0 or n % nh == 0):
            for rank in range(size):
                expected = reference.heads_of_rank(nh, rank, size)
                assert kk.tp.heads_of_rank(rank, size, nh) == (expected.start, expected.stop)
    # One rank is asked about, however many there are.
    assert kk.tp.heads_of_rank(10**15 - 1, 10**15, 2) == (1, 2)
    with pytest.raises(ValueError, match="rank is 2, expected 0 to 1"):
        kk.tp.heads_of_rank(2, 2, 4)
    with pytest.raises(ValueError, match="10 heads cannot be shared by 4 ranks"):
        kk.tp.heads_of_rank(0, 4, 10)


NB, NL, NO, NT, HD = 3, 6, 2, 5, 8


def shape_of(kv):
    _, nl, no, nt, nh, hd = kv.shape
    return kk.BlockShape(nl, no, nh, nt, hd, kv.dtype)


def operational(kv):
    """Blocks that hold this, and what they are in."""
    array = reference.operational(kv, "HND")
    return kk.OperationalBlocks(array, shape_of(kv), "HND"), array


def logical(array, kv):
    return reference.from_operational(array, kv.shape[3], kv.shape[4], "HND")


@pytest.mark.parametrize(
    ("from_size", "to_size", "nh"), [(2, 4, 8), (2, 3, 6), (3, 2, 6), (4, 1, 2), (1, 4, 2), (4, 2, 2), (5, 10, 10)]
)
def test_views_are_what_copy_blocks_takes(rng, from_size, to_size, nh):
    """From one size to another in one call; each rank then has the heads that are its own, to the bit."""
    kv = reference.random_kv(rng, (NB, NL, NO, NT, nh, HD), np.uint16).view(np.float16)
    parts = [
        [np.ascontiguousarray(kv[..., reference.heads_of_rank(nh, rank, size), :]) for rank in range(size)]
        for size in (from_size, to_size)
    ]
    srcs = [operational(part)[0] for part in parts[0]]
    dsts = [operational(np.zeros_like(part)) for part in parts[1]]
    kk.copy_blocks(*kk.tp.plan(from_size, to_size, nh).views([view for view, _ in dsts], srcs))
    for (_, array), part in zip(dsts, parts[1], strict=True):
        reference.assert_same_bytes(logical(array, part), part)


def test_stages_and_ranks_together(rng):
    """2 stages of 2 ranks to 3 stages of 3 ranks: a plan for each, one inside the other."""
    kv = reference.random_kv(rng, (NB, NL, NO, NT, 6, HD), np.uint16).view(np.float16)

    def grid(layer_counts, size):
        bounds = np.cumsum([0, *layer_counts])
        return [
            [np.ascontiguousarray(kv[:, a:b][..., reference.heads_of_rank(6, rank, size), :]) for rank in range(size)]
            for a, b in itertools.pairwise(bounds)
        ]

    src = [[operational(part)[0] for part in stage] for stage in grid([4, 2], 2)]
    wanted = grid([1, 3, 2], 3)
    made = [[operational(np.zeros_like(part)) for part in stage] for stage in wanted]
    dst = [[view for view, _ in stage] for stage in made]
    heads = kk.tp.plan(2, 3, 6)
    for t in kk.pp.plan([4, 2], [1, 3, 2], NL):
        kk.copy_blocks(
            *heads.views(
                [view.layers(*t.dst_layers) for view in dst[t.dst_stage]],
                [view.layers(*t.src_layers) for view in src[t.src_stage]],
            )
        )
    for stage, parts in zip(made, wanted, strict=True):
        for (_, array), part in zip(stage, parts, strict=True):
            reference.assert_same_bytes(logical(array, part), part)


def test_groups_of_each_rank(rng):
    """Two groups whose layers, tokens and rows differ; the heads are what a plan is about."""
    caches = [
        reference.random_kv(rng, e, np.uint16).view(np.float16) for e in ((2, 3, 2, 4, 6, 8), (5, 1, 2, 2, 6, 16))
    ]

    def ranks(size, *, empty):
        made = []
        for rank in range(size):
            parts = [np.ascontiguousarray(kv[..., reference.heads_of_rank(6, rank, size), :]) for kv in caches]
            made.append([(*operational(np.zeros_like(part) if empty else part), part) for part in parts])
        return made

    two, three = ranks(2, empty=False), ranks(3, empty=True)
    dsts, srcs = ([tuple(view for view, _, _ in groups) for groups in ranks] for ranks in (three, two))
    kk.copy_blocks(*kk.tp.plan(2, 3, 6).views(dsts, srcs))
    for groups in three:
        for _, array, part in groups:
            reference.assert_same_bytes(logical(array, part), part)


def test_views_of_layers(rng):
    kv = reference.random_kv(rng, (NB, NL, NO, NT, 2, HD), np.uint16).view(np.float16)
    srcs = [operational(np.ascontiguousarray(kv[:, :4]))[0], operational(np.ascontiguousarray(kv[:, 4:]))[0]]
    whole, array = operational(np.zeros_like(kv))
    kk.copy_blocks(*kk.pp.plan([4, 2], 1, NL).views([whole], srcs))
    reference.assert_same_bytes(logical(array, kv), kv)


def test_views_that_do_not_fit_are_named(rng):
    kv = reference.random_kv(rng, (NB, NL, NO, NT, 3, HD), np.uint16).view(np.float16)
    view = operational(kv)[0]
    plan = kk.tp.plan(2, 1, 6)
    whole = operational(np.concatenate([kv, kv], 4))[0]
    plan.views([whole], [view, view])
    for dsts, srcs, error, message in (
        ([whole], [view], ValueError, "srcs is a list of 1, expected 2 views"),
        ([view], [view, view], ValueError, r"dsts\[0\] has nh = 3, expected 6"),
        ([whole], [view, whole], ValueError, r"srcs\[1\] has nh = 6, expected 3"),
        (whole, [view, view], TypeError, "dsts is an OperationalBlocks, expected a list of 1 view"),
        ([whole], [view, kv], TypeError, r"srcs\[1\] is a ndarray, expected a view"),
        ([[whole]], [[view], [whole]], ValueError, r"srcs\[1\]\[0\] has nh = 6, expected 3"),
        ([[whole]], [[view, view], view], ValueError, r"srcs\[0\] is a list of 2 views, dsts\[0\] of 1"),
    ):
        with pytest.raises(error, match=message):
            plan.views(dsts, srcs)
    with pytest.raises(ValueError, match=r"srcs\[0\] has nl = 6, expected 3"):
        kk.pp.plan(2, 1, 6).views([view], [view, view])
