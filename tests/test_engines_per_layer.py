"""What layer_groups is told of each layer: the lists of groups and layers, and arguments with a value for each."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import kvbm_kernels as kk
from engine_zeros import B, D, H, N, layers, raises, zeros
from kvbm_kernels.engines import from_flashinfer, from_sglang, from_vllm, layer_groups

PAGES = {"layout": "NHD", "page_size": N}


def pool(num_layers=4):
    """SGLang's pairs [slots, heads, head_size] a layer."""
    return [tuple(zeros(B * N, H, D) for _ in "kv") for _ in range(num_layers)]


class TestPerLayer:
    def test_without_groups_layers_with_other_values_are_apart(self):
        """Pages of as many heads as tokens are of one shape in both layouts."""
        square = [tuple(zeros(B, H, H, D) for _ in "kv") for _ in range(3)]
        layouts = {"layout": ["NHD", "HND", "NHD"]}
        groups = layer_groups(from_flashinfer, square, page_size=H, per_layer=layouts)
        assert groups.layers == ((0, 2), (1,))
        assert [view.geometry.strides.head for view in groups] == [2 * D, 2 * H * D]

    def test_groups_of_what_has_no_order(self):
        for group, what in ((b"\0\1\2\3", "bytes"), ({0, 1, 2, 3}, "set"), (frozenset(range(4)), "frozenset")):
            with raises(TypeError, rf"groups\[0\] is a {what}, expected a list of layers"):
                layer_groups(from_sglang, pool(), groups=[group], **PAGES)
            with raises(TypeError, f"groups is a {what}, expected a list with the layers of each group"):
                layer_groups(from_sglang, pool(), groups=group, **PAGES)

    def test_what_a_generator_raises_is_its_callers(self):
        def broken():
            yield [0]
            raise TypeError("of the generator")

        with raises(TypeError, "^of the generator$"):
            layer_groups(from_sglang, pool(), groups=broken(), **PAGES)
        groups = layer_groups(from_sglang, pool(), groups=(iter(each) for each in ([0, 2], [1, 3])), **PAGES)
        assert groups.layers == ((0, 2), (1, 3))

    def test_per_layer_for_what_is_no_argument_of_the_adapter(self):
        pairs = pool(2)
        for name in ("groups", "tensors", "per_layer", "buffers", "num_kv_heads"):
            with raises(
                TypeError, rf"per_layer\['{name}'\] is given, expected a keyword argument of the adapter"
            ) as raised:
                layer_groups(from_sglang, pairs, per_layer={name: [1, 1]}, **PAGES)
            assert isinstance(raised.value, kk.KvbmError)
        with raises(TypeError, r"per_layer\[3\] is given, expected the name of an argument") as raised:
            layer_groups(from_sglang, pairs, per_layer={3: [1, 1]}, **PAGES)
        assert isinstance(raised.value, kk.KvbmError)
        for name in ("part", "parts"):
            with raises(ValueError, rf"per_layer\['{name}'\] is given, expected part or parts, which are the same for"):
                layer_groups(from_sglang, pairs, per_layer={name: ["k"] * 2}, **PAGES)

    def test_per_layer_for_adapters_of_ones_own(self):
        """Whatever keywords they take, and where nothing says which those are."""
        pairs = pool(2)

        class Unsigned:
            __signature__ = "none"

            def __call__(self, tensors, **keywords):
                return from_sglang(tensors, layout="NHD", **keywords)

        for adapter in (
            functools.partial(from_sglang, layout="NHD"),
            lambda tensors, **keywords: from_sglang(tensors, layout="NHD", **keywords),
            Unsigned(),
        ):
            assert layer_groups(adapter, pairs, per_layer={"page_size": [N, N // 2]}).layers == ((0,), (1,))

    def test_values_that_are_arrays_whatever_makes_them_so(self):
        class OfDlpack:
            def __dlpack__(self, **_): ...

            def __dlpack_device__(self):
                return 1, 0

        with raises(TypeError, r"per_layer\['x'\]\[0\] is an OfDlpack, expected a plain value$"):
            layer_groups(from_sglang, pool(), per_layer={"x": [OfDlpack()] * 4}, **PAGES)

    def test_arguments_that_are_no_lists_and_no_plain_values(self):
        torch = pytest.importorskip("torch")
        pairs = pool(2)
        for tensors, said, message in (
            (None, {}, "tensors is a NoneType, expected a list or dict with an entry for each layer"),
            (pairs, {"parts": 3}, "parts is an int, expected a list"),
            (pairs, {"parts": "kv"}, "parts is a str, expected a list"),
            (pairs, {"per_layer": [1, 2]}, "per_layer is a list, expected a dict"),
            (pairs, {"per_layer": {"x": 3}}, r"per_layer\['x'\] is an int, expected a list with a value for each"),
            (pairs, {"per_layer": {"x": "ab"}}, r"per_layer\['x'\] is a str, expected a list"),
            (pairs, {"per_layer": {"x": np.array(3)}}, r"per_layer\['x'\] is an? ndarray, expected a list"),
            (pairs, {"per_layer": {"x": [[3], [3]]}}, r"per_layer\['x'\]\[0\] is a list, expected a plain value$"),
            (pairs, {"per_layer": {"x": [1, np.zeros(2)]}}, r"per_layer\['x'\]\[1\] is an? ndarray, expected a plain"),
            (pairs, {"per_layer": {"x": torch.zeros(2)}}, r"per_layer\['x'\]\[0\] is a Tensor, expected a plain value"),
        ):
            with raises(TypeError, message) as raised:
                layer_groups(from_sglang, tensors, **said, **PAGES)
            assert isinstance(raised.value, kk.KvbmError)
        with raises(TypeError, "adapter is a NoneType, expected a function such as from_vllm"):
            layer_groups(None, pairs)
        with raises(ValueError, r"per_layer\['page_size'\] is given and so is page_size, expected one of them"):
            layer_groups(from_sglang, pairs, per_layer={"page_size": [N, N]}, **PAGES)

    def test_numbers_of_other_libraries_are_the_numbers_that_they_are(self):
        torch = pytest.importorskip("torch")
        caches = layers(B, 2, N, H, D)
        call = {"layout": "blocks_first", "block_size": N}
        for heads in (torch.tensor([H, H]), np.array([H, H]), [np.array(H), torch.tensor(H)], [H, np.int8(H)]):
            assert layer_groups(from_vllm, caches, per_layer={"num_kv_heads": heads}, **call).layers == ((0, 1),)
        for dtype in (kk.DType.F16, np.float16, "fp16", np.dtype("f2"), torch.float16):
            per_layer = {"dtype": [dtype] * 2}
            groups = layer_groups(from_vllm, caches, per_layer=per_layer, num_kv_heads=H, **call)
            assert [view.shape.dtype for view in groups] == [kk.DType.F16]
