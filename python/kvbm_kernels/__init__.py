"""Move the KV-cache blocks of large language models between memory layouts and between memories."""

from kvbm_kernels import engines, pp, tp
from kvbm_kernels._native import ffi, lib
from kvbm_kernels.batch import last_batch_routes, memcpy_batch, vectorized_copy
from kvbm_kernels.block_allocator import BlockAllocator, BlockUsage, OutOfBlocks
from kvbm_kernels.block_pool import BlockPool
from kvbm_kernels.blocks import BlockStack, OperationalBlocks, UniversalBlocks
from kvbm_kernels.contiguous_cache import ContiguousKvCache
from kvbm_kernels.convert import (
    block_from_operational,
    block_from_universal,
    operational_from_block,
    universal_from_block,
)
from kvbm_kernels.copy import copy_blocks
from kvbm_kernels.csr import Csr
from kvbm_kernels.dtypes import DType
from kvbm_kernels.errors import (
    CudaError,
    KvbmError,
    KvbmIndexError,
    KvbmMemoryError,
    KvbmTypeError,
    KvbmValueError,
    LibraryError,
    StubBuildError,
)
from kvbm_kernels.explanation import DeviceRoute, Explanation, HostRoute, Loop, explain
from kvbm_kernels.info import BuildInfo, build_info, has_memcpy_batch_async, is_stub_build
from kvbm_kernels.kv_batch import BatchTables, KvBatch
from kvbm_kernels.kv_cache import CapacityError, KvCache
from kvbm_kernels.kv_dtypes import KvBf16, KvDtype, KvFp8, KvFp16, KvFp32, KvInt8
from kvbm_kernels.kv_layer import LayerCache
from kvbm_kernels.layouts import BlockShape, Layout
from kvbm_kernels.paged_cache import PagedKvCache
from kvbm_kernels.prefix_cache import block_hashes
from kvbm_kernels.views import View

__version__ = ".".join(str(getattr(lib, f"KVBM_KERNELS_VERSION_{part}")) for part in ("MAJOR", "MINOR", "PATCH"))

__all__ = [
    "BatchTables",
    "BlockAllocator",
    "BlockPool",
    "BlockShape",
    "BlockStack",
    "BlockUsage",
    "BuildInfo",
    "CapacityError",
    "ContiguousKvCache",
    "Csr",
    "CudaError",
    "DType",
    "DeviceRoute",
    "Explanation",
    "HostRoute",
    "KvBatch",
    "KvBf16",
    "KvCache",
    "KvDtype",
    "KvFp8",
    "KvFp16",
    "KvFp32",
    "KvInt8",
    "KvbmError",
    "KvbmIndexError",
    "KvbmMemoryError",
    "KvbmTypeError",
    "KvbmValueError",
    "LayerCache",
    "Layout",
    "LibraryError",
    "Loop",
    "OperationalBlocks",
    "OutOfBlocks",
    "PagedKvCache",
    "StubBuildError",
    "UniversalBlocks",
    "View",
    "__version__",
    "block_from_operational",
    "block_from_universal",
    "block_hashes",
    "build_info",
    "copy_blocks",
    "engines",
    "explain",
    "ffi",
    "has_memcpy_batch_async",
    "is_stub_build",
    "last_batch_routes",
    "lib",
    "memcpy_batch",
    "operational_from_block",
    "pp",
    "tp",
    "universal_from_block",
    "vectorized_copy",
]
