"""layer_groups where shapes do not tell groups apart, K or V alone, scales beside rows, and what is refused."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import kvbm_kernels as kk
from engine_zeros import B, D, H, N, raises, zeros
from kvbm_kernels.engines import (
    LayerGroups,
    from_flashinfer,
    from_sglang,
    from_tensorrt_llm,
    from_vllm,
    layer_groups,
)

PAGES = {"layout": "NHD", "page_size": N}


def pool(rng, width=D, dtype=np.float16, num_layers=4):
    """SGLang's pairs [slots, heads, width] a layer, of random bytes."""
    return [tuple(rng.integers(1, 100, (2, B * N, H, width)).astype(dtype)) for _ in range(num_layers)]


def empty(pairs):
    return [tuple(np.zeros_like(each) for each in pair) for pair in pairs]


def block(tensor, i):
    return tensor[i * N : (i + 1) * N]


class TestGroupsThatTheCallerKnows:
    """Layers with a window and without, of one shape, and a block table for each kind."""

    GROUPS = ((0, 2), (1, 3))
    TABLES = ([1], [2, 3])
    TO_TABLES = ([3], [1, 2])

    def copied(self, src, dst, adapter, **arguments):
        of, to = (layer_groups(adapter, each, groups=self.GROUPS, **arguments) for each in (src, dst))
        assert of.layers == to.layers == self.GROUPS
        kk.copy_blocks(
            [view[ids] for view, ids in zip(to, self.TO_TABLES, strict=True)],
            [view[ids] for view, ids in zip(of, self.TABLES, strict=True)],
        )

    def test_have_a_table_each(self, rng):
        src = pool(rng)
        dst = empty(src)
        self.copied(src, dst, from_sglang, **PAGES)
        for held, table, to_table in zip(self.GROUPS, self.TABLES, self.TO_TABLES, strict=True):
            for layer in held:
                for mine, theirs in zip(dst[layer], src[layer], strict=True):
                    for i in range(B):
                        expected = block(theirs, table[to_table.index(i)]) if i in to_table else 0
                        assert np.array_equal(block(mine, i), np.broadcast_to(expected, (N, H, D)))

    def test_are_in_the_order_given_with_each_part(self, rng):
        groups = layer_groups(from_sglang, pool(rng), groups=[[3], range(2), np.array([2])], parts=("k", "v"), **PAGES)
        assert groups.layers == ((3,), (0, 1), (2,)) * 2
        assert groups.parts == ("k",) * 3 + ("v",) * 3

    def test_of_named_layers(self):
        """vLLM's groups are of names; the layers are numbered as the dict has them."""
        caches = {f"layers.{i}": zeros(B, 2, N, H, D) for i in range(3)}
        per_layer = {"num_kv_heads": [H, H, H]}
        call = {"layout": "blocks_first", "block_size": N, "per_layer": per_layer}
        for groups in ([[2], [0, 1]], [["layers.2"], ["layers.0", "layers.1"]], [["layers.2"], ("layers.0", 1)]):
            assert layer_groups(from_vllm, caches, groups=groups, **call).layers == ((2,), (0, 1))
        for groups, error, message in (
            ([["layers.2"], ["layers.7"]], IndexError, r"groups\[1\]\[0\] is 'layers.7', expected a key of tensors"),
            ([["layers.2"], [2]], ValueError, r"groups\[1\]\[0\] is 2, which is in groups\[0\] already"),
            ([[2], ["layers.2"]], ValueError, r"groups\[1\]\[0\] is 'layers.2', which is in groups\[0\] already"),
            ([["layers.0", 2]], ValueError, r"groups has no layer 1 \('layers.1'\), expected each of 3 layers"),
            (["layers.0"], TypeError, r"groups\[0\] is a str, expected a list of layers"),
        ):
            with raises(error, message):
                layer_groups(from_vllm, caches, groups=groups, **call)
        # A key that is a number could be another layer's place.
        with raises(IndexError, r"groups\[0\]\[0\] is 7, expected 0 to 0"):
            layer_groups(from_vllm, {7: caches["layers.0"]}, groups=[[7]], layout="blocks_first", block_size=N)
        with raises(ValueError, r"kv_caches\['layers.1'\] .* is the same memory as kv_caches\['layers.0'\]"):
            layer_groups(from_vllm, {**caches, "layers.1": caches["layers.0"]}, groups=[[2], [0, 1]], **call)

    def test_hold_every_layer_once(self, rng):
        pairs = pool(rng)
        for groups, error, message in (
            ([[0, 1], [2, 0]], ValueError, r"groups\[1\]\[1\] is 0, which is in groups\[0\] already"),
            ([[1, 0], [2, 0], [3]], ValueError, r"groups\[1\]\[1\] is 0, which is in groups\[0\] already"),
            ([[0, 1], [3]], ValueError, "groups has no layer 2, expected each of 4 layers in one group"),
            ([], ValueError, "groups has no layer 0, expected each of 4 layers in one group"),
            ([[0, 1, 2, 3], []], ValueError, r"groups\[1\] has no layers, expected at least 1"),
            ([[0, 1, 2, 4]], IndexError, r"groups\[0\]\[3\] is 4, expected 0 to 3"),
            ([[0, 1, 2, -1]], ValueError, r"groups\[0\]\[3\] is -1, expected 0 or more"),
            ([[0, 1, 2, 3.0]], TypeError, r"groups\[0\]\[3\] is 3.0, expected an integer"),
            ([0, 1, 2, 3], TypeError, r"groups\[0\] is an int, expected a list of layers"),
            ([["layers.0"]], TypeError, r"groups\[0\]\[0\] is 'layers.0', expected an integer"),
            (3, TypeError, "groups is an int, expected a list with the layers of each group"),
        ):
            with raises(error, message) as raised:
                layer_groups(from_sglang, pairs, groups=groups, **PAGES)
            assert isinstance(raised.value, kk.KvbmError)

    def test_are_of_one_shape_and_of_one_value_of_each_argument(self, rng):
        pairs = [*pool(rng, num_layers=1), *pool(rng, width=2 * D, num_layers=1)]
        with raises(ValueError, r"buffers\[1\]\[0\] has shape .*12\] .*, expected the shape .*6\] of buffers"):
            layer_groups(from_sglang, pairs, groups=[[0, 1]], **PAGES)
        with raises(
            ValueError,
            r"per_layer\['no'\] is 1 for layer 0 and 2 for layer 2, expected the same for all of groups\[0\]",
        ):
            layer_groups(
                from_vllm, [zeros(B, H, N, D) for _ in range(3)], groups=[[0, 2], [1]], layout="packed", block_size=N,
                num_kv_heads=H, per_layer={"no": [1, 1, 2]},
            )  # fmt: skip


