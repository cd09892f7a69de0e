"""Imports modules of this package by name, at the first use of a name in them.

The names are in tables. `tests/test_layers.py` checks these tables as it checks import statements. No other
module imports modules of this package by name.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

_CLIENT: Final = "pygazette-client"
_WHOLE: Final = "pygazette"


def lazy_names(package: str, homes: Mapping[str, str], *, extra: str = "") -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package: it imports a name from its module in ``homes``.

    A name whose home is ``package.name`` is the module itself. ``extra`` is the extra with the packages
    that the modules need.
    """

    def __getattr__(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = importlib.import_module(home)
        except ModuleNotFoundError as error:
            problem = _problem(f"{package}.{name}", str(error.name), extra)
            if problem is None:
                raise
            raise problem from error
        value = module if home == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__


def import_function(target: str) -> Any:
    """Import ``module:function``. Errors of importing the module reach the caller."""
    module, _, name = target.partition(":")
    with many_imports():
        return getattr(importlib.import_module(module), name)


@contextmanager
def many_imports() -> Iterator[None]:
    """Collect no garbage during the block, which imports many modules. Switch the collector on afterwards.

    The collector would go through the new modules again and again. That takes a tenth of the time of a
    broker's imports.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _problem(what: str, missing: str, extra: str) -> Exception | None:
    """Return the error that says what to install for ``what``, or None if the missing module is unknown."""
    if missing.startswith("gazette."):
        return ImportError(f"{what} is part of {_WHOLE}, {_remedy()}", name=missing)
    if not extra:
        return None
    from gazette.errors import not_installed

    return not_installed(what, missing, extra)


def _remedy() -> str:
    """Return what is wrong with the installed packages, and the command that mends it."""
    import importlib.metadata  # Each process imports `lazy`, but few processes call this function.
    from pathlib import Path

    try:
        importlib.metadata.version(_WHOLE)
    except importlib.metadata.PackageNotFoundError:
        return f"and only {_CLIENT} is installed: run `pip install {_WHOLE}`"
    directory = Path(__file__).parents[1]
    return (
        f"which is installed in another place than {_CLIENT} ({directory}): install both in one "
        f"place, or run `pip uninstall {_CLIENT}` if {_WHOLE} is a checkout"
    )
