"""Journals, exactly-once consumers with SQL state, and Spark backfills: Gazette in Python.

This module has the names that an application starts from. Each name is imported at its first use. So
an import of one module of this package does not import all other modules.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from gazette.lazy import lazy_names

# gRPC's core writes a line to stderr, and not to our log, for each connection that ends. With this
# variable, which gRPC reads when it is imported, it writes only errors.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

if TYPE_CHECKING:
    from gazette import runconsumer
    from gazette.consumer.application import (
        Application,
        DeferToNextTransaction,
        MessageProducer,
        Shard,
        StateView,
        Store,
    )
    from gazette.consumer.contract.error_cause import ErrorCause
    from gazette.consumer.contract.poison import DeadLetter, DeadTimer, PoisonPolicy
    from gazette.consumer.declare.source import Output, Source
    from gazette.consumer.query.all_shards import ListPage, gather_route, list_route
    from gazette.consumer.query.query import QueryResult, ShardQuery
    from gazette.consumer.query.shard_route import ShardRequest, shard_route
    from gazette.consumer.query.shard_rpc import shard_rpc
    from gazette.consumer.service import ConsumerService
    from gazette.consumer.timers.timer import EventTime, TimeDomain, Timer, TimerTable
    from gazette.errors import GazetteError
    from gazette.history.shard_tables.application import TableApplication
    from gazette.history.tables import read_batches, read_table
    from gazette.message.envelope import Envelope
    from gazette.message.framing.frames import MalformedMessage
    from gazette.message.mapping import Partition
    from gazette.message.message import Acknowledgement, CSVRecord, Message
    from gazette.message.message_time import MessageTime, UnusableTime
    from gazette.message.publisher import Publisher
    from gazette.message.publishing.client_publisher import ClientPublisher, open_publisher
    from gazette.message.publishing.service import CommitFailed
    from gazette.recoverylog.log.recorder import Recorder
    from gazette.version import __version__

_HOMES = {
    "Acknowledgement": "gazette.message.message",
    "Application": "gazette.consumer.application",
    "CSVRecord": "gazette.message.message",
    "ClientPublisher": "gazette.message.publishing.client_publisher",
    "CommitFailed": "gazette.message.publishing.service",
    "ConsumerService": "gazette.consumer.service",
    "DeadLetter": "gazette.consumer.contract.poison",
    "DeadTimer": "gazette.consumer.contract.poison",
    "DeferToNextTransaction": "gazette.consumer.application",
    "Envelope": "gazette.message.envelope",
    "ErrorCause": "gazette.consumer.contract.error_cause",
    "EventTime": "gazette.consumer.timers.timer",
    "GazetteError": "gazette.errors",
    "ListPage": "gazette.consumer.query.all_shards",
    "MalformedMessage": "gazette.message.framing.frames",
    "Message": "gazette.message.message",
    "MessageProducer": "gazette.consumer.application",
    "MessageTime": "gazette.message.message_time",
    "Output": "gazette.consumer.declare.source",
    "Partition": "gazette.message.mapping",
    "PoisonPolicy": "gazette.consumer.contract.poison",
    "Publisher": "gazette.message.publisher",
    "QueryResult": "gazette.consumer.query.query",
    "Recorder": "gazette.recoverylog.log.recorder",
    "Shard": "gazette.consumer.application",
    "ShardQuery": "gazette.consumer.query.query",
    "ShardRequest": "gazette.consumer.query.shard_route",
    "Source": "gazette.consumer.declare.source",
    "StateView": "gazette.consumer.application",
    "Store": "gazette.consumer.application",
    "TableApplication": "gazette.history.shard_tables.application",
    "TimeDomain": "gazette.consumer.timers.timer",
    "Timer": "gazette.consumer.timers.timer",
    "TimerTable": "gazette.consumer.timers.timer",
    "UnusableTime": "gazette.message.message_time",
    "__version__": "gazette.version",
    "gather_route": "gazette.consumer.query.all_shards",
    "list_route": "gazette.consumer.query.all_shards",
    "open_publisher": "gazette.message.publishing.client_publisher",
    "read_batches": "gazette.history.tables",
    "read_table": "gazette.history.tables",
    "runconsumer": "gazette.runconsumer",
    "shard_route": "gazette.consumer.query.shard_route",
    "shard_rpc": "gazette.consumer.query.shard_rpc",
}

__all__ = [
    "Acknowledgement",
    "Application",
    "CSVRecord",
    "ClientPublisher",
    "CommitFailed",
    "ConsumerService",
    "DeadLetter",
    "DeadTimer",
    "DeferToNextTransaction",
    "Envelope",
    "ErrorCause",
    "EventTime",
    "GazetteError",
    "ListPage",
    "MalformedMessage",
    "Message",
    "MessageProducer",
    "MessageTime",
    "Output",
    "Partition",
    "PoisonPolicy",
    "Publisher",
    "QueryResult",
    "Recorder",
    "Shard",
    "ShardQuery",
    "ShardRequest",
    "Source",
    "StateView",
    "Store",
    "TableApplication",
    "TimeDomain",
    "Timer",
    "TimerTable",
    "UnusableTime",
    "__version__",
    "gather_route",
    "list_route",
    "open_publisher",
    "read_batches",
    "read_table",
    "runconsumer",
    "shard_route",
    "shard_rpc",
]


if not TYPE_CHECKING:  # Without this, type checkers could not report a name that is not here.
    __getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted(__all__)
