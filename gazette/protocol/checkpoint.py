"""Checkpoints: a shard's offsets, states of producers, and ACK intents."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf.message import DecodeError

from gazette.errors import Corrupt
from gazette.protocol.ids import JournalName, Offset
from gazette.protocol.journal_life import JournalLife
from gazette.protocol.pb import consumer_pb2
from gazette.protocol.text import go_json
from gazette.protocol.text.validation import UINT64

_NO_SPAN: Final = -1


@dataclass(frozen=True, slots=True)
class ProducerState:
    """State of one producer in one journal.

    ``last_ack`` is the clock up to which the producer's messages have committed. ``begin`` is the offset of
    its first uncommitted message, or ``None`` if all have committed. On the wire and in JSON, ``None`` is
    -1, and an absent ``begin`` is offset 0.
    """

    last_ack: int
    begin: Offset | None
    seen_at: int = field(default=0, compare=False)
    """Time of the last checkpoint before which the producer wrote a message, as offsets of streams in Spark
    keep it; else 0. The wire form lacks this field."""


@dataclass(frozen=True, slots=True)
class SourceCheckpoint:
    """Offset up to which one journal was read, and the states of its producers by their 6-byte ids."""

    read_through: Offset = 0
    producers: dict[bytes, ProducerState] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Offsets and producers of each source, and ACK intents to append once the checkpoint has committed.

    Encoded forms are canonical: checkpoints with equal parts have equal bytes, in any order of their
    dictionaries. ``==`` does not compare ``application``.
    """

    sources: dict[JournalName, SourceCheckpoint] = field(default_factory=dict)
    ack_intents: dict[JournalName, bytes] = field(default_factory=dict)
    application: str = field(default="", compare=False)
    """Name of the application that committed the checkpoint; empty for earlier versions and the original."""
    lives: dict[JournalName, JournalLife] = field(default_factory=dict)
    """The life of each source to which its offsets belong; absent for a source that the original has read."""

    def to_pb(self) -> consumer_pb2.Checkpoint:
        pb = consumer_pb2.Checkpoint(ack_intents=self.ack_intents, application=self.application)
        for journal, source in self.sources.items():
            pb_source = pb.sources[journal]
            pb_source.read_through = source.read_through
            for producer, state in sorted(source.producers.items()):
                pb_state = pb_source.producers.add(id=producer).state
                pb_state.SetInParent()  # Encode a state of zeros, too.
                pb_state.last_ack = state.last_ack
                pb_state.begin = _NO_SPAN if state.begin is None else state.begin
        for journal, life in self.lives.items():
            pb.lives[journal].cluster_id, pb.lives[journal].created = life
        return pb

    @classmethod
    def from_pb(cls, pb: consumer_pb2.Checkpoint) -> Checkpoint:
        return cls(
            sources={
                journal: SourceCheckpoint(
                    read_through=source.read_through,
                    producers={
                        entry.id: _state(entry.state.last_ack, entry.state.begin)
                        for entry in source.producers
                    },
                )
                # Maps of protobuf have a different order in each process.
                for journal, source in sorted(pb.sources.items())
            },
            ack_intents=dict(sorted(pb.ack_intents.items())),
            application=pb.application,
            lives={
                journal: JournalLife(life.cluster_id, life.created)
                for journal, life in sorted(pb.lives.items())
            },
        )

    def to_bytes(self) -> bytes:
        """Return the protobuf encoding, with journals and producers in ascending order."""
        return self.to_pb().SerializeToString(deterministic=True)

    @classmethod
    def from_bytes(cls, data: bytes) -> Checkpoint:
        """Decode a checkpoint of ``to_bytes``, in any order. Raise ``Corrupt`` for other bytes."""
        try:
            pb = consumer_pb2.Checkpoint.FromString(data)
        except DecodeError as error:
            raise Corrupt(f"not a checkpoint: {error}", length=len(data)) from error
        return cls.from_pb(pb)

    def to_json(self) -> bytes:
        """Return the JSON encoding that the JSON file store keeps."""
        sources = {
            journal: _source_to_json(source) for journal, source in sorted(self.sources.items())
        }
        intents = {
            journal: go_json.encode_bytes(intent)
            for journal, intent in sorted(self.ack_intents.items())
        }
        lives = {journal: list(life) for journal, life in sorted(self.lives.items())}
        value = {
            "sources": sources,
            "ack_intents": intents,
            "application": self.application,
            "lives": lives,
        }
        return go_json.dumps(go_json.omit_zero(value, "sources"))

    @classmethod
    def from_json(cls, data: bytes) -> Checkpoint:
        """Decode a checkpoint of ``to_json``. Raise ``Corrupt`` for other bytes."""
        value = go_json.loads(data)
        intents = go_json.as_object(value.get("ack_intents"))
        return cls(
            sources={
                go_json.as_text(journal): _source_from_json(go_json.as_object(source))
                for journal, source in go_json.as_object(value.get("sources")).items()
            },
            ack_intents={
                go_json.as_text(journal): go_json.decode_bytes(intent)
                for journal, intent in intents.items()
            },
            application=_name_from_json(value.get("application", "")),
            lives={
                go_json.as_text(journal): _life_from_json(life)
                for journal, life in go_json.as_object(value.get("lives")).items()
            },
        )


def _name_from_json(value: Any) -> str:
    if not isinstance(value, str):
        raise Corrupt(f"expected the name of an application, not {type(value).__name__}")
    return go_json.as_text(value)


def _life_from_json(value: Any) -> JournalLife:
    numbers = go_json.as_list(value)
    if len(numbers) != len(JournalLife._fields) or not all(type(part) is int for part in numbers):
        raise Corrupt("expected the life of a journal: the id of an etcd cluster, and a revision")
    return JournalLife(*numbers)


def _state(last_ack: int, begin: int) -> ProducerState:
    return ProducerState(last_ack, None if begin == _NO_SPAN else begin)


def _source_to_json(source: SourceCheckpoint) -> dict[str, Any]:
    producers = []
    for producer, state in sorted(source.producers.items()):
        begin = _NO_SPAN if state.begin is None else state.begin
        entry = {
            "id": go_json.encode_bytes(producer),
            "state": go_json.omit_zero({"last_ack": state.last_ack, "begin": begin}),
        }
        producers.append(go_json.omit_zero(entry, "state"))
    value = {"read_through": source.read_through, "producers": producers or None}
    return go_json.omit_zero(value, "producers")


def _source_from_json(source: dict[str, Any]) -> SourceCheckpoint:
    producers = {}
    for value in go_json.as_list(source.get("producers")):
        entry = go_json.as_object(value)
        state = go_json.as_object(entry.get("state"))
        producers[go_json.decode_bytes(entry.get("id"))] = _state(
            go_json.get_int(state, "last_ack", UINT64), go_json.get_int(state, "begin")
        )
    return SourceCheckpoint(go_json.get_int(source, "read_through"), producers)
