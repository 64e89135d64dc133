"""Arrays live until the stream has passed their copy: by their library's own means, or held here."""

from __future__ import annotations

import contextlib
import sys
import weakref
from types import SimpleNamespace
from typing import ClassVar

import pytest

from kvbm_kernels import lifetime, streams
from kvbm_kernels.arrays import Memory


class Stream:
    def __init__(self, handle, device=0):
        self.cuda_stream = self.ptr = handle
        self.device = device
        self.is_captured = False

    def is_capturing(self):
        return self.is_captured


class ExternalStream(Stream):
    pass


class Event:
    made: ClassVar = []

    def __init__(self, **_):
        self.has_passed = False
        self.on = None
        self.made.append(self)

    def record(self, stream):
        self.on = stream

    def query(self):
        return self.has_passed

    done = property(query)


class Tensor:
    def __init__(self, storage):
        self.storage = storage
        self.recorded = []

    def untyped_storage(self):
        return SimpleNamespace(data_ptr=lambda: self.storage)

    def record_stream(self, stream):
        self.recorded.append(stream)


class Array:
    """Stands for an array of any library; it can be told when it is gone."""


class Cuda:
    """What this package uses of torch.cuda and of cupy.cuda."""

    Stream = Stream
    ExternalStream = ExternalStream
    Event = Event

    def __init__(self):
        self.current = Stream(10)
        self.devices = []

    def is_initialized(self):
        return True

    def current_device(self):
        return 0

    def current_stream(self, device=None):
        return self.current

    get_current_stream = current_stream

    def default_stream(self, device):
        return Stream(0, device)

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def is_current_stream_capturing(self):
        return self.current.is_captured

    @contextlib.contextmanager
    def device(self, device):
        self.devices.append(device)
        yield

    Device = device


@pytest.fixture(autouse=True)
def nothing_held(monkeypatch):
    monkeypatch.setattr(lifetime, "_held", {})
    monkeypatch.setattr(Event, "made", [])
    lifetime.torch_stream.cache_clear()
    yield
    lifetime.torch_stream.cache_clear()


@pytest.fixture
def torch(monkeypatch):
    fake = SimpleNamespace(cuda=Cuda(), Tensor=Tensor)
    monkeypatch.setitem(sys.modules, "torch", fake)
    return fake.cuda


@pytest.fixture
def cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    fake = SimpleNamespace(cuda=Cuda())
    monkeypatch.setitem(sys.modules, "cupy", fake)
    return fake.cuda


def memory(library, *owners, device=0):
    return Memory(list(owners), [] if device is not None else list(owners), {(library, device)}, "")


def host(*owners):
    return memory("", *owners, device=None)


def num_held():
    return sum(map(len, lifetime._held.values()))


def test_on_the_librarys_current_stream_nothing_is_needed(torch):
    tensor = Tensor(1)
    for stream in (None, torch.current, 10):
        lifetime.keep_until_passed(stream, 10, [memory("torch", tensor)])
    assert (num_held(), tensor.recorded, Event.made) == (0, [], [])


def test_pytorch_is_told_of_its_own_other_streams_once(torch):
    """Once for each piece of memory and stream: PyTorch remembers it."""
    side, other = Stream(11), Stream(12)
    tensors = [Tensor(1), Tensor(1), Tensor(2)]
    side_of_copy = memory("torch", *tensors)
    for stream in (side, side, other):
        lifetime.keep_until_passed(stream, stream.cuda_stream, [side_of_copy])
    assert [t.recorded for t in tensors] in ([[], [side, other], [side, other]], [[side, other], [], [side, other]])
    assert num_held() == 0


@pytest.mark.parametrize("stream", [11, ExternalStream(11), Array()], ids=["handle", "external", "of another library"])
def test_streams_that_others_may_destroy_are_not_recorded(torch, stream):
    """PyTorch would come back to them when the tensor is freed."""
    tensor = Tensor(1)
    lifetime.keep_until_passed(stream, 11, [memory("torch", tensor)])
    assert tensor.recorded == []
    assert num_held() == 1
    assert Event.made[0].on.cuda_stream == 11


def keep_and_drop(stream, handle, make):
    array = Array()
    alive = weakref.ref(array)
    lifetime.keep_until_passed(stream, handle, [make(array)])
    return alive


@pytest.mark.parametrize("make", [host, lambda a: memory("", a), lambda a: memory("cupy", a)])
def test_all_else_is_held_until_the_stream_has_passed(torch, monkeypatch, make):
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=torch))
    first, second = (keep_and_drop(11, 11, make) for _ in range(2))
    elsewhere = keep_and_drop(12, 12, make)
    lifetime.let_go()
    assert [first() is None, second() is None, elsewhere() is None] == [False, False, False]
    Event.made[0].has_passed = Event.made[2].has_passed = True
    # The next call that has something to hold looks at what is held.
    third = keep_and_drop(11, 11, make)
    assert [first() is None, second() is None, elsewhere() is None] == [True, False, True]
    for event in Event.made:
        event.has_passed = True
    lifetime.let_go()
    assert [second() is None, third() is None] == [True, True]


def test_host_memory_is_held_on_the_current_stream_too(torch):
    alive = keep_and_drop(None, 10, host)
    assert alive() is not None
    assert Event.made[0].on is torch.current


@pytest.mark.parametrize("handle", [0, 1])
def test_the_null_stream(torch, handle):
    keep_and_drop(handle, handle, host)
    assert type(Event.made[0].on) is Stream
    assert Event.made[0].on.cuda_stream == 0


@pytest.mark.parametrize("captured", ["its stream", "the current stream"])
def test_in_a_capture_nothing_is_held_or_asked(torch, captured):
    alive = keep_and_drop(None, 10, host)
    Event.made[0].query = None
    side = Stream(11)
    (side if captured == "its stream" else torch.current).is_captured = True
    assert keep_and_drop(side, 11, host)() is None
    assert len(Event.made) == 1
    assert alive() is not None


def test_cupy_alone(cupy):
    first = keep_and_drop(11, 11, host)
    assert first() is not None
    assert Event.made[0].on.ptr == 11
    Event.made[0].has_passed = True
    second = keep_and_drop(None, 10, host)
    assert first() is None
    cupy.current.is_captured = True
    assert keep_and_drop(12, 12, host)() is None
    assert second() is not None


def test_without_a_library_that_has_events_nothing_is_held(monkeypatch):
    """It is then for the caller to keep arrays."""
    for name in ("torch", "cupy"):
        monkeypatch.setitem(sys.modules, name, None)
    assert keep_and_drop(11, 11, host)() is None


def test_the_device_of_a_default_stream_is_made_current(torch):
    """Such a stream has no handle of its own; what has one is on the right device anyway."""
    places = {("torch", 1), ("", None)}
    for stream, handle, expected in (
        (None, 0, [1]),
        (Stream(0, 1), 0, [1]),
        (0, 0, []),
        (None, 10, []),
        (Stream(11, 1), 11, []),
    ):
        torch.devices.clear()
        with streams._device_of(stream, handle, places):
            assert torch.devices == expected
