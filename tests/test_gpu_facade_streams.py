"""The Python package on CUDA streams: whose stream a call is on, and what it is in order with."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import kvbm_kernels as kk
import reference
from gpu_arrays import STREAMS, get_stack, make, place, put_chunks, sleep
from kinds import views

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("idle_cuda")]


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
