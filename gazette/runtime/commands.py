"""The functions behind the words of a command line, imported when they are called."""

from __future__ import annotations

import gc
import importlib
from typing import Any


def import_function(module: str, name: str) -> Any:
    """Import a function of a module. Raise what importing the module raises.

    No garbage is collected meanwhile. Modules are no garbage, and going through them again and again takes a
    tenth of the time of importing a broker.
    """
    gc.disable()
    try:
        return getattr(importlib.import_module(module), name)
    finally:
        gc.enable()
