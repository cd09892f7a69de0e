"""Client library: read and append journals, list and change specifications."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gazette.lazy import lazy_names

if TYPE_CHECKING:
    from gazette.client.append.service import AppendService as AppendService
    from gazette.client.client import Client as Client
    from gazette.client.read.reader import Reader as Reader
    from gazette.client.read.retry_reader import RetryReader as RetryReader

_HOMES = {
    "AppendService": "gazette.client.append.service",
    "Client": "gazette.client.client",
    "Reader": "gazette.client.read.reader",
    "RetryReader": "gazette.client.read.retry_reader",
}

__all__ = ["AppendService", "Client", "Reader", "RetryReader"]


if not TYPE_CHECKING:  # Without this, type checkers could not report a name that is not here.
    __getattr__ = lazy_names(__name__, _HOMES)
