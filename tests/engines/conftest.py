"""What the tests with the engines' own code share: loading that code, and caches to compare."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import warnings
from pathlib import Path
from unittest.mock import MagicMock

import ml_dtypes
import numpy as np
import pytest

import kvbm_kernels as kk
import reference

HERE = Path(__file__).parent

# Imported at the top of files that have nothing to do with it, and larger than the rest together.
STAND_INS = {"sglang": ("torchvision", "sentencepiece")}


def pytest_collection_modifyitems(config, items):
    """These tests run only when they are asked for: to import an engine takes seconds and leaves nothing as it was."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engines)
            item.add_marker(pytest.mark.filterwarnings("default"))
            if "engines" not in config.option.markexpr:
                item.add_marker(pytest.mark.skip(reason="only with -m engines, see ci/engines.sh"))


class _StandIn(types.ModuleType):
    """A module in name only: whatever is taken from it can be called and inherited from, and does nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        found = type(name, (), {}) if name[:1].isupper() else MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules that only an engine wants, for this engine alone."""

    def find_spec(self, name, path=None, target=None):
        frame = sys._getframe(1)
        while "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        engine = frame.f_globals.get("__name__", "").partition(".")[0]
        parent = sys.modules.get(name.rpartition(".")[0])
        if isinstance(parent, _StandIn) or name in STAND_INS.get(engine, ()):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _StandIn(spec.name)

    def exec_module(self, module):
        pass


@pytest.fixture(scope="session")
def load():
    """Imports a module of an engine; the test is skipped with the reason where that cannot be."""
    finder = _StandIns()

    def loaded(name: str):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return importlib.import_module(name)
        except Exception as error:
            pytest.skip(f"{name} cannot be loaded: {type(error).__name__}: {error}")

    # Behind all others, so that what is installed is taken as it is.
    sys.meta_path.append(finder)
    yield loaded
    sys.meta_path.remove(finder)


class Logical:
    """A cache as it is meant, ``kv[block, layer, outer, token, head]``, and PyTorch's tensors of it in bf16."""

    def __init__(self, nb=5, nl=3, no=2, nt=8, nh=4, hd=16) -> None:
        self.kv = reference.random_kv(np.random.default_rng(nb), (nb, nl, no, nt, nh, hd), ml_dtypes.bfloat16)
        self.shape = kk.BlockShape(nl, no, nh, nt, hd, "bf16")
        import torch

        self.tensor = torch.from_numpy(self.kv.view(np.int16)).view(torch.bfloat16)

    @property
    def tokens(self):
        """``[layer, outer, token, head, hd]`` of the blocks one after another."""
        nb, nl, no, nt, nh, hd = self.tensor.shape
        return self.tensor.permute(1, 2, 0, 3, 4, 5).reshape(nl, no, nb * nt, nh, hd)

    def assert_read(self, view: kk.View) -> None:
        """The view has this cache, to the bit."""
        store = np.zeros_like(reference.universal(self.kv))
        kk.copy_blocks(kk.UniversalBlocks(store, self.shape), view)
        reference.assert_same_bytes(store, reference.universal(self.kv))

    def write(self, view: kk.View) -> None:
        """Restore this cache into the view, from universal blocks."""
        kk.copy_blocks(view, kk.UniversalBlocks(reference.universal(self.kv), self.shape))


@pytest.fixture
def logical():
    """Makes caches of the sizes given."""
    pytest.importorskip("torch")
    return Logical