class TestKOrVAlone:
    """What a group holds of its layers is said, so that K is never copied over V."""

    @staticmethod
    def with_scales(rng):
        rows, scales = pool(rng, dtype=np.uint8, num_layers=2), pool(rng, width=1, dtype=np.float32, num_layers=2)
        flat = [tuple(each.reshape(B * N, H) for each in pair) for pair in scales]
        paged = [tuple(each.reshape(B, N, H, -1) for each in pair) for pair in rows]
        paged_scales = [tuple(each.reshape(B, N, H, 1) for each in pair) for pair in scales]
        data, block_scales = zeros(B, 2, 2, H * N * D, dtype=np.uint8), zeros(B, 2, 2, H * N, dtype=np.uint8)
        of_pool = {"layout": "HND", "num_kv_heads": H, "tokens_per_block": N}
        return [
            lambda part: from_sglang(rows, scales=flat, part=part, **PAGES),
            lambda part: from_flashinfer(paged, scales=paged_scales, part=part, **PAGES),
            lambda part: from_tensorrt_llm(data, scales=block_scales, part=part, **of_pool),
            lambda part: layer_groups(from_sglang, rows, scales=flat, part=part, **PAGES),
        ]

    def test_of_rows_and_scales(self, rng):
        for call in self.with_scales(rng):
            assert call(None).parts == ("kv", "scales")
            assert call("k").parts == ("k", "k_scales")
            assert call("v").parts == ("v", "v_scales")
            with raises(ValueError, r"dst has parts \('k', 'k_scales'\) and src \('v', 'v_scales'\)"):
                kk.copy_blocks(call("k"), call("v"))

    def test_of_layer_groups(self, rng):
        pairs = pool(rng)
        k, v = (layer_groups(from_sglang, pairs, part=part, **PAGES) for part in "kv")
        assert (k.parts, v.parts) == (("k",), ("v",))
        with raises(ValueError, r"dst has parts \('k',\) and src \('v',\)"):
            kk.copy_blocks(k, v)
        with raises(ValueError, r"part is 'v' and parts \['k'\], expected one of them"):
            layer_groups(from_sglang, pairs, part="v", parts=("k",), **PAGES)
        with raises(ValueError, r"per_layer\['part'\] is given, expected part or parts"):
            layer_groups(from_sglang, pairs, per_layer={"part": ["k", "v", "k", "v"]}, **PAGES)
        with raises(ValueError, r"parts\[1\] is 'kv', expected \"k\" or \"v\""):
            layer_groups(from_sglang, pairs, parts=("k", "kv"), **PAGES)
        with raises(TypeError, r"parts\[0\] is array.*, expected \"k\" or \"v\""):
            layer_groups(from_sglang, pairs, parts=[np.zeros(2)], **PAGES)


