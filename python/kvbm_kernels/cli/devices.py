"""The GPUs of this machine: what CUDA says of those this process sees, and nvidia-smi and the kernel of the link."""

from __future__ import annotations

import csv
import importlib
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

# Gigatransfers a second of a lane, by which the kernel tells a generation.
_GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}

_PCI = Path("/sys/bus/pci/devices")

# What is asked of nvidia-smi.
_SMI = {
    "pci_bus_id": "pci.bus_id",
    "name": "name",
    "memory_mib": "memory.total",
    "compute_capability": "compute_cap",
    "pcie_generation": "pcie.link.gen.current",
    "pcie_width": "pcie.link.width.current",
    "pcie_max_generation": "pcie.link.gen.max",
    "pcie_max_width": "pcie.link.width.max",
    "driver": "driver_version",
}


@dataclass(frozen=True)
class Device:
    """A GPU. None is what could not be found out, with the reason in ``unknown``."""

    ordinal: int | None = None
    """Its number in CUDA, for this process."""
    name: str | None = None
    memory_nbytes: int | None = None
    compute_capability: str | None = None
    multiprocessors: int | None = None
    pci_bus_id: str | None = None
    pcie_generation: int | None = None
    """Of the link to the host as it is now: a GPU at rest slows it down."""
    pcie_width: int | None = None
    """Lanes."""
    pcie_max_generation: int | None = None
    """What the GPU and its place in this machine can do."""
    pcie_max_width: int | None = None
    unknown: dict[str, str] = field(default_factory=dict)


class Found(NamedTuple):
    """The GPUs, and why there are none, or less than all about them."""

    devices: list[Device]
    driver_release: str | None
    reason: str | None


def find_devices(visible: int) -> Found:
    """The GPUs of the machine; those among them that CUDA shows to this process, ``visible`` of them, have a number."""
    by_smi, driver_release, smi_reason = _ask_smi()
    by_cuda, cuda_reason = _ask_cuda(visible)
    devices = []
    for device in by_cuda:
        same = [other for other in by_smi if other.pci_bus_id == device.pci_bus_id]
        by_smi = [other for other in by_smi if other not in same]
        devices.append(_joined(device, *same))
    devices += by_smi
    reasons = [reason for reason in (smi_reason, cuda_reason) if reason]
    devices = [_explained(_with_link(device, _PCI), smi_reason, cuda_reason) for device in devices]
    return Found(devices, driver_release, "; ".join(reasons) or None)


