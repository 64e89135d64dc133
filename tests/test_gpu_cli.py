"""On a GPU: the report names what is there, and an explanation is what the profiler sees of the copy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import kvbm_kernels as kk
from commands import kvbm_kernels, output

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def report() -> dict:
    return json.loads(output(kvbm_kernels("info", "--json")))


class TestInfo:
    def test_the_library_found_cuda(self, report):
        assert report["build"] == "CUDA"
        assert report["visible_devices"] >= 1
        for name in ("cuda_runtime", "cuda_driver"):
            assert re.fullmatch(r"\d+\.\d+", report[name])
        assert report["architectures"]

    def test_batch_copies_or_the_reason(self, report):
        assert report["batch_copy"] == kk.has_memcpy_batch_async()
        if tuple(map(int, kk.build_info().driver.split("."))) >= (12, 8):
            assert (report["batch_copy"], report["batch_copy_reason"]) == (True, "cudaMemcpyBatchAsync")

    def test_devices_are_those_of_torch(self, report, torch):
        devices = {device["ordinal"]: device for device in report["devices"]}
        assert devices.keys() >= set(range(torch.cuda.device_count()))
        for ordinal in range(torch.cuda.device_count()):
            device, known = devices[ordinal], torch.cuda.get_device_properties(ordinal)
            assert device["name"] == known.name
            assert device["multiprocessors"] == known.multi_processor_count
            assert device["compute_capability"] == f"{known.major}.{known.minor}"
            # The driver keeps some for itself, and tools differ in whether they count that.
            assert device["memory_nbytes"] == pytest.approx(known.total_memory, rel=0.05)

    def test_what_is_unknown_has_a_reason(self, report):
        for device in report["devices"]:
            unknown = {name for name, value in device.items() if value is None}
            assert unknown == set(device["unknown"])
            assert all(device["unknown"].values())
            for name in ("pcie_generation", "pcie_max_generation"):
                assert device[name] is None or 1 <= device[name] <= 7

    def test_the_text_has_the_devices(self, report):
        text = output(kvbm_kernels("info"))
        for device in report["devices"]:
            if device["ordinal"] is not None:
                assert f"  cuda:{device['ordinal']}  " in text
                assert f"{device['name']}, " in text


class Launch(NamedTuple):
    """A kernel of ours that ran."""

    kernel: str
    ctas: int
    threads: int


def launches_of(torch: Any, work: Callable[[], None], folder: Path) -> list[Launch]:
    """What the profiler saw; the test is skipped where it sees no kernel at all, whoever's it is."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        torch.zeros(1 << 20, device="cuda").add_(1)
        work()
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    if not kernels:
        pytest.skip("the profiler sees no kernels on this machine")
    found = []
    for event in sorted(kernels, key=lambda event: event["ts"]):
        name = re.search(r"kvbm::device::(\w+)", event["name"])
        if name:
            found.append(Launch(name[1], event["args"]["grid"][0], event["args"]["block"][0]))
    return found


def empty(torch: Any, where: str, *extents: int, dtype: Any) -> Any:
    if where == "host":
        return torch.zeros(extents, dtype=dtype, pin_memory=True)
    return torch.zeros(extents, dtype=dtype, device="cuda")


# nb, nl, no, nh, nt, hd of f16; source and destination; and the kernel that is meant, where it matters to the case.
CASES = {
    "inside the device": ((8, 4, 2, 8, 16, 128), "device", "device"),
    "to the host": ((8, 4, 2, 8, 16, 128), "device", "host"),
    "from the host": ((8, 4, 2, 8, 16, 128), "host", "device"),
    "small chunks": ((3, 2, 2, 2, 4, 8), "device", "device"),
    "short rows": ((4, 2, 2, 4, 64, 1), "device", "device"),
    "odd rows": ((4, 2, 2, 4, 16, 13), "device", "device"),
    "many launches": ((9000, 1, 1, 1, 2, 64), "device", "device"),
}


@pytest.mark.parametrize("max_sms", [None, 3])
@pytest.mark.parametrize("case", CASES)
def test_an_explanation_is_what_runs(torch, tmp_path, case, max_sms):
    (nb, nl, no, nh, nt, hd), source, destination = CASES[case]
    shape = kk.BlockShape(nl, no, nh, nt, hd, "fp16")
    stack = empty(torch, source, nb, nl, no, nt, nh, hd, dtype=torch.float16)
    chunks = [list(block.flatten(0, 1)) for block in stack]
    blocks = kk.BlockStack(chunks, shape)
    universal = kk.UniversalBlocks(list(empty(torch, destination, nb, nh, nl, no, nt, hd, dtype=torch.float16)), shape)
    found = kk.explain(
        universal, blocks, src_on_host=source == "host", dst_on_host=destination == "host", max_sms=max_sms
    ).device
    ran = launches_of(torch, lambda: kk.copy_blocks(universal, blocks, max_sms=max_sms), tmp_path)
    assert {launch.kernel for launch in ran} == {found.kernel}
    assert len(ran) == found.launches
    assert (ran[0].ctas, ran[0].threads) == (found.ctas, found.cta_threads)


def test_where_arrays_are_is_seen(torch):
    shape = kk.BlockShape(2, 2, 4, 16, 64, "fp16")
    on_device = kk.UniversalBlocks(empty(torch, "device", 3, 4, 2, 2, 16, 64, dtype=torch.float16), shape)
    pinned = kk.UniversalBlocks(empty(torch, "host", 3, 4, 2, 2, 16, 64, dtype=torch.float16), shape)
    for dst, src, sides in ((on_device, on_device, (False, False)), (pinned, on_device, (False, True))):
        found = kk.explain(dst, src).device
        assert (found.src_on_host, found.dst_on_host) == sides
