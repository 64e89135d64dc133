"""The Python package in CUDA graphs: what a capture takes in, and what may go on beside it."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import kvbm_kernels as kk
import reference
from gpu_arrays import NB, NL, NO, make, num_held, place, put_chunks

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("idle_cuda")]


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
