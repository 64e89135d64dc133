"""Views: what arrays they take in which layouts, and what they refuse."""

from __future__ import annotations

import dataclasses
import re
import timeit

import ml_dtypes
import numpy as np
import pytest

import kvbm_kernels as kk
import reference

NB, NL, NO, NT, NH, HD = 5, 4, 2, 3, 6, 8
SHAPE = kk.BlockShape(nl=NL, no=NO, nh=NH, nt=NT, hd=HD, dtype="bf16")


@pytest.fixture
def kv(rng):
    """A logical cache; every test about one sees the same bits."""
    return reference.random_kv(rng, (NB, NL, NO, NT, NH, HD), ml_dtypes.bfloat16)


def read(view: kk.View) -> np.ndarray:
    """The rows of a view as the logical cache they are, by way of the copy under test elsewhere."""
    s = view.shape
    out = np.zeros((len(view), s.nh, s.nl, s.no, s.nt, s.hd), ml_dtypes.bfloat16)
    kk.copy_blocks(kk.UniversalBlocks(out, s), view)
    return reference.from_universal(out)


class TestBlockShape:
    def test_sizes(self):
        assert (SHAPE.row_nbytes, SHAPE.chunk_nbytes, SHAPE.block_nbytes) == (16, 288, 2304)

    def test_is_a_value(self):
        assert SHAPE == kk.BlockShape(NL, NO, NH, NT, HD, ml_dtypes.bfloat16)
        assert len({SHAPE, dataclasses.replace(SHAPE), dataclasses.replace(SHAPE, nl=1)}) == 2
        with pytest.raises(dataclasses.FrozenInstanceError):
            SHAPE.nl = 3

    @pytest.mark.parametrize(
        ("name", "dtype"),
        [
            ("f16", "F16"),
            ("fp16", "F16"),
            ("float16", "F16"),
            ("BF16", "BF16"),
            ("bfloat16", "BF16"),
            ("f32", "F32"),
            ("fp32", "F32"),
            ("f64", "F64"),
            ("fp8_e4m3", "FP8_E4M3"),
            ("float8_e4m3fn", "FP8_E4M3"),
            ("fp8_e5m2", "FP8_E5M2"),
            ("int8", "INT8"),
            ("uint8", "UINT8"),
            (np.float16, "F16"),
            (np.dtype("float64"), "F64"),
            (ml_dtypes.float8_e5m2, "FP8_E5M2"),
            (kk.DType.INT8, "INT8"),
        ],
    )
    def test_takes_types_by_name_and_from_array_libraries(self, name, dtype):
        assert kk.BlockShape(1, 1, 1, 1, 1, name).dtype is kk.DType[dtype]

    @pytest.mark.parametrize("dtype", [None, float, 3, np.int64, np.dtype(">f2"), ml_dtypes.float8_e4m3fnuz, object()])
    def test_other_types_are_type_errors(self, dtype):
        with pytest.raises(TypeError, match="dtype is .* expected one of f16, bf16"):
            kk.BlockShape(1, 1, 1, 1, 1, dtype)

    def test_an_unknown_name_is_a_value_error(self):
        with pytest.raises(ValueError, match="dtype is 'fp4', expected one of f16"):
            kk.BlockShape(1, 1, 1, 1, 1, "fp4")

    @pytest.mark.parametrize("symbol", ["nl", "no", "nh", "nt", "hd"])
    def test_sizes_are_positive_integers(self, symbol):
        sizes = {"nl": 1, "no": 1, "nh": 1, "nt": 1, "hd": 1, "dtype": "f16"}
        assert getattr(kk.BlockShape(**{**sizes, symbol: np.int32(7)}), symbol) == 7
        for wrong in (0, -1):
            with pytest.raises(ValueError, match=f"{symbol} is {wrong}, expected 1 or more"):
                kk.BlockShape(**{**sizes, symbol: wrong})
        for wrong in (True, 1.0, "1", None):
            with pytest.raises(TypeError, match=f"{symbol} is {wrong!r}, expected an integer"):
                kk.BlockShape(**{**sizes, symbol: wrong})

    def test_a_block_of_more_bytes_than_anything_counts_is_refused(self):
        with pytest.raises(ValueError, match=r"expected less than 2\*\*63"):
            kk.BlockShape(1 << 20, 2, 1 << 20, 1 << 20, 128, "bf16")


