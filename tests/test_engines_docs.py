"""The sessions on the pages about engines are what a reader who types them sees, and their links lead somewhere."""

from __future__ import annotations

import doctest
import re

import pytest

from buildtools import ROOT

PAGES = sorted((ROOT / "docs/engines").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_session(page) -> None:
    failures, tried = doctest.testfile(str(page), module_relative=False, encoding="utf-8")
    assert tried > 3
    assert failures == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links(page) -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_every_call_has_a_page() -> None:
    import kvbm_kernels.engines as engines

    index = (ROOT / "docs/engines/README.md").read_text()
    for name in engines.__all__:
        assert f"`{name}" in index, name
