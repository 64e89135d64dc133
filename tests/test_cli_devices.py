"""What `kvbm-kernels info` makes of several sources about one GPU."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from kvbm_kernels.cli import devices
from kvbm_kernels.cli.devices import Device, find_devices

BUS = "0000:3b:00.0"


def module(name: str, **attributes: object) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(attributes)
    return made


@pytest.fixture
def sources(monkeypatch, tmp_path):
    """Nothing to ask: no nvidia-smi, no library, and a kernel without devices."""
    monkeypatch.setattr(devices, "_PCI", tmp_path)
    monkeypatch.setattr(devices, "_ask_smi", lambda: ([], None, "there is no nvidia-smi"))
    for name in ("cuda", "cuda.core", "cuda.core.experimental", "torch", "cupy"):
        monkeypatch.setitem(sys.modules, name, None)
    return SimpleNamespace(
        pci=tmp_path,
        smi=lambda *found: monkeypatch.setattr(devices, "_ask_smi", lambda: (list(found), "580.95.05", None)),
        library=lambda name, **attributes: monkeypatch.setitem(sys.modules, name, module(name, **attributes)),
    )


def torch_with(**changed: object) -> SimpleNamespace:
    known = {"name": "NVIDIA H200", "total_memory": 7 << 30, "major": 9, "minor": 0, "multi_processor_count": 132}
    place = {"pci_domain_id": 0, "pci_bus_id": 0x3B, "pci_device_id": 0}
    properties = SimpleNamespace(**{**known, **place, **changed})
    return SimpleNamespace(get_device_properties=lambda ordinal: properties)


def test_no_source_is_a_reason(sources):
    assert find_devices(0) == ([], None, "there is no nvidia-smi")
    found = find_devices(2)
    assert found.devices == []
    assert found.reason.endswith("for a CUDA library to tell: no cuda.core, no torch, no cupy")


def test_torch_and_the_kernel(sources):
    sources.library("torch", cuda=torch_with())
    folder = sources.pci / BUS
    folder.mkdir()
    for name, text in {
        "current_link_speed": "2.5 GT/s PCIe",
        "current_link_width": "16",
        "max_link_speed": "32.0 GT/s PCIe",
        "max_link_width": "255",
    }.items():
        (folder / name).write_text(text + "\n")
    (device,) = find_devices(1).devices
    assert (device.ordinal, device.multiprocessors, device.memory_nbytes) == (0, 132, 7 << 30)
    assert (device.pcie_generation, device.pcie_width, device.pcie_max_generation) == (1, 16, 5)
    # A virtual machine's way of saying that it does not know.
    assert device.unknown == {"pcie_max_width": "there is no nvidia-smi, nor does the kernel"}


def test_cuda_core_and_nvidia_smi_are_one_device(sources):
    class CoreDevice:
        name = "NVIDIA H200"
        compute_capability = (9, 0)
        pci_bus_id = "0000:3B:00.0"
        properties = SimpleNamespace(multiprocessor_count=132)

        def __init__(self, ordinal: int) -> None:
            assert ordinal == 0

    other = Device(name="NVIDIA T4", pci_bus_id="0000:5e:00.0")
    sources.smi(other, Device(name="H200", pci_bus_id=BUS, memory_nbytes=9 << 30, pcie_generation=5))
    sources.library("cuda.core", Device=CoreDevice)
    first, second = find_devices(1).devices
    assert (first.ordinal, first.name, first.memory_nbytes, first.pcie_generation) == (0, "NVIDIA H200", 9 << 30, 5)
    assert (first.compute_capability, first.multiprocessors) == ("9.0", 132)
    assert (second.ordinal, second.name) == (None, "NVIDIA T4")


def test_cuda_core_of_before_it_was_stable(sources):
    stable = SimpleNamespace(multiprocessor_count=80)
    early = SimpleNamespace(name="T4", compute_capability=(7, 5), pci_bus_id=BUS, properties=stable)
    sources.library("cuda.core")
    sources.library("cuda.core.experimental", Device=lambda ordinal: early)
    (device,) = find_devices(1).devices
    assert (device.name, device.compute_capability, device.multiprocessors) == ("T4", "7.5", 80)


def test_cupy(sources):
    properties = {"name": b"T4", "totalGlobalMem": 5, "major": 7, "minor": 5, "multiProcessorCount": 40}
    runtime = SimpleNamespace(
        getDeviceProperties=lambda ordinal: properties, deviceGetPCIBusId=lambda ordinal: "0000:3B:00.0"
    )
    sources.library("cupy", cuda=SimpleNamespace(runtime=runtime))
    (device,) = find_devices(1).devices
    assert (device.name, device.memory_nbytes, device.multiprocessors, device.pci_bus_id) == ("T4", 5, 40, BUS)


def test_a_library_that_fails_is_passed_over(sources):
    def fail(ordinal: int) -> None:
        raise RuntimeError("no kernel image\nmore")

    sources.library("cuda.core", Device=fail)
    sources.library("torch", cuda=torch_with())
    assert find_devices(1).devices[0].multiprocessors == 132
    sources.library("torch", cuda=SimpleNamespace(get_device_properties=fail))
    sources.smi(Device(name="H200", pci_bus_id=BUS))
    found = find_devices(1)
    assert found.reason.endswith("cuda.core failed: no kernel image, torch failed: no kernel image, no cupy")
    (device,) = found.devices
    assert device.unknown["multiprocessors"] == found.reason


def test_a_torch_that_does_not_say_where_a_device_is(sources):
    """Then nothing can be joined to it, and the machine's list stands beside it."""
    sources.library("torch", cuda=torch_with(pci_bus_id=None))
    sources.smi(Device(name="H200", pci_bus_id=BUS))
    first, second = find_devices(1).devices
    assert (first.ordinal, first.pci_bus_id, second.ordinal) == (0, None, None)
