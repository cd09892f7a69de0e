"""Lets processes of another version of this package take part in a simulation.

The other version's modules are imported beside ours, under the same names. Apart from the event loop, both
versions share only what passes between processes: bytes of calls, keys of etcd, and files of stores.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from gazette.testing.simulation import loop

_FORMER_LOOP: Final = "tools.simulation.loop"
"""Name of the loop's module in versions before `gazette test`."""
_OWN: Final = ("gazette", "tools", "prometheus_client")
"""Packages of which each version has its own modules. The last one keeps metrics by their names."""


def _is_own(name: str) -> bool:
    return name.partition(".")[0] in _OWN


class OtherVersion:
    """The modules of another checkout of this repository."""

    def __init__(self, checkout: Path) -> None:
        self._checkout = str(checkout.resolve())
        # Both versions use our loop: a simulation has one time, and its nodes are of one class.
        vars(loop).setdefault("Node", loop.SimNode)  # Former versions call it so.
        self._modules: dict[str, ModuleType] = dict.fromkeys((loop.__name__, _FORMER_LOOP), loop)
        self._is_in_place = False
        self._import = builtins.__import__
        builtins.__import__ = self._imported

    def module(self, name: str) -> Any:
        """Import a module of the other version."""
        with self._in_place():
            return importlib.import_module(name)

    def _imported(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Any = (),
        level: int = 0,
    ) -> ModuleType:
        """Import as the statement does. For code of the other version, import modules of that version."""
        if globals is not None and _is_own(name) and self._has(globals):
            with self._in_place():
                return self._import(name, globals, locals, fromlist, level)
        return self._import(name, globals, locals, fromlist, level)

    def _has(self, globals: Mapping[str, object]) -> bool:
        """Return True if these are the globals of a module of the other version, and not of ours."""
        module = self._modules.get(str(globals.get("__name__")))
        return module is not None and vars(module) is globals

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Let names mean the modules of the other version."""
        if self._is_in_place:
            yield
            return
        ours = self._take_away()
        sys.modules.update(self._modules)
        sys.path.insert(0, self._checkout)
        self._is_in_place = True
        try:
            yield
        finally:
            self._is_in_place = False
            sys.path.remove(self._checkout)
            self._modules = self._take_away()
            sys.modules.update(ours)

    def _take_away(self) -> dict[str, ModuleType]:
        return {name: sys.modules.pop(name) for name in [*sys.modules] if _is_own(name)}
