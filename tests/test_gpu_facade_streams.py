"""The Python package on CUDA streams: order, capture, errors of others, and how long arrays live."""

from __future__ import annotations

import ctypes
import re
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest

import kvbm_kernels as kk
import reference
from gpu_arrays import NB, NL, NO, PINNED, code_of, get_stack, make, place, put_chunks, sleep
from kinds import views
from kvbm_kernels import lifetime

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def cuda(torch):
    """PyTorch's CUDA, idle before the test and after."""
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


class WithProtocol:
    """A stream of a library that has only the protocol."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.handle)


STREAMS = {
    "torch": lambda stream: stream,
    "handle": lambda stream: stream.cuda_stream,
    "cupy": lambda stream: pytest.importorskip("cupy").cuda.ExternalStream(stream.cuda_stream),
    "protocol": lambda stream: WithProtocol(stream.cuda_stream),
}


class TestStreams:
    @pytest.mark.parametrize("form", STREAMS)
    @pytest.mark.parametrize("copy", ["copy_blocks", "vectorized_copy", "memcpy_batch"])
    def test_the_copy_is_on_the_stream_given(self, torch, form, copy):
        """Behind a slow producer there, and before what follows there."""
        stream = torch.cuda.Stream()
        src, dst, out = (torch.zeros(4, 4096, dtype=torch.uint8, device="cuda") for _ in range(3))
        shape = kk.BlockShape(1, 1, 1, 1, 4096, "uint8")
        if copy == "copy_blocks":
            args = [kk.BlockStack.from_layers([t], shape, "bd") for t in (dst, src)]
        else:
            args = [list(dst), list(src)]
        torch.cuda.synchronize()
        # Once before, so that nothing has to be loaded while it matters.
        for value in (0, 7):
            stream.synchronize()
            with torch.cuda.stream(stream):
                sleep(30)
                src.fill_(value)
            getattr(kk, copy)(*args, stream=STREAMS[form](stream))
            waited = stream.query()
            with torch.cuda.stream(stream):
                out.copy_(dst)
        assert not waited
        stream.synchronize()
        assert (out == 7).all()

    def test_a_stream_of_cuda_core(self, torch):
        core = pytest.importorskip("cuda.core")
        if not hasattr(core, "Device"):
            core = pytest.importorskip("cuda.core.experimental")
        device = core.Device(torch.cuda.current_device())
        device.set_current()
        stream = device.create_stream()
        src, dst = torch.full((4096,), 7, device="cuda"), torch.zeros(4096, dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        kk.vectorized_copy([dst], [src], stream=stream)
        stream.sync()
        assert (dst == 7).all()

    @pytest.mark.parametrize("library", ["torch", "cupy"])
    @pytest.mark.parametrize("pinned", [False, True])
    def test_none_is_the_current_stream_of_the_library(self, torch, cupy, library, pinned):
        stream = torch.cuda.Stream()
        external = cupy.cuda.ExternalStream(stream.cuda_stream)
        where = place(library)
        src, dst = where.put(np.zeros(4096, np.uint8)), where.put(np.zeros(4096, np.uint8))
        staging = place("cupyx pinned").put(np.zeros(4096, np.uint8))
        torch.cuda.synchronize()
        # Once before, so that nothing has to be compiled or loaded while it matters; CuPy needs no kernel for 0.
        for value in (3, 7):
            stream.synchronize()
            with torch.cuda.stream(stream):
                sleep(30)
            with external, torch.cuda.stream(stream):
                src[:] = value
            with external if library == "cupy" else torch.cuda.stream(stream):
                if pinned:
                    kk.vectorized_copy([staging], [src])
                    kk.vectorized_copy([dst], [staging])
                else:
                    kk.vectorized_copy([dst], [src])
            waited = stream.query()
        assert not waited
        stream.synchronize()
        assert (where.get(dst) == 7).all()

    def test_libraries_on_different_streams_are_refused(self, torch, cupy):
        stream = torch.cuda.Stream()
        tensor, array = torch.zeros(64, dtype=torch.uint8, device="cuda"), cupy.ones(64, np.uint8)
        torch.cuda.synchronize()
        message = "stream is None, and the arrays have different current streams"
        with torch.cuda.stream(stream), pytest.raises(ValueError, match=message):
            kk.vectorized_copy([tensor], [array])
        assert not tensor.any()
        with torch.cuda.stream(stream):
            kk.vectorized_copy([tensor], [array], stream=stream)
            assert tensor.all()

    @pytest.mark.parametrize("side", [False, True])
    def test_a_source_rewritten_right_after_the_call(self, torch, side):
        """500 rounds: each copy takes what was there before the next write on the stream."""
        order = np.random.default_rng(0).permutation(64)
        src, dst = (torch.zeros(64, 4096, dtype=torch.uint8, device="cuda") for _ in range(2))
        shape = kk.BlockShape(1, 1, 1, 1, 4096, "uint8")
        of, to = (kk.BlockStack.from_layers([t], shape, "bd")[order] for t in (src, dst))
        bad = torch.zeros((), dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream() if side else torch.cuda.default_stream()):
            for i in range(500):
                src.fill_(i % 251)
                kk.copy_blocks(to, of)
                src.fill_(252)
                bad += (dst != i % 251).sum()
            assert int(bad) == 0

    def test_threads_on_their_own_streams(self, torch):
        failures = []

        def work(seed):
            try:
                rng = np.random.default_rng(seed)
                host = place("numpy over torch pinned")
                with torch.cuda.stream(torch.cuda.Stream()):
                    for layout in ("NHD", "HND") * 5:
                        kv, shape = make(rng)
                        where = place("torch", "bfloat16")
                        blocks = put_chunks(where, kv, layout)
                        universals = [host.put(block) for block in np.zeros_like(reference.universal(kv))]
                        kk.universal_from_block(universals, blocks, layout)
                        back = put_chunks(where, np.zeros_like(kv), layout)
                        kk.block_from_universal(back, universals, layout)
                        reference.assert_same_bytes(get_stack(where, back, shape, layout), kv)
            except BaseException as error:
                failures.append(repr(error))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures[0]

    def test_the_current_device_stays(self, torch, rng):
        """The work runs on the arrays' device, also on its default stream, which has no handle of its own."""
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two GPUs")
        kv, shape = make(rng)
        with torch.cuda.device(1):
            src, _ = views(kv, shape, *place("torch", "bfloat16"))["NHD"]
            side = torch.cuda.Stream()
            torch.cuda.synchronize()
        for stream in (None, torch.cuda.default_stream(1), side, side.cuda_stream):
            with torch.cuda.device(1):
                dst, read_back = views(np.zeros_like(kv), shape, *place("torch", "bfloat16"))["universal"]
                torch.cuda.synchronize()
            assert torch.cuda.current_device() == 0
            kk.copy_blocks(dst, src, stream=stream)
            assert torch.cuda.current_device() == 0
            torch.cuda.synchronize(1)
            reference.assert_same_bytes(read_back(), kv)


