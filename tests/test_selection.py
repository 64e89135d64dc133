"""Parts of views: blocks by id, and ranges of layers, tokens and heads."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import kvbm_kernels as kk
import reference
from kvbm_kernels.overlap import repeated_block, rows_collide

NB, NL, NO, NT, NH, HD = 5, 4, 2, 3, 6, 8
SHAPE = kk.BlockShape(nl=NL, no=NO, nh=NH, nt=NT, hd=HD, dtype="bf16")


@pytest.fixture
def kv(rng):
    """A logical cache; every test about one sees the same bits."""
    return reference.random_kv(rng, (NB, NL, NO, NT, NH, HD), ml_dtypes.bfloat16)


def read(view: kk.View) -> np.ndarray:
    """The rows of a view as the logical cache they are, by way of the copy under test elsewhere."""
    s = view.shape
    out = np.zeros((len(view), s.nh, s.nl, s.no, s.nt, s.hd), ml_dtypes.bfloat16)
    kk.copy_blocks(kk.UniversalBlocks(out, s), view)
    return reference.from_universal(out)


@pytest.fixture(params=["chunks", "layers", "universal", "one array"])
def view(request, kv):
    if request.param == "chunks":
        return kk.BlockStack(reference.block_stack(kv, "HND"), SHAPE, "HND")
    if request.param == "layers":
        return kk.BlockStack.from_layers(list(kv.transpose(1, 0, 2, 3, 4, 5).copy()), SHAPE)
    if request.param == "universal":
        return kk.UniversalBlocks(list(reference.universal(kv)), SHAPE)
    return kk.UniversalBlocks(reference.universal(kv), SHAPE)


@pytest.mark.parametrize(
    "ids",
    [
        [3, 0],
        (4,),
        [],
        [2, 2],
        range(4, 0, -2),
        np.array([1, 4], np.uint32),
        np.array([1, 4], np.int32),
        np.array([4, 1], np.int64),
        np.array([0, 3], np.uint64)[::-1],
        [np.int32(3), 1],
    ],
    ids=repr,
)
def test_by_ids(view, kv, ids):
    chosen = view[ids]
    assert type(chosen) is type(view)
    assert len(chosen) == len(ids)
    reference.assert_same_bytes(read(chosen), kv[np.asarray(ids, np.int64)])


@pytest.mark.parametrize("ids", [slice(1, 4), slice(None), slice(-2, None), slice(None, None, -2), slice(2, 99)])
def test_by_slices_as_lists_do(view, kv, ids):
    reference.assert_same_bytes(read(view[ids]), kv[ids])


def test_by_one_id(view, kv):
    reference.assert_same_bytes(read(view[3]), kv[3:4])
    reference.assert_same_bytes(read(view[np.uint32(3)]), kv[3:4])
    assert [len(block) for block in view] == [1] * NB


def test_of_a_selection(view, kv):
    reference.assert_same_bytes(read(view[[4, 2, 0]][1:][[1, 0]]), kv[[0, 2]])


def test_torch_ids(torch, view, kv):
    reference.assert_same_bytes(read(view[torch.tensor([4, 0], dtype=torch.int32)]), kv[[4, 0]])


@pytest.mark.parametrize("wrong", [-1, 5, 511, 1 << 70, np.uint64((1 << 64) - 1)])
def test_ids_out_of_range_are_named(view, wrong):
    for ids in (wrong, [0, wrong], [0, 1, wrong, 1000]):
        with pytest.raises(IndexError, match=rf"block id {int(wrong)}\b"):
            view[ids]
    with pytest.raises(IndexError, match="block id 511, expected 0 to 4: the view has 5 blocks"):
        view[[0, 511]]


def test_ids_count_in_the_view_they_select_from(view):
    with pytest.raises(IndexError, match="block id 2, expected 0 to 1: the view has 2 blocks"):
        view[[3, 4]][2]


@pytest.mark.parametrize(
    "wrong",
    [
        1.0,
        True,
        None,
        "0",
        [0.0],
        [0, 1.0],
        [True, False],
        [0, True],
        [np.True_],
        np.array([0.0]),
        np.array([True] * 5),
        [np.array([], int)],
        [np.array([1])],
        [np.array([1, 2]), np.array([3, 4])],
        [np.array(1.7)],
        [np.array(True)],
        [[1]],
        ["1"],
        [np.float32(1)],
        np.ma.array([0, 1], mask=[0, 1]),
    ],
    ids=repr,
)
def test_ids_that_are_no_integers_are_type_errors(view, wrong):
    with pytest.raises(TypeError, match="block ids") as raised:
        view[wrong]
    assert isinstance(raised.value, kk.KvbmError)


def test_ids_have_one_dimension(view):
    with pytest.raises(TypeError, match="block ids have 2 dimensions"):
        view[np.zeros((1, 1), np.int64)]


def test_the_ids_are_taken_over(view, kv):
    """A block table that changes later does not change a view made from it."""
    ids = np.array([1, 2], np.int64)
    chosen = view[ids]
    ids[:] = 4
    reference.assert_same_bytes(read(chosen), kv[[1, 2]])


def test_heads_layers_and_tokens(view, kv):
    narrow = view.heads(1, 4).layers(2, 4).tokens(0, 2)[[4, 1]].heads(1, 3)
    assert narrow.shape == kk.BlockShape(2, NO, 2, 2, HD, "bf16")
    assert type(narrow) is type(view)
    reference.assert_same_bytes(read(narrow), kv[[4, 1]][:, 2:4, :, 0:2, 2:4])


@pytest.mark.parametrize("what", ["heads", "layers", "tokens"])
def test_ranges_outside_are_refused(view, what):
    count = {"heads": NH, "layers": NL, "tokens": NT}[what]
    for start, stop in ((0, count + 1), (-1, 1), (2, 2), (2, 1)):
        message = rf"{what}\({start}, {stop}\), expected 0 <= start < stop <= {count}"
        with pytest.raises(IndexError, match=message):
            getattr(view, what)(start, stop)
    with pytest.raises(TypeError, match=rf"{what}\(0, 1.5\), expected two integers"):
        getattr(view, what)(0, 1.5)


@pytest.mark.parametrize("size", [1, 2, 3, 6, 12, 18])
def test_shards_are_the_heads_of_a_rank(view, kv, size):
    for rank in range(size):
        expected = kv[:, :, :, :, reference.heads_of_rank(NH, rank, size)]
        reference.assert_same_bytes(read(view.shard(rank, size)), expected)


def test_shards_that_cannot_be(view):
    with pytest.raises(ValueError, match="6 heads cannot be shared by 4 ranks: neither number divides the other"):
        view.shard(0, 4)
    with pytest.raises(ValueError, match="rank is 2, expected 0 to 1"):
        view.shard(2, 2)
    with pytest.raises(ValueError, match="rank is -1, expected 0 or more"):
        view.shard(-1, 2)
    with pytest.raises(ValueError, match="size is 0, expected 1 or more"):
        view.shard(0, 0)


def test_repr_says_what_it_is(view):
    text = repr(view[[1, 2]].heads(0, 2))
    assert text.startswith(f"<{type(view).__name__}: 2 blocks of nl=4 no=2 nh=2 nt=3 hd=8 bf16")
    assert text.endswith("cpu>")
    assert view.device == "cpu"


class Index:
    def __index__(self):
        return 3


@pytest.mark.parametrize("number", [Index(), np.int8(3), np.uint64(3), np.array(3)], ids=lambda n: type(n).__name__)
def test_whatever_is_an_index_is_an_id(view, kv, number):
    for ids in (number, [number], (number, 3)):
        chosen = view[ids]
        reference.assert_same_bytes(read(chosen), np.concatenate([kv[3:4]] * len(chosen)))


def test_tensors_among_ids(torch, view):
    assert len(view[[torch.tensor(3), 1]]) == 2
    for wrong in (torch.tensor(1.7), torch.tensor(True), torch.tensor([1]), torch.tensor([1, 2])):
        with pytest.raises(kk.KvbmTypeError, match=r"block ids \[1\] is tensor"):
            view[[0, wrong]]


def test_wrong_slices(view):
    with pytest.raises(kk.KvbmTypeError, match="expected a slice of integers"):
        view["a":]
    with pytest.raises(kk.KvbmValueError, match="slice step cannot be zero"):
        view[::0]


def test_an_id_of_an_empty_view(view):
    with pytest.raises(kk.KvbmIndexError, match="block id 0, expected none: the view has no blocks"):
        view[[]][0]


@pytest.mark.parametrize("what", ["heads", "layers", "tokens"])
@pytest.mark.parametrize("start", [True, np.True_, 0.0, np.array([0]), "0"], ids=repr)
def test_ranges_are_of_integers(view, what, start):
    with pytest.raises(kk.KvbmTypeError, match="expected two integers"):
        getattr(view, what)(start, 2)


def test_ids_are_looked_through_once(view, monkeypatch):
    """Whether a view names a block twice is kept, for its parts too."""
    chosen = view[[4, 2]]
    assert not rows_collide(chosen.geometry)
    part = chosen.layers(1, 3).heads(0, 2)
    monkeypatch.setattr(chosen.geometry, "ids", None)
    assert not rows_collide(chosen.geometry)
    assert not rows_collide(part.tokens(0, 1).geometry)
    twice = view[[4, 2, 4]].geometry
    assert rows_collide(twice)
    assert repeated_block(twice) == (4, 0, 2)
    assert twice.has_repeats
