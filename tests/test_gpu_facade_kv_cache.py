"""Caches in CUDA memory as only a GPU shows them: on streams, in graphs, under a model, and driven at random."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

import kvbm_kernels as kk
import reference
from buildtools import ROOT
from gpu_arrays import sleep
from kv_held import Held, HeldSlots
from kv_machine import Caches
from kv_places import Cupy, Torch
from kv_support import BS, HD, NH, NL, new_pool
from kvbm_kernels import lifetime

pytestmark = pytest.mark.gpu


class OnTorch(Caches):
    place_name = "torch"
    look_every = 5


class OnCupy(Caches):
    place_name = "cupy"
    look_every = 5


MANY = settings(
    max_examples=80, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
TestOnTorch = OnTorch.TestCase
TestOnTorch.settings = MANY
TestOnCupy = OnCupy.TestCase
TestOnCupy.settings = settings(MANY, max_examples=20)


@pytest.fixture
def place(torch):
    made = Torch()
    yield made
    made.close()


class TestGraphs:
    """A decode step is captured once, with empty slots, and replayed whatever the slots hold."""

    @pytest.mark.parametrize("marker", [kk.KvBf16, kk.KvInt8, kk.KvFp8])
    @pytest.mark.parametrize(("by_layer", "v_head_dim"), [(False, HD), (True, HD), (True, 5)])
    def test_a_step_is_replayed(self, torch, place, rng, marker, by_layer, v_head_dim):
        """Sequences grow over block boundaries, come and go; a captured step writes for those that are there."""
        pool = new_pool(num_blocks=40, kv_dtype=marker, v_head_dim=v_head_dim, **place.options)
        slots = HeldSlots(place, pool)
        batch = slots.batch
        given = torch.float32 if marker.IS_QUANTISED else torch.bfloat16
        k = torch.zeros(NL, 4, NH, HD, dtype=given, device="cuda")
        v = torch.zeros(NL, 4, NH, v_head_dim, dtype=given, device="cuda")
        positions = torch.zeros(4, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(NL) if by_layer else [None]:
                rows = (k, v) if i is None else (k[i], v[i])
                batch.write(*rows, layer=i)
            torch.add(batch.context_lens.view(torch.int32), 1, out=positions)

        slots.enter(rng, 1, 6)
        slots.enter(rng, 3, 0)
        for step in range(3 * BS):
            if step == 4:
                slots.enter(rng, 0, 3)
            if step == 6:
                slots.enter(rng, 1, 1)
            if step == 9:
                slots.leave(3)
            for buffer, new in zip((k, v), slots.given(rng, 1), strict=True):
                buffer.copy_(place.put(new))
            batch.reserve()
            graph.replay()
            batch.advance()
            slots.check()
            told = place.get(positions).tolist()
            assert [n for n, held in zip(told, slots.slots, strict=True) if held] == [
                len(held.cache) for held in slots.taken
            ]
        pool.allocator.check()

    def test_the_documented_step(self, torch):
        """docs/kv_cache.md shows one, and it runs."""
        text = (ROOT / "docs/kv_cache.md").read_text()
        names: dict = {}
        exec(re.search(r"```python\n(import torch\n.*?)```", text, re.DOTALL)[1], names)
        assert [cache and len(cache) for cache in names["batch"].caches[:4]] == [32, None, 51, None]
        torch.cuda.synchronize()
        assert names["batch"].context_lens.tolist()[:3] == [32, 0, 51]

    def test_one_sequence(self, torch, place, rng):
        """A cache by itself can be captured too."""
        held = Held(place, kk.KvCache.paged(new_pool(kv_dtype=kk.KvFp8, **place.options)))
        k, v = (torch.zeros(NL, 2, NH, HD, device="cuda") for _ in range(2))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held.cache.write(k, v)
        for _ in range(7):
            for buffer, new in zip((k, v), held.given(rng, 2), strict=True):
                buffer.copy_(place.put(new))
            held.cache.reserve(2)
            graph.replay()
            held.cache.advance(2)
            held.check()


class TestStreams:
    def test_calls_are_in_the_order_of_their_stream_and_wait_for_nothing(self, torch, place, rng):
        """Behind a slow producer there, tables and all, before what follows there, and the host goes on meanwhile."""
        pool = new_pool(num_blocks=40, kv_dtype=kk.KvInt8, **place.options)
        stream = torch.cuda.Stream()
        caches = [kk.KvCache.paged(pool) for _ in range(4)]
        other = kk.KvCache.paged(pool)
        batch = kk.KvBatch(caches)
        k, v = (torch.zeros(NL, 9, NH, HD, device="cuda") for _ in range(2))
        step = torch.zeros(NL, 4, NH, HD, device="cuda")
        saved = torch.zeros(3, NH, NL, 2, BS, HD + 4, dtype=torch.int8, pin_memory=True)
        universal = kk.UniversalBlocks(saved, pool.block_shape)
        rows = rng.standard_normal((NL, 9, NH, HD)).astype(np.float32)
        source = place.put(rows)
        table = torch.zeros(batch.block_table.shape, dtype=torch.int32, device="cuda")
        lens = torch.zeros(4, dtype=torch.int32, device="cuda")

        def run():
            with torch.cuda.stream(stream):
                sleep(40)
                k.copy_(source)
                v.copy_(source)
                step.copy_(source[:, 5:9])
            caches[0].append(k, v, stream=stream)
            caches[1].append(k[:, :5], v[:, :5], stream=stream)
            for i in range(NL):
                batch.append(step[i], step[i], layer=i, stream=stream)
            batch.reserve(stream=stream)
            batch.write(step, step, stream=stream)
            batch.advance(stream=stream)
            kk.copy_blocks(universal, caches[0].blocks(), stream=stream)
            caches[0].truncate(0, stream=stream)
            other.restore(universal, 11, stream=stream)
            waited = stream.query()
            with torch.cuda.stream(stream):
                table.copy_(batch.block_table.view(torch.int32))
                lens.copy_(batch.context_lens.view(torch.int32))
            return waited

        # Once before, so that nothing has to be loaded while it matters.
        run()
        stream.synchronize()
        for cache in (*caches, other):
            cache.truncate(0, stream=stream)
        pool.k.zero_()
        torch.cuda.synchronize()
        assert not run()
        stream.synchronize()
        stored = reference.dequantised(reference.quantised(rows, "int8", np.float32), HD, "int8", np.float32)
        reference.assert_same_bytes(place.get(caches[1].gather()[0]), stored[:, [0, 1, 2, 3, 4, 6, 6]])
        reference.assert_same_bytes(place.get(other.gather()[1]), stored[:, [*range(9), 5, 5]])
        assert place.get(lens).tolist() == [0, 7, 2, 2]
        for row, cache in zip(place.get(table), caches, strict=True):
            blocks = cache.paged_block_indices
            assert row.tolist() == blocks + [pool.null_block] * (len(row) - len(blocks))

    def test_gathered_arrays_belong_to_the_stream(self, torch, place, rng):
        """They are written there behind what was on it, and memory that others still read is not theirs."""
        cache = kk.KvCache.paged(new_pool(num_blocks=4000, **place.options))
        rows = reference.random_kv(rng, (NL, 15000, NH, HD), np.float16)
        tensor = place.put(rows)
        cache.append(tensor, tensor)
        stream = torch.cuda.Stream()
        for _ in range(2):
            torch.cuda.synchronize()
            sleep(40)
            busy = torch.full_like(tensor, 3)
            out = busy + 1
            del busy
            k, v = cache.gather(stream=stream)
            stream.synchronize()
            reference.assert_same_bytes(place.get(k), rows)
            reference.assert_same_bytes(place.get(v), rows)
            assert bool((out == 4).all())

    def test_cupy(self, torch, rng):
        """Its arrays are made, and its calls are put, on the stream of whatever library."""
        place = Cupy()
        stream = torch.cuda.Stream()
        held = Held(place, kk.KvCache.paged(new_pool(kv_dtype=kk.KvInt8, **place.options), stream=stream))
        rows = [place.put(a) for a in held.given(rng, 9)]
        late = [place.cupy.zeros_like(a) for a in rows]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            sleep(40)
        with lifetime.cupy_stream(place.cupy.cuda, stream.cuda_stream):
            for to, of in zip(late, rows, strict=True):
                to[...] = of
        held.cache.append(*late, stream=stream)
        found = held.cache.gather(stream=stream.cuda_stream)
        assert not stream.query()
        stream.synchronize()
        for actual, expected in zip(found, held.stored(), strict=True):
            reference.assert_same_bytes(place.get(actual), expected)
        held.check()

    def test_rows_dropped_right_after_the_call(self, torch, place):
        """On another stream, the rows' memory is not handed out again before it has been read."""
        cache = kk.KvCache.paged(new_pool(num_blocks=4000, **place.options))
        stream = torch.cuda.Stream()
        rows = [torch.full((NL, 15000, NH, HD), 1.0, dtype=torch.float16, device="cuda") for _ in range(2)]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            sleep(60)
        cache.append(*rows, stream=stream)
        del rows
        others = [torch.full((NL, 15000, NH, HD), 2.0, dtype=torch.float16, device="cuda") for _ in range(2)]
        assert not stream.query()
        stream.synchronize()
        assert all(bool((array == 1).all()) for array in cache.gather())
        assert all(bool((array == 2).all()) for array in others)


