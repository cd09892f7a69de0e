"""Specifications that broker and consumer processes announce."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gazette.errors import Invalid
from gazette.protocol.ids import ProcessId
from gazette.protocol.pb import broker_pb2, consumer_pb2
from gazette.protocol.route import validate_endpoint
from gazette.protocol.text.validation import within

JOURNAL_LIMIT_MAX: Final = 1 << 17


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process, and the URL at which its peers and clients reach it."""

    id: ProcessId
    endpoint: str

    def validate(self) -> None:
        with within("Id"):
            self.id.validate()
        with within("Endpoint"):
            validate_endpoint(self.endpoint)

    def to_pb(self) -> broker_pb2.ProcessSpec:
        return broker_pb2.ProcessSpec(id=self.id.to_pb(), endpoint=self.endpoint)

    @classmethod
    def from_pb(cls, pb: broker_pb2.ProcessSpec) -> ProcessSpec:
        return cls(ProcessId.from_pb(pb.id), pb.endpoint)


@dataclass(frozen=True, slots=True)
class BrokerSpec:
    """A broker, as a member of the allocator. ``exiting`` requests its drain.

    ``http_endpoint`` is the URL at which the broker serves HTTP. If it is empty, ``endpoint`` is that
    URL, as for brokers of the original.
    """

    id: ProcessId
    endpoint: str
    journal_limit: int
    exiting: bool = False
    http_endpoint: str = ""

    @property
    def process(self) -> ProcessSpec:
        return ProcessSpec(self.id, self.endpoint)

    def validate(self) -> None:
        self.process.validate()
        if not 0 <= self.journal_limit <= JOURNAL_LIMIT_MAX:
            raise Invalid(
                f"invalid JournalLimit ({self.journal_limit}; "
                f"expected 0 <= JournalLimit <= {JOURNAL_LIMIT_MAX})"
            )

    def to_pb(self) -> broker_pb2.BrokerSpec:
        return broker_pb2.BrokerSpec(
            process_spec=self.process.to_pb(),
            journal_limit=self.journal_limit,
            exiting=self.exiting,
            http_endpoint=self.http_endpoint,
        )

    @classmethod
    def from_pb(cls, pb: broker_pb2.BrokerSpec) -> BrokerSpec:
        process = ProcessSpec.from_pb(pb.process_spec)
        return cls(process.id, process.endpoint, pb.journal_limit, pb.exiting, pb.http_endpoint)


@dataclass(frozen=True, slots=True)
class ConsumerSpec:
    """A consumer process, as a member of the allocator. ``exiting`` requests its drain."""

    id: ProcessId
    endpoint: str
    shard_limit: int
    exiting: bool = False
    application: str = ""
    """Name of the application. Empty for members without a name, such as those of the original."""

    @property
    def process(self) -> ProcessSpec:
        return ProcessSpec(self.id, self.endpoint)

    def validate(self) -> None:
        self.process.validate()

    def to_pb(self) -> consumer_pb2.ConsumerSpec:
        return consumer_pb2.ConsumerSpec(
            process_spec=self.process.to_pb(),
            shard_limit=self.shard_limit,
            exiting=self.exiting,
            application=self.application,
        )

    @classmethod
    def from_pb(cls, pb: consumer_pb2.ConsumerSpec) -> ConsumerSpec:
        process = ProcessSpec.from_pb(pb.process_spec)
        return cls(process.id, process.endpoint, pb.shard_limit, pb.exiting, pb.application)
