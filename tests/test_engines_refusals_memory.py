"""Tensors that lie otherwise than their layout, or over each other: refused, with their shape and strides."""

from __future__ import annotations

import numpy as np
import pytest

import kvbm_kernels as kk
from engine_zeros import B, D, H, L, N, layers, raises, vllm, zeros
from kvbm_kernels.engines import (
    from_flashinfer,
    from_llama_cpp,
    from_lmcache,
    from_sglang,
    from_tensorrt_llm,
    from_transformers,
    from_transformers_paged,
)


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

    def test_a_paged_cache_of_transformers(self):
        call = {
            "num_layers": L, "page_size": N, "num_kv_heads": H, "head_size": D, "blocks_per_sector": 1, "dtype": "fp16",
        }  # fmt: skip
        nbytes = L * 2 * N * H * D * 2
        with raises(ValueError, f"cache_tensor has {3 * nbytes + 2} bytes, expected a multiple of {nbytes}"):
            from_transformers_paged(zeros(3 * nbytes + 2, dtype=np.uint8), **call)
        with raises(ValueError, r"cache_tensor of shape .* has 1 block, expected at least the 2 reserved blocks"):
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
        with raises(ValueError, r"kv_caches\[1\] of shape .* has rows that overlap those of kv_caches\[0\]: a copy"):
            vllm([pool[:B], pool[1 : B + 1]], layout="blocks_first", block_size=N)
        with raises(ValueError, r"kv_caches\['c'\] of shape .* has rows that overlap those of kv_caches\['b'\]"):
            caches = {"a": zeros(B, 2, N, H, D), "b": pool[:B], "c": pool[1 : B + 1]}
            vllm(caches, layout="blocks_first", block_size=N)
        # Of layers that lie between each other, the spans of all meet.
        rows = zeros(B, 4, 2, N, H, D)
        late = np.lib.stride_tricks.as_strided(
            rows.reshape(-1)[rows[0, 2].size * 2 + D :], rows[:, 2].shape, rows[:, 2].strides
        )
        with raises(ValueError, r"kv_caches\[2\] of shape .* has rows that overlap those of kv_caches\[1\]"):
            vllm([rows[:, 0], rows[:, 2], late], layout="blocks_first", block_size=N)
        objects = zeros(3, 2, L, 2 * N, H * D)
        late = objects.reshape(-1)[D : D + objects[0].size].reshape(objects[0].shape)
        with raises(ValueError, r"objects\[2\] of shape .* has rows that overlap those of objects\[0\]"):
            from_lmcache([objects[0], objects[2], late], fmt="KV_2LTD", block_size=N, num_kv_heads=H)

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
