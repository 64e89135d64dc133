"""The sessions in the README are what a reader who types them sees."""

from __future__ import annotations

import doctest
import re

from buildtools import ROOT, environment, installed, require_program, run

README = ROOT / "README.md"


def test_python_session() -> None:
    failures, tried = doctest.testfile(str(README), module_relative=False, encoding="utf-8")
    assert tried > 10
    assert failures == 0


def test_c_session(tmp_path) -> None:
    text = README.read_text()
    program = re.search(r"```c\n(.*?)```", text, re.DOTALL)[1]
    expected = re.search(r"\./a\.out\n(.*?)```", text, re.DOTALL)[1]
    (tmp_path / "session.c").write_text(program)
    prefix = installed("stub")
    env = environment(PKG_CONFIG_PATH=str(prefix / "lib/pkgconfig"), LD_LIBRARY_PATH=str(prefix / "lib"))
    flags = run(require_program("pkg-config"), "--cflags", "--libs", "kvbm_kernels", env=env).split()
    run(
        require_program("cc"), "-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror", "session.c", *flags, cwd=tmp_path
    )
    assert run("./a.out", cwd=tmp_path, env=env) == expected


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README.read_text()):
        assert (ROOT / link).exists(), link
