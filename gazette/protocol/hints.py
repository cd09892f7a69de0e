"""Hints: the table of contents by which a recovery log is played back."""

from __future__ import annotations

import enum
import gzip
import zlib
from dataclasses import dataclass, replace
from typing import Any, Final

from google.protobuf.message import DecodeError

from gazette.errors import Corrupt, Invalid
from gazette.protocol.ids import JournalName, Offset, validate_journal_name
from gazette.protocol.pb import recoverylog_pb2
from gazette.protocol.text import go_json
from gazette.protocol.text.validation import UINT32, within

HINTS_BYTES_MAX: Final = (3 << 19) - (8 << 10)
"""Greatest size of hints: etcd's default ``--max-request-bytes``, 1.5 MiB, minus 8 KiB for other fields."""
FEWER_FILES: Final = (
    "Reduce the number of files: raise table_bytes (target_file_size_base) for RocksDB, run VACUUM for"
    " SQLite, or use more shards with less state each."
)
_GZIP: Final = b"\x1f\x8b"
_PLAIN_BYTES_MAX: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class Property:
    """A small file that is always replaced as a whole, such as an identity."""

    path: str
    content: str

    def to_pb(self) -> recoverylog_pb2.Property:
        return recoverylog_pb2.Property(path=self.path, content=self.content)

    @classmethod
    def from_pb(cls, pb: recoverylog_pb2.Property) -> Property:
        return cls(pb.path, pb.content)


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of operations by one author, with sequence numbers ``[first_seq_no, last_seq_no]``.

    The operations are at offsets ``[first_offset, last_offset)`` of ``log``. ``last_offset`` is 0 if the
    author wrote the hints before it knew the offset. ``log`` is ``""`` for the log of the hints.
    ``first_checksum`` is the checksum in the first operation.
    """

    author: int
    first_seq_no: int
    first_offset: Offset
    first_checksum: int
    last_seq_no: int
    last_offset: Offset = 0
    log: JournalName = ""

    def validate(self) -> None:
        if self.author == 0:
            raise Invalid("Author is zero")
        if self.first_seq_no <= 0:
            raise Invalid("FirstSeqNo <= 0")
        if self.first_offset < 0:
            raise Invalid("FirstOffset < 0")
        if self.last_seq_no < self.first_seq_no:
            raise Invalid("LastSeqNo < segment.FirstSeqNo")
        if self.last_offset != 0 and self.last_offset <= self.first_offset:
            raise Invalid("LastOffset <= segment.FirstOffset")
        with within("Log"):
            validate_journal_name(self.log)

    def to_pb(self) -> recoverylog_pb2.Segment:
        return recoverylog_pb2.Segment(
            author=self.author,
            first_seq_no=self.first_seq_no,
            first_offset=self.first_offset,
            first_checksum=self.first_checksum,
            last_seq_no=self.last_seq_no,
            last_offset=self.last_offset,
            log=self.log,
        )

    @classmethod
    def from_pb(cls, pb: recoverylog_pb2.Segment) -> Segment:
        return cls(
            author=pb.author,
            first_seq_no=pb.first_seq_no,
            first_offset=pb.first_offset,
            first_checksum=pb.first_checksum,
            last_seq_no=pb.last_seq_no,
            last_offset=pb.last_offset,
            log=pb.log,
        )


@dataclass(frozen=True, slots=True)
class FnodeSegments:
    """A file node, named by the sequence number of its creation, and the segments of its history."""

    fnode: int
    segments: tuple[Segment, ...]

    def to_pb(self) -> recoverylog_pb2.FnodeSegments:
        return recoverylog_pb2.FnodeSegments(
            fnode=self.fnode, segments=[segment.to_pb() for segment in self.segments]
        )

    @classmethod
    def from_pb(cls, pb: recoverylog_pb2.FnodeSegments) -> FnodeSegments:
        return cls(pb.fnode, tuple(Segment.from_pb(segment) for segment in pb.segments))


@dataclass(frozen=True, slots=True)
class FSMHints:
    """Live files of a recovery log. Without ``live_nodes``, playback begins at the log's first byte."""

    log: JournalName
    live_nodes: tuple[FnodeSegments, ...] = ()
    properties: tuple[Property, ...] = ()

    def validate(self) -> None:
        """Raise ``Invalid`` unless all segments are valid. For the hints' own log, ``log`` must be empty."""
        for node in self.live_nodes:
            for segment in node.segments:
                if segment.log and segment.log == self.log:
                    raise Invalid("contained segment.Log duplicates FSMHints.Log")
                with within("Segment"):
                    replace(segment, log=segment.log or self.log).validate()

    def to_pb(self) -> recoverylog_pb2.FSMHints:
        return recoverylog_pb2.FSMHints(
            log=self.log,
            live_nodes=[node.to_pb() for node in self.live_nodes],
            properties=[property.to_pb() for property in self.properties],
        )

    @classmethod
    def from_pb(cls, pb: recoverylog_pb2.FSMHints) -> FSMHints:
        return cls(
            log=pb.log,
            live_nodes=tuple(FnodeSegments.from_pb(node) for node in pb.live_nodes),
            properties=tuple(Property.from_pb(property) for property in pb.properties),
        )

    def to_json(self) -> bytes:
        """Return the JSON encoding of hints in etcd."""
        value = {
            "log": self.log,
            "live_nodes": [_node_to_json(node) for node in self.live_nodes] or None,
            "properties": [
                go_json.omit_zero({"path": property.path, "content": property.content})
                for property in self.properties
            ]
            or None,
        }
        return go_json.dumps(go_json.omit_zero(value, "live_nodes", "properties"))


