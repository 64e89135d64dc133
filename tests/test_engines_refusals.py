"""What is refused, with a message that names the tensor, its shape and strides, or the argument that is missing."""

from __future__ import annotations

import numpy as np
import pytest

import kvbm_kernels as kk
from kvbm_kernels.engines import (
    from_flashinfer,
    from_llama_cpp,
    from_lmcache,
    from_sglang,
    from_tensorrt_llm,
    from_transformers,
    from_transformers_paged,
    from_vllm,
    from_vllm_buffer,
    layer_groups,
    split_blocks,
)

B, L, N, H, D = 4, 2, 8, 3, 6


def zeros(*shape, dtype=np.float16):
    return np.zeros(shape, dtype)


def layers(*shape, dtype=np.float16):
    return [zeros(*shape, dtype=dtype) for _ in range(L)]


def vllm(tensors, **arguments):
    """from_vllm, with the heads that tensors here have if nothing else is said."""
    return from_vllm(tensors, **{"num_kv_heads": 1 if arguments["layout"] == "mla" else H, **arguments})


def raises(error, message):
    return pytest.raises(error, match=message)


class TestLayoutsThatAreNone:
    @pytest.mark.parametrize("layout", ["x_packed", "cpu", "nvfp4", "dsv4"])
    def test_of_vllm(self, layout):
        reasons = {
            "x_packed": "have no rows",
            "cpu": "keeps K of a block transposed",
            "nvfp4": "no row has its scales",
            "dsv4": "no row of it has its scales",
        }
        with raises(ValueError, f"layout is '{layout}': .*{reasons[layout]}"):
            vllm(layers(B, 2, N, H, D), layout=layout, block_size=N)
        with raises(ValueError, f"layout is '{layout}': .*{reasons[layout]}"):
            from_vllm_buffer(
                zeros(9), layout=layout, num_layers=1, num_blocks=1, num_kv_heads=1, block_size=1, head_size=1,
                dtype="fp16", no=1,
            )  # fmt: skip

    def test_pages_of_deepseek_v4_even_under_another_name(self):
        with raises(
            ValueError, r"kv_caches\[0\] of shape \[4, 8, 584\] .* has 584 bytes a token: a DeepSeek-V4 page holds"
        ):
            vllm(layers(B, N, 584, dtype=np.uint8), layout="mla", block_size=N, scales="inline")
        with raises(ValueError, r"584 bytes a token"):
            vllm(
                layers(B, 1, N, 584, dtype=np.uint8),
                layout="LBNHC",
                block_size=N,
                num_kv_heads=1,
                no=1,
                scales="inline",
            )
        assert vllm(layers(B, N, 292), layout="mla", block_size=N).shape.row_nbytes == 584

    @pytest.mark.parametrize(
        ("layout", "reason"),
        [
            ("vectorized_5d", "have no rows"),
            ("page_first_kv_split", "pools of their own"),
            ("mxfp8_interleaved", "no single row"),
        ],
    )
    def test_of_sglang(self, layout, reason):
        with raises(ValueError, f"layout is '{layout}': .*{reason}"):
            from_sglang([], layout=layout, page_size=N)

    @pytest.mark.parametrize("fmt", ["BINARY", "BINARY_BUFFER", "EC_TD", "HS_TD"])
    def test_of_lmcache(self, fmt):
        with raises(ValueError, f"fmt is '{fmt}': what it holds is compressed|fmt is '{fmt}': it holds"):
            from_lmcache([], fmt=fmt, block_size=N, num_kv_heads=H)

    def test_transposed_v_of_llama_cpp(self):
        pairs = [(zeros(B * N, H * D), zeros(H * D, B * N))]
        with raises(ValueError, r"v_trans is True: V is transposed, .* only part=\"k\" has rows"):
            from_llama_cpp(pairs, v_trans=True, num_kv_heads=H)
        assert from_llama_cpp(pairs, v_trans=True, num_kv_heads=H, part="k").shape.no == 1
        with raises(TypeError, "v_trans is None, expected True or False"):
            from_llama_cpp(pairs, v_trans=None, num_kv_heads=H)

    @pytest.mark.parametrize(
        "call",
        [
            lambda layout: vllm([], layout=layout, block_size=N),
            lambda layout: from_sglang([], layout=layout, page_size=N),
            lambda layout: from_tensorrt_llm([], layout=layout, num_kv_heads=H, tokens_per_block=N),
            lambda layout: from_flashinfer([], layout=layout, page_size=N),
        ],
    )
    def test_unknown_names(self, call):
        with raises(ValueError, "layout is 'DHN', expected one of "):
            call("DHN")
        with raises(TypeError, "layout is 3, expected one of "):
            call(3)


