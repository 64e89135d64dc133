"""The exceptions, and what happens when the library cannot be loaded."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

import kvbm_kernels as kk
from kvbm_kernels import _native


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (kk.KvbmValueError, ValueError),
        (kk.KvbmTypeError, TypeError),
        (kk.KvbmIndexError, IndexError),
        (kk.KvbmMemoryError, MemoryError),
        (kk.LibraryError, ImportError),
        (kk.StubBuildError, RuntimeError),
        (kk.CudaError, RuntimeError),
    ],
)
def test_every_error_is_ours_and_a_builtin(error, builtin):
    assert issubclass(error, kk.KvbmError)
    assert issubclass(error, builtin)


def test_the_stubs_refusal_is_no_failure_of_cuda():
    assert not issubclass(kk.StubBuildError, kk.CudaError)


def test_cuda_errors_travel_between_processes():
    error = kk.CudaError("copy_blocks: an illegal memory access", 700, "cudaErrorIllegalAddress")
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is kk.CudaError
        assert (str(again), again.code, again.name) == (str(error), 700, "cudaErrorIllegalAddress")


def failing_call():
    """Leaves a message behind, as every failing function does."""
    return kk.lib.kvbm_kernels_memcpy_batch(kk.ffi.NULL, kk.ffi.NULL, 1, 1, 7, kk.ffi.NULL)


@pytest.mark.parametrize(
    ("status", "error"),
    [(1, kk.KvbmValueError), (2, kk.KvbmMemoryError), (34, kk.StubBuildError), (801, kk.CudaError), (35, kk.CudaError)],
)
def test_status_codes_become_errors_with_the_librarys_message(status, error):
    failing_call()
    with pytest.raises(error, match="memcpy_batch: mode_value is 7") as raised:
        _native.check(status)
    assert type(raised.value) is error


def test_cuda_errors_keep_code_and_name():
    with pytest.raises(kk.CudaError) as raised:
        _native.check(801)
    assert (raised.value.code, raised.value.name) == (801, "cudaErrorNotSupported")


def test_success_raises_nothing():
    _native.check(0)


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def test_a_missing_library_is_named(tmp_path):
    missing = str(tmp_path / "libnothing.so")
    done = python("import kvbm_kernels", KVBM_KERNELS_LIBRARY=missing)
    assert done.returncode == 1
    assert f"{missing} (named by KVBM_KERNELS_LIBRARY)" in done.stderr
    assert "LibraryError: kvbm_kernels cannot use its library" in done.stderr


def test_another_library_is_not_taken_for_ours():
    done = python("import kvbm_kernels", KVBM_KERNELS_LIBRARY="libc.so.6")
    assert done.returncode == 1
    assert "libc.so.6 (named by KVBM_KERNELS_LIBRARY) has no kvbm_kernels_version" in done.stderr


def test_the_variable_names_the_library():
    path = kk.build_info().library
    done = python("import kvbm_kernels as kk; print(kk.build_info().library)", KVBM_KERNELS_LIBRARY=path)
    assert (done.stdout.strip(), done.stderr) == (path, "")


def test_importing_the_package_imports_no_array_library_but_numpy():
    done = python(
        "import sys, kvbm_kernels\n"
        "print({'numpy', 'cffi'} <= set(sys.modules), {'torch', 'cupy', 'jax', 'ml_dtypes'} & set(sys.modules))"
    )
    assert done.stdout.strip() == "True set()", done.stderr


def test_the_library_describes_itself():
    info = kk.build_info()
    assert info.version == kk.__version__
    assert info.is_stub_build is kk.is_stub_build()
    assert os.path.exists(info.library)  # noqa: PTH110
    if info.is_stub_build:
        assert (info.cuda, info.archs, info.driver, info.devices) == (None, (), None, 0)
        assert not kk.has_memcpy_batch_async()
    else:
        assert info.cuda is not None
        assert int(info.cuda.split(".")[0]) >= 12
        assert all(arch.rstrip("af").isdigit() for arch in info.archs)
        assert info.archs
    if not info.devices:
        assert not kk.has_memcpy_batch_async()


def test_dtypes_and_layouts_have_the_values_of_the_header():
    for dtype in kk.DType:
        assert dtype == getattr(kk.lib, f"KVBM_KERNELS_DTYPE_{dtype.name}")
    for layout in kk.Layout:
        assert layout == getattr(kk.lib, f"KVBM_KERNELS_LAYOUT_{layout.name}")
    assert (kk.DType.F16, kk.DType.BF16, kk.DType.F32, kk.DType.F64) == (0, 1, 2, 3)
    assert (kk.Layout.NHD, kk.Layout.HND) == (0, 1)


def uncopied():
    shape = kk.BlockShape(1, 1, 1, 1, 4, "f16")
    array = np.zeros((3, 1, 1, 1, 1, 4), np.float16)
    pool = kk.BlockPool(4, 2, 1, 1, 4)
    paged = kk.KvCache.paged(pool)
    view = kk.UniversalBlocks(array, shape)
    return [
        view,
        view[[0, 2]],
        kk.OperationalBlocks([array[0].reshape(-1)], shape),
        kk.BlockStack([[array[0, 0, 0]]], shape),
        view.geometry,
        view.memory,
        pool,
        pool.rows,
        pool.updates,
        paged,
        paged._held,
        paged._tables,
        paged._tables.own,
        paged.layer(0),
        kk.KvCache.contiguous(num_kv_heads=1, head_dim=4, capacity=2),
        kk.KvBatch([paged]),
    ]


@pytest.mark.parametrize("obj", uncopied(), ids=lambda obj: type(obj).__name__)
def test_what_refers_to_memory_is_neither_copied_nor_pickled(obj):
    """A copy would keep addresses of memory that it does not keep alive."""
    for how in (copy.copy, copy.deepcopy, pickle.dumps, lambda o: pickle.dumps(o, 0), lambda o: copy.deepcopy([o])):
        with pytest.raises(kk.KvbmTypeError, match=f"a {type(obj).__name__} cannot be copied or pickled"):
            how(obj)


def test_the_base_of_views_is_no_view():
    with pytest.raises(kk.KvbmTypeError, match="View is no layout, expected BlockStack"):
        kk.View()
