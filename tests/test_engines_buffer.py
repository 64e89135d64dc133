"""Layers in vLLM's one buffer: the same rows as in its tensors, and what of sizes and strides cannot be so."""

from __future__ import annotations

import numpy as np
import pytest

import kvbm_kernels as kk
import reference
import reference_engines as ref
from engine_kinds import SIX, copy
from engine_zeros import B, D, H, L, N, raises, zeros
from kvbm_kernels.engines import from_vllm, from_vllm_buffer
from reference_engines import Size

IDS = [5, 2, 7]
CALL = {
    "layout": "LBHNC", "num_layers": L, "num_blocks": B, "num_kv_heads": H, "block_size": N, "head_size": D,
    "dtype": "fp16", "no": 2,
}  # fmt: skip
PAGE = N * H * 2 * D * 2


def sizes_of(size: Size) -> dict[str, int]:
    return {"num_layers": size.L, "num_blocks": size.B, "num_kv_heads": size.H, "block_size": size.N}


def restored(view: kk.View, kv: np.ndarray) -> np.ndarray:
    """What universal blocks have of a view of blocks like these, which may be in pieces."""
    nb, nl, no, nt, nh, hd = kv.shape
    out = np.zeros((nb, nh, nl, no, nt, hd), kv.dtype)
    copy(kk.UniversalBlocks(out, kk.BlockShape(nl, no, nh, nt, hd, view.shape.dtype)), view)
    return out


class TestLatentRows:
    """fp8_ds_mla has 656 bytes a token, nvfp4_ds_mla 352, with the scales in them, whatever the model's head size."""

    @pytest.mark.parametrize("nbytes", [656, 352, 528])
    @pytest.mark.parametrize("name", SIX)
    def test_are_as_long_as_they_are_stored(self, rng, name, nbytes):
        size = Size(B=8, L=3, N=4, H=1, D=nbytes, no=1, dtype=np.uint8)
        cache = ref.vllm_whole(rng, size, name)
        expected = reference.universal(cache.read(IDS))
        stored = {"no": 1, "head_size": nbytes, "head_size_v": 0, "scales": "inline", "layout": name}
        buffer = cache.memory[0].reshape(-1)
        assert_same = reference.assert_same_bytes
        of_buffer = from_vllm_buffer(buffer, dtype="uint8", **sizes_of(size), **stored)
        assert_same(restored(of_buffer[IDS], cache.read(IDS)), expected)
        of_tensor = from_vllm(cache.tensors, block_size=4, num_kv_heads=1, **stored)
        assert_same(restored(of_tensor[IDS], cache.read(IDS)), expected)

    def test_with_strides_and_another_group_behind(self, rng):
        size = Size(B=8, L=3, N=4, H=1, D=656, no=1, dtype=np.uint8)
        cache = ref.vllm_whole(rng, size, "LBNHC")
        buffer = np.concatenate([cache.memory[0].reshape(-1), rng.integers(0, 255, 9999, np.uint8)])
        view = from_vllm_buffer(
            buffer, layout="LBNHC", no=1, head_size=656, head_size_v=0, dtype="uint8", scales="inline",
            layer_stride=8 * 4 * 656, block_stride=4 * 656, **sizes_of(size),
        )  # fmt: skip
        reference.assert_same_bytes(restored(view[IDS], cache.read(IDS)), reference.universal(cache.read(IDS)))

    def test_are_not_what_the_model_calls_its_head_size(self):
        call = {"layout": "LBNHC", "no": 1, "head_size_v": 0, "scales": "inline"}
        with raises(ValueError, "head_size is 576, expected the row as it is stored, with the scales in it: 656"):
            from_vllm_buffer(
                zeros(9999, dtype=np.uint8), dtype="uint8", head_size=576, num_layers=1, num_blocks=2, num_kv_heads=1,
                block_size=4, block_stride=4 * 656, **call,
            )  # fmt: skip
        layers = [zeros(B, 1, N, 656, dtype=np.uint8)]
        with raises(ValueError, "has a content of 656, expected head_size, 576, which without V is the row as it is"):
            from_vllm(layers, block_size=N, num_kv_heads=1, head_size=576, **call)

    def test_of_576_are_those_of_elements_without_a_scale_in_the_row_or_wider_than_a_byte(self):
        call = {"layout": "LBNHC", "no": 1, "head_size": 576, "head_size_v": 0, "num_kv_heads": 1, "block_size": 4}
        buffer = zeros(9999, dtype=np.uint8)
        for dtype, scales in (("fp8_e4m3", "constant"), ("bf16", None), ("fp16", "inline"), ("fp16", "constant")):
            view = from_vllm_buffer(buffer, dtype=dtype, scales=scales, num_layers=1, num_blocks=2, **call)
            assert view.shape.hd == 576