class TestScalesOfGroups:
    @pytest.mark.parametrize("groups", [None, [[0, 2], [1]]])
    def test_lie_behind_the_rows_of_each_group(self, rng, groups):
        widths = (16, 32, 16)
        rows = [pool(rng, width, np.uint8, 1)[0] for width in widths]
        scales = [pool(rng, width // 16, np.uint8, 1)[0] for width in widths]
        flat = [tuple(each.reshape(B * N, -1) for each in pair) for pair in scales]
        of = layer_groups(from_sglang, rows, scales=flat, groups=groups, **PAGES)
        assert of.layers == ((0, 2), (0, 2), (1,), (1,))
        assert of.parts == ("kv", "scales") * 2
        out, out_scales = empty(rows), empty(flat)
        to = layer_groups(from_sglang, out, scales=dict(enumerate(out_scales)), groups=groups, **PAGES)
        kk.copy_blocks(to.select([1, 3]), of.select([2, 1]))
        for mine, theirs in zip([*out, *out_scales], [*rows, *flat], strict=True):
            for a, b in zip(mine, theirs, strict=True):
                assert np.array_equal(block(a, 1), block(b, 2))
                assert np.array_equal(block(a, 3), block(b, 1))
                assert not block(a, 2).any()

    def test_are_one_for_each_layer(self, rng):
        rows, scales = pool(rng, dtype=np.uint8), pool(rng, width=1, dtype=np.uint8)
        flat = [tuple(each.reshape(B * N, -1) for each in pair) for pair in scales]
        with raises(ValueError, "scales has 3 entries, expected one for each of 4 layers"):
            layer_groups(from_sglang, rows, scales=flat[:3], **PAGES)
        with raises(ValueError, "scales has 5 entries, expected one for each of 4 layers"):
            layer_groups(from_sglang, rows, scales=[*flat, flat[0]], **PAGES)
        with raises(
            TypeError,
            r"per_layer\['scales'\]\[0\] is a list, expected a plain value; tensors are given as scales, an entry for",
        ):
            layer_groups(from_sglang, rows, per_layer={"scales": [[each] for each in flat]}, **PAGES)


class TestSelect:
    """Ids are for every view, or there is a list of them for each group of layers."""

    GROUPS = ((0, 2), (1, 3))

    @staticmethod
    def ids(groups):
        return [view.geometry.ids.tolist() for view in groups]

    def test_a_table_for_each_group(self, rng):
        torch = pytest.importorskip("torch")
        groups = layer_groups(from_sglang, pool(rng), groups=self.GROUPS, **PAGES)
        assert self.ids(groups.select([1, 3])) == [[1, 3], [1, 3]]
        assert self.ids(groups.select([np.int64(1), torch.tensor(3)])) == [[1, 3], [1, 3]]
        assert self.ids(groups.select([])) == [[], []]
        for tables in ([[1], [2, 3]], ([1], np.array([2, 3])), (torch.tensor([1]), range(2, 4)), [(1,), slice(2, 4)]):
            selected = groups.select(tables)
            assert self.ids(selected) == [[1], [2, 3]]
            assert (selected.layers, selected.parts) == (groups.layers, groups.parts)
        assert self.ids(groups.select([[], [3]])) == [[], [3]]

    def test_the_parts_of_a_group_have_its_table(self, rng):
        groups = layer_groups(from_sglang, pool(rng), groups=self.GROUPS, parts=("k", "v"), **PAGES)
        assert self.ids(groups.select([[1], [2, 3]])) == [[1], [2, 3]] * 2
        rows, scales = pool(rng, dtype=np.uint8), pool(rng, width=1, dtype=np.float32)
        flat = [tuple(each.reshape(B * N, H) for each in pair) for pair in scales]
        groups = layer_groups(from_sglang, rows, scales=flat, groups=self.GROUPS, **PAGES)
        assert self.ids(groups.select([[1], [2, 3]])) == [[1], [1], [2, 3], [2, 3]]

    def test_others_are_refused(self, rng):
        groups = layer_groups(from_sglang, pool(rng), groups=self.GROUPS, parts=("k", "v"), **PAGES)
        for ids, error, message in (
            ([[1]], ValueError, r"ids has 1 list, expected 2: one for each group of layers, \[\(0, 2\), \(1, 3\)"),
            ([[1], [2], [1], [2]], ValueError, "ids has 4 lists, expected 2: one for each group of layers"),
            ([[1], 2], TypeError, r"block ids \[0\] is \[1\], expected an integer"),
            ([[1], [B]], IndexError, rf"ids\[1\]: block id {B}, expected 1 to {B - 1}: those below are reserved"),
            ([[1], "a"], TypeError, r"ids\[1\]: block ids are a str"),
            ([[1], [[2]]], TypeError, r"ids\[1\]: block ids \[0\] is \[2\], expected an integer"),
        ):
            with raises(error, message) as raised:
                groups.select(ids)
            assert isinstance(raised.value, kk.KvbmError)


class TestLayer:
    """One layer of the model, whichever group has it."""

    def test_is_of_the_group_that_has_it(self, rng):
        src = pool(rng)
        dst = empty(src)
        of, to = (layer_groups(from_sglang, each, groups=[[0, 2], [3, 1]], **PAGES) for each in (src, dst))
        of, to = of.select([[1], [2, 3]]), to.select([[3], [1, 2]])
        kk.copy_blocks(to.layer(1), of.layer(1))
        for layer, (mine, theirs) in enumerate(zip(dst, src, strict=True)):
            for i, j in ((1, 2), (2, 3), (3, None)):
                for a, b in zip(mine, theirs, strict=True):
                    assert np.array_equal(block(a, i), block(b, j) if layer == 1 and j else np.zeros((N, H, D)))
        with raises(ValueError, r"dst has layers \(\(1,\),\) and src \(\(3,\),\), expected the same"):
            kk.copy_blocks(to.layer(1), of.layer(3))

    def test_has_every_part(self, rng):
        groups = layer_groups(from_sglang, pool(rng), groups=[[0, 2], [1, 3]], parts=("k", "v"), **PAGES)
        layer = groups.layer(np.int64(2))
        assert (layer.layers, layer.parts) == (((2,), (2,)), ("k", "v"))
        assert [view.shape.nl for view in layer] == [1, 1]

    def test_that_is_in_no_group(self, rng):
        groups = layer_groups(from_sglang, pool(rng), **PAGES)
        for layer, error, message in (
            (4, IndexError, "layer 4 is in no group: the groups have 0 to 3"),
            (-1, ValueError, "layer is -1, expected 0 or more"),
            ("a", TypeError, "layer is 'a', expected an integer"),
        ):
            with raises(error, message) as raised:
                groups.layer(layer)
            assert isinstance(raised.value, kk.KvbmError)
        with raises(IndexError, "layer 0 is in no group: there are no groups"):
            LayerGroups([], []).layer(0)


class TestRefused:
    def test_groups_of_what_are_no_views_or_layers(self, rng):
        (view,) = layer_groups(from_sglang, pool(rng, num_layers=1), **PAGES)
        for arguments, message in (
            (([np.zeros(3)], [[0]]), r"views\[0\] is an? ndarray, expected a view"),
            ((view, [[0]]), "views is an EngineBlocks, expected a list of views"),
            (([view], [0]), r"layers\[0\] is an int, expected a list of layers"),
            (([view], 0), "layers is an int, expected a list with the layers of each view"),
            (([view], [["a"]]), r"layers\[0\]\[0\] is 'a', expected an integer"),
            (([view], [[0]], "k"), "parts is a str, expected a list of names"),
            (([view], [[0]], [["k"]]), r"parts\[0\] is \['k'\], expected a name"),
        ):
            with raises(TypeError, message) as raised:
                LayerGroups(*arguments)
            assert isinstance(raised.value, kk.KvbmError)

    def test_copies_of_groups(self, rng):
        groups = layer_groups(from_sglang, pool(rng), **PAGES)
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            with raises(TypeError, "a LayerGroups cannot be copied or pickled") as raised:
                make(groups)
            assert isinstance(raised.value, kk.KvbmError)
