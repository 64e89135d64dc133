"""Calls as users write them, for the type checker alone: nothing here is run."""

from __future__ import annotations

import array
import mmap
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

import kvbm_kernels as kk


class DeviceArray:
    """An array of a library this project does not know."""

    def __dlpack__(self, *, stream: int | None = None) -> object:
        raise NotImplementedError


class CudaOnly:
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raise NotImplementedError


class TorchLikeStream:
    cuda_stream: int = 0


class CupyLikeStream:
    @property
    def ptr(self) -> int:
        raise NotImplementedError


class Stream:
    def __cuda_stream__(self) -> tuple[int, int]:
        raise NotImplementedError


def shapes() -> kk.BlockShape:
    shape = kk.BlockShape(nl=32, no=2, nh=8, nt=16, hd=128, dtype="bf16")
    kk.BlockShape(1, 1, np.int32(1), 1, 576, np.float16)
    kk.BlockShape(1, 1, 1, 1, 576, ml_dtypes.bfloat16)
    kk.BlockShape(1, 1, 1, 1, 576, kk.DType.FP8_E4M3)
    nbytes: int = shape.row_nbytes + shape.chunk_nbytes + shape.block_nbytes + shape.dtype.itemsize
    del nbytes
    return shape


def views(shape: kk.BlockShape, a: npt.NDArray[np.uint16]) -> None:
    nested: list[list[npt.NDArray[np.uint16]]] = [[a, a]]
    stack: kk.BlockStack = kk.BlockStack(nested, shape, layout="NHD")
    kk.BlockStack([[[a, a]]], shape, kk.Layout.HND)
    layers: kk.BlockStack = kk.BlockStack.from_layers([a, a], shape, "bothd")
    kk.BlockStack.from_layers([(a, a), (a, a)], shape, axes="bthd")
    kk.BlockStack.from_layers(a, shape, axes="blothd")
    universal: kk.UniversalBlocks = kk.UniversalBlocks(a, shape)
    kk.UniversalBlocks(
        [bytearray(4), memoryview(b""), mmap.mmap(-1, 4), array.array("B"), DeviceArray(), CudaOnly()], shape
    )
    operational: kk.OperationalBlocks = kk.OperationalBlocks([a], shape, inner="HND")

    part: kk.UniversalBlocks = universal[[3, 1]].heads(0, 4).layers(1, 2).tokens(0, 8)
    stack = stack[3]
    stack = stack[1:4]
    layers = layers[np.array([1, 2], np.uint32)]
    part = universal.shard(rank=0, size=4)
    blocks: int = len(part)
    layout: kk.Layout | None = part.layout
    device: str = part.device
    del blocks, layout, device

    kk.copy_blocks(universal, stack)
    kk.copy_blocks(operational, universal, stream=None, max_sms=8, num_threads=2)
    for stream in (0, TorchLikeStream(), CupyLikeStream(), Stream()):
        kk.copy_blocks(universal, layers, stream=stream)
    view: kk.View = universal
    kk.copy_blocks(view, view)


def plans(a: kk.BlockStack, b: kk.UniversalBlocks) -> None:
    plan = kk.tp.plan(from_size=2, to_size=np.int32(3), nh=6)
    for heads in plan.to(1):
        kk.copy_blocks(b.heads(*heads.dst_heads), a.heads(*heads.src_heads))
    for layers in kk.pp.plan([2, 1], 3, 3):
        kk.copy_blocks(b.layers(*layers.dst_layers), a.layers(*layers.src_layers))
    kk.copy_blocks(*plan.views([a, b, a], (a, b)), stream=0)
    kk.copy_blocks(*plan.views([(a, b), (b, a), [a, a]], [[a, b], [b, a]]))
    kk.copy_blocks([a, b], (b, a))
    first: int = kk.tp.heads_of_rank(0, 2, 4)[0] + plan.transfers[0].src_rank
    text: str = str(plan)
    del first, text


def lists(a: npt.NDArray[Any], b: DeviceArray) -> None:
    kk.universal_from_block([a], [[a, a]], "NHD")
    kk.block_from_universal([[b, b]], (b,), kk.Layout.HND, stream=7)
    kk.operational_from_block([a], [[a, a]])
    kk.block_from_operational([[a, a]], [bytearray(10)])
    kk.vectorized_copy([a, b], [b, a], stream=Stream())
    kk.memcpy_batch([a], [b], mode="batch")


def information() -> None:
    info: kk.BuildInfo = kk.build_info()
    text: str = f"{info.version} {info.cuda} {','.join(info.archs)} {info.driver} {info.devices} {kk.__version__}"
    flags: tuple[bool, bool] = kk.is_stub_build(), kk.has_memcpy_batch_async()
    del text, flags


def pools(a: npt.NDArray[Any], b: DeviceArray) -> None:
    pool: kk.BlockPool = kk.BlockPool(1024, 16, num_layers=32, num_kv_heads=8, head_dim=128, kv_dtype=kk.KvBf16)
    kk.BlockPool(8, 16, 1, 1, 1, v_head_dim=2, kv_dtype=kk.KvInt8, scale_dtype="fp16", layout="NHD", arrays="torch")
    blocks: list[int] = pool.allocator.allocate(3)
    maybe: list[int] | None = pool.allocator.try_allocate(3)
    pool.allocator.free(np.array(blocks, np.uint32))
    usage: kk.BlockUsage = pool.allocator.usage()
    stack: kk.BlockStack = pool.blocks([1, 2], of="k")
    del maybe, usage, stack