class TestKernelBlocks:
    @pytest.mark.parametrize("strided", [False, True])
    @pytest.mark.parametrize(
        ("name", "num_layers"), [("LBHNC", 3), ("LBNHC", 3), ("LHBNC", 3), ("BLHNC", 1), ("BLNHC", 1), ("BHLNC", 1)]
    )
    def test_of_a_buffer(self, rng, name, num_layers, strided):
        size = Size(B=8, L=num_layers, N=4, H=5, D=6)
        cache = ref.vllm_kernel_blocks(rng, size, name, 2, ref.vllm_whole)
        page = 4 * 5 * 2 * 6 * 2
        strides = {}
        if strided:
            strides["block_stride"] = page // 5 if name == "LHBNC" else page
            strides["layer_stride"] = {"L": size.B * page, "BH": page // 5}.get(name[: 1 + (name[0] == "B")], page)
        view = from_vllm_buffer(
            cache.memory[0].reshape(-1).view(np.int8), layout=name, kernel_block_size=2, head_size=6, no=2,
            dtype="bf16", **sizes_of(size), **strides,
        )  # fmt: skip
        reference.assert_same_bytes(restored(view[IDS], cache.read(IDS)), reference.universal(cache.read(IDS)))

    def test_have_no_padding_and_no_other_layer_behind_them(self):
        """Where the kernel blocks of such a block lie nothing tells: vLLM has none."""
        call = {**CALL, "kernel_block_size": N // 2}
        buffer = zeros(4 * L * B * PAGE, dtype=np.int8)
        for name in ("LBHNC", "LBNHC"):
            with raises(ValueError, f"block_stride is {PAGE + 64}, expected {PAGE} with kernel_block_size, 4: vLLM"):
                from_vllm_buffer(buffer, block_stride=PAGE + 64, layer_stride=2 * B * PAGE, **{**call, "layout": name})
        with raises(ValueError, f"block_stride is {2 * PAGE // H}, expected {PAGE // H} with kernel_block_size"):
            from_vllm_buffer(buffer, **{**call, "layout": "LHBNC"}, block_stride=2 * PAGE // H)
        for name in ("BLHNC", "BLNHC", "BHLNC"):
            one = {**call, "layout": name, "num_layers": 1}
            with raises(ValueError, "layer_stride is .*, expected .* with kernel_block_size, 4: vLLM splits no blocks"):
                from_vllm_buffer(buffer, **one, layer_stride=2 * PAGE)
            for strides in ({}, {"block_stride": L * PAGE}):
                with raises(
                    ValueError, f"kernel_block_size is 4, expected block_size, 8, for layout '{name}' of 2 layers"
                ):
                    from_vllm_buffer(buffer, **{**call, "layout": name}, **strides)


class TestSizes:
    def test_of_the_buffer(self):
        whole = zeros(L * B * PAGE, dtype=np.int8)
        assert len(from_vllm_buffer(whole, **CALL)) == B - 1
        with raises(ValueError, f"buffer has {len(whole) - 1} bytes, expected at least {len(whole)} for these blocks"):
            from_vllm_buffer(whole[1:], **CALL)
        with raises(ValueError, f"buffer has {len(whole)} bytes, expected at least {len(whole) + 8}"):
            from_vllm_buffer(whole, offset=8, **CALL)
        with raises(ValueError, "buffer has shape .* and strides .*, expected a contiguous buffer"):
            from_vllm_buffer(np.repeat(whole, 2)[::2], **CALL)
        with raises(ValueError, "no is 2, expected 1 for rows without V: head_size_v is 0"):
            from_vllm_buffer(whole, **{**CALL, "head_size_v": 0})

    def test_strides_that_do_not_step_over_what_is_inside(self):
        whole = zeros(L * B * PAGE, dtype=np.int8)
        for layout, wrong, message in (
            ("LBHNC", {"block_stride": PAGE - 2}, f"block_stride is {PAGE - 2}, expected at least {PAGE}"),
            ("LBHNC", {"layer_stride": PAGE}, f"layer_stride is {PAGE}, expected at least {B * PAGE}"),
            # Those of a layout with blocks outermost.
            ("LBNHC", {"layer_stride": PAGE, "block_stride": L * PAGE}, f"expected at least {B * L * PAGE}"),
            ("BLHNC", {"block_stride": PAGE}, f"block_stride is {PAGE}, expected at least {L * PAGE}"),
            ("BHLNC", {"layer_stride": 2}, f"layer_stride is 2, expected at least {N * 2 * D * 2}"),
        ):
            with raises(ValueError, f"{message}, the bytes that layout '{layout}' has in between"):
                from_vllm_buffer(whole, **{**CALL, "layout": layout, **wrong})
        # Of one layer there is nothing to step over.
        for layout in SIX:
            call = {**CALL, "layout": layout, "num_layers": 1}
            assert from_vllm_buffer(whole, **call, layer_stride=1).shape.nl == 1
            one_block = from_vllm_buffer(whole, **{**call, "num_layers": 2, "num_blocks": 1}, block_stride=1)
            assert (one_block.shape.nl, one_block.num_blocks) == (2, 1)
