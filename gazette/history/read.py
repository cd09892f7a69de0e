"""Reads runs: all messages as columns, and committed messages as envelopes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from gazette.errors import Corrupt
from gazette.history.columns import Array64, ColumnDecoder, Columns, uuid_bytes
from gazette.history.commit_filter import CommitFilter, Mask
from gazette.history.json_lines import Field, FoundFields
from gazette.history.merge import CommittedRun
from gazette.history.snapshot import PLACE_HINT, Piece, Run
from gazette.history.source import OpenAccess
from gazette.labels import CONTENT_CSV, CONTENT_JSON_LINES, CONTENT_PROTO_FIXED
from gazette.message.envelope import Envelope, TimedEnvelope, build_envelopes
from gazette.message.framing.frames import (
    FRAME_BYTES_MAX,
    Framing,
    MalformedMessage,
    TruncatedFrame,
)
from gazette.message.framing.framing import FIXED_MAGIC, framing_of
from gazette.message.message_time import MessageTime, TimeReader
from gazette.protocol.ids import JournalName, Offset

if TYPE_CHECKING:
    from gazette.history.field_arrays import ArrowColumns

_LINES: Final = (CONTENT_JSON_LINES, CONTENT_CSV)
"""Content types whose messages end with a newline."""


class Batch(NamedTuple):
    """Messages as columns, with their bytes. The first byte is at offset ``base``."""

    columns: Columns
    buffer: bytes
    """Empty if ``arrays`` has all fields of all messages."""
    base: Offset
    fields: FoundFields | None = None
    """The wanted fields, if the pass over the messages has found them."""
    arrays: ArrowColumns | None = None
    """The wanted fields as arrays, instead of ``fields``."""

    def part(self, first: int, last: int) -> Batch:
        """Return the messages from position ``first`` to before ``last``, without ``fields``."""
        arrays = None if self.arrays is None else self.arrays.part(first, last)
        columns = self.columns.part(first, last)
        return self._replace(columns=columns, fields=None, arrays=arrays)


class RunReader:
    """Reader of all messages of a run, in order, committed or not. For one thread."""

    def __init__(
        self, access: OpenAccess, run: Run, fields: Sequence[Field] = (), *, digest: Any = None
    ) -> None:
        """Make a reader that finds ``fields`` in the same pass if possible. ``digest`` hashes the bytes."""
        self._access = access
        self._digest = digest
        self._run = run
        self._decoder = ColumnDecoder(run.journal, run.shape, fields)
        self._fields = fields
        self.rest = b""
        """Bytes of a message that does not end in the run; empty at the end of a run with ``beyond``."""
        self.reached = run.pieces[0].begin
        """Offset up to which complete messages were decoded. ``rest`` begins there."""

    @property
    def clean(self) -> bool:
        """True if no malformed message was found so far."""
        return self._decoder.clean

    def batches(self) -> Iterator[Batch]:
        """Yield the messages that begin in the run. Leave out a message that ends neither in the run nor in
        ``run.beyond``.

        Raise `MalformedMessage` for a malformed message, unless the format skips it or makes nulls of it.
        Raise it for any message of more than `FRAME_BYTES_MAX`. Raise ``Corrupt`` if a run that is ``sure``
        begins inside a message: only a cut first piece shows that. Raise the errors of `OpenAccess.chunks`.
        """
        run = self._run
        yield from self._decoded(self._placed_chunks())
        if not (self.rest and run.beyond):
            return
        beyond = self._access.chunks(run.journal, run.beyond)
        for batch in self._decoded(beyond, past=run.end):
            begins = batch.columns.begins
            count = int(np.searchsorted(begins, run.end))
            if count:
                yield batch.part(0, count)
            if count < len(begins):
                self.reached = int(begins[count])
        self.rest = b""

    def _placed_chunks(self) -> Iterator[tuple[Offset, bytes]]:
        """Yield the bytes of the run. If the run is ``sure`` and its first piece was cut, look first at the
        bytes before: raise ``Corrupt`` if no message begins with the run's first byte."""
        run, first = self._run, self._run.pieces[0]
        pieces = run.pieces
        must_check = run.sure and first.start is not None
        if must_check and run.shape.content_type in _LINES:
            # The byte before must be a newline.
            pieces = (replace(first, begin=first.begin - 1), *pieces[1:])
        chunks = self._access.chunks(run.journal, pieces)
        for offset, data in chunks:
            if offset < first.begin:
                must_check, is_inside = False, data[:1] != b"\n"
                offset, data = offset + 1, data[1:]
            else:
                is_inside = must_check and self._is_inside_frame(first, data)
                must_check = False
            if is_inside:
                raise Corrupt(
                    "no message begins at the offset where reading begins: it is inside another one",
                    hint=PLACE_HINT,
                    journal=run.journal,
                    begin=first.begin,
                )
            yield offset, data

    def _is_inside_frame(self, piece: Piece, data: bytes) -> bool:
        """Return True if the bytes before a piece of fixed frames end inside a frame."""
        has_fixed_frames = self._run.shape.content_type == CONTENT_PROTO_FIXED
        if not has_fixed_frames or data.startswith(FIXED_MAGIC[: len(data)]) or piece.start is None:
            return False
        # The bytes here may be a malformed message. So read the frames before: does one end exactly here?
        piece_before = Piece(piece.start, piece.begin, piece.fragment)
        shape = replace(self._run.shape, malformed="skip")
        run = replace(self._run, shape=shape, pieces=(piece_before,), sure=False, beyond=())
        reader = RunReader(self._access, run)
        for _ in reader.batches():
            pass
        return bool(reader.rest)

    def _decoded(
        self, chunks: Iterator[tuple[Offset, bytes]], past: Offset | None = None
    ) -> Iterator[Batch]:
        """Yield the messages of ``self.rest`` and of chunks. End once offset ``past`` is decoded.

        Decode an incomplete frame again only when twice as many bytes of the frame are there. Otherwise
        the time for a long frame would grow with the square of its length.
        """
        blocks, size = [self.rest], len(self.rest)
        decode_at = 2 * size
        for offset, data in chunks:
            if offset != self.reached + size:  # The journal has lost the bytes before this chunk.
                yield from self._decode(blocks)
                self._cut(offset)
                blocks, size, decode_at = [], 0, 0
            if self._digest is not None:
                self._digest.update(data)
            blocks.append(data)
            size += len(data)
            if size >= decode_at:
                yield from self._decode(blocks)  # Now `rest` has the incomplete frame at the end.
                if past is not None and self.reached >= past:
                    return
                blocks, size = [self.rest], len(self.rest)
                decode_at = min(2 * size, FRAME_BYTES_MAX)
        if len(blocks) > 1:
            yield from self._decode(blocks)

    def _decode(self, blocks: Sequence[bytes]) -> Iterator[Batch]:
        """Decode the bytes from ``reached`` on. Keep an incomplete frame in ``rest``."""
        buffer, base = b"".join(blocks), self.reached
        columns, consumed, fields = self._decoder.decode(buffer, base)
        self.rest, self.reached = buffer[consumed:], base + consumed
        if len(columns):
            yield Batch(columns, buffer, base, fields if self._fields else None)
        if len(self.rest) > FRAME_BYTES_MAX:
            raise self._malformed("message is too long", self.rest[:1024])

    def _cut(self, offset: Offset) -> None:
        """Continue at ``offset``, after bytes that the journal has lost. Raise `MalformedMessage` for a
        message that is cut off, if such messages fail."""
        if self.rest:
            if self._run.shape.malformed == "fail":
                raise self._malformed(
                    f"a message is cut off: the journal continues at offset {offset}", self.rest
                )
            self._decoder.clean = False
        self.rest, self.reached = b"", offset

    def _malformed(self, problem: str, raw: bytes) -> MalformedMessage:
        return MalformedMessage(
            problem,
            begin=self.reached,
            end=self.reached + len(self.rest),
            raw=raw,
            journal=self._run.journal,
        )

    def require_whole(self) -> None:
        """Raise `TruncatedFrame` if a message continues in the next run."""
        if self.rest and not self._run.last:
            try:
                self._decoder.finish(self.rest, self.reached)
            except TruncatedFrame as error:
                raise TruncatedFrame(
                    "a message continues in the next fragment, which another task reads "
                    "(its publisher appended it in parts): let one task read the whole journal",
                    begin=error.begin,
                    end=error.end,
                    raw=error.raw,
                    journal=self._run.journal,
                ) from error


