"""A connector: blocks of a running generation go to host memory as they fill, and come back when a prompt begins alike.

An engine of two tensor-parallel ranks answers a prompt. Each block that has become full is copied to the host as a
universal block and found there by the hash of its tokens and of all before them. Later the conversation goes on, with
another question, in engines that have never seen it, of two ranks and of four: what is found is restored and only the
rest computed. The time of the restore is printed beside that of computing the same tokens, and the logits have to be,
bit for bit, those of the engine that kept its cache.

    python examples/offload.py [--device cpu|cuda] [--prompt TOKENS] [--generate TOKENS]

It needs PyTorch. With ``--device cuda`` the host memory is pinned, copies run on a stream of their own, and the model
has the size of Llama-3.1-8B; on the CPU it is a small one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from paged_model import Cache, Config, Model

import kvbm_kernels as kk

BLOCK_SIZE = 16
ROUNDS = 5
SIZES = {
    "cpu": Config(8, 512, 8, 4, 64, 1024, 8192, torch.float32),
    "cuda": Config(32, 4096, 32, 8, 128, 14336, 128256, torch.bfloat16),
}


class Connector:
    """Blocks in host memory: universal, so that any number of ranks reads its heads of them, and found by hash.

    Which blocks are in use, and which to give up first, is the business of a BlockAllocator, as in a pool on the GPU.
    """

    def __init__(self, shape: kk.BlockShape, num_blocks: int, device: str) -> None:
        dtype = torch.float32 if shape.dtype is kk.DType.F32 else torch.bfloat16
        extents = (num_blocks, shape.nh, shape.nl, shape.no, shape.nt, shape.hd)
        self.memory = torch.empty(extents, dtype=dtype, pin_memory=device == "cuda")
        self.blocks = kk.UniversalBlocks(self.memory, shape)
        self.slots = kk.BlockAllocator(num_blocks)
        self.stream = torch.cuda.Stream() if device == "cuda" else None

    def save(self, hashes: list[bytes], cache: Cache, first: int) -> int:
        """Copy the blocks of a cache from the one at ``first`` on, as many as there are hashes for; gives their number.

        The blocks must not change until wait(). What is there already is not copied again.
        """
        new: dict[bytes, int] = {}
        for digest, block in zip(hashes[first:], cache.blocks[first:], strict=False):
            # Found, it counts as used a moment ago, and is given up later.
            found = self.slots.lookup([digest])
            self.slots.free(found)
            if not found:
                new[digest] = block
        slots = self.slots.allocate(len(new))
        self._copy(cache, slots, list(new.values()), to_host=True)
        for slot, digest in zip(slots, new, strict=True):
            self.slots.register(slot, digest)
        # Nobody holds them, but they can be found until their place is needed.
        self.slots.free(slots)
        return len(new)

    def restore(self, hashes: list[bytes], cache: Cache) -> int:
        """Begin an empty cache with the blocks that are found, from the first on; gives how many tokens they hold."""
        slots = self.slots.lookup(hashes)
        cache.grow(len(slots) * cache.block_size)
        self._copy(cache, slots, cache.blocks, to_host=False)
        self.wait()
        self.slots.free(slots)
        return cache.length

    def wait(self) -> None:
        """Have the engine's stream wait for the copies so far."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)

    def _copy(self, cache: Cache, slots: list[int], blocks: list[int], *, to_host: bool) -> None:
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())
        host, ranks = [self.blocks[slots]], [rank[blocks] for rank in cache.ranks]
        nh, size = cache.shape.nh, len(ranks)
        if to_host:
            dsts, srcs = kk.tp.plan(size, 1, nh).views(host, ranks)
        else:
            dsts, srcs = kk.tp.plan(1, size, nh).views(ranks, host)
        kk.copy_blocks(dsts, srcs, stream=self.stream)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--prompt", type=int, help="tokens of the prompt (default: 1,000, or 16,000 on a GPU)")
    parser.add_argument("--generate", type=int, default=40, help="tokens to generate (default: 40)")
    arguments = parser.parse_args()
    device = arguments.device
    if device == "cuda" and (kk.is_stub_build() or not torch.cuda.is_available()):
        sys.exit("offload: --device cuda needs a GPU, and a library built with CUDA")
    prompt_tokens = arguments.prompt or (1000 if device == "cpu" else 16000)
    if prompt_tokens < BLOCK_SIZE or arguments.generate < 1:
        parser.error(f"expected --prompt {BLOCK_SIZE} or more and --generate 1 or more")

    model = Model(SIZES[device], device)
    random = np.random.default_rng(0)
    prompt, question = (random.integers(0, model.config.vocabulary, n).tolist() for n in (prompt_tokens, 20))
    num_blocks = -(-(prompt_tokens + arguments.generate + len(question)) // BLOCK_SIZE)

    def new_cache(ranks: int) -> Cache:
        return Cache(model, ranks, num_blocks, BLOCK_SIZE)

    # The first engine: two ranks. Blocks leave as they fill; generation does not wait for them.
    live = new_cache(2)
    connector = Connector(live.shape, num_blocks, device)
    tokens = list(prompt)
    logits = model.forward(prompt, live)
    saved = connector.save(kk.block_hashes(tokens, BLOCK_SIZE), live, 0)
    finished = saved
    for _ in range(arguments.generate):
        tokens.append(int(logits.argmax()))
        logits = model.forward(tokens[-1:], live)
        if live.length // BLOCK_SIZE > finished:
            saved += connector.save(kk.block_hashes(tokens, BLOCK_SIZE), live, finished)
            finished = live.length // BLOCK_SIZE

    # The conversation goes on. The last token is never looked for: its logits are wanted.
    tokens += question
    hashes = kk.block_hashes(tokens[:-1], BLOCK_SIZE)
    connector.wait()
    live.truncate(finished * BLOCK_SIZE)
    expected = model.forward(tokens[live.length :], live)

    nbytes = finished * live.shape.block_nbytes
    print(f"{finished} blocks of {live.shape}: {finished * BLOCK_SIZE} tokens, {nbytes / 1e6:.1f} MB")
    print(f"{saved} saved while 2 ranks generated; then, with {len(tokens) - finished * BLOCK_SIZE} tokens to compute:")
    slowest = 0.0
    for ranks in (2, 4):
        cache = new_cache(ranks)
        seconds = timed(device, cache, lambda cache=cache: connector.restore(hashes, cache))
        slowest = max(slowest, seconds)
        print(f"restored to {ranks} ranks {seconds * 1e3:10.2f} ms{nbytes / seconds / 1e9:8.1f} GB/s")
        if cache.length != finished * BLOCK_SIZE:
            sys.exit(f"offload: {cache.length} tokens were found, expected {finished * BLOCK_SIZE}")
        if not torch.equal(model.forward(tokens[cache.length :], cache), expected):
            sys.exit(f"offload: the logits of {ranks} ranks differ from those of the engine that kept its cache")
    cache = new_cache(2)
    seconds = timed(device, cache, lambda: model.forward(tokens[: finished * BLOCK_SIZE], cache))
    print(f"computed again     {seconds * 1e3:12.2f} ms{seconds / slowest:8.1f} times the slower restore")
    print("verified: the next logits are those of the engine that kept its cache, bit for bit")


def timed(device: str, cache: Cache, work: Callable[[], object]) -> float:
    """The median time to fill a cache that is empty again at each round; the first round is not counted."""
    times = []
    for _ in range(ROUNDS + 1):
        cache.truncate(0)
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


if __name__ == "__main__":
    main()