NBYTES = 48 << 20


def pinned_array(torch, name):
    if name == "cupyx pinned":
        return pytest.importorskip("cupyx").empty_pinned(NBYTES, np.uint8)
    tensor = torch.empty(NBYTES, dtype=torch.uint8, pin_memory=True)
    return tensor.numpy() if name == "numpy over torch pinned" else tensor


def address(array):
    if hasattr(array, "data_ptr"):
        return array.data_ptr()
    return array.data.ptr if hasattr(array.data, "ptr") else array.ctypes.data


def num_held():
    return sum(map(len, lifetime._held.values()))


@pytest.fixture(params=[True, False], ids=["kept", "not kept"])
def kept(request, monkeypatch, torch, cupy):
    """Without what keeps arrays alive, each of these tests sees its memory handed out again under the copy."""
    lifetime.let_go()
    # Nothing but what the test drops is there to be handed out.
    for pool in (cupy.get_default_memory_pool(), cupy.get_default_pinned_memory_pool()):
        pool.free_all_blocks()
    torch.cuda.empty_cache()
    getattr(torch._C, "_host_emptyCache", lambda: None)()
    if not request.param:
        monkeypatch.setattr("kvbm_kernels.streams.keep_until_passed", lambda *_: None)
    return request.param


class TestArraysDroppedRightAfterTheCall:
    @pytest.mark.parametrize("name", PINNED)
    def test_pinned_host_memory(self, torch, name, kept):
        """Pinned allocators hand memory out again at once."""
        stream = torch.cuda.Stream()
        dst = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
        source = pinned_array(torch, name)
        source[:] = 1
        at = address(source)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            sleep(300)
            kk.vectorized_copy([dst], [source])
        del source
        other = pinned_array(torch, name)
        other[:] = 2
        stream.synchronize()
        assert (address(other) == at) == (not kept)
        assert (dst == (1 if kept else 2)).all()

    @pytest.mark.parametrize("form", STREAMS)
    @pytest.mark.parametrize("library", ["torch", "cupy"])
    @pytest.mark.parametrize("dropped", ["source", "destination"])
    def test_device_memory_used_on_another_stream(self, torch, cupy, library, form, dropped, kept):
        """Device allocators hand memory out again for use on the stream that it came from."""

        def full(value):
            if library == "torch":
                return torch.full((NBYTES,), value, dtype=torch.uint8, device="cuda")
            return cupy.full(NBYTES, value, np.uint8)

        stream = torch.cuda.Stream()
        arrays = {"source": full(1), "destination": full(0)}
        at = address(arrays[dropped])
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            sleep(100)
        kk.vectorized_copy([arrays["destination"]], [arrays["source"]], stream=STREAMS[form](stream))
        del arrays[dropped]
        other = full(2)
        reused = address(other) == at
        assert kept or not stream.query(), "the memory was handed out too late to matter"
        torch.cuda.synchronize()
        assert reused == (not kept)
        if dropped == "source":
            assert bool((arrays["destination"] == (1 if kept else 2)).all())
        else:
            assert bool((other == (2 if kept else 1)).all())

    def test_arrays_of_no_known_library(self, torch):
        """What comes through DLPack alone is held whatever the stream."""
        exported = place("torch through DLPack").put(np.ones(64, np.uint8))
        dst = torch.zeros(64, dtype=torch.uint8, device="cuda")
        lifetime.let_go()
        assert num_held() == 0
        sleep(50)
        kk.vectorized_copy([dst], [exported])
        assert num_held() == 1
        del exported
        torch.cuda.synchronize()
        lifetime.let_go()
        assert num_held() == 0
        assert dst.all()

    @pytest.mark.parametrize("name", ["torch pinned", "cupyx pinned"])
    def test_they_are_let_go_once_the_stream_has_passed(self, torch, name):
        stream = torch.cuda.Stream()
        dst = torch.zeros(64, dtype=torch.uint8, device="cuda")
        source = place(name).put(np.ones(64, np.uint8))
        alive = weakref.ref(source)
        with torch.cuda.stream(stream):
            sleep(50)
            kk.vectorized_copy([dst], [source])
            del source
            lifetime.let_go()
            assert alive() is not None
            stream.synchronize()
            # The next call that has something to keep lets go of what is no longer needed.
            kk.vectorized_copy([dst], [place(name).put(np.ones(64, np.uint8))])
        assert alive() is None
        stream.synchronize()

    def test_little_is_held_however_many_calls(self, torch):
        dst = torch.zeros(64, dtype=torch.uint8, device="cuda")
        source = place("torch pinned").put(np.ones(64, np.uint8))
        for _ in range(300):
            kk.vectorized_copy([dst], [source])
            torch.cuda.synchronize()
        assert num_held() <= 1

    def test_on_their_own_stream_nothing_is_held(self, torch):
        torch.cuda.synchronize()
        lifetime.let_go()
        src, dst = torch.ones(64, device="cuda"), torch.zeros(64, device="cuda")
        kk.vectorized_copy([dst], [src])
        with torch.cuda.stream(torch.cuda.Stream()):
            kk.vectorized_copy([dst], [src])
        assert num_held() == 0