class HintsForm(enum.Enum):
    """Encoding of hints in etcd."""

    JSON = "JSON"
    PROTOBUF = "protobuf"
    COMPRESSED = "compressed protobuf"
    """Protobuf compressed by gzip. The original cannot read this form."""


def encode_hints(hints: FSMHints, bytes_max: int = HINTS_BYTES_MAX) -> tuple[HintsForm, bytes]:
    """Encode hints for etcd in the first form that fits: JSON, protobuf, or compressed protobuf.

    The original reads the first two forms. Raise ``Invalid`` if no form fits into ``bytes_max``.
    """
    encoded = hints.to_json()
    if len(encoded) <= bytes_max:
        return HintsForm.JSON, encoded
    encoded = hints.to_pb().SerializeToString(deterministic=True)
    if len(encoded) <= bytes_max:
        return HintsForm.PROTOBUF, encoded
    encoded = gzip.compress(encoded, 6, mtime=0)
    if len(encoded) <= bytes_max:
        return HintsForm.COMPRESSED, encoded
    raise Invalid(
        f"the compressed hints have {len(encoded)} bytes, but etcd accepts only {bytes_max}",
        hint=FEWER_FILES,
        files=len(hints.live_nodes),
    )


def decode_hints(data: bytes) -> FSMHints:
    """Decode hints from a value of etcd: JSON, protobuf, or protobuf compressed by gzip.

    Hints are not validated. Raise ``Invalid`` for an empty value, and ``Corrupt`` for a
    value that does not hold hints.
    """
    if not data:
        raise Invalid("hints are empty", hint="Delete the key, or write hints to it.")
    if data[:2] == _GZIP:
        data = _decompressed(data)
    if data[:1] == b"{":
        return _hints_from_json(go_json.loads(data))
    try:
        return FSMHints.from_pb(recoverylog_pb2.FSMHints.FromString(data))
    except DecodeError as error:
        raise Corrupt(f"not hints: {error}", length=len(data)) from error


def _decompressed(data: bytes) -> bytes:
    """Return hints without gzip. Raise ``Corrupt`` for other bytes, or for more than ``_PLAIN_BYTES_MAX``."""
    decoder = zlib.decompressobj(wbits=31)  # 31: the header is that of gzip.
    try:
        plain = decoder.decompress(data, _PLAIN_BYTES_MAX)
    except zlib.error as error:
        raise Corrupt(f"not compressed hints: {error}", length=len(data)) from error
    if not decoder.eof or decoder.unused_data:
        raise Corrupt("compressed hints are cut off or too long", length=len(data))
    return plain


def _node_to_json(node: FnodeSegments) -> dict[str, Any]:
    segments = [
        go_json.omit_zero(
            {
                "author": segment.author,
                "first_seq_no": segment.first_seq_no,
                "first_offset": segment.first_offset,
                "first_checksum": segment.first_checksum,
                "last_seq_no": segment.last_seq_no,
                "last_offset": segment.last_offset,
                "log": segment.log,
            }
        )
        for segment in node.segments
    ]
    return go_json.omit_zero({"fnode": node.fnode, "segments": segments or None}, "segments")


def _hints_from_json(value: dict[str, Any]) -> FSMHints:
    nodes = [go_json.as_object(node) for node in go_json.as_list(value.get("live_nodes"))]
    properties = [go_json.as_object(entry) for entry in go_json.as_list(value.get("properties"))]
    return FSMHints(
        log=go_json.get_str(value, "log"),
        live_nodes=tuple(
            FnodeSegments(
                fnode=go_json.get_int(node, "fnode"),
                segments=tuple(
                    _segment_from_json(go_json.as_object(segment))
                    for segment in go_json.as_list(node.get("segments"))
                ),
            )
            for node in nodes
        ),
        properties=tuple(
            Property(go_json.get_str(entry, "path"), go_json.get_str(entry, "content"))
            for entry in properties
        ),
    )


def _segment_from_json(value: dict[str, Any]) -> Segment:
    return Segment(
        author=go_json.get_int(value, "author", UINT32),
        first_seq_no=go_json.get_int(value, "first_seq_no"),
        first_offset=go_json.get_int(value, "first_offset"),
        first_checksum=go_json.get_int(value, "first_checksum", UINT32),
        last_seq_no=go_json.get_int(value, "last_seq_no"),
        last_offset=go_json.get_int(value, "last_offset"),
        log=go_json.get_str(value, "log"),
    )
