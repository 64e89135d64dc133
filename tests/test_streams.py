"""Streams of any library become the handle they stand for, and None the current stream of the arrays' library."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import kvbm_kernels as kk
from kvbm_kernels.streams import as_handle, current_handle


class TorchStream:
    cuda_stream = 7


class CupyStream:
    ptr = 7


class WithMethod:
    def __cuda_stream__(self):
        return (0, 7)


class WithAttribute:
    __cuda_stream__ = (0, 7)


@pytest.mark.parametrize("stream", [7, TorchStream(), CupyStream(), WithMethod(), WithAttribute()])
def test_every_kind_of_stream(stream):
    assert as_handle(stream) == 7


@pytest.mark.parametrize("handle", [0, 1, 2, (1 << 64) - 1])
def test_handles_are_taken_as_they_are(handle):
    """CUDA's legacy and per-thread streams among them."""
    assert as_handle(handle) == handle


@pytest.mark.parametrize("stream", [True, 1.0, "0", np.zeros(1), object(), SimpleNamespace(ptr=None)])
def test_things_that_are_no_streams(stream):
    with pytest.raises(TypeError, match="stream is .*, expected a handle, a stream of PyTorch or CuPy, or an object"):
        as_handle(stream)


@pytest.mark.parametrize("protocol", [None, 7, (), (0,), {}, lambda: None, lambda: (0,)])
def test_malformed_cuda_streams(protocol):
    with pytest.raises(kk.KvbmTypeError, match="as __cuda_stream__, expected a version and a handle"):
        as_handle(SimpleNamespace(__cuda_stream__=protocol))


@pytest.mark.parametrize("stream", [-1, 1 << 64])
def test_numbers_that_are_no_handles(stream):
    with pytest.raises(ValueError, match=f"stream is {stream}, expected a handle") as raised:
        as_handle(stream)
    assert isinstance(raised.value, kk.KvbmError)


@pytest.fixture
def libraries(monkeypatch):
    """PyTorch and CuPy as far as their current streams: 100 and 200 plus the device."""
    chosen = []

    @contextlib.contextmanager
    def use_device(device):
        chosen.append(device)
        yield
        chosen.pop()

    torch_cuda = SimpleNamespace(current_stream=lambda device: SimpleNamespace(cuda_stream=100 + device))
    cupy_cuda = SimpleNamespace(Device=use_device, get_current_stream=lambda: SimpleNamespace(ptr=200 + chosen[-1]))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=torch_cuda))
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cupy_cuda))


@pytest.mark.parametrize(
    ("places", "handle"),
    [
        ([("torch", 1)], 101),
        ([("cupy", 1)], 201),
        ([("", 0)], 0),
        ([("torch", None), ("torch", 0), ("torch", 0)], 100),
        ([("torch", 2), ("", None)], 102),
        ([("torch", None)], 0),
    ],
)
def test_none_is_the_current_stream_of_the_arrays(libraries, places, handle):
    assert current_handle(places) == handle


@pytest.mark.parametrize(
    "places", [[("torch", 0), ("torch", 1)], [("torch", 0), ("cupy", 0)], [("", 0), ("cupy", 0)], [("", 0), ("", 1)]]
)
def test_none_among_several_has_to_be_said(libraries, places):
    """On one of them the copy would not be ordered with what the other library does."""
    with pytest.raises(ValueError, match="stream is None, and the arrays have different current streams .*say which"):
        current_handle(places)
