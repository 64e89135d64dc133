"""The session in docs/tp.md is what a reader who types it sees."""

from __future__ import annotations

import doctest

from buildtools import ROOT


def test_session() -> None:
    """Every line of the session gives what the page says."""
    failures, tried = doctest.testfile(str(ROOT / "docs/tp.md"), module_relative=False, encoding="utf-8")
    assert tried >= 15
    assert failures == 0
