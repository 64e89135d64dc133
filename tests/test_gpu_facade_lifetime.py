"""How long the arrays of a call live whose work is still to be done on a CUDA stream."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

import kvbm_kernels as kk
from gpu_arrays import PINNED, STREAMS, num_held, place, sleep
from kvbm_kernels import lifetime

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("idle_cuda")]

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
