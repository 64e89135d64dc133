"""Scales in a dict by name are paired with the rows of that name, in whichever order the names stand."""

from __future__ import annotations

import numpy as np
import pytest

import kvbm_kernels as kk
from engine_zeros import B, D, H, N, raises, zeros
from kvbm_kernels.engines import from_flashinfer, from_sglang, from_tensorrt_llm, layer_groups

PAGES = {"layout": "NHD", "page_size": N}
POOL = {"layout": "HND", "num_kv_heads": H, "tokens_per_block": N}
ARGUMENTS = {"sglang": "buffers", "flashinfer": "kv_caches", "tensorrt_llm": "pool"}


def by_adapter():
    """Adapters, and rows and scales of a layer that hold one number throughout."""

    def pairs(number, dtype, *shape):
        return tuple(np.full(shape, number, dtype) for _ in "kv")

    def whole(number, width):
        return np.full((B, 2, H, N, width), number, np.uint8)

    return {
        "sglang": (
            lambda rows, scales: from_sglang(rows, scales=scales, **PAGES),
            lambda number: pairs(number, np.uint8, B * N, H, D),
            lambda number: pairs(number, np.float32, B * N, H),
        ),
        "flashinfer": (
            lambda rows, scales: from_flashinfer(rows, scales=scales, **PAGES),
            lambda number: pairs(number, np.uint8, B, N, H, D),
            lambda number: pairs(number, np.float32, B, N, H, 1),
        ),
        "tensorrt_llm": (
            lambda rows, scales: from_tensorrt_llm(rows, scales=scales, **POOL),
            lambda number: whole(number, D),
            lambda number: whole(number, 1),
        ),
    }


def numbers_in(view):
    """What the rows of each layer hold."""
    s = view.shape
    out = np.zeros((len(view), s.nh, s.nl, s.no, s.nt, s.hd), np.float32 if s.dtype == kk.DType.F32 else np.uint8)
    kk.copy_blocks(kk.UniversalBlocks(out, s), view)
    return [np.unique(out[:, :, layer]).tolist() for layer in range(s.nl)]


class TestByName:
    @pytest.mark.parametrize("in_groups", [False, True])
    @pytest.mark.parametrize("engine", ["sglang", "flashinfer", "tensorrt_llm"])
    def test_are_found(self, engine, in_groups):
        adapter, make_rows, make_scales = by_adapter()[engine]

        def numbers(rows, scales):
            made = layer_groups(adapter, rows, scales=scales) if in_groups else adapter(rows, scales)
            assert (made.layers, made.parts) == (((0, 1, 2),) * 2, ("kv", "scales"))
            return [numbers_in(view) for view in made]

        rows = {"a": make_rows(1), "b": make_rows(2), "c": make_rows(3)}
        scales = {"c": make_scales(3), "b": make_scales(2), "a": make_scales(1)}
        expected = [[[1], [2], [3]]] * 2
        assert numbers(rows, scales) == expected
        assert numbers(rows, list(scales.values())[::-1]) == expected
        placed = {2: scales["c"], 0: scales["a"], 1: scales["b"]}
        assert numbers(list(rows.values()), placed) == expected
        assert numbers(tuple(rows.values()), placed) == expected

    @pytest.mark.parametrize("in_groups", [False, True])
    @pytest.mark.parametrize("engine", ["sglang", "flashinfer", "tensorrt_llm"])
    def test_others_are_refused(self, engine, in_groups):
        adapter, make_rows, make_scales = by_adapter()[engine]
        rows = {name: make_rows(1) for name in "abcdef"}
        name = "tensors" if in_groups else ARGUMENTS[engine]
        for of, keys, message in (
            (rows, "abcdeg", f"scales lacks 'f' and has also 'g', expected the keys of {name}"),
            (rows, "abcde", f"scales lacks 'f', expected the keys of {name}"),
            (rows, "gfedcba", f"scales has also 'g', expected the keys of {name}"),
            (
                rows,
                range(6),
                "scales lacks 'a', 'b', 'c' and 3 more and has also 0, 1, 2 and 3 more, expected the keys",
            ),
            (
                list(rows.values()),
                "abcdef",
                "scales lacks 0, 1, 2 and 3 more and has also 'a', .* expected the places of layers, 0 to 5",
            ),
            (list(rows.values()), [0, 1, 2, 3, 4], "scales lacks 5, expected the places of layers, 0 to 5"),
            (tuple(rows.values()), range(5), "scales lacks 5, expected the places of layers, 0 to 5"),
        ):
            scales = {key: make_scales(1) for key in keys}
            with raises(ValueError, message) as raised:
                layer_groups(adapter, of, scales=scales) if in_groups else adapter(of, scales)
            assert isinstance(raised.value, kk.KvbmError)

    def test_beside_a_pool_that_is_one_tensor(self):
        rows = zeros(B, 2, 2, H * N * D, dtype=np.uint8)
        first, second = (np.full((B, 2, H, N, 1), number, np.uint8) for number in (1, 2))
        made = from_tensorrt_llm(rows, scales={1: second, 0: first}, **POOL)
        assert numbers_in(made[1]) == [[1], [2]]
        with raises(ValueError, "scales lacks 0, 1 and has also 'a', 'b', expected the places of layers, 0 to 1"):
            from_tensorrt_llm(rows, scales={"a": first, "b": second}, **POOL)

    def test_of_a_group_are_those_of_its_names(self):
        """Layers that are several views, each with its own scales."""
        widths = {"a": 16, "b": 32, "c": 16}
        rows = {name: tuple(zeros(B * N, H, width, dtype=np.uint8) for _ in "kv") for name, width in widths.items()}
        flat = {name: tuple(np.full((B * N, H), i, np.float32) for _ in "kv") for i, name in enumerate(widths)}
        for scales in (dict(reversed(flat.items())), list(flat.values()), tuple(flat.values())):
            groups = layer_groups(from_sglang, rows, scales=scales, **PAGES)
            assert groups.layers == ((0, 2), (0, 2), (1,), (1,))
            assert [numbers_in(view) for view in groups[1::2]] == [[[0], [2]], [[1]]]
            groups = layer_groups(from_sglang, rows, scales=scales, groups=[["b"], ["c", "a"]], **PAGES)
            assert [numbers_in(view) for view in groups[1::2]] == [[[1]], [[2], [0]]]
