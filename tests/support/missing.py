"""An interpreter in which packages are not installed, by the hooks of imports that Python documents."""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
from collections.abc import Iterator
from typing import Any


class _Lacking:
    """A finder of modules that does not find some packages, and is another one apart from that."""

    def __init__(self, finder: Any, packages: tuple[str, ...]) -> None:
        self._finder = finder
        self._packages = packages

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)

    def find_spec(self, name: str, *arguments: Any) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in self._packages:
            return None
        found: importlib.machinery.ModuleSpec | None = self._finder.find_spec(name, *arguments)
        return found


@contextlib.contextmanager
def missing(*packages: str) -> Iterator[None]:
    """Let these packages be missing within a block: neither imports nor ``find_spec`` find them."""
    finders, sys.meta_path[:] = (
        list(sys.meta_path),
        [_Lacking(one, packages) for one in sys.meta_path],
    )
    hidden = {name: sys.modules.pop(name) for name in [*sys.modules] if _is_of(name, packages)}
    try:
        yield
    finally:
        sys.meta_path[:] = finders
        sys.modules.update(hidden)


def _is_of(name: str, packages: tuple[str, ...]) -> bool:
    return name.partition(".")[0] in packages