def _ask_smi() -> tuple[list[Device], str | None, str | None]:
    """Devices, the driver's release, and why there are none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_SMI.values())}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=20)
    except OSError:
        return [], None, "there is no nvidia-smi"
    except subprocess.TimeoutExpired:
        return [], None, "nvidia-smi did not answer"
    if result.returncode:
        said = (result.stdout + result.stderr).strip().splitlines()
        return [], None, f"nvidia-smi failed: {said[0] if said else f'exit status {result.returncode}'}"
    devices, release = [], None
    for values in csv.reader(result.stdout.splitlines(), skipinitialspace=True):
        # What it does not know is "[N/A]" or "[Not Supported]".
        known = {name: value for name, value in zip(_SMI, values, strict=False) if not value.startswith("[")}
        release = known.get("driver", release)
        number = {name: int(value) for name, value in known.items() if value.isdecimal()}
        devices.append(
            Device(
                name=known.get("name"),
                memory_nbytes=number["memory_mib"] << 20 if "memory_mib" in number else None,
                compute_capability=known.get("compute_capability"),
                pci_bus_id=_bus_id(known.get("pci_bus_id")),
                pcie_generation=number.get("pcie_generation"),
                pcie_width=number.get("pcie_width"),
                pcie_max_generation=number.get("pcie_max_generation"),
                pcie_max_width=number.get("pcie_max_width"),
            )
        )
    return devices, release, None


def _ask_cuda(visible: int) -> tuple[list[Device], str | None]:
    """The devices that this process sees, by whichever library is there to ask, or why there are none."""
    if not visible:
        return [], None
    failures = []
    for name, ask in _LIBRARIES.items():
        try:
            return [ask(ordinal) for ordinal in range(visible)], None
        except ModuleNotFoundError:
            failures.append(f"no {name}")
        except Exception as error:  # Whatever else is wrong with a library, the report goes on without it.
            failures.append(f"{name} failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
    return [], f"which devices this process sees is for a CUDA library to tell: {', '.join(failures)}"


def _by_cuda_core(ordinal: int) -> Device:
    try:
        module = importlib.import_module("cuda.core")
        device = module.Device(ordinal)
    except (ModuleNotFoundError, AttributeError):
        device = importlib.import_module("cuda.core.experimental").Device(ordinal)
    return Device(
        ordinal=ordinal,
        name=device.name,
        compute_capability=".".join(map(str, device.compute_capability)),
        multiprocessors=int(device.properties.multiprocessor_count),
        pci_bus_id=_bus_id(device.pci_bus_id),
    )


def _by_torch(ordinal: int) -> Device:
    properties = importlib.import_module("torch").cuda.get_device_properties(ordinal)
    place: list[Any] = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    return Device(
        ordinal=ordinal,
        name=properties.name,
        memory_nbytes=int(properties.total_memory),
        compute_capability=f"{properties.major}.{properties.minor}",
        multiprocessors=int(properties.multi_processor_count),
        pci_bus_id=None if None in place else "{:04x}:{:02x}:{:02x}.0".format(*place),
    )


def _by_cupy(ordinal: int) -> Device:
    runtime = importlib.import_module("cupy").cuda.runtime
    properties = runtime.getDeviceProperties(ordinal)
    return Device(
        ordinal=ordinal,
        name=properties["name"].decode(),
        memory_nbytes=int(properties["totalGlobalMem"]),
        compute_capability=f"{properties['major']}.{properties['minor']}",
        multiprocessors=int(properties["multiProcessorCount"]),
        pci_bus_id=_bus_id(runtime.deviceGetPCIBusId(ordinal)),
    )


_LIBRARIES: dict[str, Callable[[int], Device]] = {"cuda.core": _by_cuda_core, "torch": _by_torch, "cupy": _by_cupy}


def _bus_id(text: str | None) -> str | None:
    """One spelling for "00000000:3B:00.0" and "0000:3b:00.0"."""
    if text is None:
        return None
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]:0>4}:{rest}"


def _joined(device: Device, *others: Device) -> Device:
    """The device, with what it lacks from the others."""
    for other in others:
        lacking = {name: getattr(other, name) for name in _FIELDS if getattr(device, name) is None}
        device = replace(device, **lacking)
    return device


_FIELDS = [name for name in Device.__dataclass_fields__ if name != "unknown"]


def _with_link(device: Device, folder: Path) -> Device:
    """What the kernel says of the link, where nobody else did."""
    if device.pci_bus_id is None:
        return device

    def read(name: str) -> str | None:
        try:
            return (folder / str(device.pci_bus_id) / name).read_text().strip()
        except OSError:
            return None

    return _joined(
        device,
        Device(
            pcie_generation=_generation(read("current_link_speed")),
            pcie_width=_lanes(read("current_link_width")),
            pcie_max_generation=_generation(read("max_link_speed")),
            pcie_max_width=_lanes(read("max_link_width")),
        ),
    )


def _generation(speed: str | None) -> int | None:
    """Of "16.0 GT/s PCIe"; "Unknown" is none."""
    return _GENERATIONS.get(speed.split()[0]) if speed else None


def _lanes(width: str | None) -> int | None:
    """Of "16"; virtual machines say "0" or "255" for what they do not know."""
    return int(width) if width is not None and width in ("1", "2", "4", "8", "12", "16", "32") else None


def _explained(device: Device, smi_reason: str | None, cuda_reason: str | None) -> Device:
    """Every field that is None, with the reason."""
    reasons = {}
    for name in _FIELDS:
        if getattr(device, name) is not None:
            continue
        if name in ("ordinal", "multiprocessors"):
            reasons[name] = cuda_reason or "this process does not see the device"
        else:
            reasons[name] = smi_reason or "nvidia-smi does not say"
            if name.startswith("pcie_"):
                reasons[name] += ", nor does the kernel"
    return replace(device, unknown=reasons)
