"""Puts the mistake that ``GAZETTE_CHAOS_PLANT`` names into this process, as its module is imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final

from tools.chaos_plants.plants import PLANTS

PLANT_ENV: Final = "GAZETTE_CHAOS_PLANT"


def install() -> None:
    """Have the import of the plant's module make its mistake. Of no effect without the variable."""
    if name := os.environ.get(PLANT_ENV):
        for module, put in PLANTS[name].puts.items():
            sys.meta_path.insert(0, _Finder(module, put))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, module: str, put: Callable[[Any], None]) -> None:
        self._module = module
        self._put = put

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        spec.loader = _Loader(spec.loader, self._put)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, put: Callable[[Any], None]) -> None:
        self._loader = loader
        self._put = put

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._put(module)
