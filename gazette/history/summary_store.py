"""Keeps summaries of fragments as objects of a blob store, for later first passes: `SummaryStore`.

A fragment never changes, and so its summary never changes. The first reader of a fragment keeps the summary
for later readers. A kept summary may be removed at any time: then a reader reads the fragment.

The name of an object is a digest of all that its summary depends on: the bytes (journal, offsets, and SHA-1
of each fragment), the offset where the first message begins, the offset where reading ends, the decoding of
messages, and the version of the format. So all writers of one name write the same bytes, and no object is
ever stale. One exception: if frames are malformed, the object also says for which treatment of them it holds,
and a reader with another treatment replaces it. The object has a checksum, and repeats the digest. A damaged
object is written again.
"""

from __future__ import annotations

import hashlib
import io
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from gazette.blobs.blob_store import BlobStore
from gazette.errors import NotAllowed, NotFound, Unavailable
from gazette.history.columns import MessageFormat
from gazette.history.snapshot import Piece
from gazette.history.summary import Summary
from gazette.labels import CONTENT_PROTO_FIXED
from gazette.protocol.fragment import ZERO_SUM
from gazette.protocol.ids import JournalName
from gazette.runtime.decoders import msgpack_decoder

LOGGER: Final = logging.getLogger(__name__)

DIRECTORY: Final = ".gazette-summaries"
"""Directory of the objects, at the root of a store: brokers list only directories of journals."""
VERSION: Final = 2
"""Version of the format. Raise it also when the code makes a different summary of the same bytes."""
BYTES_MAX: Final = 16 << 20
"""Greatest size of a kept object, in bytes: about 200,000 producers."""

_MARK: Final = b"gazette-summary\n"
_SUM_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class _Kept:
    """Content of an object. ``malformed`` is the treatment of malformed frames; empty if there are none."""

    identity: bytes
    malformed: str
    summary: Summary


class SummaryStore:
    """Summaries of one store. Thread-safe.

    After a write that fails, write no more. After a read that fails, use the store no more. Each of the two
    logs one warning.
    """

    def __init__(self, store: BlobStore, url: str) -> None:
        self._store = store
        self._url = url
        self._readable = self.writable = True
        self._lock = threading.Lock()

    def keeps(self, journal: JournalName, shape: MessageFormat, pieces: Sequence[Piece]) -> bool:
        """Return True if `put` would try to keep a summary of these pieces."""
        return self.writable and _identity(journal, shape, pieces) is not None

    def get(
        self, journal: JournalName, shape: MessageFormat, pieces: Sequence[Piece]
    ) -> Summary | None:
        """Return the kept summary of some pieces, whose first byte begins a message; None if none can be
        used."""
        identity = _identity(journal, shape, pieces) if self._readable else None
        if identity is None:
            return None
        path = _path(journal, pieces, identity)
        try:
            with self._store.open(path) as source:
                content = source.read(BYTES_MAX + 1)
        except NotFound:
            return None
        except (NotAllowed, Unavailable) as error:
            self._give_up(error, "read")
            return None
        kept = _decode(content, identity)
        if kept is None or not _fits(kept.summary, pieces):
            LOGGER.warning(
                "a kept summary is not what was written, and is made again",
                extra={"store": self._url, "file": path},
            )
            return None
        return kept.summary if kept.malformed in ("", shape.malformed) else None

    def put(
        self, journal: JournalName, shape: MessageFormat, pieces: Sequence[Piece], summary: Summary
    ) -> None:
        """Keep a summary. Do nothing if it is torn, has more than `BYTES_MAX`, or gets no name."""
        identity = _identity(journal, shape, pieces) if self.writable else None
        if identity is None or summary.torn:
            return
        malformed = "" if summary.clean else shape.malformed
        body = msgspec.msgpack.encode(_Kept(identity, malformed, summary))
        content = _MARK + hashlib.sha256(body).digest() + body
        if len(content) > BYTES_MAX:
            return
        try:
            self._store.put(_path(journal, pieces, identity), io.BytesIO(content))
        except (NotAllowed, Unavailable) as error:
            self._give_up(error, "written")

    def _give_up(self, error: Exception, what: str) -> None:
        """Write no more and, if ``what`` is "read", read no more. Warn only the first time."""
        with self._lock:
            is_logged = not (self._readable if what == "read" else self.writable)
            self.writable = False
            if what == "read":
                self._readable = False
        if not is_logged:
            LOGGER.warning(
                "summaries cannot be %(what)s in %(store)s, so later reads will read fragments "
                "again: %(error)s. Permit it, or name another place by the option summaries.",
                {"what": what, "store": self._url, "error": error},
            )


def _identity(journal: JournalName, shape: MessageFormat, pieces: Sequence[Piece]) -> bytes | None:
    """Return the digest of everything that decides a summary; None if one of these facts is unknown."""
    spans = []
    for piece in pieces:
        fragment = piece.fragment
        if fragment is None or fragment.sum == ZERO_SUM:
            return None
        cut_end = () if piece.end == fragment.end else (piece.end,)
        spans.append((fragment.begin, fragment.end, fragment.sum, piece.begin, *cut_end))
    decoding = _decoding(shape)
    if decoding is None:
        return None
    parts = (VERSION, journal, decoding, spans)
    return hashlib.sha256(msgspec.msgpack.encode(parts)).digest()


def _decoding(shape: MessageFormat) -> tuple[str, ...] | None:
    """Return the facts that determine how UUIDs are found; None if the code of a class determines that."""
    if shape.content_type != CONTENT_PROTO_FIXED or not shape.message:
        return (shape.content_type, shape.uuid_field)
    message_class: Any = shape.message_type()
    if hasattr(message_class, "gazette_codec") or not hasattr(message_class, "DESCRIPTOR"):
        return None
    schema_sum = hashlib.sha256(message_class.DESCRIPTOR.file.serialized_pb).hexdigest()
    place = (shape.place,) if shape.place else ()
    return (shape.content_type, str(message_class.DESCRIPTOR.full_name), schema_sum, *place)


def _path(journal: JournalName, pieces: Sequence[Piece], identity: bytes) -> str:
    begin, end = pieces[0].begin, pieces[-1].end
    return f"{DIRECTORY}/{journal}/{begin:016x}-{end:016x}-{identity.hex()[:40]}"


def _decode(content: bytes, identity: bytes) -> _Kept | None:
    """Return the content of an object; None if it is damaged, or has another identity."""
    header_bytes = len(_MARK) + _SUM_BYTES
    body = content[header_bytes:]
    if content[:header_bytes] != _MARK + hashlib.sha256(body).digest():
        return None
    try:
        kept = msgpack_decoder(_Kept).decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    return kept if kept.identity == identity else None


def _fits(summary: Summary, pieces: Sequence[Piece]) -> bool:
    begin, end = pieces[0].begin, pieces[-1].end
    return begin <= summary.end <= summary.reached <= end and not summary.torn