def caches(pool: kk.BlockPool, a: npt.NDArray[Any], b: DeviceArray) -> None:
    flat: kk.ContiguousKvCache = kk.KvCache.contiguous(num_kv_heads=8, head_dim=128, capacity=512, kv_dtype=kk.KvFp16)
    with kk.KvCache.paged(pool, max_blocks=64) as cache:
        cache.append(a, b, layer=3, order="HND")
        cache.reserve(3)
        cache.truncate(0)
        fork: kk.PagedKvCache = cache.fork()
        found: int = fork.attach_prefix([1, 2, 3], extra=b"model")
        fork.register_prefix(np.array([1, 2], np.uint32))
        fork.restore(cache.blocks(), 3)
        fork.restore((cache.blocks(of="k"), cache.blocks(of="v")), n=3)
        csr: kk.Csr = cache.csr()
        batch = kk.KvBatch([cache, fork, None], max_blocks=64)
        batch.append(a, a, stream=0)
        batch.reserve(2)
        batch.write(b, b, layer=1, order="HND", stream=7)
        batch.advance(2)
        before: kk.PagedKvCache | None = batch.replace(2, None)
        kk.KvBatch([None, before], pool=pool)
        cache.write(a, b, stream=None)
        tables: kk.BatchTables = batch.tables(max_blocks=8)
        del found, csr, tables
    either: kk.KvCache = flat
    k, v = either.gather(0, dtype="fp16")
    layer = either.layer(0)
    layer.append(k, v)
    length: int = len(either) + either.len + layer.len
    marker: type[kk.KvDtype] = either.kv_dtype
    nbytes: int = marker.BYTES_PER_ELEM + len(marker.NAME)
    digests: list[bytes] = kk.block_hashes(range(64), 16)
    del length, nbytes, digests


def engines(tensors: list[npt.NDArray[Any]], pairs: list[tuple[DeviceArray, DeviceArray]]) -> None:
    view = kk.engines.from_vllm(
        {"layer": tensors[0]}, layout="LBNHC", block_size=16, num_kv_heads=8, no=2, head_size=128
    )
    blocks: kk.engines.EngineBlocks = view[[3, 1]].heads(0, 2).layers(0, 1)
    pages: kk.engines.EngineBlocks = kk.engines.from_sglang(pairs, layout="NHD", page_size=1, scales="constant")
    beside: kk.engines.LayerGroups = kk.engines.from_sglang(pairs, layout="NHD", page_size=1, scales=pairs)
    groups = kk.engines.layer_groups(kk.engines.from_transformers, pairs, parts=("k", "v"), block_size=16)
    windows = kk.engines.layer_groups(kk.engines.from_sglang, pairs, groups=[[0, 2], [1]], part="k", scales=pairs)
    kk.copy_blocks(groups.select([1]).shard(0, 2), beside)
    kk.copy_blocks(windows.select([[1], range(2)]).layer(2), windows.select(np.array([1, 2])).layer(np.int64(2)))
    kk.copy_blocks([view[[1]] for view in windows], windows)
    kk.copy_blocks(kk.engines.split_blocks(pages, 1), blocks)
    held: tuple[tuple[int, ...], ...] = groups.layers
    count: int = view.num_blocks + view.num_reserved + view.pieces
    del held, count


def errors() -> int:
    try:
        shapes()
    except kk.OutOfBlocks as out:
        return out.needed - out.free
    except kk.CapacityError as full:
        return full.needed - full.capacity
    except kk.CudaError as error:
        name: str = error.name
        del name
        return error.code
    except kk.KvbmError:
        raise
    except (ValueError, TypeError, IndexError):
        return 1
    return 0


def explanations(dst: kk.UniversalBlocks, src: kk.BlockStack) -> None:
    found: kk.Explanation = kk.explain(dst, src, src_on_host=True, max_sms=np.int32(4), num_threads=2)
    kernel: str = found.device.kernel
    rows: str = found.host.rows
    stride: int = found.loops[0].src_stride
    del kernel, rows, stride


def misuse(a: npt.NDArray[Any], shape: kk.BlockShape) -> None:
    """What the checker has to catch; an ignore that is not needed is an error under strict."""
    kk.universal_from_block([a], [[a]], 0)  # type: ignore[arg-type]
    kk.memcpy_batch([a], [a], mode="fast")  # type: ignore[arg-type]
    kk.copy_blocks(a, a)  # type: ignore[arg-type]
    kk.UniversalBlocks(3, shape)  # type: ignore[arg-type]
    kk.KvCache.paged(3)  # type: ignore[arg-type]
    kk.KvCache.contiguous(num_kv_heads=1, head_dim=1, capacity=1, kv_dtype="fp16")  # type: ignore[arg-type]
    shape.nl = 3  # type: ignore[misc]
    kk.copy_blocks(kk.UniversalBlocks(a, shape), kk.UniversalBlocks(a, shape), stream="0")  # type: ignore[arg-type]
