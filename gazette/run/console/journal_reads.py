"""Reads some messages of a journal: at an offset, at a time, the last ones, or those that follow."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Final

from gazette.client.client import Client
from gazette.client.journals import ListedJournal
from gazette.client.read.reader import WRITE_HEAD, OffsetJump, ReadParams
from gazette.errors import Invalid, NotYet, Unavailable
from gazette.labels import CONTENT_PROTO_FIXED, CONTENT_RECOVERY_LOG, CONTENT_TYPE, MESSAGE_UUID
from gazette.protocol.ids import Offset
from gazette.protocol.journal import SuspendLevel
from gazette.run.console.frames import FrameCutter, message_of
from gazette.runtime.numbers import bytes_text
from gazette.runtime.timeouts import timeout

MESSAGES_MAX: Final = 100
READ_BYTES_MAX: Final = 16 << 20
"""Bytes that are read for one answer."""
_PIECE_BYTES: Final = 1 << 17
_LAST_BYTES: Final = (1 << 16, 1 << 19, 1 << 22, READ_BYTES_MAX)
"""Numbers of bytes to read for the last messages: the next one, if a number does not suffice."""
_READ_S: Final = 8.0
_CLOSE_BYTES: Final = 1 << 16
"""Bytes between two offsets at which a search for a time ends. The rest is read."""


@dataclass(frozen=True, slots=True)
class JournalReads:
    """Reads of one journal. ``client`` is the caller's."""

    client: Client
    journal: ListedJournal

    @property
    def content_type(self) -> str:
        return self.journal.spec.labels.value_of(CONTENT_TYPE) or ""

    @property
    def place(self) -> str:
        return self.journal.spec.labels.value_of(MESSAGE_UUID) or "uuid"

    async def bounds(self) -> tuple[Offset, Offset]:
        """Return the offset of the first byte, and the head. Raise ``Unavailable`` after some seconds."""
        name = self.journal.spec.name
        try:
            async with timeout(_READ_S):
                return await bounds_of(self.client, name)
        except TimeoutError:
            raise self._late() from None

    def _late(self) -> Unavailable:
        name = self.journal.spec.name
        reason = self.client.waits.reason(name)
        return Unavailable(
            f"no byte of {name} came within {_READ_S:g} s" + (f": {reason}" if reason else ""),
            hint="See the brokers of this journal, and its fragment store.",
        )

    async def last(self, count: int) -> dict[str, Any]:
        """Return the last messages. Leave out messages before the last `READ_BYTES_MAX` bytes."""
        begin, head = await self.bounds()
        document, read_from = dict[str, Any](), head
        for size in _LAST_BYTES:
            start = max(begin, head - size)
            longer = await self.window(start, MESSAGES_MAX * 1000, head, align=start > begin)
            if document and longer["behind"]:  # Its messages are not the last ones.
                document["notes"] += longer["notes"]
                break
            document, read_from = longer, start
            if len(document["messages"]) >= count or start == begin:
                break
        messages = document["messages"]
        document["messages"] = messages[-count:] if count else []
        if read_from > begin and len(messages) < count:
            document["notes"].append(f"only the last {bytes_text(head - read_from)} were read")
        return {**document, "first": begin, "head": head}

    async def following(self, offset: Offset, count: int, seen: Offset) -> dict[str, Any]:
        """Return messages from ``offset`` on, where one begins. Read nothing if ``seen`` is the head."""
        begin, head = await self.bounds()
        at = max(offset, begin)
        document = await self.window(at, count, at if head == seen else head)
        return {**document, "first": begin, "head": head}

    async def at_offset(self, offset: Offset, count: int) -> dict[str, Any]:
        """Return messages from an offset on: from the first message that begins there or later."""
        begin, head = await self.bounds()
        if offset > head:
            raise Invalid(f"the journal ends at offset {head}", path="offset")
        # A message begins at an offset if the byte before ends one: so begin to read with that byte.
        document = await self.window(max(offset, begin), count, head, align=offset > begin)
        return {**document, "first": begin, "head": head}

    async def at_time(self, time_ms: int, count: int) -> dict[str, Any]:
        """Return messages from a time on, by the clocks of their publishers: they rise with the offsets."""
        begin, head = await self.bounds()
        low, high, knows_time = begin, head, False
        while high - low > _CLOSE_BYTES:
            middle = (low + high) // 2
            document = await self.window(middle, 1, head, align=True)
            times = [message.get("time_ms") for message in document["messages"]]
            knows_time = knows_time or any(time is not None for time in times)
            if times and times[0] is not None and times[0] < time_ms:
                low = middle
            else:
                high = middle
        document = await self.window(low, count, head, align=low > begin, since_ms=time_ms)
        if not document["messages"]:
            known = "no message is later" if knows_time else "no message with a time was read"
            document["notes"].append(known)
        return {**document, "first": begin, "head": head}

    async def window(
        self, offset: Offset, count: int, end: Offset, *, align: bool = False, since_ms: int = 0
    ) -> dict[str, Any]:
        """Return at most ``count`` messages of ``[offset, end)``, and where the next one begins.

        ``behind`` is True if there may be more messages: a limit was reached, and the notes say which. With
        ``align``, begin after the message that has the byte before ``offset``. Leave out messages that are
        older than ``since_ms``.
        """
        self.require_messages()
        is_fixed = self.content_type == CONTENT_PROTO_FIXED
        begin = offset - 1 if align and not is_fixed else offset
        cutter = FrameCutter(self.content_type, begin)
        drop = align and not is_fixed
        messages: list[dict[str, Any]] = []
        notes: list[str] = []
        bytes_read, stopped = 0, False
        try:
            pieces = self._pieces(begin, end, cutter, notes)
            async with timeout(_READ_S), aclosing(pieces):
                async for piece in pieces:
                    bytes_read += len(piece)
                    for frame in cutter.feed(piece):
                        message = message_of(frame, self.content_type, self.place)
                        if not drop and message.get("time_ms", since_ms) >= since_ms:
                            messages.append(message)
                        drop = False  # It was the rest of the message before.
                        if len(messages) == count:
                            break
                    stopped = len(messages) == count or bytes_read > READ_BYTES_MAX + 1
                    if stopped:
                        if len(messages) < count:
                            notes.append(f"only {bytes_text(READ_BYTES_MAX)} were read")
                        break
        except TimeoutError:
            stopped = True
            reason = self.client.waits.reason(self.journal.spec.name)
            notes.append(f"reading took more than {_READ_S:g} s{f': {reason}' if reason else ''}")
            if not messages:
                raise self._late() from None
        following = messages[-1]["end"] if messages else cutter.begin
        behind = stopped and following < end
        return {"messages": messages, "next": following, "behind": behind, "notes": notes}

    def require_messages(self) -> None:
        """Raise ``Invalid`` for a journal that has no messages to show, with the reason."""
        spec = self.journal.spec
        if self.content_type == CONTENT_RECOVERY_LOG:
            raise Invalid(
                f"{spec.name} is a recovery log: it holds operations on files, and no messages",
                hint="The page of its shard shows the state.",
            )
        if spec.suspend_level is SuspendLevel.FULL:
            raise Invalid(
                f"{spec.name} is fully suspended: it has no bytes to read",
                hint="The next append resumes it.",
            )

    async def _pieces(
        self, begin: Offset, end: Offset, cutter: FrameCutter, notes: list[str]
    ) -> AsyncGenerator[bytes, None]:
        if begin >= end:
            return
        params = ReadParams(self.journal.spec.name, begin, end_offset=end)
        async with self.client.retry_reader(params) as reader:
            while True:
                try:
                    piece = await reader.read(_PIECE_BYTES)
                except OffsetJump as jump:
                    notes.append(f"bytes {jump.expected} to {jump.offset} were pruned, or are lost")
                    cutter.jump(jump.offset)
                    continue
                except NotYet:
                    return
                if not piece:
                    return
                yield piece


