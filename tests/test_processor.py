"""What the processor is called in reports and results."""

from __future__ import annotations

import platform

import pytest

from kvbm_kernels import processor


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        (
            "processor\t: 0\nmodel name\t: A Processor: 3 GHz\nprocessor\t: 1\nmodel name\t: Another\n",
            "A Processor: 3 GHz",
        ),
        ("processor\t: 0\nCPU implementer\t: 0x41\n", platform.machine()),
        (None, platform.machine()),
    ],
    ids=["x86", "Arm", "no such file"],
)
def test_the_name_of_the_processor(monkeypatch, tmp_path, cpuinfo, name):
    """The first model name, or the architecture where there is none."""
    path = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        path.write_text(cpuinfo)
    monkeypatch.setattr(processor, "_CPUINFO", path)
    assert processor.processor_name() == name