class TestNothingIsGuessed:
    def test_k_first_and_blocks_first(self):
        """Two blocks: both layouts fit the shape, and only the name tells."""
        tensors = layers(2, 2, N, H, D)
        first, second = (vllm(tensors, layout=x, block_size=N) for x in ("kv_first", "blocks_first"))
        assert first.geometry.strides.outer == second.geometry.strides.block

    def test_whether_k_and_v_are_read_apart(self):
        with raises(ValueError, "no is None, expected 2 to read K and V of a row apart, or 1 to leave them together"):
            vllm(layers(B, H, N, 2 * D), layout="packed", block_size=N)
        with raises(ValueError, "no is 1, expected 2 for layout 'kv_first', or none"):
            vllm(layers(2, B, N, H, D), layout="kv_first", block_size=N, no=1)

    def test_where_k_ends(self):
        with raises(ValueError, "head_size is missing: nothing tells where in a content of 12 elements K ends"):
            vllm(layers(B, H, N, 2 * D), layout="packed", block_size=N, no=2)
        with raises(
            ValueError, r"kv_caches\[0\] of shape \[4, 3, 8, 12\] .* has a content of 12, expected 5 \+ 5 elements"
        ):
            vllm(layers(B, H, N, 2 * D), layout="packed", block_size=N, no=2, head_size=5)

    def test_heads_that_are_planes(self):
        """Tensors of another backend, K and V for heads, have another number of them."""
        with raises(
            ValueError,
            r"kv_caches\[0\] has shape \[4, 2, 8, 18\] .* expected \[num_blocks, num_heads = 3, block_size = 8",
        ):
            vllm(layers(B, 2, N, H * D), layout="LBHNC", block_size=N, no=2, head_size=9)
        with raises(ValueError, "num_kv_heads is missing: heads and tokens, and heads and planes .* are told apart by"):
            from_vllm(layers(B, 2, N, H * D), layout="LBHNC", block_size=N, no=2, head_size=9)
        with raises(ValueError, "num_kv_heads is 2, expected 1 for layout 'mla'"):
            vllm(layers(B, N, D), layout="mla", block_size=N, num_kv_heads=2)

    def test_which_sequence_of_a_batch(self):
        pairs = [(zeros(3, H, N, D), zeros(3, H, N, D))]
        with raises(ValueError, "sequence is missing: the cache has 3, and nothing tells which one"):
            from_transformers(pairs, block_size=N)
        with raises(IndexError, "sequence is 3, expected 0 to 2"):
            from_transformers(pairs, block_size=N, sequence=3)
        with raises(IndexError, "start is 9, expected 0 to 8, the tokens of the cache"):
            from_transformers(pairs, block_size=1, sequence=0, start=N + 1)
        pairs = [(zeros(3, B * N, H * D), zeros(3, B * N, H * D))]
        with raises(ValueError, "stream is missing: the cache has 3"):
            from_llama_cpp(pairs, v_trans=False, num_kv_heads=H)
        with raises(IndexError, "stream is 3, expected 0 to 2"):
            from_llama_cpp(pairs, v_trans=False, num_kv_heads=H, stream=3)

    def test_what_a_region_of_bytes_holds(self):
        region = zeros(B, L * 2 * N * H * D * 2, dtype=np.uint8)
        call = {"layout": "HND", "num_kv_heads": H, "tokens_per_block": N}
        for missing in ("num_layers", "no", "dtype"):
            said = {"num_layers": L, "no": 2, "dtype": "fp16"}
            del said[missing]
            with raises(ValueError, f"{missing} is missing: a region of bytes does not tell"):
                from_tensorrt_llm(region, **call, **said)
        with raises(
            ValueError,
            r"pool of shape \[4, 1150\] .* cannot be read as elements of f32, expected bytes, a multiple of 4",
        ):
            from_tensorrt_llm(region[:, :1150], num_layers=L, no=2, dtype="f32", **call)
        with raises(ValueError, "cannot be read as elements of fp16|cannot be read as elements of f16"):
            from_tensorrt_llm(np.repeat(region, 2, 1)[:, ::2], num_layers=L, no=2, dtype="fp16", **call)
        with raises(ValueError, "has 576 elements a block, expected a multiple of 5 layers times 2"):
            from_tensorrt_llm(region, num_layers=5, no=2, dtype="fp16", **call)

    def test_heads_in_groups(self):
        pool = zeros(B, 2, L, 2, N, 3, D)
        with raises(ValueError, "head_group is missing: 2 groups of 3 heads each are no one view"):
            from_sglang(pool, layout="page_unified", page_size=N)
        assert from_sglang(pool, layout="page_unified", page_size=N, head_group=1).shape.nh == 3
        with raises(ValueError, "head_group is 2, expected 0 to 1"):
            from_sglang(pool, layout="page_unified", page_size=N, head_group=2)
        with raises(ValueError, "head_group is 0, expected none for layout 'page_first' without groups"):
            from_sglang(zeros(2, B * N, L, H, D), layout="page_first", page_size=N, head_group=0)
        with raises(ValueError, "head_group is 0, expected none for layout 'MLA' without groups"):
            from_sglang(layers(B * N, 1, D), layout="MLA", page_size=N, head_group=0)

    def test_what_integers_hold(self):
        with raises(TypeError, r"kv_caches\[0\] has dtype uint16, which does not say what its 16 bits are: give dtype"):
            vllm(layers(B, 2, N, H, D, dtype=np.uint16), layout="blocks_first", block_size=N)
        with raises(TypeError, r"kv_caches\[0\] has dtype float16, expected one that holds bf16"):
            vllm(layers(B, 2, N, H, D), layout="blocks_first", block_size=N, dtype="bf16")


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
            ValueError, r"kv_caches\[0\] of shape \[0, 2, 8, 3, 6\] .* has 0 blocks, expected the 1 reserved ones"
        ):
            vllm(layers(0, 2, N, H, D), layout="blocks_first", block_size=N)
        with raises(ValueError, "has 0 blocks, expected the 1 reserved ones"):
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
        assert vllm(layers(B, N, 656, dtype=np.uint8), layout="mla", block_size=N, head_size=576, scales="inline")
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


