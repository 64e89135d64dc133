"""Append, gather and store_u32 on the GPU, bit for bit against the reference."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_size_t, c_void_p

import numpy as np
import pytest

import reference
from gpu_support import Memory, Shape, Stream, View, library, synchronize, table
from rows_case import (
    ALL_FORMATS,
    BITS,
    DTYPES,
    NULL_BLOCK,
    PLACES,
    STORED,
    Call,
    Case,
    Quantization,
    Tables,
    TokenMap,
    check_case,
    make_call,
    sides_of,
)

pytestmark = pytest.mark.gpu


def message() -> str:
    return library().kvbm_kernels_last_error_message().decode()


def call_rows(name: str, *arguments, last) -> int:
    """kvbm_kernels_NAME of dst, src, shape, map and quantization; ``last`` is a stream or a number of threads."""
    pointers = [None if argument is None else byref(argument) for argument in arguments]
    function = getattr(library(), f"kvbm_kernels_{name}")
    function.argtypes = [c_void_p] * 5 + [c_void_p if name.startswith("launch") else ctypes.c_int]
    return function(*pointers, last)


def name_of(call: Call) -> str:
    return "launch_append" if call.appends else "launch_gather"


class OnDevice:
    """A call with its memory, which may be launched more than once."""

    def __init__(self, call: Call, cache: str = "device", rows: str = "device", maps: str = "device") -> None:
        self.call = call
        # Whatever an allocation starts at, the misalignment is what the case says.
        self.cache = Memory(call.cache_image.size, cache).write(call.cache_image)
        self.rows = Memory(call.rows_image.size, rows).write(call.rows_image)
        tables = call.tables
        self.maps = [
            None if array is None else Memory(array.nbytes, maps).write(array)
            for array in (tables.slots, tables.block_tables, tables.starts)
        ]
        addresses = [None if memory is None else memory.address for memory in self.maps]
        self.arguments, self._keep = call.arguments(self.cache.address, self.rows.address, *addresses)

    def launch(self, stream: int = 0) -> int:
        return call_rows(name_of(self.call), *self.arguments, last=stream)

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        return self.cache.read(), self.rows.read()


def run(call: Call, *places: str) -> tuple[np.ndarray, np.ndarray]:
    launched = OnDevice(call, *places)
    synchronize()
    assert launched.launch() == 0, message()
    synchronize()
    return launched.read()


@pytest.mark.parametrize("name", PLACES)
def test_rows_lie_where_the_map_says(name) -> None:
    for seed, stored in enumerate([None, "int8", "fp8"]):
        for scale in ("f32", "f16"):
            check_case(PLACES[name].but(stored=stored, scale=scale, seed=seed), run)


@pytest.mark.parametrize("places", [("pinned", "device", "device"), ("device", "pinned", "pinned")])
def test_pinned_memory(places) -> None:
    for stored in (None, "fp8"):
        for by_slots in (False, True):
            check_case(Case(each=20, stored=stored, by_slots=by_slots), lambda call: run(call, *places))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", STORED)
def test_head_dims(dtype, stored, rng) -> None:
    dims = [*range(1, 18), 31, 32, 33, 63, 64, 65, 80, 96, 112, 127, 128, 129, 192, 256, 257, 512, 576, 640, 644, 1000]
    for hd in [*dims, *rng.integers(130, 600, 6)]:
        misalign = tuple(int(n) for n in rng.choice([0, 0, 0, 1, 2, 4, 8, 12], 2))
        for scale in ("f32", "f16"):
            case = Case(nl=1, hd=int(hd), dtype=dtype, stored=stored, scale=scale, misalign=misalign, seed=int(hd))
            check_case(case.but(each=12, num_sequences=2, num_blocks=24), run)


def test_plain_rows_of_every_size() -> None:
    for row in [*range(1, 34), 63, 65, 127, 128, 130, 576, 1024, 2049, 4096, 5000]:
        order = ("bloth", "bloht")[row % 2]
        for misalign in ((0, 0), (8, 8), (4, 12), (2, 6), (1, 0)):
            gaps = (row % 3, row % 2) if row % 5 == 0 else (0, 0)
            case = Case(nl=1, hd=row, cache_order=order, gaps=gaps, misalign=misalign, each=9, seed=row)
            check_case(case, run)


def test_long_runs_of_heads() -> None:
    """All heads of a token are one piece, or several."""
    for nh, hd in ((8, 128), (16, 128), (40, 128), (128, 128), (3, 5000)):
        check_case(Case(nl=1, nh=nh, hd=hd, each=40, num_blocks=20), run)


@pytest.mark.parametrize(("dtype", "stored", "scale"), ALL_FORMATS)
def test_many_rows(dtype, stored, scale) -> None:
    """Zeros, ties, subnormal numbers, NaNs, infinities, and scales beyond float16, by the thousand."""
    check_case(Case(hd=24, dtype=dtype, stored=stored, scale=scale, each=600, num_blocks=160, nl=3, nh=4), run)


@pytest.mark.parametrize(("dtype", "stored", "scale"), ALL_FORMATS)
def test_random_bits_are_as_on_the_host(dtype, stored, scale, rng) -> None:
    """A million numbers and more, and as many codes."""
    case = Case(nl=1, nh=8, hd=64, dtype=dtype, stored=stored, scale=scale, each=4096, num_blocks=256, block_size=16)
    cache_side, rows_side = sides_of(case)
    for appends in (True, False):
        cache, rows = (rng.integers(0, 256, side.nbytes, np.uint8) for side in (cache_side, rows_side))
        if appends:
            given = rows_side.of(rows).view(BITS[dtype])
            # The exponents of most rows near each other: else one number is all there is to a row.
            below, spread, sign = {
                "f16": (0x3C00, 0x1400, 0x8000),
                "bf16": (0x3F80, 0x280, 0x8000),
                "f32": (0x3F800000, 0x2800000, 0x80000000),
            }[dtype]
            near = rng.integers(below - spread, below, given.shape) | rng.choice([0, sign], given.shape)
            given[...] = np.where(rng.random((*given.shape[:-1], 1)) < 0.9, near.astype(given.dtype), given)
        tables = Tables(None, rng.permutation(256).astype(np.uint32).reshape(1, 256), None)
        call = Call(case, appends, cache_side, rows_side, cache, rows, cache, tables)
        launched = OnDevice(call)
        assert launched.launch() == 0, message()
        arguments, _keep = call.arguments(
            cache.ctypes.data, rows.ctypes.data, None, tables.block_tables.ctypes.data, None
        )
        assert call_rows("host_append" if appends else "host_gather", *arguments, last=0) == 0, message()
        synchronize()
        for actual, expected in zip(launched.read(), (cache, rows), strict=True):
            reference.assert_same_bytes(actual, expected)


def test_more_layers_than_a_launch_has_bases_for() -> None:
    for stored in (None, "int8"):
        check_case(Case(nl=300, nh=2, hd=8, each=3, bases=(True, True), stored=stored), run)
        check_case(Case(nl=23, no=1, nh=2, hd=8, each=3, bases=(True, False), stored=stored), run)


@pytest.mark.gpu(emulated=False)
@pytest.mark.parametrize("by_slots", [True, False])
@pytest.mark.parametrize("stored", [None, "int8", "fp8"])
def test_a_graph_replays_with_what_the_map_holds_then(by_slots, stored) -> None:
    """Tables, starts, slots and rows change between replays, as in decode steps."""
    import torch

    for appends in (True, False):
        case = Case(num_sequences=6, each=1, num_blocks=30, by_slots=by_slots, stored=stored, hd=64)
        captured = OnDevice(make_call(case, appends))
        synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            assert captured.launch(torch.cuda.current_stream().cuda_stream) == 0, message()
        for seed in range(1, 6):
            call = make_call(case.but(seed=seed), appends)
            captured.cache.write(call.cache_image)
            captured.rows.write(call.rows_image)
            for memory, array in zip(
                captured.maps, (call.tables.slots, call.tables.block_tables, call.tables.starts), strict=True
            ):
                if memory is not None:
                    memory.write(array)
            synchronize()
            graph.replay()
            synchronize()
            reference.assert_same_bytes(captured.read()[0 if appends else 1], call.expected)


@pytest.mark.gpu(emulated=False)
def test_the_map_is_read_when_the_stream_gets_there() -> None:
    import torch

    case = Case(each=20, num_blocks=30, holes=False)
    first, second = (make_call(case.but(seed=seed), True) for seed in (1, 2))
    launched = OnDevice(first)
    later = torch.from_numpy(second.tables.block_tables).cuda(), torch.from_numpy(second.tables.starts).cuda()
    launched.cache.write(second.cache_image)
    launched.rows.write(second.rows_image)
    stream = Stream()
    synchronize()
    with torch.cuda.stream(stream._stream):
        torch.cuda._sleep(20_000_000)
        for memory, tensor in zip(launched.maps[1:], later, strict=True):
            memory._bytes.copy_(tensor.view(-1).view(torch.uint8), non_blocking=True)
        assert launched.launch(stream.handle) == 0, message()
    stream.synchronize()
    reference.assert_same_bytes(launched.read()[0], second.expected)


@pytest.mark.parametrize("what", ["cache", "rows", "maps"])
def test_ordinary_memory_is_refused(what) -> None:
    for appends in (True, False):
        for by_slots in (True, False):
            call = make_call(Case(by_slots=by_slots, each=20), appends)
            launched = OnDevice(call, **{what: "pageable"})
            assert launched.launch() == 1
            name = {"cache": "the memory of the cache", "rows": "the memory of rows"}.get(what, "the array map->")
            assert message().startswith(f"{name_of(call).removeprefix('launch_')}: {name}"), message()
            assert "ordinary host memory" in message()
            synchronize()
            for actual, expected in zip(launched.read(), (call.cache_image, call.rows_image), strict=True):
                reference.assert_same_bytes(actual, expected)


@pytest.mark.gpu(emulated=False)
@pytest.mark.parametrize("stored", [None, "int8"])
def test_more_than_32_bits(stored) -> None:
    """More than 2^31 elements, and places past 4 GiB, in one call."""
    import torch

    nh, hd, block_size, n = 8, 128, 16, 3 << 20
    row, stored_row = 2 * hd, 2 * hd if stored is None else 132
    assert n * nh * hd > 1 << 31
    num_blocks = n // block_size + 1
    rows = torch.randint(-(1 << 15), 1 << 15, (n, nh, hd), dtype=torch.int16, device="cuda")
    rows.bitwise_and_(-0x4001)  # no NaNs: they come back canonical
    cache = torch.zeros(num_blocks, nh, block_size, stored_row, dtype=torch.uint8, device="cuda")
    order = torch.randperm(num_blocks, device="cuda")[: num_blocks - 1].to(torch.int32)
    back = torch.zeros_like(rows)

    def move(name: str, memory: torch.Tensor, first: int = 0, count: int = n) -> None:
        bases = table([cache.data_ptr()]), table([memory[first:].data_ptr()])
        of_cache = View(
            bases[0].ctypes.data, 1, 0, 0, 0, None, num_blocks, 0, nh * block_size * stored_row, 0, 0, stored_row,
            block_size * stored_row,
        )  # fmt: skip
        of_rows = View(bases[1].ctypes.data, 1, 0, 0, 0, None, 1, 0, 0, 0, 0, nh * row, row)
        start = torch.tensor([first], dtype=torch.int32, device="cuda")
        token_map = TokenMap(
            ctypes.sizeof(TokenMap), block_size, None, order.data_ptr(), len(order), start.data_ptr(), 1
        )
        quantization = Quantization(ctypes.sizeof(Quantization), 1, DTYPES["bf16"], DTYPES["f32"]) if stored else None
        views = (of_cache, of_rows) if name == "launch_append" else (of_rows, of_cache)
        synchronize()
        assert call_rows(name, *views, Shape(1, 1, nh, count, row), token_map, quantization, last=0) == 0, message()
        synchronize()

    move("launch_append", rows)
    by_token = cache[order.long()].permute(0, 2, 1, 3).reshape(n, nh, stored_row)
    if stored is None:
        assert torch.equal(by_token.view(torch.int16), rows)
        move("launch_gather", back)
        assert torch.equal(back, rows)
        return
    # In parts that each fit, and those in the small tests' way.
    whole = cache.clone()
    cache.zero_()
    for first in range(0, n, 1 << 18):
        move("launch_append", rows, first, 1 << 18)
    assert torch.equal(cache, whole)
    some = torch.randint(0, n, (500,), device="cuda")
    given = rows[some].cpu().numpy().view(np.uint16)
    expected = reference.quantised(reference.numbers_of(given, "bf16"), "int8", np.float32)
    reference.assert_same_bytes(by_token[some].cpu().numpy(), expected)
    move("launch_gather", back)
    wanted = reference.bits_of(reference.dequantised(expected, hd, "int8", np.float32), "bf16")
    reference.assert_same_bytes(back[some].cpu().numpy().view(np.uint16), wanted)


def test_null_blocks_take_nothing() -> None:
    """A batch padded for a captured graph: sequences of null blocks beside live ones."""
    case = Case(num_sequences=4, each=1, num_blocks=16, holes=False)
    call = make_call(case, True)
    call.tables.block_tables[1], call.tables.block_tables[3] = NULL_BLOCK, case.num_blocks
    padded = call.cache_image.copy()
    for token in (0, 2):
        block, inside = call.tables.places[token]
        call.cache.of(padded)[block, :, :, inside] = call.rows.of(call.rows_image)[0, :, :, token]
    reference.assert_same_bytes(run(call)[0], padded)


class TestStoreU32:
    @staticmethod
    def store(addresses: np.ndarray, values: np.ndarray, stream: int = 0) -> int:
        function = library().kvbm_kernels_launch_store_u32
        function.argtypes = [c_void_p, c_void_p, c_size_t, c_void_p]
        dsts, words = table(addresses), np.ascontiguousarray(values, np.uint32)
        return function(dsts.ctypes.data, words.ctypes.data, len(words), stream)

    @pytest.mark.parametrize("where", ["device", "pinned"])
    @pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 128, 129, 2729, 2730, 10_000])
    def test_words_reach_their_places(self, n, where, rng) -> None:
        image = rng.integers(0, 256, 8 * n + 64, np.uint8)
        memory = Memory(image.size, where).write(image)
        places, values = rng.permutation(2 * n)[:n], rng.integers(0, 1 << 32, n, np.uint32)
        synchronize()
        assert self.store(memory.address + 4 * (places + 4), values) == 0, message()
        synchronize()
        image.view(np.uint32)[places + 4] = values
        reference.assert_same_bytes(memory.read(), image)

    @pytest.mark.gpu(emulated=False)
    def test_the_tables_are_read_before_it_returns(self) -> None:
        import torch

        memory, stream = Memory(64).fill(0), Stream()
        synchronize()
        with torch.cuda.stream(stream._stream):
            torch.cuda._sleep(20_000_000)
            for value in range(1, 4):
                # Both arrays are gone once this returns.
                assert self.store(memory.address + 4 * np.arange(4), np.full(4, value), stream.handle) == 0
        stream.synchronize()
        assert memory.read().view(np.uint32).tolist() == [3] * 4 + [0] * 12

    @pytest.mark.gpu(emulated=False)
    def test_in_a_graph(self) -> None:
        import torch

        memory = Memory(64).fill(0)
        synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            assert self.store(memory.address + np.array([8]), [7], torch.cuda.current_stream().cuda_stream) == 0
        for _ in range(2):
            memory.fill(0)
            graph.replay()
            synchronize()
            assert memory.read().view(np.uint32).tolist() == [0, 0, 7] + [0] * 13

    def test_ordinary_memory_is_refused(self) -> None:
        device, pageable = Memory(64).fill(5), Memory(64, "pageable").fill(5)
        synchronize()
        assert self.store(np.array([device.address, pageable.address]), [1, 1]) == 1
        assert message().startswith("store_u32: dsts[1] is in ordinary host memory")
        synchronize()
        assert (device.read() == 5).all()
        assert (pageable.read() == 5).all()
