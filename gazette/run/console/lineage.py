"""Traces a message to the transaction of a shard that published it, with its inputs and changes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from gazette.client.client import Client
from gazette.client.journals import ListedJournal
from gazette.client.shards import ListedShard
from gazette.errors import Broken, Invalid, NotFound, Unavailable
from gazette.protocol.checkpoint import Checkpoint
from gazette.protocol.ids import Offset, split_journal_meta
from gazette.run.console.frames import FrameCutter, message_of
from gazette.run.console.journal_reads import MESSAGES_MAX, READ_BYTES_MAX, JournalReads
from gazette.run.console.log_moments import LoggedCommit, commits_near
from gazette.run.console.states import States, StillRecovering

_SHARDS_MAX: Final = 6
"""Greatest number of shards that are looked at for the producer of a message."""
_COMMITS_MAX: Final = 6
_RECOVERIES_MAX: Final = 2
"""Greatest number of states that are recovered for one answer. The next answer knows their checkpoints."""
_CLOCKS_MS: Final = 2
"""Milliseconds by which a commit may seem older than the acknowledgement that it holds."""


class Lineage:
    """Traces messages to transactions. ``journals`` are the listed journals, by name."""

    def __init__(self, client: Client, states: States, journals: dict[str, ListedJournal]) -> None:
        self._client = client
        self._states = states
        self._journals = journals
        self._recoveries = 0

    async def trace(
        self, journal: ListedJournal, offset: int, candidates: list[ListedShard]
    ) -> dict[str, Any]:
        """Return the message, its transaction with its inputs, and the rows that it changed.

        Raise ``NotFound`` if no transaction of a shard published the message, ``StillRecovering`` for now.
        """
        reads = JournalReads(self._client, journal)
        message, ack = await self._ended(reads, offset)
        for shard in candidates[:_SHARDS_MAX]:
            commit = await self._commit(shard, journal.spec.name, reads, ack)
            if commit is not None:
                return {
                    "message": message,
                    "acknowledgement": ack,
                    "shard": shard.spec.id,
                    "commit": asdict(commit),
                    **await self._effects(shard, commit),
                }
        names = ", ".join(shard.spec.id for shard in candidates[:_SHARDS_MAX]) or "no shard"
        raise NotFound(
            f"no transaction in the recovery logs of {names} published this message",
            hint="A publisher that is no shard may have. Or a log was pruned, or the shard is of another "
            "application.",
        )

    async def _ended(
        self, reads: JournalReads, offset: int
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the message at an offset, and the acknowledgement of its transaction."""
        document = await reads.at_offset(offset, 1)
        head = document["head"]
        message = next(iter(document["messages"]), {"begin": -1})
        if message["begin"] != offset or "producer" not in message:
            raise NotFound(
                f"no message with a UUID begins at offset {offset}",
                hint="Choose a message on the page of the journal.",
            )
        if message["role"] == "alone":
            raise NotFound(
                "the message was published at once, outside of any transaction",
                hint="Shards publish in transactions: a program or `gazctl` published it.",
            )
        at = offset
        while at < min(head, offset + READ_BYTES_MAX):
            document = await reads.window(at, 10 * MESSAGES_MAX, head)
            for other in document["messages"]:
                is_own = other.get("producer") == message["producer"]
                if is_own and other["role"] == "acknowledgement":
                    return message, other
            if document["next"] <= at:
                break
            at = document["next"]
        raise NotFound(
            "the transaction of the message has not ended, or was rolled back",
            hint="Its shard acknowledges it once it has committed. Try again.",
        )

    async def _commit(
        self, shard: ListedShard, journal: str, reads: JournalReads, ack: dict[str, Any]
    ) -> LoggedCommit | None:
        """Return the commit whose checkpoint has the acknowledgement; None if no commit has it."""
        commits = await commits_near(self._client, shard.spec.recovery_log, ack["time_ms"])
        later = [commit for commit in commits if commit.time_ms >= ack["time_ms"] - _CLOCKS_MS]
        for commit in later[:_COMMITS_MAX]:
            checkpoint = await self._checkpoint(shard, commit.end)
            intent = checkpoint.ack_intents.get(journal, b"")
            cutter = FrameCutter(reads.content_type, 0)
            for frame in cutter.feed(intent):
                own_ack = message_of(frame, reads.content_type, reads.place)
                if own_ack.get("producer") not in (None, ack["producer"]):
                    return None
                if own_ack.get("clock") == ack["clock"]:
                    return commit
        return None

    async def _checkpoint(self, shard: ListedShard, offset: Offset) -> Checkpoint:
        """Return a checkpoint. Recover few states for one answer: it has a deadline."""
        if self._states.known_checkpoint(shard, offset) is None:
            if self._recoveries == _RECOVERIES_MAX:
                raise StillRecovering(f"the transactions of {shard.spec.id} are being looked at")
            self._recoveries += 1
        return await self._states.checkpoint(shard, offset)

    async def _effects(self, shard: ListedShard, commit: LoggedCommit) -> dict[str, Any]:
        after = await self._checkpoint(shard, commit.end)
        notes: list[str] = []
        before = Checkpoint()
        tables: list[dict[str, Any]] = []
        try:
            before = await self._checkpoint(shard, commit.begin)
        except (Invalid, NotFound) as error:
            notes.append(f"the rows before are not known: {error}")
        else:
            try:
                tables = await self._states.difference(shard, str(commit.begin), str(commit.end))
            except (Invalid, NotFound, Unavailable, Broken) as error:
                # A state may be too large to be compared: the inputs are shown all the same.
                notes.append(f"the rows that changed are not known: {error}")
        inputs = []
        for source in shard.spec.sources:
            end = after.sources.get(source.journal)
            begin = before.sources.get(source.journal)
            name = split_journal_meta(source.journal)[0]
            low = source.min_offset if begin is None else begin.read_through
            if end is None or end.read_through <= low or name not in self._journals:
                continue
            reads = JournalReads(self._client, self._journals[name])
            document = await reads.window(low, MESSAGES_MAX, end.read_through)
            inputs.append({"journal": name, "begin": low, "end": end.read_through, **document})
        return {"inputs": inputs, "tables": tables, "notes": notes}
