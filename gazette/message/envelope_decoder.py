"""Stage 11 of the byte path: takes chunks of one journal's bytes, gives envelopes in batches.

Pure. A task of the event loop or the thread of a shard drives the decoder.
"""

from __future__ import annotations

from typing import Generic, TypeVar

from gazette.errors import Bug
from gazette.message.envelope import Envelope, build_envelopes
from gazette.message.foreign_uuids import warn_of_foreign_uuids
from gazette.message.framing.frames import Framing, MalformedMessage, TruncatedFrame
from gazette.message.message_time import TimeReader
from gazette.message.uuid_place import DEFAULT_PLACE
from gazette.protocol.ids import JournalName, Offset

M = TypeVar("M")

_HEAD_BYTES = 16


class EnvelopeDecoder(Generic[M]):
    """Decoder of one journal's bytes into envelopes. It holds at most one incomplete frame between
    calls.

    Feed it, then call `decode` until `decode` returns an empty list:

        decoder.feed(chunk)
        while batch := decoder.decode():
            ...

    ``times`` reads the declared times of messages.

    Invariant: ``begin`` is the offset of the first message that `decode` has not returned yet.
    ``end`` is the offset of the next chunk.
    """

    def __init__(
        self,
        journal: JournalName,
        framing: Framing[M],
        offset: Offset,
        times: TimeReader | None = None,
    ) -> None:
        self._times = times
        self.journal = journal
        self.framing = framing
        self.begin: Offset = offset
        self._parts: list[bytes] = []
        self._size = 0
        self._ready = False
        self._discarding = False

    @property
    def end(self) -> Offset:
        return self.begin + self._size

    @property
    def pending(self) -> int:
        """Bytes of the incomplete frame that the decoder holds."""
        return self._size

    @property
    def clock_place(self) -> str | None:
        """Place of the UUID whose clock is the time of messages. None: a declared time, or no UUIDs."""
        codec = self.framing.codec
        if self._times is not None or codec.form is None:
            return None
        return DEFAULT_PLACE if codec.place is None else codec.place.text

    def feed(self, data: bytes) -> None:
        """Add the bytes that begin at ``end``."""
        if self._discarding:
            at = self.framing.resume(data)
            self.begin += len(data) if at is None else at
            if at is None:
                return
            data, self._discarding = data[at:], False
        if not data:
            return
        if not self._ready:
            self._ready = self.framing.may_complete(self._head(), self._size, data)
        self._parts.append(data)
        self._size += len(data)
        if self._size > self.framing.frame_bytes_max:
            self._ready = True

    def decode(self) -> list[Envelope[M]]:
        """Return the next batch of envelopes, in order. An empty batch means that more bytes are needed.

        Raise `MalformedMessage` at a malformed frame, after all messages before it were returned. Each
        further call raises the error again, until `skip` is called with it.
        """
        if not self._ready:
            return []
        buffer = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts = [buffer]
        try:
            frames = self.framing.decode(buffer, self.begin)
        except MalformedMessage as error:
            raise error.of(self.journal) from error.__cause__
        if not frames.messages:
            self._ready = False
            if self._size > self.framing.frame_bytes_max:
                raise self._malformed("message is too long", buffer)
            return []
        self._drop(frames.consumed)
        self._ready = frames.stopped
        batch = build_envelopes(
            self.journal,
            frames.begins,
            frames.ends,
            frames.messages,
            frames.uuids,
            self._times,
        )
        if batch.has_foreign:
            warn_of_foreign_uuids(self.journal)
        return batch

    def skip(self, error: MalformedMessage) -> None:
        """Continue behind a malformed message that `decode` raised."""
        if error.begin != self.begin or error.end > self.end:
            raise Bug(
                "cannot skip: decoding did not stop at this message",
                begin=error.begin,
                at=self.begin,
            )
        self._ready = True
        if error.end == self.end and self._size > self.framing.frame_bytes_max:
            self._discarding = True
        self._drop(error.end - error.begin)

    def jump(self, offset: Offset) -> None:
        """Continue at another offset, because the journal has lost the bytes before it.

        Raise `MalformedMessage` if the jump cuts a frame. It has ``raw``, the start of the frame. The decoder
        continues at ``offset`` all the same.
        """
        rest, begin = b"".join(self._parts), self.begin
        self._parts, self._size, self._ready, self._discarding = [], 0, False, False
        self.begin = offset
        if rest:
            raise MalformedMessage(
                f"a message is cut off: the journal continues at offset {offset}",
                begin=begin,
                end=begin + len(rest),
                raw=rest,
                journal=self.journal,
            )

    def finish(self) -> None:
        """End the input. Raise `TruncatedFrame` if a message is incomplete."""
        try:
            self.framing.finish(b"".join(self._parts), self.begin)
        except TruncatedFrame as error:
            raise TruncatedFrame(
                error.reason,
                begin=error.begin,
                end=error.end,
                raw=error.raw,
                journal=self.journal,
            ) from None

    def _head(self) -> bytes:
        """Return the first bytes of the incomplete frame."""
        if self._parts and len(self._parts[0]) < _HEAD_BYTES and len(self._parts) > 1:
            # Rare: only tests, or peers that send byte by byte, make parts this short.
            self._parts = [b"".join(self._parts)]
        return self._parts[0][:_HEAD_BYTES] if self._parts else b""

    def _drop(self, size: int) -> None:
        rest = self._parts[0][size:]
        self._parts = [rest] if rest else []
        self._size -= size
        self.begin += size

    def _malformed(self, reason: str, buffer: bytes) -> MalformedMessage:
        return MalformedMessage(
            reason,
            begin=self.begin,
            end=self.begin + len(buffer),
            raw=buffer,
            journal=self.journal,
        )