class TestPlaces:
    def test_pinned_rows(self, torch, place, rng):
        """A cache in CUDA memory takes pinned host memory; pageable memory is refused by name, and leaves no trace."""
        held = Held(place, kk.KvCache.paged(new_pool(**place.options)))
        k, v = held.given(rng, 6)
        with pytest.raises(kk.KvbmValueError, match="k and v is in pageable host memory"):
            held.cache.append(k, v)
        assert held.cache.paged_block_indices == []
        assert place.get(held.cache.block_table).tolist() == [12] * 12
        held.cache.append(*(torch.from_numpy(a).pin_memory() for a in (k, v)))
        held.check()

    def test_the_host_agrees(self, torch, place, rng):
        """The same rows in a pool of NumPy's are the same bytes."""
        for marker in (kk.KvInt8, kk.KvFp8):
            rows = rng.standard_normal((NL, 40, NH, 128)).astype(np.float32) * 10
            found = []
            for options, put in (({}, np.copy), (place.options, place.put)):
                pool = new_pool(head_dim=128, kv_dtype=marker, **options)
                cache = kk.KvCache.paged(pool)
                cache.append(put(rows), put(rows))
                found.append((pool.rows.k, *cache.gather(dtype="fp16")))
            for on_host, on_device in zip(*found, strict=True):
                reference.assert_same_bytes(place.get(on_device), on_host)

    def test_cuda_memory_into_a_pool_of_the_host(self, place, rng):
        """Is refused by name."""
        cache = kk.KvCache.paged(new_pool())
        rows = place.put(reference.random_kv(rng, (NL, 2, NH, HD), np.float16))
        with pytest.raises(kk.KvbmValueError, match="k and v is on cuda:0, expected host memory, as the cache"):
            cache.append(rows, rows)

    def test_long_tables(self, place):
        """More words than fit in the parameters of one launch."""
        cache = kk.KvCache.paged(new_pool(num_blocks=20000, num_layers=1, block_size=1, **place.options))
        cache.reserve(19999)
        assert place.get(cache.block_table).tolist() == [*range(19999), 20000]
        cache.truncate(0)
        assert set(place.get(cache.block_table).tolist()) == {20000}

    def test_too_much_memory(self):
        """What the device does not have is a KvbmMemoryError."""
        with pytest.raises(kk.KvbmMemoryError, match="bytes for K and V .* cannot be had"):
            kk.BlockPool(1 << 30, 16, 80, 8, 128, arrays="torch", device="cuda")


def test_a_model_generates(torch):
    """The tiny Llama on the GPU with a paged cache in place of its own: the same logits to the bit."""
    transformers = pytest.importorskip("transformers")
    import test_llama_paged as paged
    from test_llama import HEAD_DIM, NUM_LAYERS, small_llama

    model = small_llama(num_kv_heads=2).cuda()
    tokens = paged.prompt(1).cuda()
    pool = kk.BlockPool(16, 16, NUM_LAYERS, 2, HEAD_DIM, kv_dtype=kk.KvBf16, arrays="torch", device="cuda")
    cache = kk.KvCache.paged(pool)
    expected = paged.run(model, tokens, transformers.DynamicCache(config=model.config))
    paged.assert_same(paged.run(model, tokens, paged.PagedCache(cache)), expected)