class TestCapture:
    def graph_of(self, torch, work, mode="global"):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=mode):
            work()
        return graph

    @pytest.mark.parametrize("pinned", [False, True])
    def test_replays_copy_the_new_content(self, torch, rng, pinned):
        kv, shape = make(rng)
        where = place("torch", "bfloat16")
        source = place("torch pinned") if pinned else where
        blocks = put_chunks(source, kv, "NHD")
        by_views, by_lists, by_batch = (where.put(np.zeros_like(reference.universal(kv))) for _ in range(3))
        to, of = kk.UniversalBlocks(by_views, shape), kk.BlockStack(blocks, shape)
        flat = list(by_batch.view(NB * NL * NO, -1))
        torch.cuda.synchronize()

        def work():
            kk.copy_blocks(to, of)
            kk.universal_from_block(list(by_lists), blocks, "NHD")
            kk.memcpy_batch(flat, [chunk.view(-1) for block in blocks for chunk in block])

        held = num_held()
        graph = self.graph_of(torch, work)
        assert num_held() == held
        for _ in range(3):
            kv = reference.random_kv(rng, kv.shape, kv.dtype)
            for block, chunks in zip(blocks, reference.block_stack(kv, "NHD"), strict=True):
                for tensor, chunk in zip(block, chunks, strict=True):
                    tensor.copy_(source.put(chunk))
            torch.cuda.synchronize()
            graph.replay()
            reference.assert_same_bytes(where.get(by_views), reference.universal(kv))
            reference.assert_same_bytes(where.get(by_lists), reference.universal(kv))
            stacks = np.array(reference.block_stack(kv, "NHD")).reshape(NB * NL * NO, -1)
            reference.assert_same_bytes(where.get(by_batch).reshape(stacks.shape), stacks)

    def test_what_is_held_from_before_does_not_disturb_a_capture(self, torch):
        """Asking for an event in a capture would end it; that goes for a stream that has joined one, too."""
        source = place("torch pinned").put(np.ones(64, np.uint8))
        dst, other = (torch.zeros(64, dtype=torch.uint8, device="cuda") for _ in range(2))
        side, fork, join = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()
        kk.vectorized_copy([dst], [source])

        def work():
            kk.vectorized_copy([dst], [source])
            fork.record()
            side.wait_event(fork)
            kk.vectorized_copy([other], [source], stream=side)
            kk.memcpy_batch([other], [source], stream=side.cuda_stream)
            join.record(side)
            torch.cuda.current_stream().wait_event(join)

        graph = self.graph_of(torch, work)
        source.fill_(5)
        graph.replay()
        torch.cuda.synchronize()
        assert (dst == 5).all()
        assert (other == 5).all()

    def test_copies_of_other_threads_during_a_capture(self, torch):
        """Its mode has to allow what they do."""
        source = place("torch pinned").put(np.full(64, 3, np.uint8))
        dst, other = (torch.zeros(64, dtype=torch.uint8, device="cuda") for _ in range(2))
        torch.cuda.synchronize()
        failures = []

        def copy_elsewhere():
            try:
                with torch.cuda.stream(torch.cuda.Stream()):
                    for _ in range(20):
                        kk.vectorized_copy([other], [source])
                    torch.cuda.current_stream().synchronize()
            except BaseException as error:
                failures.append(repr(error))

        def work():
            kk.vectorized_copy([dst], [source])
            thread = threading.Thread(target=copy_elsewhere)
            thread.start()
            thread.join()

        graph = self.graph_of(torch, work, mode="thread_local")
        assert not failures, failures[0]
        assert (other == 3).all()
        graph.replay()
        assert (dst == 3).all()


