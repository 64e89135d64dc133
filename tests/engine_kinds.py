"""Every cache an engine can have: how reference_engines.py lays it out, and the call that reads it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import kvbm_kernels as kk
import reference
import reference_engines as ref
from kvbm_kernels import engines
from reference_engines import Cache, Size


class Kind(NamedTuple):
    """A cache of one engine in one layout.

    ``lay_out(rng, size)`` allocates it, ``view(tensors, size)`` is the call under test, and ``fits(size)`` says whether
    the engine can have a cache of that size.
    """

    lay_out: Callable[[np.random.Generator, Size], Cache]
    view: Callable[[Any, Size], engines.EngineBlocks]
    fits: Callable[[Size], bool] = lambda _: True


def _typed(adapter: Callable[..., Any], **fixed: Any) -> Callable[..., Any]:
    """The adapter, told what the bits in the test's integers are."""
    return functools.partial(adapter, dtype="bf16", **fixed)


def _even(size: Size) -> bool:
    return size.N % 2 == 0


SIX = ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"]
PADDED = ["LBHNC", "LBNHC", "BLHNC", "BLNHC"]


def _vllm() -> dict[str, Kind]:
    def per_layer(layout, lay_out, physical, **arguments):
        return Kind(
            lambda rng, s: lay_out(rng, s, physical),
            lambda t, s: _typed(engines.from_vllm)(
                t, layout=layout, block_size=s.N, num_kv_heads=s.H, **_split(s, arguments)
            ),
        )

    def _split(size, arguments):
        return {name: size.D if value is ... else value for name, value in arguments.items()}

    packed = {"no": 2, "head_size": ...}
    kinds = {}
    for physical in ("2BNHD", "2BHND", "BL2NHD", "BHL2ND"):
        kinds[f"vllm kv_first {physical}"] = per_layer("kv_first", ref.vllm_kv_first, physical)
    for physical in ("B2NHD", "B2HND", "BL2NHD", "B2HLND"):
        kinds[f"vllm blocks_first {physical}"] = per_layer("blocks_first", ref.vllm_blocks_first, physical)
    for physical in ("BNHC", "BHNC", "BLNHC", "BHLNC"):
        kinds[f"vllm packed {physical}"] = per_layer("packed", ref.vllm_packed, physical, **packed)
    for name in SIX:
        kinds[f"vllm {name}"] = per_layer(name, ref.vllm_packed, name, **packed)
        kinds[f"vllm {name} whole"] = per_layer(name, ref.vllm_whole, name, **packed)
        kinds[f"vllm {name} buffer"] = Kind(
            lambda rng, s, name=name: _flattened(ref.vllm_whole(rng, s, name)),
            lambda t, s, name=name: _vllm_buffer(t, s, name),
        )
    for name in PADDED:
        kinds[f"vllm {name} padded"] = Kind(
            lambda rng, s, name=name: ref.vllm_padded(rng, s, name, 5),
            lambda t, s, name=name: _typed(engines.from_vllm)(
                t, layout=name, block_size=s.N, num_kv_heads=s.H, no=2, head_size=s.D
            ),
        )
    for name in ("BL2NHD", "BHL2ND", "B2HLND"):
        kinds[f"vllm {name} whole"] = per_layer(name, ref.vllm_whole, name)
    kinds["vllm planes"] = per_layer("planes", lambda rng, s, _: ref.vllm_planes(rng, s), "")
    for layout, lay_out, physical in (
        ("packed", ref.vllm_packed, "BNHC"),
        ("packed", ref.vllm_packed, "BHNC"),
        ("kv_first", ref.vllm_kv_first, "2BNHD"),
        ("kv_first", ref.vllm_kv_first, "2BHND"),
        ("blocks_first", ref.vllm_blocks_first, "B2NHD"),
    ):
        sizes = packed if layout == "packed" else {}
        kinds[f"vllm kernel blocks {physical}"] = Kind(
            lambda rng, s, lay_out=lay_out, physical=physical: ref.vllm_kernel_blocks(rng, s, physical, 2, lay_out),
            lambda t, s, layout=layout, sizes=sizes: _typed(engines.from_vllm)(
                t, layout=layout, block_size=s.N, num_kv_heads=s.H, kernel_block_size=s.N // 2, **_split(s, sizes)
            ),
            _even,
        )
    return kinds


def _flattened(cache: Cache) -> Cache:
    return cache._replace(tensors=cache.memory[0].reshape(-1).view(np.int8))


def _vllm_buffer(buffer: Any, size: Size, name: str) -> engines.EngineBlocks:
    return engines.from_vllm_buffer(
        buffer,
        layout=name,
        num_layers=size.L,
        num_blocks=size.B,
        num_kv_heads=size.H,
        block_size=size.N,
        head_size=size.D,
        dtype="bf16",
        no=2,
    )


