"""The caches of inference engines, in plain NumPy.

Each function here allocates one engine's cache the way that engine does, filled with noise, and says two things about
it: ``tensors``, what the engine has in its hands, and ``rows``, where in these the rows of a logical cache
``kv[b, l, o, t, h, :]`` belong. Nothing in this file knows the library; tests compare the library with it bit for bit.

    B blocks, L layers, N tokens a block, H heads, D elements a row, C = 2*D for K and V in one row
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Size(NamedTuple):
    """How large a cache is; with no = 1 it is one of MLA."""

    B: int
    L: int
    N: int
    H: int
    D: int
    no: int = 2
    dtype: Any = np.uint16


class Cache(NamedTuple):
    """An engine's cache: ``rows[l][o]`` is a view ``[B, pieces, N/pieces, H, D]``, with one piece but where it says.

    Blocks before ``first`` are not for sequences. ``memory`` are all the arrays there are.
    """

    tensors: Any
    rows: list[list[np.ndarray]]
    memory: list[np.ndarray]
    first: int = 0

    def write(self, kv: np.ndarray, ids: list[int]) -> None:
        """Put block b of the logical cache into the engine's block ids[b]."""
        for layer, outers in enumerate(self.rows):
            for outer, rows in enumerate(outers):
                rows[ids] = kv[:, layer, outer].reshape(len(ids), *rows.shape[1:])

    def read(self, ids: list[int]) -> np.ndarray:
        """The logical cache of these blocks."""
        layers = [[rows[ids].reshape(len(ids), -1, *rows.shape[3:]) for rows in outers] for outers in self.rows]
        return np.array(layers).transpose(2, 0, 1, 3, 4, 5)


