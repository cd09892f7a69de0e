"""Journals, exactly-once consumers with SQL state, and Spark backfills: Gazette in Python.

The names that an application starts from. They are imported when they are first used, so that
importing one module of this package never imports others.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gazette import runconsumer
    from gazette.consumer.application import Application, DeferToNextTransaction, Shard, Store
    from gazette.errors import GazetteError
    from gazette.message.envelope import Envelope
    from gazette.message.frames import MalformedMessage
    from gazette.message.mapping import Partition
    from gazette.message.message import Acknowledgement, CSVRecord, Message
    from gazette.message.publisher import Publisher
    from gazette.version import __version__

_HOMES = {
    "Acknowledgement": "gazette.message.message",
    "Application": "gazette.consumer.application",
    "CSVRecord": "gazette.message.message",
    "DeferToNextTransaction": "gazette.consumer.application",
    "Envelope": "gazette.message.envelope",
    "GazetteError": "gazette.errors",
    "MalformedMessage": "gazette.message.frames",
    "Message": "gazette.message.message",
    "Partition": "gazette.message.mapping",
    "Publisher": "gazette.message.publisher",
    "Shard": "gazette.consumer.application",
    "Store": "gazette.consumer.application",
    "__version__": "gazette.version",
}

__all__ = [
    "Acknowledgement",
    "Application",
    "CSVRecord",
    "DeferToNextTransaction",
    "Envelope",
    "GazetteError",
    "MalformedMessage",
    "Message",
    "Partition",
    "Publisher",
    "Shard",
    "Store",
    "__version__",
    "runconsumer",
]


def __getattr__(name: str) -> Any:
    if name == "runconsumer":
        return importlib.import_module("gazette.runconsumer")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'gazette' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
