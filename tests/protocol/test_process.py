"""Specifications of processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gazette.errors import Invalid
from gazette.protocol.ids import ProcessId
from gazette.protocol.pb import broker_pb2, consumer_pb2
from gazette.protocol.process import BrokerSpec, ConsumerSpec, ProcessSpec

ID = ProcessId("zone", "suffix")
BROKER = BrokerSpec(ID, "http://host:8080", journal_limit=1 << 17, exiting=True)
CONSUMER = ConsumerSpec(ID, "http://host:8080", shard_limit=7)


def test_specifications_round_trip_and_are_valid() -> None:
    BROKER.validate()
    CONSUMER.validate()
    wire = BROKER.to_pb().SerializeToString()
    assert BrokerSpec.from_pb(broker_pb2.BrokerSpec.FromString(wire)) == BROKER
    wire = CONSUMER.to_pb().SerializeToString()
    assert ConsumerSpec.from_pb(consumer_pb2.ConsumerSpec.FromString(wire)) == CONSUMER
    assert ProcessSpec.from_pb(BROKER.process.to_pb()) == BROKER.process


def test_sub_messages_are_on_the_wire_even_when_empty() -> None:
    empty = BrokerSpec(ProcessId("", ""), "", 0)
    assert empty.to_pb().SerializeToString() == bytes.fromhex("0a020a00")
    assert ConsumerSpec(empty.id, "", 0).to_pb().SerializeToString() == bytes.fromhex("0a020a00")


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (replace(BROKER, id=ProcessId("z", "x")), "Id.Suffix: invalid length (1"),
        (replace(BROKER, endpoint="host"), "Endpoint: not absolute: host"),
        (
            replace(BROKER, journal_limit=(1 << 17) + 1),
            "invalid JournalLimit (131073; expected 0 <= JournalLimit <= 131072)",
        ),
        (replace(CONSUMER, endpoint="http:///x"), "Endpoint: missing host: http:///x"),
        (replace(CONSUMER, id=ProcessId("", "suffix")), "Id.Zone: invalid length (0"),
    ],
)
def test_specifications_that_are_refused(spec: BrokerSpec | ConsumerSpec, problem: str) -> None:
    with pytest.raises(Invalid) as caught:
        spec.validate()
    assert str(caught.value).startswith(problem)