@pytest.fixture
def cudart(torch):
    """The CUDA runtime that PyTorch uses, with the error it remembers for this thread cleared before and after."""
    found = re.findall(r"(/\S*libcudart\.so\S*)", Path("/proc/self/maps").read_text())
    if not found:
        pytest.skip("PyTorch's CUDA runtime is not a library of its own")
    runtime = ctypes.CDLL(found[0])
    runtime.cudaGetLastError()
    yield runtime
    runtime.cudaGetLastError()


class TestErrorsOfOthers:
    def test_they_are_neither_reported_nor_swallowed(self, torch, cudart, rng):
        kv, shape = make(rng)
        where = place("torch", "bfloat16")
        src, _ = views(kv, shape, *where)["NHD"]
        dst, read_back = views(np.zeros_like(kv), shape, *where)["universal"]
        staging = place("torch pinned").put(np.zeros(64, np.uint8))
        lists = [staging], [torch.ones(64, dtype=torch.uint8, device="cuda")]
        torch.cuda.synchronize()
        lifetime.let_go()
        invalid_device = cudart.cudaSetDevice(9999)
        assert invalid_device
        assert cudart.cudaPeekAtLastError() == invalid_device
        kk.copy_blocks(dst, src)
        kk.vectorized_copy(*lists)
        kk.build_info()
        assert cudart.cudaGetLastError() == invalid_device
        torch.cuda.synchronize()
        assert staging.all()
        reference.assert_same_bytes(read_back(), kv)

    def test_ours_do_not_stay_behind(self, torch, cudart):
        src, dst = (torch.zeros(2, 64, dtype=torch.uint8, device="cuda") for _ in range(2))
        with pytest.raises(kk.KvbmError):
            kk.vectorized_copy(list(dst), [np.zeros(64, np.uint8)] * 2)
        assert code_of(lambda: kk.memcpy_batch(list(dst), list(src), mode="batch", stream=0)) in (0, 801)
        assert cudart.cudaPeekAtLastError() == 0
