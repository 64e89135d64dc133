"""Shapes and types that are not those of a layout: refused, with the tensor, its shape and what was expected."""

from __future__ import annotations

import numpy as np

from engine_zeros import B, D, H, L, N, layers, raises, vllm, zeros
from kvbm_kernels.engines import (
    from_flashinfer,
    from_llama_cpp,
    from_lmcache,
    from_sglang,
    from_tensorrt_llm,
    from_transformers,
    from_transformers_paged,
    from_vllm_buffer,
    layer_groups,
    split_blocks,
)


class TestShapes:
    def test_of_other_dimensions(self):
        with raises(
            ValueError,
            r"kv_caches\[0\] has shape \[4, 8, 3, 6\] and strides \[144, 18, 6, 1\], "
            r"expected \[num_blocks, 2, block_size = 8, num_heads = 3, head_size\]",
        ):
            vllm(layers(B, N, H, D), layout="blocks_first", block_size=N)
        with raises(ValueError, r"buffers\[0\]\[0\] .* expected \[slots, num_heads, head_size\]"):
            from_sglang([(zeros(B, N, H, D), zeros(B, N, H, D))], layout="NHD", page_size=N)
        with raises(
            ValueError, r"buffers has .* \[2, num_layers, slots, num_heads, head_size\] or \[num_layers, slots, 1, h"
        ):
            from_sglang(zeros(B, N, H), layout="layer_first", page_size=N)

    def test_of_another_block_size(self):
        with raises(ValueError, r"has shape \[4, 2, 8, 3, 6\] .* block_size = 16"):
            vllm(layers(B, 2, N, H, D), layout="blocks_first", block_size=16)
        with raises(ValueError, "kernel_block_size is 5, expected a divisor of block_size, 8"):
            vllm(layers(B, 2, N, H, D), layout="blocks_first", block_size=N, kernel_block_size=5)
        with raises(ValueError, "has 4 kernel blocks, expected a multiple of 3"):
            vllm(layers(B, 2, N, H, D), layout="blocks_first", block_size=3 * N, kernel_block_size=N)

    def test_a_layer_unlike_the_others_is_named(self):
        caches = {f"model.layers.{i}": zeros(B, 2, N, H, D) for i in range(3)}
        caches["model.layers.1"] = zeros(B, 2, N, H, 2 * D)
        with raises(
            ValueError, r"kv_caches\['model.layers.1'\] has shape .*12\] .* shape .*6\] of kv_caches\['model.layers.0'"
        ):
            vllm(caches, layout="blocks_first", block_size=N)
        caches["model.layers.1"] = zeros(B, 2, H, N, D).swapaxes(2, 3)
        with raises(
            ValueError,
            r"layers.1'\] has .* strides \[288, 144, 6, 48, 1\], expected the strides \[288, 144, 18, 6, 1\]",
        ):
            vllm(caches, layout="blocks_first", block_size=N)
        caches["model.layers.1"] = zeros(B, 2, N, H, D, dtype=np.float32)
        with raises(TypeError, r"layers.1'\] has dtype float32, expected the float16"):
            vllm(caches, layout="blocks_first", block_size=N)

    def test_not_even_the_reserved_blocks(self):
        with raises(
            ValueError,
            r"kv_caches\[0\] of shape \[0, 2, 8, 3, 6\] .* has 0 blocks, expected at least the 1 reserved block",
        ):
            vllm(layers(0, 2, N, H, D), layout="blocks_first", block_size=N)
        with raises(ValueError, "has 0 blocks, expected at least the 1 reserved block"):
            from_sglang([(zeros(N - 1, H, D), zeros(N - 1, H, D))], layout="NHD", page_size=N)
        view = from_sglang([(zeros(N, H, D), zeros(N, H, D))], layout="NHD", page_size=N)
        assert (len(view), view.num_blocks) == (0, 1)
        assert len(from_flashinfer(layers(0, 2, N, H, D), layout="NHD", page_size=N)) == 0

    def test_lists(self):
        one = zeros(B, 2, N, H, D)
        with raises(TypeError, "kv_caches is a ndarray, expected a list or dict of layers for layout 'blocks_first'"):
            vllm(one, layout="blocks_first", block_size=N)
        with raises(TypeError, "kv_caches is a list, expected one tensor for layout 'BL2NHD'"):
            vllm([one], layout="BL2NHD", block_size=N)
        with raises(ValueError, "kv_caches has 0 entries, expected an entry for each layer"):
            vllm([], layout="blocks_first", block_size=N)
        with raises(TypeError, r"buffers\[0\] is a ndarray, expected a pair with two entries, K and V"):
            from_sglang([one], layout="NHD", page_size=N)
        with raises(ValueError, r"buffers\[0\] has 3 entries, expected two entries, K and V"):
            from_sglang([(one, one, one)], layout="NHD", page_size=N)
        with raises(ValueError, r"buffers\[0\] has 1 entry, expected two entries, K and V"):
            from_sglang([(one,)], layout="NHD", page_size=N)
        with raises(TypeError, r"kv_caches\[1\] is a NoneType, expected an array"):
            vllm([one, None], layout="blocks_first", block_size=N)
        with raises(TypeError, "kv_caches is a ndarray, expected a list or dict with an entry for each layer"):
            from_flashinfer(one, layout="NHD", page_size=N)

    def test_pairs_have_an_order(self):
        """Names in the place of an order would be a guess, and V before K one that is wrong."""
        pair = {"v": zeros(4 * N, H, D), "k": zeros(4 * N, H, D)}
        with raises(TypeError, r"buffers\[0\] is a dict, expected a pair with two entries, K and V"):
            from_sglang([pair], layout="NHD", page_size=N)
        with raises(TypeError, r"layers\['a'\] is a dict, expected a pair"):
            from_transformers({"a": {"v": zeros(1, H, N, D), "k": zeros(1, H, N, D)}}, block_size=N)

    def test_numbers_that_are_not_those_of_the_tensors(self):
        """Whatever is said beside what the shapes say has to agree with them."""
        for layout, shape in (("blocks_first", (B, 2, N, H, D)), ("planes", (B, 2, N, H * D))):
            for name in ("head_size", "head_size_v"):
                with raises(ValueError, f"has heads of 6 elements, expected {name}, 5"):
                    vllm(layers(*shape), layout=layout, block_size=N, **{name: 5})
            assert vllm(layers(*shape), layout=layout, block_size=N, head_size=D, head_size_v=D).shape.hd == D
        with raises(ValueError, "has heads of 6 elements, expected head_size, 6 and a scale of 4"):
            vllm(layers(B, 2, N, H, D, dtype=np.int8), layout="blocks_first", block_size=N,
                 head_size=D, scales="inline")  # fmt: skip
        with raises(ValueError, "has heads of 6 elements, expected head_size, 4"):
            vllm(layers(B, N, D), layout="mla", block_size=N, head_size=4)
        latent = {"layout": "mla", "block_size": N, "scales": "inline"}
        with raises(ValueError, "has heads of 656 elements, expected head_size, 576"):
            vllm(layers(B, N, 656, dtype=np.uint8), head_size=576, **latent)
        with raises(ValueError, "head_size_v is 512, expected 0 for layout 'mla', or none"):
            vllm(layers(B, N, 656, dtype=np.uint8), head_size=656, head_size_v=512, **latent)
        assert vllm(layers(B, N, 656, dtype=np.uint8), head_size=656, head_size_v=0, **latent).shape.hd == 656
        pool, sizes = zeros(B, L, 2, N * H * D), {"layout": "HND", "num_kv_heads": H, "tokens_per_block": N}
        for name, number in (("num_layers", L), ("no", 2)):
            for tensors in (pool, [zeros(B, 2, H, N, D)] * L):
                with raises(ValueError, f"is of {name} = {number}, expected 7"):
                    from_tensorrt_llm(tensors, **sizes, **{name: 7})
        assert from_tensorrt_llm(pool, **sizes, num_layers=L, no=2).shape.nl == L
        for wrong in ({"no": 2}, {"head_size_v": D}):
            with raises(ValueError, "expected none for format 'KV_MLA_FMT': K and V are one row"):
                from_lmcache(zeros(1, L, N, D), fmt="KV_MLA_FMT", block_size=N, num_kv_heads=1, **wrong)
        with raises(ValueError, "has heads of 6 elements, expected head_size_v, 5"):
            from_lmcache(zeros(2, L, N, H * D), fmt="KV_2LTD", block_size=N, num_kv_heads=H, head_size_v=5)

    def test_buffers_of_another_type(self):
        """Memory without dimensions is bytes, or of the type that is said: F16 is not BF16."""
        for dtype, name in (("bf16", "bf16"), ("fp32", "f32")):
            with raises(TypeError, f"cache_tensor has dtype float16, expected bytes, or one that holds {name}"):
                from_transformers_paged(
                    zeros(96 * B), num_layers=1, page_size=2, num_kv_heads=2, head_size=2, blocks_per_sector=1,
                    dtype=dtype,
                )  # fmt: skip
        with raises(TypeError, "buffer has dtype float32, expected bytes, or one that holds f16"):
            from_vllm_buffer(
                zeros(96 * B, dtype=np.float32), layout="LBNHC", num_layers=1, num_blocks=1, num_kv_heads=1,
                block_size=1, head_size=1, dtype="fp16", no=1,
            )  # fmt: skip

    def test_arguments_that_are_no_names(self):
        """What has no hash, and what compares element by element, is refused as anything else."""
        array = np.zeros(3)
        with raises(TypeError, r"layout is \['packed'\], expected one of"):
            vllm(layers(B, H, N, 2 * D), layout=["packed"], block_size=N)
        with raises(TypeError, "scales is a ndarray, expected a list"):
            from_sglang([(zeros(4 * N, H, D),) * 2], layout="NHD", page_size=N, scales=array)
        with raises(TypeError, "scales is a ndarray, expected a list"):
            from_flashinfer(layers(B, 2, N, H, D), layout="NHD", page_size=N, scales=array)
        with raises(ValueError, 'scales is array.*, expected "inline" or "constant", or None'):
            vllm(layers(B, H, N, 2 * D), layout="packed", block_size=N, no=2, head_size=D, scales=array)

    def test_groups_without_layers_or_with_one_twice(self):
        """A group of layers is there once, and no layers are no cache."""
        pairs = [(zeros(4 * N, H, D), zeros(4 * N, H, D))]
        with raises(ValueError, "layer 0 of k is in two views, expected it once"):
            layer_groups(from_sglang, pairs, layout="NHD", page_size=N, parts=("k", "k"))
        with raises(ValueError, "tensors has 0 entries, expected one for each layer"):
            layer_groups(from_sglang, [], layout="NHD", page_size=N)

    def test_parts(self):
        with raises(ValueError, 'part is \'q\', expected "k" or "v"'):
            vllm(layers(B, 2, N, H, D), layout="blocks_first", block_size=N, part="q")
        with raises(ValueError, "has no K and V apart, so part cannot be 'k'"):
            vllm(layers(B, N, D), layout="mla", block_size=N, part="k")
        with raises(ValueError, "part is 'k', expected none for MLA"):
            from_sglang(layers(B * N, 1, D), layout="MLA", page_size=N, part="k")
        with raises(ValueError, "part is 'v', expected none with no=1"):
            vllm(layers(B, H, N, D), layout="packed", block_size=N, no=1, part="v")

        rows = layers(B, H, N, 10)
        uneven = {"layout": "packed", "block_size": N, "no": 2, "head_size": 6, "head_size_v": 4}
        with raises(ValueError, 'part is \'q\', expected "k" or "v"'):
            vllm(rows, part="q", **uneven)
        for part in (np.array([1, 2]), 3):
            with raises(TypeError, 'part is .*, expected "k" or "v"'):
                vllm(rows, part=part, **uneven)
            with raises(TypeError, 'part is .*, expected "k" or "v"'):
                vllm(layers(B, 2, N, H, D), layout="blocks_first", block_size=N, part=part)
            with raises(TypeError, 'part is .*, expected "k" or "v"'):
                from_sglang([(zeros(N, H, D), zeros(N, H, D))], layout="NHD", page_size=N, part=part)

    def test_heads_that_do_not_divide(self):
        with raises(ValueError, r"objects\[0\] .* has 18 elements a token, expected a multiple of 4 heads"):
            from_lmcache(zeros(2, L, N, H * D), fmt="KV_2LTD", block_size=N, num_kv_heads=4)
        with raises(ValueError, "has heads of 6 elements, expected head_size, 7"):
            from_lmcache(zeros(2, L, N, H * D), fmt="KV_2LTD", block_size=N, num_kv_heads=H, head_size=7)
        with raises(ValueError, "no is None, expected 2 to read K and V of a row apart"):
            from_lmcache(zeros(1, L, N, H * 2 * D), fmt="KV_2LTD", block_size=N, num_kv_heads=H)
        with raises(ValueError, "no is 1, expected 2 for K and V in a plane each, or none"):
            from_lmcache(zeros(2, L, N, H * D), fmt="KV_2LTD", block_size=N, num_kv_heads=H, no=1)
        with raises(ValueError, "has 3 planes, expected 2 for K and V or 1"):
            from_lmcache(zeros(3, L, N, H * D), fmt="KV_2LTD", block_size=N, num_kv_heads=H)
        with raises(ValueError, "num_kv_heads is 2, expected 1 for format 'KV_MLA_FMT'"):
            from_lmcache(zeros(1, L, N, D), fmt="KV_MLA_FMT", block_size=N, num_kv_heads=2)
        with raises(ValueError, "has rows of 6 elements, expected at least head_size, 7"):
            from_lmcache(zeros(1, L, N, D), fmt="KV_MLA_FMT", block_size=N, num_kv_heads=1, head_size=7)
        with raises(ValueError, "has 18 elements a token, expected a multiple of 4 heads"):
            from_llama_cpp([(zeros(B, H * D), zeros(B, H * D))], v_trans=False, num_kv_heads=4)
        with raises(ValueError, "has 144 elements a chunk, expected a multiple of 5 heads times 8 tokens"):
            from_tensorrt_llm(zeros(B, L, 2, N * H * D), layout="HND", num_kv_heads=5, tokens_per_block=N)
        with raises(ValueError, "has 3 outer chunks, expected 2 for K and V or 1"):
            from_tensorrt_llm(zeros(B, L, 3, N * H * D), layout="HND", num_kv_heads=H, tokens_per_block=N)

    def test_splits(self):
        view = vllm(layers(B, 2, N, H, D), layout="blocks_first", block_size=N)
        with raises(ValueError, "blocks of 8 tokens cannot be split into blocks of 3"):
            split_blocks(view, 3)
        with raises(TypeError, "view is a list, expected a view"):
            split_blocks([], 3)
