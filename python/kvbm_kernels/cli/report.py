"""What a bug report should carry: the library, the CUDA it found, the GPUs, and the Python around them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform
import sys
from dataclasses import dataclass
from importlib import metadata

import kvbm_kernels as kk
from kvbm_kernels.cli.devices import Device, find_devices
from kvbm_kernels.processor import processor_name

# Whose arrays, streams and types the package works with.
_PACKAGES = ("numpy", "cffi", "ml_dtypes", "torch", "cupy", "cupy-cuda12x", "cupy-cuda13x", "jax", "cuda-core")


@dataclass(frozen=True)
class Report:
    """Everything ``kvbm-kernels info`` says."""

    version: str
    """Of the package."""
    library: str
    """The path of the library."""
    library_version: str
    build: str
    """ "CUDA" or "stub"."""
    architectures: list[str]
    """CUDA architectures compiled in."""
    cuda_runtime: str | None
    """The CUDA linked in."""
    cuda_driver: str | None
    """The newest CUDA that the driver supports."""
    driver_release: str | None
    """The driver's own version."""
    visible_devices: int
    """CUDA devices that the library sees."""
    batch_copy: bool
    """Whether cudaMemcpyBatchAsync can be used."""
    batch_copy_reason: str
    """Why not, or what it takes."""
    devices: list[Device]
    devices_reason: str | None
    """Why there are none to tell of, or less than all about them."""
    processor: str
    processors: int
    """Processors that this process may run on."""
    python: str
    platform: str
    packages: dict[str, str]
    """Versions of the installed packages that it may work with."""


def collect() -> Report:
    """Ask the library, the driver's tools and Python."""
    build = kk.build_info()
    found = find_devices(build.devices)
    batches = kk.has_memcpy_batch_async()
    return Report(
        version=kk.__version__,
        library=build.library,
        library_version=build.version,
        build="stub" if build.is_stub_build else "CUDA",
        architectures=list(build.archs),
        cuda_runtime=build.cuda,
        cuda_driver=build.driver,
        driver_release=found.driver_release,
        visible_devices=build.devices,
        batch_copy=batches,
        batch_copy_reason=_about_batches(build, batches),
        devices=found.devices,
        devices_reason=found.reason,
        processor=processor_name(),
        processors=len(os.sched_getaffinity(0)),
        python=f"{platform.python_implementation()} {platform.python_version()}, {sys.executable}",
        platform=platform.platform(),
        packages=_versions(),
    )


def _about_batches(build: kk.BuildInfo, usable: bool) -> str:
    if usable:
        return "cudaMemcpyBatchAsync"
    if build.is_stub_build:
        return "this is the build without CUDA"
    if build.driver is None:
        return "there is no CUDA driver"
    for what, version in (("the library was built with", build.cuda), ("the driver supports", build.driver)):
        if version is not None and tuple(map(int, version.split("."))) < (12, 8):
            return f"{what} CUDA {version}, and cudaMemcpyBatchAsync came with 12.8"
    if not build.devices:
        return "there is no CUDA device"
    return "the driver has no cudaMemcpyBatchAsync, or refused it"


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def as_text(report: Report, *, as_json: bool) -> str:
    """The report to paste, or as JSON, with null for what is not known. No line is folded: paths stay whole."""
    return json.dumps(dataclasses.asdict(report), indent=2) if as_json else "\n".join(_lines(report))


def _lines(report: Report) -> list[str]:
    if report.build == "stub":
        cuda = "none: this is the build without CUDA"
    else:
        driver = "no driver" if report.cuda_driver is None else f"the driver supports {report.cuda_driver}"
        cuda = f"{report.cuda_runtime} linked in; {driver}"
    release = f", release {report.driver_release}" if report.driver_release else ""
    rows = [
        ("kvbm-kernels", report.version),
        ("library", f"{report.library_version}, {report.build} build, {report.library}"),
        ("architectures", ", ".join(report.architectures) or "none"),
        ("CUDA", f"{cuda}{release}"),
        ("batch copy", f"{'yes' if report.batch_copy else 'no'}: {report.batch_copy_reason}"),
        (
            "devices",
            f"{report.visible_devices} visible" + (f"; {report.devices_reason}" if report.devices_reason else ""),
        ),
    ]
    for device in report.devices:
        rows += _of_device(device)
    rows += [
        ("processor", f"{report.processor}, {report.processors} usable"),
        ("python", report.python),
        ("platform", report.platform),
        ("packages", ", ".join(f"{name} {version}" for name, version in report.packages.items())),
    ]
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}".rstrip() for name, value in rows]


def _of_device(device: Device) -> list[tuple[str, str]]:
    def said(name: str, wording: str = "{}") -> str:
        value = getattr(device, name)
        return wording.format("?" if value is None else value)

    memory = "? GiB" if device.memory_nbytes is None else f"{device.memory_nbytes / 2**30:.1f} GiB"
    name = "not visible" if device.ordinal is None else f"cuda:{device.ordinal}"
    capability = said("compute_capability", "compute capability {}")
    link = (
        f"PCIe {said('pcie_generation')} x{said('pcie_width')} now, "
        f"{said('pcie_max_generation')} x{said('pcie_max_width')} at most, at {said('pci_bus_id')}"
    )
    rows = [
        (f"  {name}", f"{said('name')}, {memory}, {capability}, {said('multiprocessors')} multiprocessors"),
        ("", link),
    ]
    by_reason: dict[str, list[str]] = {}
    for unknown, reason in device.unknown.items():
        by_reason.setdefault(reason, []).append(unknown)
    rows += [("", f"? {', '.join(names)}: {reason}") for reason, names in by_reason.items()]
    return rows