def read_columns(access: OpenAccess, run: Run, fields: Sequence[Field] = ()) -> Iterator[Batch]:
    """Yield all messages of a run, committed or not: this needs no first pass. Find ``fields`` in the same
    pass over the bytes, if possible.

    Leave out an incomplete message at the end of the last run of a journal. Raise the errors of
    `RunReader.batches`, and `TruncatedFrame` for a message that continues in the next run. The caller
    should then use larger runs, or read only committed messages.
    """
    reader = RunReader(access, run, fields)
    yield from reader.batches()
    reader.require_whole()


def committed(
    runs: Sequence[CommittedRun], batches: Iterable[Batch], *, acks: bool = False
) -> Iterator[tuple[Batch, Mask]]:
    """Yield each batch with a mask of its committed messages. Leave out batches without such a message.

    ``batches`` have the messages of ``runs``. Split a batch where one run ends and the next one begins.
    """
    runs_ahead = deque(runs)
    commit_filter: CommitFilter[Batch] = CommitFilter(runs_ahead[0], acks=acks)
    for batch in batches:
        while len(runs_ahead) > 1 and batch.columns.begins[-1] >= runs_ahead[0].run.end:
            count = int(np.searchsorted(batch.columns.begins, runs_ahead[0].run.end))
            if count:
                first_part = batch.part(0, count)
                commit_filter.add(first_part.columns, first_part)
                batch = batch.part(count, len(batch.columns))
            # The fold has computed the fates of all messages that are pending here.
            commit_filter.finish()
            yield from _with_any(commit_filter)
            runs_ahead.popleft()
            commit_filter = CommitFilter(runs_ahead[0], acks=acks)
        commit_filter.add(batch.columns, batch)
        yield from _with_any(commit_filter)
    commit_filter.finish()
    yield from _with_any(commit_filter)