def noise(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(rng.bytes(nbytes), np.uint8).copy().view(dtype).reshape(shape)


def one_piece(rows: np.ndarray) -> np.ndarray:
    """[B, N, H, D] as [B, 1, N, H, D]."""
    return rows[:, None]


def spelled(physical: np.ndarray, spelling: str, order: str) -> np.ndarray:
    """A view with its dimensions in another order: the letters of the one spelling rearranged to be the other."""
    return physical.transpose([spelling.index(letter) for letter in order])


def allocate(rng: np.random.Generator, size: Size, spelling: str) -> np.ndarray:
    """An array with these dimensions; 2 stands for K and V, C for K|V in one row."""
    extents = {**size._asdict(), "2": 2, "C": size.no * size.D}
    return noise(rng, tuple(extents[letter] for letter in spelling), size.dtype)


def each_layer(rng: np.random.Generator, size: Size, spelling: str, order: str) -> tuple[list, list]:
    """A tensor for each layer that lies in memory as spelled, in the order given; and the memory."""
    memory = [allocate(rng, size, spelling) for _ in range(size.L)]
    return [spelled(each, spelling, order) for each in memory], memory


# vLLM: register_kv_caches is given logical shapes, whose strides are the physical order.


def vllm_kv_first(rng, size: Size, physical: str) -> Cache:
    """[2, B, N, H, D] a layer; physical is "2BNHD" or "2BHND", or over all layers "BL2NHD" or "BHL2ND"."""
    layers, memory = _vllm_layers(rng, size, physical, "2BNHD")
    return Cache(layers, [[one_piece(layer[o]) for o in range(2)] for layer in layers], memory, 1)


def vllm_blocks_first(rng, size: Size, physical: str) -> Cache:
    """[B, 2, N, H, D] a layer; physical is "B2NHD" or "B2HND", or over all layers "BL2NHD" or "B2HLND"."""
    layers, memory = _vllm_layers(rng, size, physical, "B2NHD")
    return Cache(layers, [[one_piece(layer[:, o]) for o in range(2)] for layer in layers], memory, 1)


def vllm_packed(rng, size: Size, physical: str) -> Cache:
    """[B, H, N, C] a layer; physical is "BNHC" or "BHNC", or one of the six names, which are over all layers."""
    layers, memory = _vllm_layers(rng, size, physical, "BHNC")
    return Cache({f"layers.{i}.attn": layer for i, layer in enumerate(layers)}, _of_packed(layers, size), memory, 1)


def _vllm_layers(rng, size, physical, order):
    if "L" not in physical:
        return each_layer(rng, size, physical, order)
    pool = allocate(rng, size, physical)
    return list(spelled(pool, physical, "L" + order)), [pool]


def _of_packed(layers, size):
    """The rows of K and V of tensors [B, H, N, C]."""

    def apart(layer):
        return np.split(layer, size.no, axis=-1)

    return [[one_piece(spelled(rows, "BHND", "BNHD")) for rows in apart(layer)] for layer in layers]


def vllm_whole(rng, size: Size, name: str) -> Cache:
    """One tensor over all layers, its dimensions in the order of its name."""
    pool = allocate(rng, size, name)
    if "C" in name:
        return Cache(pool, _of_packed(list(spelled(pool, name, "LBHNC")), size), [pool], 1)
    layers = spelled(pool, name, "L2BNHD")
    return Cache(pool, [[one_piece(layer[o]) for o in range(2)] for layer in layers], [pool], 1)


def vllm_padded(rng, size: Size, name: str, padding: int) -> Cache:
    """A flat buffer with pages of a whole layer and block, each with this many elements behind it."""
    counts = (size.L, size.B) if name[0] == "L" else (size.B, size.L)
    inner = (size.H, size.N) if name[2] == "H" else (size.N, size.H)
    length = size.N * size.H * size.no * size.D
    pages = noise(rng, (*counts, length + padding), size.dtype)
    filled = pages[..., :length].reshape(*counts, *inner, size.no * size.D)
    layers = list(spelled(filled, name, "LBHNC"))
    return Cache(layers, _of_packed(layers, size), [pages], 1)


def vllm_kernel_blocks(rng, size: Size, physical: str, pieces: int, laid_out=vllm_packed) -> Cache:
    """Blocks of N tokens in kernel blocks of N/pieces, each laid out as one of the functions above does it."""
    cache = laid_out(rng, size._replace(B=size.B * pieces, N=size.N // pieces), physical)
    shape = (size.B, pieces, size.N // pieces, size.H, size.D)
    return cache._replace(rows=[[rows.reshape(shape) for rows in outers] for outers in cache.rows])


def vllm_planes(rng, size: Size) -> Cache:
    """[B, 2, N, H*D] a layer."""
    memory = [allocate(rng, size, "B2NHD") for _ in range(size.L)]
    rows = [[one_piece(layer[:, o]) for o in range(2)] for layer in memory]
    return Cache([layer.reshape(size.B, 2, size.N, -1) for layer in memory], rows, memory, 1)


def vllm_mla(rng, size: Size) -> Cache:
    """[B, N, D] a layer."""
    layers, memory = each_layer(rng, size, "BND", "BND")
    return Cache(layers, [[one_piece(layer[:, :, None])] for layer in layers], memory, 1)


# SGLang: slots of tokens on the device, the first page of them a dummy; on the host one tensor.


def sglang_nhd(rng, size: Size) -> Cache:
    """K and V [slots, H, D], two halves of an allocation a layer, which is padded to whole pages."""
    memory = [noise(rng, (2, size.B * size.N, size.H, size.D), size.dtype) for _ in range(size.L)]
    return Cache(
        [(fused[0], fused[1]) for fused in memory],
        [[one_piece(fused[o].reshape(size.B, size.N, size.H, size.D)) for o in range(2)] for fused in memory],
        memory,
        1,
    )


def sglang_hnd(rng, size: Size) -> Cache:
    """K and V [B, H, N, D], of which slots after the last page are no part."""
    memory = [allocate(rng, size, "2BHND") for _ in range(size.L)]
    return Cache(
        [(fused[0], fused[1]) for fused in memory],
        [[one_piece(spelled(fused[o], "BHND", "BNHD")) for o in range(2)] for fused in memory],
        memory,
        1,
    )


def sglang_mla(rng, size: Size) -> Cache:
    """[slots, 1, D] a layer, with slots after the last whole page."""
    memory = [noise(rng, (size.B * size.N + size.N - 1, 1, size.D), size.dtype) for _ in range(size.L)]
    whole = [layer[: size.B * size.N].reshape(size.B, size.N, 1, size.D) for layer in memory]
    return Cache(memory, [[one_piece(layer)] for layer in whole], memory, 1)


def sglang_host(rng, size: Size, layout: str, groups: int = 1) -> Cache:
    """One of the layouts of HiCache; ``groups`` are the head groups of page_unified."""
    if layout == "page_unified" and size.no == 2:
        pool = noise(rng, (size.B, groups, size.L, 2, size.N, size.H // groups, size.D), size.dtype)
        kv = pool.transpose(3, 2, 0, 4, 1, 5, 6)
        rows = [[kv[o, layer] for o in range(2)] for layer in range(size.L)]
        # Heads are groups of heads: only with one group, or groups of one head, are they one dimension.
        flat = [[r[:, :, 0] if groups == 1 else r[:, :, :, 0] for r in outers] for outers in rows]
        return Cache(pool, [[one_piece(r) for r in outers] for outers in flat], [pool])
    spelling = {
        "layer_first": "oLBNHD",
        "page_first": "oBNLHD",
        "page_first_direct": "oBLNHD",
        "page_head": "oBHNLD",
        "page_unified": "oBLNHD",
    }[layout]
    pool = noise(rng, tuple({**size._asdict(), "o": size.no}[letter] for letter in spelling), size.dtype)
    kv = spelled(pool, spelling, "oLBNHD")
    shape = list(pool.shape)
    if layout == "layer_first":
        shape[2:4] = [size.B * size.N]
    elif layout == "page_first":
        shape[1:3] = [size.B * size.N]
    if size.no == 1:
        shape = shape[1:]
        if layout == "page_unified":
            del shape[3]
    return Cache(pool.reshape(shape), [[one_piece(kv[o, i]) for o in range(size.no)] for i in range(size.L)], [pool])


# TensorRT-LLM


def tensorrt_llm_pool(rng, size: Size, inner: str) -> Cache:
    """[B, L, 2, blob], the blob in the order "HND" or "NHD"."""
    spelling = "BLo" + inner
    pool = noise(rng, tuple({**size._asdict(), "o": size.no}[letter] for letter in spelling), size.dtype)
    kv = spelled(pool, spelling, "oLBNHD")
    rows = [[one_piece(kv[o, i]) for o in range(size.no)] for i in range(size.L)]
    return Cache(pool.reshape(size.B, size.L, size.no, -1), rows, [pool])


def tensorrt_llm_region(rng, size: Size, padding: int) -> Cache:
    """Bytes [B, size] that lie further apart than they are long."""
    pool = tensorrt_llm_pool(rng, size, "HND")
    nbytes = pool.tensors[0].nbytes
    wide = noise(rng, (size.B, nbytes + padding), np.uint8)
    inner = np.ndarray(
        (size.B, size.L, size.no, size.H, size.N, size.D),
        size.dtype,
        wide.data,
        strides=(wide.strides[0], *pool.memory[0].strides[1:]),
    )
    kv = spelled(inner, "BLoHND", "oLBNHD")
    rows = [[one_piece(kv[o, i]) for o in range(size.no)] for i in range(size.L)]
    return Cache(wide[:, :nbytes], rows, [wide])


def tensorrt_llm_buffers(rng, size: Size, spelling: str) -> Cache:
    """What get_buffers gives of one pool for each layer, "B2HND" or "B2NHD"; or AutoDeploy's own, "BN2HD"."""
    if spelling == "BN2HD":
        layers, memory = each_layer(rng, size, spelling, spelling)
    else:
        pool = allocate(rng, size, "BL" + spelling[1:])
        layers, memory = list(spelled(pool, "BL" + spelling[1:], "L" + spelling)), [pool]
    apart = [spelled(layer, spelling, "2BNHD") for layer in layers]
    return Cache(layers, [[one_piece(layer[o]) for o in range(2)] for layer in apart], memory)


# FlashInfer


def flashinfer(rng, size: Size, spelling: str, kind: str) -> Cache:
    """Spelling is "BNHD" or "BHND"; kind "one" tensor a layer, a "pair", or a pair of views of "shared" rows."""
    if kind == "shared":
        memory = [allocate(rng, size, spelling[:-1] + "C") for _ in range(size.L)]
        pairs = [(layer[..., : size.D], layer[..., size.D :]) for layer in memory]
        tensors = pairs
    else:
        memory = [allocate(rng, size, "2" + spelling) for _ in range(size.L)]
        pairs = [(layer[0], layer[1]) for layer in memory]
        tensors = pairs
        if kind == "one":
            memory = [allocate(rng, size, "B2" + spelling[1:]) for _ in range(size.L)]
            pairs = [(layer[:, 0], layer[:, 1]) for layer in memory]
            tensors = memory
    rows = [[one_piece(spelled(part, spelling, "BNHD")) for part in pair] for pair in pairs]
    return Cache(tensors, rows, memory)


def flashinfer_mla(rng, size: Size) -> Cache:
    """[B, N, D] a layer."""
    return vllm_mla(rng, size)._replace(first=0)


# transformers


def transformers(rng, size: Size, batch: int, sequence: int, rest: int, *, token_major: bool = False) -> Cache:
    """Pairs [batch, H, length, D] a layer, of B*N tokens and a rest; in memory heads first, or tokens first."""
    length = size.B * size.N + rest
    extents = {"n": batch, "H": size.H, "S": length, "D": size.D}
    spelling = "nSHD" if token_major else "nHSD"
    memory = [noise(rng, tuple(extents[x] for x in spelling), size.dtype) for _ in range(2 * size.L)]
    tensors = [spelled(each, spelling, "nHSD") for each in memory]
    pairs = list(zip(tensors[::2], tensors[1::2], strict=True))

    def blocks(tensor):
        # [H, S, D] in one sequence, its tokens in blocks: splitting a dimension is a view.
        tokens = tensor[sequence][:, : size.B * size.N]
        return one_piece(spelled(tokens.reshape(size.H, size.B, size.N, size.D), "HBND", "BNHD"))

    return Cache(pairs, [[blocks(t) for t in pair] for pair in pairs], memory)


def transformers_paged(rng, size: Size, blocks_per_sector: int) -> Cache:
    """A flat tensor of bytes, blocks [L, 2, N, H, D] one after another, the first two sectors for padding."""
    blocks = allocate(rng, size, "BL2NHD")
    kv = spelled(blocks, "BL2NHD", "2LBNHD")
    rows = [[one_piece(kv[o, i]) for o in range(2)] for i in range(size.L)]
    return Cache(blocks.reshape(-1).view(np.uint8), rows, [blocks], 2 * blocks_per_sector)


# LMCache, llama.cpp


def lmcache(rng, size: Size, fmt: str, blocks_per_object: int) -> Cache:
    """Memory objects of several blocks, with tokens behind the last whole one."""
    layers, no, hidden = size.L, size.no, size.H * size.D
    count = size.B // blocks_per_object
    tokens = blocks_per_object * size.N + size.N - 1
    if fmt in ("KV_2LTD", "KV_MLA_FMT"):
        # The rows of MLA are aligned: longer than what is used of them.
        width = hidden if fmt == "KV_2LTD" else size.D + 3
        memory = [noise(rng, (no, layers, tokens, width), size.dtype) for _ in range(count)]
        tensors: list = memory
        parts = [[[o[i] for o in each] for i in range(layers)] for each in memory]
    else:
        shape = (tokens, 2, hidden) if fmt == "KV_T2D" else (2, tokens, hidden)
        memory = [noise(rng, shape, size.dtype) for _ in range(count * layers)]
        tensors = [memory[i * layers : (i + 1) * layers] for i in range(count)]
        parts = [
            [[layer[:, o] if fmt == "KV_T2D" else layer[o] for o in range(2)] for layer in each] for each in tensors
        ]
    rows = [[_Joined([parts[i][layer][o] for i in range(count)], size) for o in range(no)] for layer in range(layers)]
    return Cache(tensors, rows, memory)  # type: ignore[arg-type]


def lmcache_packed(rng, size: Size, blocks_per_object: int, *, plane: bool) -> Cache:
    """Memory objects with K|V of each head in one row: [1, L, tokens, H*C], or without the 1."""
    count, tokens = size.B // blocks_per_object, blocks_per_object * size.N
    memory = [noise(rng, (size.L, tokens, size.H, 2, size.D), size.dtype) for _ in range(count)]
    shape = ((1,) if plane else ()) + (size.L, tokens, size.H * 2 * size.D)
    rows = [[_Joined([each[layer, :, :, o] for each in memory], size) for o in range(2)] for layer in range(size.L)]
    return Cache([each.reshape(shape) for each in memory], rows, memory)  # type: ignore[arg-type]


class _Joined:
    """The blocks of several arrays [tokens, width] or [tokens, H, D] under one index, as if they were one array."""

    def __init__(self, arrays: list[np.ndarray], size: Size) -> None:
        self.arrays = arrays
        self.size = size
        self.shape = (size.B, 1, size.N, size.H, size.D)

    def _place(self, block: int) -> np.ndarray:
        i, at = divmod(block, self.size.B // len(self.arrays))
        tokens = self.arrays[i][at * self.size.N : (at + 1) * self.size.N]
        if tokens.ndim == 3:
            return tokens
        # Splitting a dimension is a view.
        return tokens[:, : self.size.H * self.size.D].reshape(self.shape[2:])

    def __setitem__(self, ids: list[int], rows: np.ndarray) -> None:
        for block, each in zip(ids, rows, strict=True):
            self._place(block)[...] = each[0]

    def __getitem__(self, ids: list[int]) -> np.ndarray:
        return np.array([self._place(block)[None] for block in ids])


def llama_cpp(rng, size: Size, streams: int, stream: int) -> Cache:
    """Pairs [streams, cells, H*D] a layer."""
    memory = [noise(rng, (streams, size.B * size.N, size.H * size.D), size.dtype) for _ in range(2 * size.L)]
    pairs = list(zip(memory[::2], memory[1::2], strict=True))
    rows = [[one_piece(t[stream].reshape(size.B, size.N, size.H, size.D)) for t in pair] for pair in pairs]
    return Cache(pairs, rows, memory)
