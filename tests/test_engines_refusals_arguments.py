"""Layouts without rows, and what has to be said as no shape tells it: refused, with the argument that is missing."""

from __future__ import annotations

import numpy as np
import pytest

from engine_zeros import B, D, H, L, N, layers, raises, vllm, zeros
from kvbm_kernels.engines import (
    from_flashinfer,
    from_llama_cpp,
    from_lmcache,
    from_sglang,
    from_tensorrt_llm,
    from_transformers,
    from_vllm,
    from_vllm_buffer,
)


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
        message = "has 584 bytes a token: a DeepSeek-V4 page holds"
        slots = zeros(B * N, 584, dtype=np.uint8)
        for call in (
            lambda: from_llama_cpp([(slots, None)], v_trans=True, num_kv_heads=1, part="k", scales="inline"),
            lambda: from_sglang([slots[:, None]], layout="MLA", page_size=N, scales="inline"),
            lambda: from_flashinfer([slots.reshape(B, N, 584)], layout="MLA", page_size=N, scales="inline"),
            lambda: from_lmcache(slots[None, None], fmt="KV_MLA_FMT", block_size=N, num_kv_heads=1, scales="inline"),
            lambda: from_tensorrt_llm(
                slots.reshape(B, 1, 1, -1), layout="HND", num_kv_heads=1, tokens_per_block=N, scales="constant"
            ),
            lambda: from_vllm_buffer(
                slots.reshape(-1), layout="LBNHC", num_layers=1, num_blocks=B, num_kv_heads=1, block_size=N,
                head_size=584, head_size_v=0, dtype="uint8", no=1, scales="inline",
            ),
        ):  # fmt: skip
            with raises(ValueError, message):
                call()

    def test_rows_of_k_and_v_as_long_as_those_of_deepseek_v4_are_rows(self):
        """DeepSeek-V4 has one head, and no V: what has several, or is said to have V, is not it."""
        inline = {"head_size": 288, "dtype": "int8", "scales": "inline"}
        for heads in (1, H):
            buffer = zeros(L * B * N * heads * 584, dtype=np.uint8)
            for sizes in (inline, {**inline, "head_size": 292, "scales": "constant"}):
                for no, row in ((1, 584), (2, 292)):
                    view = from_vllm_buffer(
                        buffer, layout="LBHNC", num_layers=L, num_blocks=B, num_kv_heads=heads, block_size=N, no=no,
                        **sizes,
                    )  # fmt: skip
                    assert (view.shape.no, view.shape.hd) == (no, row)
            content = layers(B, heads, N, 584, dtype=np.int8)
            for no, row in ((1, 584), (2, 292)):
                call = {"layout": "packed", "block_size": N, "num_kv_heads": heads, "no": no}
                assert vllm(content, **call, head_size=288, scales="inline").shape.hd == row
            wide = layers(B, heads, N, 592, dtype=np.int8)
            call = {"layout": "packed", "block_size": N, "num_kv_heads": heads, "no": 2, "scales": "constant"}
            assert vllm(wide, **call, head_size=584, head_size_v=8, part="k").shape.hd == 584
        call = {"layout": "packed", "block_size": N, "no": 1, "scales": "inline"}
        assert vllm(layers(B, H, N, 584, dtype=np.uint8), **call).shape.hd == 584
        with raises(ValueError, "584 bytes a token"):
            vllm(layers(B, 1, N, 584, dtype=np.uint8), num_kv_heads=1, head_size=584, head_size_v=0, **call)
        pairs = [tuple(zeros(B * N, 584, dtype=np.uint8) for _ in "kv")]
        assert from_llama_cpp(pairs, v_trans=False, num_kv_heads=1, scales="inline").shape.no == 2

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

    @pytest.mark.parametrize("no", [True, np.True_, 1.0, 2.0, np.array([2]), "2"])
    def test_a_number_of_outers_is_an_integer(self, no):
        for call in (
            lambda: vllm(layers(B, H, N, 2 * D), layout="packed", block_size=N, no=no, head_size=D),
            lambda: vllm(layers(B, 2, N, H, D), layout="blocks_first", block_size=N, no=no),
            lambda: from_lmcache(zeros(2, L, N, H * D), fmt="KV_2LTD", block_size=N, num_kv_heads=H, no=no),
            lambda: from_lmcache(zeros(1, L, N, D), fmt="KV_MLA_FMT", block_size=N, num_kv_heads=1, no=no),
            lambda: from_vllm_buffer(
                zeros(9999), layout="LBNHC", num_layers=1, num_blocks=B, num_kv_heads=H, block_size=N, head_size=D,
                dtype="fp16", no=no,
            ),
        ):  # fmt: skip
            with raises(TypeError, "no is .*, expected an integer"):
                call()

    def test_sizes_that_are_not_needed_are_still_those_of_the_rows(self):
        packed = {"layout": "packed", "block_size": N, "no": 1}
        for sizes, expected in (
            ({"head_size": 999}, r"expected 999 \+ 999 elements of K and V; of rows without V, as in MLA, head_size_v"),
            ({"head_size": D, "head_size_v": 5}, r"expected 6 \+ 5 elements of K and V$"),
            ({"head_size": D, "head_size_v": 0}, "expected head_size, 6, which without V is the row as it is stored"),
        ):
            with raises(ValueError, f"has a content of 12, {expected}"):
                vllm(layers(B, H, N, 2 * D), **packed, **sizes)
        with raises(ValueError, "head_size is missing: nothing tells where"):
            vllm(layers(B, H, N, 2 * D), **packed, head_size_v=D)
        for sizes in ({}, {"head_size": D}, {"head_size": 7, "head_size_v": 5}, {"head_size": 12, "head_size_v": 0}):
            assert vllm(layers(B, H, N, 2 * D), **packed, **sizes).shape.hd == 2 * D
        inline = {"head_size": 8, "scales": "inline"}
        assert vllm(layers(B, H, N, 24, dtype=np.uint8), **packed, **inline).shape.hd == 24

    def test_a_scale_in_a_row_is_no_part_of_the_head_in_any_form(self):
        call = {"fmt": "KV_2LTD", "block_size": N, "num_kv_heads": H, "head_size": 8, "scales": "inline"}
        assert from_lmcache(zeros(2, L, N, H * 12, dtype=np.uint8), **call).shape.hd == 12
        assert from_lmcache(zeros(1, L, N, H * 24, dtype=np.uint8), no=2, **call).shape.hd == 12
        with raises(ValueError, "has heads of 12 elements, expected head_size, 12 and a scale of 4"):
            from_lmcache(zeros(2, L, N, H * 12, dtype=np.uint8), **{**call, "head_size": 12})

    def test_where_k_ends(self):
        with raises(ValueError, "head_size is missing: nothing tells where in a content of 12 elements K ends"):
            vllm(layers(B, H, N, 2 * D), layout="packed", block_size=N, no=2)
        with raises(ValueError, "K has rows of 1 element and V of 5, which are no one view"):
            vllm(layers(B, H, N, D), layout="packed", block_size=N, no=2, head_size=1, head_size_v=5)
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
