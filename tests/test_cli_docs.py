"""docs/cli.md shows what the command prints and draws now."""

from __future__ import annotations

import re

import pytest

from buildtools import ROOT
from commands import kvbm_kernels, output

PAGE = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
SESSIONS = re.findall(r"```console\n\$ ([^\n]*)\n(.*?)```", PAGE, re.DOTALL)
PICTURES = {"layout_nhd_universal.svg": [], "layout_hnd_universal.svg": ["--from", "hnd"]}


def elsewhere(text: str) -> str:
    """Without what depends on the processor: a line of the facts, and the last sentence."""
    return re.sub(r"on the host.*", "", text.partition("Host: ")[0])


def test_there_are_sessions():
    assert len(SESSIONS) >= 3


@pytest.mark.parametrize(("command", "shown"), SESSIONS)
def test_sessions(command, shown):
    program, *arguments = command.split()
    assert program == "kvbm-kernels"
    assert elsewhere(shown) == elsewhere(output(kvbm_kernels(*arguments)))


@pytest.mark.parametrize("name", PICTURES)
def test_pictures(name, tmp_path):
    file = tmp_path / name
    output(kvbm_kernels("layout", *PICTURES[name], "--svg", file))
    assert elsewhere((ROOT / "docs" / name).read_text("utf-8")) == elsewhere(file.read_text("utf-8"))
    assert f"]({name})" in PAGE


def test_every_option_is_there():
    for option in re.findall(r"(--[a-z]+(?:-[a-z]+)*)", output(kvbm_kernels("layout", "--help"))):
        assert option in PAGE or option == "--help", option
    for field in re.findall(r"`(\w+)`", PAGE.partition("## info")[2].partition("The link is slower")[0]):
        if field != "cudaMemcpyBatchAsync":
            assert f'"{field}":' in output(kvbm_kernels("info", "--json")), field