def _with_any(passes: CommitFilter[Batch]) -> Iterator[tuple[Batch, Mask]]:
    return (batch_and_mask for batch_and_mask in passes.ready() if batch_and_mask[1].any())


def read_envelopes(
    access: OpenAccess, run: CommittedRun, message_type: Any, time: MessageTime | None = None
) -> Iterator[list[Envelope[Any]]]:
    """Yield the committed messages of a run as envelopes, by offset, without acknowledgements.

    Unless the format skips such messages, raise `MalformedMessage` for a malformed message or one of another
    type, and `UnusableTime` for a message without the declared ``time``. Raise the errors of `read_columns`.
    """
    times = None if time is None else TimeReader(time, access.clock.now)
    # The UUIDs are known already, and the type may have no field for them.
    framing = framing_of(run.run.shape.content_type, message_type, place=None)
    journal, skips = run.run.journal, run.run.shape.malformed == "skip"
    for batch, mask in committed((run,), read_columns(access, run.run)):
        rows = np.flatnonzero(mask)
        messages = _decoded(framing, batch, rows)
        if messages is None:
            rows, messages = _decoded_each(framing, batch, rows, journal, skips=skips)
        columns = batch.columns.at(rows)
        begins, ends = columns.begins.tolist(), columns.ends.tolist()
        uuids = uuid_bytes(columns.uuids)
        envelopes: list[Envelope[Any]] = build_envelopes(
            journal, begins, ends, messages, uuids, times
        )
        if times is not None:
            envelopes = list(_usable(envelopes, skips=skips))
        if envelopes:
            yield envelopes


def _usable(envelopes: list[Envelope[Any]], *, skips: bool) -> Iterator[Envelope[Any]]:
    """Yield the messages with their declared time. Raise `UnusableTime` for a message without time, or skip
    that message."""
    for envelope in envelopes:
        error = envelope.unusable if isinstance(envelope, TimedEnvelope) else None
        if error is None:
            yield envelope
        elif not skips:
            raise error


def _decoded(framing: Framing[Any], batch: Batch, rows: Array64) -> list[Any] | None:
    """Decode the messages of some rows together. Return None if one of them is malformed."""
    begins = batch.columns.begins[rows] - batch.base
    ends = batch.columns.ends[rows] - batch.base
    # Join the bytes of adjacent messages: there are fewer spans than messages to copy.
    cuts = np.flatnonzero(begins[1:] != ends[:-1]) + 1
    firsts = begins[np.concatenate(([0], cuts))].tolist()
    lasts = ends[np.concatenate((cuts - 1, [len(rows) - 1]))].tolist()
    buffer = batch.buffer
    content = b"".join([buffer[begin:end] for begin, end in zip(firsts, lasts, strict=True)])
    try:
        frames = framing.decode(content, 0)
    except MalformedMessage:
        return None
    is_complete = frames.consumed == len(content) and len(frames) == len(rows)
    return frames.messages if is_complete else None


def _decoded_each(
    framing: Framing[Any], batch: Batch, rows: Array64, journal: JournalName, *, skips: bool
) -> tuple[Array64, list[Any]]:
    """Return the rows that are messages of the type, and the messages. For another row, raise
    `MalformedMessage`, or skip it."""
    kept_rows: list[int] = []
    messages: list[Any] = []
    for row in rows.tolist():
        begin, end = int(batch.columns.begins[row]), int(batch.columns.ends[row])
        try:
            frames = framing.decode(batch.buffer[begin - batch.base : end - batch.base], begin)
        except MalformedMessage as error:
            if skips:
                continue
            raise error.of(journal) from error.__cause__
        kept_rows.append(row)
        messages.append(frames.messages[0])
    return np.array(kept_rows, np.int64), messages
