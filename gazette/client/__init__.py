"""Client library: read and append journals, list and change specifications."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gazette.client.append.service import AppendService as AppendService
    from gazette.client.client import Client as Client
    from gazette.client.read.reader import Reader as Reader
    from gazette.client.read.retry_reader import RetryReader as RetryReader

_MODULES = {
    "AppendService": "append.service",
    "Client": "client",
    "Reader": "read.reader",
    "RetryReader": "read.retry_reader",
}

__all__ = ["AppendService", "Client", "Reader", "RetryReader"]


if not TYPE_CHECKING:  # Without this, type checkers could not report a name that is not here.

    def __getattr__(name: str) -> Any:
        # Import lazily, so that one module of the package does not import the others.
        if (module := _MODULES.get(name)) is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{module}"), name)