class TestStrides:
    """A layout is also where things lie; strides that are another's are refused, whatever the shape."""

    @pytest.mark.parametrize("name", ["LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
    def test_of_another_order_of_vllm(self, name):
        pool = zeros(L, B, H, N, 2 * D)
        with raises(
            ValueError,
            r"kv_caches\[0\] of shape \[4, 3, 8, 12\] and strides \[288, 96, 12, 1\] lies, 1152 elements from the next "
            rf"layer, in another order than \[.*\] of layout '{name}'",
        ):
            vllm(list(pool), layout=name, block_size=N, no=1)
        assert vllm(list(pool), layout="LBHNC", block_size=N, no=1).layout is kk.Layout.HND

    def test_of_another_order_of_other_engines(self):
        """Shapes that fit, of tensors whose dimensions are exchanged or further apart than they are long."""

        def swapped(*shape):
            return np.swapaxes(zeros(*shape[:-3], shape[-2], shape[-3], shape[-1]), -3, -2)

        message = "lies.* in another order than"
        with raises(
            ValueError, rf"buffers\[0\]\[0\] of shape \[32, 3, 6\] .* {message} \[slots, num_heads, head_size\]"
        ):
            from_sglang([(swapped(B * N, H, D), swapped(B * N, H, D))], layout="NHD", page_size=N)
        with raises(ValueError, rf"buffers .* {message}"):
            from_sglang(swapped(2, L, B * N, H, D), layout="layer_first", page_size=N)
        of = {"num_kv_heads": H, "tokens_per_block": N}
        with raises(ValueError, rf"pool\[0\] of shape .* {message} .* of layout 'NHD'"):
            from_tensorrt_llm([swapped(B, 2, N, H, D)], layout="NHD", **of)
        with raises(ValueError, rf"pool of shape .* {message} \[num_blocks, num_layers, 2, .* of a pool"):
            from_tensorrt_llm(swapped(B, L, 2, N * H * D), layout="NHD", **of)
        with raises(ValueError, rf"objects\[0\] of shape .* {message} .* of format 'KV_2LTD'"):
            from_lmcache(swapped(2, L, N, H * D), fmt="KV_2LTD", block_size=N, num_kv_heads=H)
        with raises(ValueError, rf"layers\[0\]\[0\] of shape .* {message} .* of a cache of cells"):
            wide = [zeros(B * N, 2 * H * D)[:, : H * D] for _ in "kv"]
            from_llama_cpp([(wide[0].T.copy().T, wide[1].T.copy().T)], v_trans=False, num_kv_heads=H)

    def test_a_gap_between_heads(self):
        wide = zeros(B, 2, N, H + 1, D)[:, :, :, :H]
        with raises(
            ValueError, r"of shape \[4, 2, 8, 3, 6\] and strides \[384, 192, 24, 6, 1\] lies in another order than"
        ):
            vllm([wide], layout="blocks_first", block_size=N)

    def test_rows_that_are_not_contiguous(self):
        pairs = [(zeros(1, H, D, N).swapaxes(2, 3), zeros(1, H, D, N).swapaxes(2, 3))]
        with raises(
            ValueError,
            r"layers\[0\]\[0\] of shape \[1, 3, 8, 6\] .* has the elements of a row 16 bytes apart, expected 2",
        ):
            from_transformers(pairs, block_size=N)

    def test_heads_and_tokens_exchanged(self):
        """A tensor in the order of its memory, not in that of vLLM: with as many tokens as heads, its shape fits."""
        tensors = layers(B, N, N, 2 * D)
        for layout in ("packed", "LBHNC"):
            assert vllm(tensors, layout=layout, block_size=N, num_kv_heads=N, no=1).layout is kk.Layout.HND
        with raises(ValueError, "in another order than .* of layout 'LBNHC'"):
            vllm(tensors, layout="LBNHC", block_size=N, num_kv_heads=N, no=1)

    def test_flashinfer_has_gaps_but_no_other_order(self):
        shared = zeros(B, N, H, 2 * D)
        assert len(from_flashinfer([(shared[..., :D], shared[..., D:])], layout="NHD", page_size=N)) == B
        swapped = zeros(B, H, N, D).swapaxes(1, 2)
        with raises(ValueError, r"kv_caches\[0\]\[0\] .* in another order than .* of layout 'NHD'"):
            from_flashinfer([(swapped, swapped.copy("K"))], layout="NHD", page_size=N)

    def test_sizes_of_a_buffer(self):
        call = {
            "layout": "LBHNC", "num_layers": L, "num_blocks": B, "num_kv_heads": H, "block_size": N, "head_size": D,
            "dtype": "fp16", "no": 2,
        }  # fmt: skip
        page = N * H * 2 * D * 2
        whole = zeros(L * B * page, dtype=np.int8)
        assert len(from_vllm_buffer(whole, **call)) == B - 1
        with raises(ValueError, f"buffer has {len(whole) - 1} bytes, expected at least {len(whole)} for these blocks"):
            from_vllm_buffer(whole[1:], **call)
        with raises(ValueError, f"buffer has {len(whole)} bytes, expected at least {len(whole) + 8}"):
            from_vllm_buffer(whole, offset=8, **call)
        with raises(ValueError, r"buffer of shape \[2304\] and strides \[1\] has rows that overlap each other"):
            from_vllm_buffer(whole, layer_stride=page, **call)
        with raises(ValueError, "buffer has shape .* and strides .*, expected a contiguous buffer"):
            from_vllm_buffer(np.repeat(whole, 2)[::2], **call)
        with raises(ValueError, "no is 2, expected 1 for rows without V: head_size_v is 0"):
            from_vllm_buffer(whole, head_size_v=0, **call)
        with raises(ValueError, "block_stride is 577, expected a multiple of 2"):
            from_vllm_buffer(whole, block_stride=577, kernel_block_size=N // 2, **call)

    def test_a_paged_cache_of_transformers(self):
        call = {
            "num_layers": L, "page_size": N, "num_kv_heads": H, "head_size": D, "blocks_per_sector": 1, "dtype": "fp16",
        }  # fmt: skip
        nbytes = L * 2 * N * H * D * 2
        with raises(ValueError, f"cache_tensor has {3 * nbytes + 2} bytes, expected a multiple of {nbytes}"):
            from_transformers_paged(zeros(3 * nbytes + 2, dtype=np.uint8), **call)
        with raises(ValueError, r"cache_tensor of shape .* has 1 blocks, expected the 2 reserved ones at least"):
            from_transformers_paged(zeros(nbytes, dtype=np.uint8), **call)


class TestAliasing:
    def test_layers_that_share_a_cache(self):
        """vLLM gives a layer that reuses another's cache the same tensor under its own name."""
        caches = {f"layers.{i}": zeros(B, 2, N, H, D) for i in range(3)}
        caches["layers.3"] = caches["layers.1"]
        with raises(
            ValueError,
            r"kv_caches\['layers.3'\] of shape .* is the same memory as kv_caches\['layers.1'\]: layers that share",
        ):
            vllm(caches, layout="blocks_first", block_size=N)

    def test_groups_that_lie_over_each_other(self):
        pool = zeros(2 * B, 2, N, H, D)
        with raises(ValueError, "has rows that overlap each other, or those of another tensor"):
            vllm([pool[:B], pool[1 : B + 1]], layout="blocks_first", block_size=N)

    def test_tokens_repeated_by_a_stride_of_zero(self):
        k, v = (np.broadcast_to(zeros(1, H, 1, D), (1, H, N, D)) for _ in "kv")
        with raises(
            ValueError, r"layers\[0\]\[0\] of shape \[1, 3, 8, 6\] and strides \[.*, 0, 1\] has rows that overlap"
        ):
            from_transformers([(k, v)], block_size=N)
        # Seen without a look at every row.
        k, v = (np.broadcast_to(zeros(1, H, 1, D), (1, H, 10**12, D)) for _ in "kv")
        with raises(ValueError, "has rows that overlap"):
            from_transformers([(k, v)], block_size=N)

    def test_k_that_is_also_v(self):
        k = zeros(B * N, H, D)
        with raises(ValueError, r"buffers\[0\]\[1\] .* is the same memory as buffers\[0\]\[0\]"):
            from_sglang([(k, k)], layout="NHD", page_size=N)