def _sglang() -> dict[str, Kind]:
    read = _typed(engines.from_sglang)
    kinds = {
        "sglang NHD": Kind(ref.sglang_nhd, lambda t, s: read(t, layout="NHD", page_size=s.N)),
        "sglang HND": Kind(ref.sglang_hnd, lambda t, s: read(t, layout="HND", page_size=s.N)),
    }
    for layout in ("layer_first", "page_first", "page_first_direct", "page_head", "page_unified"):
        kinds[f"sglang host {layout}"] = Kind(
            lambda rng, s, layout=layout: ref.sglang_host(rng, s, layout),
            lambda t, s, layout=layout: read(t, layout=layout, page_size=s.N),
        )
    kinds["sglang host page_unified, a head a group"] = Kind(
        lambda rng, s: ref.sglang_host(rng, s, "page_unified", s.H),
        lambda t, s: read(t, layout="page_unified", page_size=s.N),
    )
    return kinds


def _tensorrt_llm() -> dict[str, Kind]:
    read = _typed(engines.from_tensorrt_llm)
    kinds = {}
    for inner in ("HND", "NHD"):
        kinds[f"tensorrt_llm pool {inner}"] = Kind(
            lambda rng, s, inner=inner: ref.tensorrt_llm_pool(rng, s, inner),
            lambda t, s, inner=inner: read(t, layout=inner, num_kv_heads=s.H, tokens_per_block=s.N),
        )
    for spelling, layout in (("B2HND", "HND"), ("B2NHD", "NHD"), ("BN2HD", "BN2HD")):
        kinds[f"tensorrt_llm buffers {spelling}"] = Kind(
            lambda rng, s, spelling=spelling: ref.tensorrt_llm_buffers(rng, s, spelling),
            lambda t, s, layout=layout: read(t, layout=layout, num_kv_heads=s.H, tokens_per_block=s.N),
        )
    kinds["tensorrt_llm region"] = Kind(
        lambda rng, s: ref.tensorrt_llm_region(rng, s, 6),
        lambda t, s: read(t, layout="HND", num_kv_heads=s.H, tokens_per_block=s.N, num_layers=s.L, no=2),
    )
    return kinds


def _flashinfer() -> dict[str, Kind]:
    return {
        f"flashinfer {layout} {kind}": Kind(
            lambda rng, s, spelling=f"B{layout}", kind=kind: ref.flashinfer(rng, s, spelling, kind),
            lambda t, s, layout=layout: _typed(engines.from_flashinfer)(t, layout=layout, page_size=s.N),
        )
        for layout in ("NHD", "HND")
        for kind in ("one", "pair", "shared")
    }


def _others() -> dict[str, Kind]:
    transformers = _typed(engines.from_transformers)
    lmcache = _typed(engines.from_lmcache)
    kinds = {
        "transformers": Kind(
            lambda rng, s: ref.transformers(rng, s, 1, 0, 0), lambda t, s: transformers(t, block_size=s.N)
        ),
        "transformers, one of a batch": Kind(
            lambda rng, s: ref.transformers(rng, s, 3, 1, s.N - 1),
            lambda t, s: transformers(t, block_size=s.N, sequence=1),
        ),
        "transformers, not yet concatenated": Kind(
            lambda rng, s: ref.transformers(rng, s, 1, 0, 0, token_major=True),
            lambda t, s: transformers(t, block_size=s.N),
        ),
        "transformers paged": Kind(
            lambda rng, s: ref.transformers_paged(rng, s, 1),
            lambda t, s: engines.from_transformers_paged(
                t,
                num_layers=s.L,
                page_size=s.N,
                num_kv_heads=s.H,
                head_size=s.D,
                blocks_per_sector=1,
                dtype="bf16",
            ),
        ),
        "llama_cpp": Kind(
            lambda rng, s: ref.llama_cpp(rng, s, 2, 1),
            lambda t, s: _typed(engines.from_llama_cpp)(t, v_trans=False, num_kv_heads=s.H, block_size=s.N, stream=1),
        ),
    }
    for fmt in ("KV_2LTD", "KV_T2D", "KV_2TD"):
        kinds[f"lmcache {fmt}"] = Kind(
            lambda rng, s, fmt=fmt: ref.lmcache(rng, s, fmt, 2),
            lambda t, s, fmt=fmt: lmcache(t, fmt=fmt, block_size=s.N, num_kv_heads=s.H),
            lambda s: s.B % 2 == 0,
        )
    for plane in (True, False):
        kinds[f"lmcache packed{' in a plane' if plane else ''}"] = Kind(
            lambda rng, s, plane=plane: ref.lmcache_packed(rng, s, 2, plane=plane),
            lambda t, s: lmcache(t, fmt="KV_2LTD", block_size=s.N, num_kv_heads=s.H, no=2, head_size=s.D),
            lambda s: s.B % 2 == 0,
        )
    return kinds