class TestLayouts:
    def test_names_are_taken_in_either_case(self, kv):
        chunks = reference.block_stack(kv, "HND")
        for layout in (kk.Layout.HND, "HND", "hnd"):
            assert kk.BlockStack(chunks, SHAPE, layout).layout is kk.Layout.HND

    def test_others_are_refused(self):
        with pytest.raises(ValueError, match='layout is \'NDH\', expected "NHD" or "HND"'):
            kk.BlockStack([], SHAPE, "NDH")
        for wrong in (0, None, 1.0):
            with pytest.raises(TypeError, match=f"layout is {wrong!r}, expected a Layout"):
                kk.BlockStack([], SHAPE, wrong)
        with pytest.raises(TypeError, match="inner is 1, expected"):
            kk.OperationalBlocks([], SHAPE, 1)


class TestBlockStack:
    @pytest.mark.parametrize("layout", ["NHD", "HND"])
    def test_chunks_in_a_flat_list_and_by_layer(self, kv, layout):
        chunks = reference.block_stack(kv, layout)
        reference.assert_same_bytes(read(kk.BlockStack(chunks, SHAPE, layout)), kv)
        by_layer = [[[block[layer * NO + o] for o in range(NO)] for layer in range(NL)] for block in chunks]
        reference.assert_same_bytes(read(kk.BlockStack(by_layer, SHAPE, layout)), kv)

    def test_flat_bytes_stand_for_a_chunk(self, kv):
        chunks = [[bytearray(chunk.tobytes()) for chunk in block] for block in reference.block_stack(kv, "NHD")]
        reference.assert_same_bytes(read(kk.BlockStack(chunks, SHAPE)), kv)

    def test_raw_integers_stand_for_elements(self, kv):
        chunks = [[chunk.view(np.uint16) for chunk in block] for block in reference.block_stack(kv, "NHD")]
        chunks[2][3] = chunks[2][3].view(ml_dtypes.bfloat16)
        chunks[1][0] = chunks[1][0].view(np.int16)
        reference.assert_same_bytes(read(kk.BlockStack(chunks, SHAPE)), kv)

    def test_only_rows_have_to_be_contiguous(self, kv):
        """Chunks cut out of wider memory, all alike: a row pitch beyond hd, and every second token."""
        wide = np.zeros((NB, NL, NO, 2 * NT, NH, HD + 3), ml_dtypes.bfloat16)
        wide[:, :, :, ::2, :, 1 : HD + 1] = kv
        chunks = [[wide[b, i // NO, i % NO, ::2, :, 1 : HD + 1] for i in range(NL * NO)] for b in range(NB)]
        reference.assert_same_bytes(read(kk.BlockStack(chunks, SHAPE)), kv)

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            (lambda c: c[1].pop(), ValueError, r"tensors\[1\] has 7 entries, expected nl\*no = 4\*2 = 8 chunks"),
            (lambda c: c.__setitem__(1, c[1][0]), TypeError, r"tensors\[1\] is a ndarray, expected a list of chunks"),
            (lambda c: c[1].__setitem__(3, None), TypeError, r"tensors\[1\]\[3\] is a NoneType, expected an array"),
            (
                lambda c: c[1].__setitem__(3, c[1][3].view(np.float16)),
                TypeError,
                r"tensors\[1\]\[3\] has dtype float16, expected bf16",
            ),
            (
                lambda c: c[1].__setitem__(3, np.zeros((NT, NH, HD), np.uint32)),
                TypeError,
                r"tensors\[1\]\[3\] has dtype uint32, expected bf16",
            ),
            (
                lambda c: c[1].__setitem__(3, c[1][3][:, 1:]),
                ValueError,
                r"tensors\[1\]\[3\] has shape \[3, 5, 8\], expected \[nt, nh, hd\] = \[3, 6, 8\]",
            ),
            (
                lambda c: c[1].__setitem__(3, np.zeros(287, np.uint8)),
                ValueError,
                r"tensors\[1\]\[3\] has 287 bytes, expected 288 for \[nt, nh, hd\] = \[3, 6, 8\]",
            ),
            (
                lambda c: c[1].__setitem__(3, c[1][3].transpose(2, 0, 1).copy().transpose(1, 2, 0)),
                ValueError,
                r"tensors\[1\]\[3\] has strides .* bytes, expected the \[96, 16, 2\] of tensors\[0\]\[0\]",
            ),
            (
                lambda c: [
                    block.__setitem__(i, np.repeat(a, 2, -1)[..., ::2]) for block in c for i, a in enumerate(block)
                ],
                ValueError,
                r"tensors\[0\]\[0\] has the elements of a row 4 bytes apart, expected 2: rows have to be contiguous",
            ),
        ],
    )
    def test_errors_name_the_chunk(self, kv, change, error, message):
        chunks = reference.block_stack(kv, "NHD")
        change(chunks)
        with pytest.raises(error, match=message) as raised:
            kk.BlockStack(chunks, SHAPE)
        assert isinstance(raised.value, kk.KvbmError)

    def test_a_row_repeated_by_a_stride_of_zero_is_not_contiguous(self):
        chunk = np.broadcast_to(np.zeros((NT, NH, 1), np.uint16), (NT, NH, HD))
        with pytest.raises(ValueError, match="0 bytes apart"):
            kk.BlockStack([[chunk] * NL * NO], SHAPE)

    def test_nested_errors_name_layer_and_outer(self, kv):
        blocks = [
            [[block[2 * layer], block[2 * layer + 1]] for layer in range(NL)]
            for block in reference.block_stack(kv, "NHD")
        ]
        blocks[2][3][1] = None
        with pytest.raises(TypeError, match=r"tensors\[2\]\[3\]\[1\] is a NoneType"):
            kk.BlockStack(blocks, SHAPE)
        blocks[2][3] = blocks[2][3][:1]
        with pytest.raises(ValueError, match=r"tensors\[2\]\[3\] is a list of 1, expected a list of no = 2 chunks"):
            kk.BlockStack(blocks, SHAPE)

    def test_an_array_is_no_list_of_chunks(self, kv):
        with pytest.raises(TypeError, match="tensors is a ndarray, expected a list with a list of chunks"):
            kk.BlockStack(kv, SHAPE)


# How engines keep their caches: axes, and what makes their tensors of a logical cache [b, l, o, t, h, d].
LAYERED = {
    "blocks first, NHD": ("bothd", lambda kv: list(kv.transpose(1, 0, 2, 3, 4, 5).copy())),
    "blocks first, HND": ("bohtd", lambda kv: list(kv.transpose(1, 0, 2, 4, 3, 5).copy())),
    "K and V first": ("obthd", lambda kv: list(kv.transpose(1, 2, 0, 3, 4, 5).copy())),
    "packed K|V, NHD": ("bthod", lambda kv: list(kv.transpose(1, 0, 3, 4, 2, 5).copy())),
    "packed K|V, HND": ("bhtod", lambda kv: list(kv.transpose(1, 0, 4, 3, 2, 5).copy())),
    "pairs of K and V": (
        "bthd",
        lambda kv: [tuple(layer.copy() for layer in kv[:, i].transpose(1, 0, 2, 3, 4)) for i in range(NL)],
    ),
    "pairs sliced from packed K|V": (
        "bthd",
        lambda kv: [
            (p[..., :HD], p[..., HD:]) for p in kv.transpose(1, 0, 3, 4, 2, 5).copy().reshape(NL, NB, NT, NH, 2 * HD)
        ],
    ),
    "permuted views": (
        "bhtod",
        lambda kv: [layer.transpose(0, 2, 1, 3, 4) for layer in kv.transpose(1, 0, 3, 4, 2, 5).copy()],
    ),
    "one pool": ("blothd", lambda kv: kv.copy()),
    "one pool, universal": ("bhlotd", lambda kv: reference.universal(kv)),
    "one pool each for K and V": ("lbthd", lambda kv: [kv[:, :, o].transpose(1, 0, 2, 3, 4).copy() for o in range(NO)]),
    "heads across blocks": ("hbtod", lambda kv: list(kv.transpose(1, 4, 0, 3, 2, 5).copy())),
}


class TestFromLayers:
    @pytest.mark.parametrize("engine", LAYERED)
    def test_axes_say_how_blocks_lie(self, kv, engine):
        axes, layers_of = LAYERED[engine]
        view = kk.BlockStack.from_layers(layers_of(kv), SHAPE, axes)
        assert len(view) == NB
        reference.assert_same_bytes(read(view), kv)

    @pytest.mark.parametrize("engine", LAYERED)
    def test_from_torch(self, torch, kv, engine):
        axes, layers_of = LAYERED[engine]

        def as_torch(tensors):
            if isinstance(tensors, list | tuple):
                return [as_torch(tensor) for tensor in tensors]
            return torch.from_numpy(tensors.view(np.uint16)).view(torch.bfloat16)

        view = kk.BlockStack.from_layers(as_torch(layers_of(kv)), SHAPE, axes)
        reference.assert_same_bytes(read(view), kv)

    def test_mla(self, rng):
        """One latent row a token: nh = no = 1, and the axes of both can be left out."""
        kv = reference.random_kv(rng, (NB, NL, 1, NT, 1, 576), ml_dtypes.bfloat16)
        shape = kk.BlockShape(NL, 1, 1, NT, 576, "bf16")
        view = kk.BlockStack.from_layers(list(kv.reshape(NB, NL, NT, 576).swapaxes(0, 1).copy()), shape, "btd")
        reference.assert_same_bytes(read(view), kv)

    def test_one_token_a_block(self, rng):
        kv = reference.random_kv(rng, (NB, NL, NO, 1, NH, HD), ml_dtypes.bfloat16)
        shape = dataclasses.replace(SHAPE, nt=1)
        layers = [(kv[:, i, 0, 0].copy(), kv[:, i, 1, 0].copy()) for i in range(NL)]
        reference.assert_same_bytes(read(kk.BlockStack.from_layers(layers, shape, "bhd")), kv)

    def test_a_contiguous_cache(self, rng):
        """[nh, capacity, hd] a layer, of which the blocks are pieces of nt tokens."""
        cache = reference.random_kv(rng, (NL, NO, NH, NB * NT, HD), ml_dtypes.bfloat16)
        layers = [tuple(part.reshape(NH, NB, NT, HD) for part in layer) for layer in cache]
        expected = cache.reshape(NL, NO, NH, NB, NT, HD).transpose(3, 0, 1, 4, 2, 5)
        reference.assert_same_bytes(read(kk.BlockStack.from_layers(layers, SHAPE, "hbtd")), expected)

    def test_flat_bytes_stand_for_a_layer(self, kv):
        layers = [bytearray(layer.tobytes()) for layer in kv.transpose(1, 0, 2, 3, 4, 5)]
        reference.assert_same_bytes(read(kk.BlockStack.from_layers(layers, SHAPE)), kv)

    @pytest.mark.parametrize(
        ("axes", "layout"),
        [("bothd", "NHD"), ("bohtd", "HND"), ("bhtod", "HND"), ("bthod", "NHD")],
    )
    def test_layout_is_the_order_of_tokens_and_heads_in_memory(self, kv, axes, layout):
        extents = {"b": NB, "o": NO, "t": NT, "h": NH, "d": HD}
        layers = [np.zeros([extents[a] for a in axes], np.uint16) for _ in range(NL)]
        assert kk.BlockStack.from_layers(layers, SHAPE, axes).layout is kk.Layout[layout]
        swapped = axes.translate(str.maketrans("th", "ht"))
        permuted = [layer.swapaxes(axes.index("t"), axes.index("h")) for layer in layers]
        assert kk.BlockStack.from_layers(permuted, SHAPE, swapped).layout is kk.Layout[layout]

    def test_one_head_leaves_the_order_to_the_axes(self):
        layers = [np.zeros((NB, NO, 1, NT, HD), np.uint16)] * NL
        assert kk.BlockStack.from_layers(layers, dataclasses.replace(SHAPE, nh=1), "bohtd").layout is kk.Layout.HND

    @pytest.mark.parametrize("axes", ["bothh", "bothx", "both", "", "b o t h d"])
    def test_axes_that_are_none(self, axes):
        with pytest.raises(
            ValueError, match="axes is .* expected each of the letters b, l, o, t, h and d at most once, and d"
        ):
            kk.BlockStack.from_layers([], SHAPE, axes)

    def test_axes_that_leave_out_what_there_is(self):
        with pytest.raises(ValueError, match="axes is 'botd' without h, expected nh = 1 then, not 6"):
            kk.BlockStack.from_layers([np.zeros((1, 2, 3, 8), np.uint16)] * NL, SHAPE, "botd")
        with pytest.raises(TypeError, match="axes is None, expected a string"):
            kk.BlockStack.from_layers([], SHAPE, None)

    def test_lists_of_the_wrong_length(self, kv):
        layers = list(kv.transpose(1, 0, 2, 3, 4, 5))
        with pytest.raises(ValueError, match="tensors is a list of 3, expected a list of nl = 4"):
            kk.BlockStack.from_layers(layers[:3], SHAPE)
        pairs = [(layer[:, 0], layer[:, 1]) for layer in layers]
        with pytest.raises(ValueError, match=r"tensors\[2\] is a list of 1, expected a list of no = 2$"):
            kk.BlockStack.from_layers([*pairs[:2], pairs[2][:1], pairs[3]], SHAPE, "bthd")

    def test_arrays_in_the_place_of_lists(self, kv):
        layers = list(kv.transpose(1, 0, 2, 3, 4, 5))
        for tensors, axes, message in (
            (kv, "bothd", "tensors is a ndarray, expected a list of nl = 4: axes is 'bothd' without l, so layers are"),
            (layers, "bthd", r"tensors\[0\] is a ndarray, .* no = 2: axes is 'bthd' without o, so K and V of a"),
        ):
            with pytest.raises(ValueError, match=message):
                kk.BlockStack.from_layers(tensors, SHAPE, axes)

    def test_layers_that_differ_are_named(self, kv):
        """Other head dimensions, other numbers of blocks, other strides: never moved as if they were the same."""
        layers = list(kv.transpose(1, 0, 2, 3, 4, 5).copy())
        message = r"tensors\[2\] has shape \[5, 2, 3, 6, 4\], expected \[nb, no, nt, nh, hd\] = \[any, 2, 3, 6, 8\]"
        with pytest.raises(ValueError, match=message):
            kk.BlockStack.from_layers([*layers[:2], layers[2][..., :4].copy(), layers[3]], SHAPE)
        with pytest.raises(
            ValueError, match=r"tensors\[3\] has shape \[4, .*\], expected the \[5, .*\] of tensors\[0\]"
        ):
            kk.BlockStack.from_layers([*layers[:3], layers[3][1:]], SHAPE)
        with pytest.raises(ValueError, match=r"tensors\[1\] has strides .* of tensors\[0\]"):
            kk.BlockStack.from_layers([layers[0], np.repeat(layers[1], 2, 0)[::2], *layers[2:]], SHAPE)

    def test_k_and_v_of_different_width_are_refused(self):
        k, v = np.zeros((NB, NT, NH, 12), np.uint16), np.zeros((NB, NT, NH, HD), np.uint16)
        with pytest.raises(ValueError, match=r"tensors\[0\]\[0\] has shape \[5, 3, 6, 12\]"):
            kk.BlockStack.from_layers([(k, v)] * NL, SHAPE, "bthd")
        separate = dataclasses.replace(SHAPE, no=1, hd=12)
        assert len(kk.BlockStack.from_layers([k] * NL, separate, "bthd")) == NB

    def test_building_does_not_go_over_chunks(self):
        """128 blocks of 80 layers in under a millisecond: the time depends on the layers alone."""
        shape = kk.BlockShape(80, 2, 1, 1, 8, "bf16")
        layers = [np.zeros((128, 2, 1, 1, 8), np.uint16) for _ in range(80)]
        pairs = [(layer[:, 0], layer[:, 1]) for layer in layers]
        assert min(timeit.repeat(lambda: kk.BlockStack.from_layers(layers, shape), number=1, repeat=20)) < 1e-3
        assert min(timeit.repeat(lambda: kk.BlockStack.from_layers(pairs, shape, "bthd"), number=1, repeat=20)) < 1e-3


class TestOtherBlocks:
    def test_universal_as_one_array_and_as_a_list(self, kv):
        universal = reference.universal(kv)
        for arrays in (universal, list(universal), bytearray(universal.tobytes())):
            view = kk.UniversalBlocks(arrays, SHAPE)
            assert len(view) == NB
            assert view.layout is None
            reference.assert_same_bytes(read(view), kv)

    def test_universal_of_strided_arrays(self, kv):
        wide = np.repeat(np.repeat(reference.universal(kv), 2, axis=0), 3, axis=3)
        reference.assert_same_bytes(read(kk.UniversalBlocks(wide[::2, :, :, ::3], SHAPE)), kv)

    @pytest.mark.parametrize("inner", ["NHD", "HND"])
    def test_operational_in_every_form(self, kv, inner):
        fused = reference.operational(kv, inner)
        spelled_out = fused.reshape(NB, NL, NO, *((NT, NH) if inner == "NHD" else (NH, NT)), HD)
        for arrays in (fused, list(fused), spelled_out, list(spelled_out), [bytearray(b.tobytes()) for b in fused]):
            view = kk.OperationalBlocks(arrays, SHAPE, inner)
            assert view.layout is kk.Layout[inner]
            reference.assert_same_bytes(read(view), kv)

    def test_the_order_inside_is_what_the_caller_says(self, rng):
        """With nh = nt and nothing else to go by, NHD and HND have one shape and different data."""
        kv = reference.random_kv(rng, (2, 2, 2, 2, 2, 2), ml_dtypes.bfloat16)
        shape = kk.BlockShape(2, 2, 2, 2, 2, "bf16")
        operational = reference.operational(kv, "NHD")
        reference.assert_same_bytes(read(kk.OperationalBlocks(operational, shape, "NHD")), kv)
        swapped = read(kk.OperationalBlocks(operational, shape, "HND"))
        reference.assert_same_bytes(swapped, kv.swapaxes(3, 4))

    def test_errors_name_the_array(self, kv):
        universal = list(reference.universal(kv))
        universal[2] = universal[2][:3]
        message = "arrays[2] has shape [3, 4, 2, 3, 8], expected [nh, nl, no, nt, hd] = [6, 4, 2, 3, 8]"
        with pytest.raises(ValueError, match=re.escape(message)):
            kk.UniversalBlocks(universal, SHAPE)
        message = "arrays has shape [5, 4, 2, 143], expected [nb, nl, no, nt*nh*hd] = [any, 4, 2, 144]"
        with pytest.raises(ValueError, match=re.escape(message)):
            kk.OperationalBlocks(reference.operational(kv, "NHD")[..., :-1], SHAPE)
        message = "arrays[0] has the elements of a chunk 4 bytes apart, expected 2"
        with pytest.raises(ValueError, match=re.escape(message)):
            kk.OperationalBlocks(list(np.repeat(reference.operational(kv, "NHD"), 2, -1)[..., ::2]), SHAPE)
        message = "arrays has 2303 bytes, expected a multiple of 2304"
        with pytest.raises(ValueError, match=re.escape(message)):
            kk.UniversalBlocks(bytearray(2303), SHAPE)

    def test_nothing_is_a_view_of_no_blocks(self):
        for view in (
            kk.UniversalBlocks([], SHAPE),
            kk.UniversalBlocks(np.zeros((0, NH, NL, NO, NT, HD), np.uint16), SHAPE),
            kk.OperationalBlocks([], SHAPE),
            kk.BlockStack([], SHAPE),
            kk.BlockStack.from_layers([np.zeros((0, NO, NT, NH, HD), np.uint16)] * NL, SHAPE),
        ):
            assert len(view) == 0
            assert len(view[[]]) == len(view[:]) == 0
            kk.copy_blocks(view, kk.UniversalBlocks([], SHAPE))


@pytest.mark.parametrize("make", [kk.BlockStack, kk.BlockStack.from_layers, kk.UniversalBlocks, kk.OperationalBlocks])
def test_a_shape_that_is_none_is_refused_by_name(make):
    with pytest.raises(kk.KvbmTypeError, match="shape is a tuple, expected a BlockShape"):
        make([[np.zeros(4, np.float16)]], (1, 1, 1, 1, 4))


@pytest.mark.parametrize("ids", [{1, 2}, (i for i in range(2)), None, "12"], ids=["set", "generator", "None", "str"])
def test_ids_of_other_kinds_are_refused_by_kind(ids):
    view = kk.UniversalBlocks(np.zeros((3, 1, 1, 1, 1, 4), np.float16), kk.BlockShape(1, 1, 1, 1, 4, "f16"))
    with pytest.raises(kk.KvbmTypeError, match=f"block ids are a {type(ids).__name__}, expected an integer"):
        view[ids]
