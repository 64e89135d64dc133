"""Shapes that models really have: head dimensions, head counts, K and V of two sizes, layers of several, scales."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import kvbm_kernels as kk
import reference
from engine_kinds import KINDS, copy, laid_out, shape_of
from kvbm_kernels.engines import (
    LayerGroups,
    from_flashinfer,
    from_sglang,
    from_tensorrt_llm,
    from_transformers,
    from_vllm,
    from_vllm_buffer,
    layer_groups,
)
from reference_engines import Size

# Names of models, and KV heads, head dimension, tokens a block: a few layers of each stand for all.
MODELS = {
    "llama-3.1-8b": (8, 128, 16),
    "llama-3.2-1b": (8, 64, 16),
    "llama-70b on 8 ranks": (1, 128, 16),
    "phi-2": (32, 80, 16),
    "phi-3-mini": (32, 96, 16),
    "phi-4": (10, 128, 16),
    "mpt-30b": (64, 112, 16),
    "gemma-3-12b": (8, 256, 16),
    "gemma-4 global": (4, 512, 16),
    "falcon-7b": (1, 64, 16),
    "qwen2.5-0.5b": (2, 64, 128),
    "page of 1 token": (4, 128, 1),
    "page of 256 tokens": (4, 128, 256),
}
IDS = [3, 1]


def universal_of(view: kk.View, dtype=np.uint16) -> np.ndarray:
    """The universal bytes of all blocks of a view."""
    s = view.shape
    out = np.zeros((len(view), s.nh, s.nl, s.no, s.nt, s.hd), dtype)
    kk.copy_blocks(kk.UniversalBlocks(out, s), view)
    return out


class TestModels:
    @pytest.mark.parametrize("model", MODELS)
    @pytest.mark.parametrize(
        "name", ["vllm LBHNC", "vllm BHLNC", "sglang NHD", "sglang host page_first", "transformers"]
    )
    def test_universal_bytes_and_back(self, rng, model, name):
        heads, head_dim, tokens = MODELS[model]
        size = Size(B=4, L=2, N=tokens, H=heads, D=head_dim)
        kind = KINDS[name]
        kv = reference.random_kv(rng, (2, 2, 2, tokens, heads, head_dim), np.uint16)
        saved = universal_of(kind.view(laid_out(kind, size, kv, IDS).tensors, size)[IDS])
        reference.assert_same_bytes(saved, reference.universal(kv))
        cache = laid_out(kind, size, None, IDS)
        copy(kind.view(cache.tensors, size)[IDS], kk.UniversalBlocks(saved, shape_of(size)))
        reference.assert_same_bytes(cache.read(IDS), kv)

    def test_rows_of_576_of_deepseek(self, rng):
        layers = [rng.integers(0, 1 << 16, (4, 64, 576), np.uint16) for _ in range(2)]
        view = from_vllm(layers, layout="mla", block_size=64, dtype="bf16")
        assert str(view.shape) == "nl=2 no=1 nh=1 nt=64 hd=576 bf16"
        reference.assert_same_bytes(universal_of(view[IDS])[:, 0, :, 0], np.stack(layers, 1)[IDS])

    def test_ten_heads_are_for_one_two_five_or_ten_ranks(self):
        view = from_vllm(
            [np.zeros((4, 2, 16, 10, 128), np.float16)], layout="blocks_first", block_size=16, num_kv_heads=10
        )
        for size in (1, 2, 5, 10, 20):
            assert view.shard(size - 1, size).shape.nh == max(10 // size, 1)
        with pytest.raises(ValueError, match="10 heads cannot be shared by 4 ranks"):
            view.shard(0, 4)


class TestKAndVOfTwoSizes:
    """MiMo-V2-Flash has K of 192 elements and V of 128."""

    K, V = 192, 128

    @pytest.fixture
    def kv(self, rng):
        """K and V [blocks, layers, tokens, heads, d]."""
        return [reference.random_kv(rng, (4, 2, 16, 4, d), np.uint16) for d in (self.K, self.V)]

    def expected(self, kv):
        return [part.transpose(0, 3, 1, 2, 4)[IDS][:, :, :, None] for part in kv]

    def assert_parts(self, groups, kv):
        assert groups.parts == ("k", "v")
        assert groups.layers == ((0, 1), (0, 1))
        for view, rows in zip(groups.select(IDS), self.expected(kv), strict=True):
            reference.assert_same_bytes(universal_of(view), np.ascontiguousarray(rows))

    def test_packed_rows(self, kv):
        content = np.concatenate(kv, -1)
        layers = [content[:, i].transpose(0, 2, 1, 3) for i in range(2)]
        arguments = {
            "layout": "packed",
            "block_size": 16,
            "num_kv_heads": 4,
            "dtype": "bf16",
            "head_size": 192,
            "head_size_v": 128,
        }
        with pytest.raises(
            ValueError, match='rows of 192 elements and V of 128, .* part="k" and part="v" are a view each'
        ):
            from_vllm(layers, no=2, **arguments)
        self.assert_parts(layer_groups(from_vllm, layers, parts=("k", "v"), no=2, **arguments), kv)
        assert from_vllm(layers, no=1, **arguments).shape.hd == 320

    def test_packed_rows_in_a_buffer(self, kv):
        content = np.ascontiguousarray(np.concatenate(kv, -1).transpose(1, 0, 3, 2, 4))
        sizes = {"num_layers": 2, "num_blocks": 4, "num_kv_heads": 4, "block_size": 16, "dtype": "bf16"}
        views = [
            from_vllm_buffer(
                content.reshape(-1).view(np.int8),
                layout="LBHNC",
                no=2,
                head_size=192,
                head_size_v=128,
                part=part,
                **sizes,
            )
            for part in ("k", "v")
        ]
        self.assert_parts(LayerGroups(views, [(0, 1)] * 2, ["k", "v"]), kv)

    @pytest.mark.parametrize("engine", ["sglang", "flashinfer", "transformers"])
    def test_pairs(self, kv, engine):
        if engine == "sglang":
            each = [[np.ascontiguousarray(part[:, i]).reshape(64, 4, -1) for part in kv] for i in range(2)]
            adapter, arguments = from_sglang, {"layout": "NHD", "page_size": 16}
        elif engine == "flashinfer":
            each = [[np.ascontiguousarray(part[:, i]) for part in kv] for i in range(2)]
            adapter, arguments = from_flashinfer, {"layout": "NHD", "page_size": 16}
        else:
            each = [[part[:, i].reshape(64, 4, -1).transpose(1, 0, 2)[None] for part in kv] for i in range(2)]
            adapter, arguments = from_transformers, {"block_size": 16}
        with pytest.raises(
            ValueError, match=r"\[0\]\[1\] has shape .*128\] .* expected the shape .*192\] .*part=\"k\""
        ):
            adapter(each, dtype="bf16", **arguments)
        self.assert_parts(layer_groups(adapter, each, parts=("k", "v"), dtype="bf16", **arguments), kv)


class TestLayersOfSeveralKinds:
    """Gemma 4: five layers with a window and 256 elements, then one of 512 with half the heads."""

    HEADS_AND_DIMS = ((8, 256), (8, 256), (4, 512), (8, 256), (4, 512))

    @pytest.fixture
    def kv(self, rng):
        return [reference.random_kv(rng, (4, 2, 16, h, d), np.uint16) for h, d in self.HEADS_AND_DIMS]

    def groups(self, engine, kv) -> LayerGroups:
        if engine == "vllm":
            layers = {
                f"layers.{i}": np.concatenate(list(kv[i].swapaxes(0, 1)), -1).transpose(0, 2, 1, 3) for i in range(5)
            }
            arguments = {"layout": "packed", "block_size": 16, "no": 2, "dtype": "bf16"}
            per_layer = {"num_kv_heads": [h for h, _ in self.HEADS_AND_DIMS]}
            per_layer["head_size"] = [d for _, d in self.HEADS_AND_DIMS]
            return layer_groups(from_vllm, layers, per_layer=per_layer, **arguments)
        pairs = [[np.ascontiguousarray(layer[:, o]).reshape(64, *layer.shape[3:]) for o in range(2)] for layer in kv]
        return layer_groups(from_sglang, pairs, layout="NHD", page_size=16, dtype="bf16")

    @pytest.mark.parametrize("engine", ["vllm", "sglang"])
    def test_a_view_for_each_kind_in_the_order_of_the_model(self, kv, engine):
        groups = self.groups(engine, kv)
        assert groups.layers == ((0, 1, 3), (2, 4))
        assert groups.parts == ("kv", "kv")
        for view, layers in zip(groups.select(IDS), groups.layers, strict=True):
            expected = reference.universal(np.stack([kv[i][IDS] for i in layers], 1))
            reference.assert_same_bytes(universal_of(view), expected)

    def test_groups_are_copied_one_for_one_between_engines(self, kv):
        empty = [np.zeros_like(layer) for layer in kv]
        dst, src = self.groups("sglang", empty), self.groups("vllm", kv)
        again = self.groups("sglang", kv)
        kk.copy_blocks(dst, src)
        for to, of in zip(dst, again, strict=True):
            reference.assert_same_bytes(universal_of(to), universal_of(of))

    def test_a_rank_has_its_heads_of_every_group(self, kv):
        shards = self.groups("vllm", kv).shard(1, 2)
        assert [view.shape.nh for view in shards] == [4, 2]
        reference.assert_same_bytes(
            universal_of(shards[1]), reference.universal(np.stack([kv[2][1:, ..., 2:, :], kv[4][1:, ..., 2:, :]], 1))
        )

    def test_without_groups_the_layer_is_named(self, kv):
        pairs = [[np.ascontiguousarray(layer[:, o]).reshape(64, *layer.shape[3:]) for o in range(2)] for layer in kv]
        with pytest.raises(
            ValueError, match=r"buffers\[2\]\[0\] has shape \[64, 4, 512\] .* layer_groups\(\) makes a view"
        ):
            from_sglang(pairs, layout="NHD", page_size=16, dtype="bf16")

    def test_errors_within_a_group_name_the_layer_of_the_model(self, kv):
        pairs = [[np.ascontiguousarray(layer[:, o]).reshape(64, *layer.shape[3:]) for o in range(2)] for layer in kv]
        pairs[4][1] = pairs[4][0]
        with pytest.raises(ValueError, match=r"buffers\[4\]\[1\] .* is the same memory as buffers\[4\]\[0\]"):
            layer_groups(from_sglang, pairs, layout="NHD", page_size=16, dtype="bf16")

    def test_what_is_no_view_of_layers_is_refused(self, kv):
        with pytest.raises(TypeError, match="the adapter returned an int, expected a BlockStack"):
            layer_groups(lambda layers: 3, kv)
        view = self.groups("vllm", kv)[0]
        with pytest.raises(ValueError, match=r"layers \[0, 1\] for a view of 3 layers of kv"):
            LayerGroups([view], [(0, 1)])
        with pytest.raises(ValueError, match="^1 view with layers for 1 and parts for 2, expected as many of each"):
            LayerGroups([view], [(0, 1, 3)], ["k", "v"])
        with pytest.raises(ValueError, match="^2 views with layers for 1 and parts for 2, expected as many of each"):
            LayerGroups([view, view], [(0, 1, 3)])

    def test_arguments_for_each_layer_are_one_for_each(self, kv):
        with pytest.raises(
            ValueError, match=r"per_layer\['head_size'\] has 2 values, expected one for each of 5 layers"
        ):
            layer_groups(from_sglang, kv, per_layer={"head_size": [1, 2]}, layout="NHD", page_size=16)


class TestScales:
    """A quantised cache is moved with its scales, in its rows or beside them, or not at all."""

    @pytest.mark.parametrize("head_size", [64, 128, 256])
    @pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.float8_e4m3fn])
    def test_four_bytes_behind_each_row(self, rng, head_size, dtype):
        """K, its scale, V, its scale: both are read apart, each row with the scale behind it."""
        row = head_size + 4
        layers = [rng.integers(-128, 127, (4, 2, 16, 2 * row), np.int8).view(dtype) for _ in range(3)]
        arguments = {"layout": "LBHNC", "block_size": 16, "num_kv_heads": 2}
        view = from_vllm(layers, no=2, head_size=head_size, scales="inline", **arguments)
        assert (view.shape.no, view.shape.hd, view.shape.row_nbytes) == (2, row, row)
        saved = universal_of(view[IDS], dtype)
        for layer in range(3):
            for outer in range(2):
                rows = layers[layer][IDS][..., outer * row : (outer + 1) * row]
                reference.assert_same_bytes(saved[:, :, layer, outer], rows)
        with pytest.raises(
            ValueError, match=f"has a content of {2 * row}, expected {head_size} \\+ {head_size} elements"
        ):
            from_vllm(layers, no=2, head_size=head_size, scales="constant", **arguments)

    def test_four_bytes_behind_each_row_of_a_buffer(self, rng):
        buffer = rng.integers(-128, 127, (2, 4, 16, 3, 2, 68), np.int8)
        view = from_vllm_buffer(
            buffer.reshape(-1), layout="LBNHC", num_layers=2, num_blocks=4, num_kv_heads=3, block_size=16, head_size=64,
            dtype="int8", no=2, scales="inline",
        )  # fmt: skip
        assert view.shape.hd == 68
        reference.assert_same_bytes(
            universal_of(view, np.int8), np.ascontiguousarray(buffer[:, 1:].transpose(1, 3, 0, 4, 2, 5))
        )

    def test_four_bytes_behind_each_row_before_packing(self, rng):
        layers = [rng.integers(0, 255, (4, 2, 16, 2, 68), np.uint8) for _ in range(2)]
        view = from_vllm(layers, layout="blocks_first", block_size=16, num_kv_heads=2, scales="inline")
        assert view.shape.hd == 68

    @pytest.mark.parametrize("nbytes", [656, 352, 528])
    def test_latent_rows_with_their_scales(self, rng, nbytes):
        layers = [rng.integers(0, 255, (4, 64, nbytes), np.uint8) for _ in range(2)]
        view = from_vllm(layers, layout="mla", block_size=64, scales="inline")
        reference.assert_same_bytes(universal_of(view[IDS], np.uint8)[:, 0, :, 0], np.stack(layers, 1)[IDS])

    def test_a_pool_of_scales_beside_the_pool(self, rng):
        """SGLang's fp4: two elements a byte, and a scale of a byte for each 16 of a row."""
        heads, tokens = 4, 16
        rows = [[rng.integers(0, 255, (80, heads, 64), np.uint8) for _ in "kv"] for _ in range(3)]
        scales = [[rng.integers(0, 255, (80, heads * 8), np.uint8) for _ in "kv"] for _ in range(3)]
        groups = from_sglang(rows, layout="NHD", page_size=tokens, scales=scales)
        assert groups.parts == ("kv", "scales")
        assert [(len(view), view.shape.nh, view.shape.hd) for view in groups] == [(4, 4, 64), (4, 4, 8)]
        data, its_scales = (universal_of(view, np.uint8) for view in groups.select(IDS))
        for i, block in enumerate(IDS):
            slots = slice(block * tokens, (block + 1) * tokens)
            for layer in range(3):
                for outer in range(2):
                    reference.assert_same_bytes(
                        data[i, :, layer, outer], rows[layer][outer][slots].swapaxes(0, 1).copy()
                    )
                    expected = scales[layer][outer][slots].reshape(tokens, heads, 8).swapaxes(0, 1)
                    reference.assert_same_bytes(its_scales[i, :, layer, outer], expected.copy())

    def test_scales_of_a_pool_have_as_many_rows(self, rng):
        rows = [[np.zeros((80, 4, 64), np.uint8) for _ in "kv"]]
        scales = [[np.zeros((64, 32), np.uint8) for _ in "kv"]]
        with pytest.raises(ValueError, match="scales has 3 blocks of .* expected the 4 blocks of nl=1 no=2 nh=4 nt=16"):
            from_sglang(rows, layout="NHD", page_size=16, scales=scales)
        scales = [[np.zeros((80, 33), np.uint8) for _ in "kv"]]
        with pytest.raises(
            ValueError, match=r"scales\[0\]\[0\] .* has 33 elements a token, expected a multiple of 4 heads"
        ):
            from_sglang(rows, layout="NHD", page_size=16, scales=scales)

    def test_a_latent_pool_with_scales(self, rng):
        rows = [rng.integers(0, 255, (80, 1, 288), np.uint8) for _ in range(2)]
        scales = [rng.integers(0, 255, (80, 36), np.uint8) for _ in range(2)]
        groups = from_sglang(rows, layout="MLA", page_size=16, scales=scales)
        assert [str(view.shape) for view in groups] == [
            "nl=2 no=1 nh=1 nt=16 hd=288 uint8",
            "nl=2 no=1 nh=1 nt=16 hd=36 uint8",
        ]

    def test_block_scales_of_a_tensorrt_llm_pool(self, rng):
        pool = rng.integers(0, 255, (4, 2, 2, 8 * 32 * 64), np.uint8)
        scales = rng.integers(0, 255, (4, 2, 2, 8 * 32 * 8), np.uint8)
        groups = from_tensorrt_llm(pool, layout="HND", num_kv_heads=8, tokens_per_block=32, scales=scales)
        data, its_scales = (universal_of(view, np.uint8) for view in groups)
        reference.assert_same_bytes(data, pool.reshape(4, 2, 2, 8, 32, 64).transpose(0, 3, 1, 2, 4, 5).copy())
        reference.assert_same_bytes(its_scales, scales.reshape(4, 2, 2, 8, 32, 8).transpose(0, 3, 1, 2, 4, 5).copy())

    def test_scale_factors_of_flashinfer(self, rng):
        rows = [[rng.integers(0, 255, (4, 16, 8, 64), np.uint8) for _ in "kv"] for _ in range(2)]
        scales = [[rng.integers(0, 255, (4, 16, 8, 8), np.uint8) for _ in "kv"] for _ in range(2)]
        groups = from_flashinfer(rows, layout="NHD", page_size=16, scales=scales)
        assert groups.parts == ("kv", "scales")
        reference.assert_same_bytes(
            universal_of(groups[1], np.uint8), reference.universal(np.array(scales).transpose(2, 0, 1, 3, 4, 5))
        )

    @pytest.mark.parametrize("dtype", [np.int8, np.uint8, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
    def test_one_byte_elements_without_a_word_about_scales_are_refused(self, dtype):
        one = {"layout": "blocks_first", "block_size": 16, "num_kv_heads": 2}
        layers = [np.zeros((4, 2, 16, 2, 64), dtype)]
        with pytest.raises(ValueError, match=r"kv_caches\[0\] of shape .* has dtype .* without their scales"):
            from_vllm(layers, **one)
        assert from_vllm(layers, scales="constant", **one).shape.hd == 64
        with pytest.raises(ValueError, match='scales is \'outside\', expected "inline" or "constant", or None'):
            from_vllm(layers, scales="outside", **one)