KINDS = {**_vllm(), **_sglang(), **_tensorrt_llm(), **_flashinfer(), **_others()}


def _mla() -> dict[str, Kind]:
    kinds = {
        "vllm mla": Kind(ref.vllm_mla, lambda t, s: _typed(engines.from_vllm)(t, layout="mla", block_size=s.N)),
        "vllm mla kernel blocks": Kind(
            lambda rng, s: ref.vllm_kernel_blocks(rng, s, "", 2, lambda rng, s, _: ref.vllm_mla(rng, s)),
            lambda t, s: _typed(engines.from_vllm)(t, layout="mla", block_size=s.N, kernel_block_size=s.N // 2),
            _even,
        ),
        "sglang MLA": Kind(ref.sglang_mla, lambda t, s: _typed(engines.from_sglang)(t, layout="MLA", page_size=s.N)),
        "tensorrt_llm MLA": Kind(
            lambda rng, s: ref.tensorrt_llm_pool(rng, s, "HND"),
            lambda t, s: _typed(engines.from_tensorrt_llm)(t, layout="HND", num_kv_heads=1, tokens_per_block=s.N),
        ),
        "flashinfer MLA": Kind(
            ref.flashinfer_mla, lambda t, s: _typed(engines.from_flashinfer)(t, layout="MLA", page_size=s.N)
        ),
        "lmcache KV_MLA_FMT": Kind(
            lambda rng, s: ref.lmcache(rng, s, "KV_MLA_FMT", 2),
            lambda t, s: _typed(engines.from_lmcache)(
                t, fmt="KV_MLA_FMT", block_size=s.N, num_kv_heads=1, head_size=s.D
            ),
            lambda s: s.B % 2 == 0,
        ),
    }
    for layout in ("layer_first", "page_first", "page_first_direct", "page_unified"):
        kinds[f"sglang host MLA {layout}"] = Kind(
            lambda rng, s, layout=layout: ref.sglang_host(rng, s, layout),
            lambda t, s, layout=layout: _typed(engines.from_sglang)(t, layout=layout, page_size=s.N),
        )
    for name in SIX:
        kinds[f"vllm MLA {name}"] = Kind(
            lambda rng, s, name=name: ref.vllm_packed(rng, s, name),
            lambda t, s, name=name: _typed(engines.from_vllm)(t, layout=name, block_size=s.N, num_kv_heads=1, no=1),
        )
    return kinds


MLA_KINDS = _mla()


def shape_of(size: Size) -> kk.BlockShape:
    """The shape of a block of a cache of this size."""
    return kk.BlockShape(size.L, size.no, size.H, size.N, size.D, "bf16")


SIZE = Size(B=8, L=3, N=4, H=5, D=6)
MLA_SIZE = Size(B=8, L=3, N=4, H=1, D=9, no=1)
# Of 8 blocks, none of those that any engine reserves.
IDS = [5, 2, 7]

EVERY = {
    **{name: (kind, SIZE) for name, kind in KINDS.items()},
    **{n: (kind, MLA_SIZE) for n, kind in MLA_KINDS.items()},
}


def logical(rng, size: Size, count: int) -> np.ndarray:
    return reference.random_kv(rng, (count, size.L, size.no, size.N, size.H, size.D), size.dtype)


def laid_out(kind: Kind, size: Size, kv: np.ndarray | None, ids: list[int], seed: int = 3) -> Cache:
    """The engine's cache, the same noise in it each time, with these blocks written by the reference."""
    cache = kind.lay_out(np.random.default_rng(seed), size)
    if kv is not None:
        cache.write(kv, ids)
    return cache


def assert_same_memory(actual: Cache, expected: Cache, name: str = "") -> None:
    for i, (mine, theirs) in enumerate(zip(actual.memory, expected.memory, strict=True)):
        try:
            reference.assert_same_bytes(mine, theirs)
        except AssertionError as error:
            raise AssertionError(f"{name} memory[{i}]: {error}") from None


def copy(dst: kk.View, src: kk.View) -> None:
    """Copy between views that may have blocks in pieces."""
    num_tokens = min(dst.shape.nt, src.shape.nt)
    kk.copy_blocks(engines.split_blocks(dst, num_tokens), engines.split_blocks(src, num_tokens))