async def bounds_of(client: Client, journal: str) -> tuple[Offset, Offset]:
    """Return the offset of a journal's first byte, and its head. Reads say both: no append is needed."""
    async with client.retry_reader(ReadParams(journal, WRITE_HEAD, metadata_only=True)) as reader:
        with suppress(NotYet, OffsetJump):
            await reader.read()
        head = max(reader.offset, reader.write_head)
    if not head:
        return 0, 0
    begin = 0
    params = ReadParams(journal, metadata_only=True, end_offset=head)
    async with client.retry_reader(params) as reader:
        try:
            await reader.read()
        except OffsetJump as jump:
            begin = jump.offset
        except NotYet:
            begin = head
    return min(begin, head), head


async def read_bytes(client: Client, journal: str, begin: Offset, end: Offset) -> bytes:
    """Return bytes of a journal, up to the first that is lost. Raise ``Unavailable`` after some seconds."""
    data = bytearray()
    try:
        async with (
            timeout(_READ_S),
            client.retry_reader(ReadParams(journal, begin, end_offset=end)) as reader,
        ):
            while begin < end:
                try:
                    piece = await reader.read(_PIECE_BYTES)
                except (NotYet, OffsetJump):
                    break
                if not piece:
                    break
                data += piece
    except TimeoutError as error:
        raise Unavailable(f"no bytes of {journal} came within {_READ_S:g} s") from error
    return bytes(data)
