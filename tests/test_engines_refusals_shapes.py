"""Shapes and types that are not those of a layout: refused, with the tensor, its shape and what was expected."""

from __future__ import annotations

import numpy as np

from engine_zeros import B, D, H, L, N, layers, raises, vllm, zeros
from kvbm_kernels.engines import (
    LayerGroups,
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

    def test_dimensions_of_none_at_all(self):
        """All but blocks, or the tokens they are made of, have to be at least one."""
        of = {"num_kv_heads": H, "tokens_per_block": N}
        for call, message in (
            (lambda: vllm(layers(B, 2, N, H, 0), layout="blocks_first", block_size=N), r"kv_caches\[0\] .* but num_b"),
            (
                lambda: vllm(layers(B, H, N, 0), layout="packed", block_size=N, no=1),
                r"kv_caches\[0\] has shape .*, 0\]",
            ),
            (lambda: from_tensorrt_llm(zeros(B, L, 2, 0), layout="HND", **of), r"pool has shape \[4, 2, 2, 0\]"),
            (lambda: from_tensorrt_llm(zeros(B, L, 0, N), layout="HND", **of), r"pool has shape \[4, 2, 0, 8\]"),
            (lambda: from_tensorrt_llm(zeros(B, 0, 2, N), layout="HND", **of), r"pool has shape \[4, 0, 2, 8\]"),
            (
                lambda: from_lmcache(zeros(2, 3, N, 0), fmt="KV_2LTD", block_size=N, num_kv_heads=H),
                r"objects\[0\] has shape \[2, 3, 8, 0\] .* but slots",
            ),
            (
                lambda: from_lmcache(zeros(0, 3, N, H), fmt="KV_2LTD", block_size=N, num_kv_heads=H),
                r"objects\[0\] has shape \[0, 3, 8, 3\]",
            ),
            (
                lambda: from_llama_cpp([(zeros(N, 0), zeros(N, 0))], v_trans=False, num_kv_heads=H),
                r"layers\[0\]\[0\] has shape \[8, 0\]",
            ),
            (
                lambda: from_sglang(zeros(B, 0, L, 2, N, H, D), layout="page_unified", page_size=N),
                r"buffers has shape \[4, 0,",
            ),
            (
                lambda: from_transformers([(zeros(0, H, N, D), zeros(0, H, N, D))], block_size=N, sequence=0),
                r"layers\[0\]\[0\] has shape \[0, 3, 8, 6\]",
            ),
        ):
            with raises(ValueError, f"{message}.*"):
                call()
            with raises(ValueError, "expected no dimension of 0 but (num_blocks|slots)$"):
                call()
        assert len(from_transformers([(zeros(1, H, 0, D), zeros(1, H, 0, D))], block_size=N)) == 0

    def test_advice_is_what_can_be_done(self):
        uneven = {"num_kv_heads": H, "block_size": N, "head_size": 6, "head_size_v": 4, "no": 2}
        with raises(ValueError, r"view each, and layer_groups\(\.\.\., parts=\(\"k\", \"v\"\)\) makes both$"):
            vllm(layers(B, H, N, 10), layout="packed", **uneven)
        objects = zeros(1, L, N, H * 10)
        message = 'part="k" and part="v" are a view each, which LayerGroups puts together$'
        with raises(ValueError, message):
            from_lmcache(objects, fmt="KV_2LTD", **uneven)
        buffer = {"layout": "LBNHC", "num_layers": L, "num_blocks": B, "dtype": "fp16", **uneven}
        memory = zeros(L * B * N * H * 10)
        with raises(ValueError, message):
            from_vllm_buffer(memory, **buffer)
        for call in (
            lambda part: from_lmcache(objects, fmt="KV_2LTD", part=part, **uneven),
            lambda part: from_vllm_buffer(memory, part=part, **buffer),
        ):
            groups = LayerGroups([call("k"), call("v")], [range(L)] * 2, ["k", "v"])
            assert [view.shape.hd for view in groups] == [6, 4]
        chunks = [zeros(2, L, 4 * N, H * D), zeros(2, L, 2 * N, H * D)]
        with raises(
            ValueError, r"objects\[1\] has shape .* of objects\[0\]: .* alike, and a shorter one is a call of its own$"
        ):
            from_lmcache(chunks, fmt="KV_2LTD", block_size=N, num_kv_heads=H)
        with raises(ValueError, r"blocks of one view have one shape; layer_groups\(\) makes a view for each kind"):
            vllm([zeros(B, 2, N, H, D), zeros(B, 2, N, H, 2 * D)], layout="blocks_first", block_size=N)

    def test_types_of_rows_and_of_scales(self):
        """What the argument dtype can say is asked for where there is one, of integers."""
        for dtype, message in (
            (np.uint16, "does not say what its 16 bits are: give dtype$"),
            (
                np.complex64,
                "has dtype complex64, expected one of f16, .*, uint8, or integers with the bits of one, and",
            ),
            (np.bool_, "has dtype bool, expected one of f16"),
            (">f2", "has dtype >f2, expected one of f16"),
        ):
            with raises(TypeError, rf"kv_caches\[0\] .*{message}"):
                vllm(layers(B, 2, N, H, D, dtype=dtype), layout="blocks_first", block_size=N)
        rows = [tuple(zeros(2, B * N, H, D, dtype=np.uint8))]
        scales = zeros(2, B * N, H, dtype=np.uint16)
        with raises(
            TypeError,
            r"scales\[0\]\[0\] has dtype uint16, expected one of f16, .*; scales of another type are given as b",
        ):
            from_sglang(rows, layout="NHD", page_size=N, scales=[tuple(scales)])
        as_bytes = from_sglang(rows, layout="NHD", page_size=N, scales=[tuple(scales.view(np.uint8))])
        assert as_bytes[1].shape.row_nbytes == 2

    def test_names(self):
        with raises(TypeError, "name is 3, expected a string"):
            vllm(layers(B, 2, N, H, D), layout="blocks_first", block_size=N, name=3)
        with raises(TypeError, "name is None, expected a string"):
            from_vllm_buffer(
                zeros(96 * B), layout="LBNHC", num_layers=1, num_blocks=1, num_kv_heads=1, block_size=1, head_size=1,
                dtype="fp16", no=1, name=None,
            )  # fmt: skip

    def test_a_region_is_named_as_it_was_given(self):
        region = zeros(B, 1152, dtype=np.uint8)
        with raises(ValueError, r"pool of shape \[4, 1152\] and strides \[1152, 1\] has 576 elements a block"):
            from_tensorrt_llm(
                region, layout="HND", num_kv_heads=H, tokens_per_block=N, num_layers=5, no=2, dtype="fp16"
            )

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
