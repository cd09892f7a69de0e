"""The owed acknowledgements of the state that a shard had before.

A shard's transaction commits its checkpoint first. Then acknowledgements make its messages visible, journal
by journal. If the shard ends in between, its next owner finds the acknowledgements in the checkpoint, as *ACK
intents*. The owner appends the intents before it commits. A backfill replaces the checkpoint, so it appends
them, too:

- For a **recovery log**, the driver plays the former state back. It does so again if the log has grown before
  the driver's fence. After the fence no owner can commit to that state, so its checkpoint is final. The
  driver appends the intents before it appends or publishes the new state.
- For a **database**, the transaction of the new state locks the row, and adds the row's intents to the new
  checkpoint. The shard appends the intents when it starts (`gazette.stores.claims`).

A later owner may append the acknowledgements again: a reader skips an acknowledgement that it has seen. Such
acknowledgements also roll back messages that the former state had published and never committed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gazette.client.append.appender import AppendParams
from gazette.client.client import Client
from gazette.client.shards import ShardHints
from gazette.errors import Broken, GazetteError, Invalid, NotAllowed, NotFound, Retryable
from gazette.history.backfill.definition import Backfill
from gazette.history.backfill.verify import opened_files
from gazette.protocol.checkpoint import Checkpoint, SourceCheckpoint
from gazette.protocol.hints import FSMHints
from gazette.protocol.ids import JournalName, Offset, split_journal_meta
from gazette.protocol.shard import ShardSpec
from gazette.recoverylog.log.fsm import RecoveryFSM
from gazette.recoverylog.playback.player import Player
from gazette.recoverylog.scratch import FORMER, scratch_directory
from gazette.recoverylog.shard_state import ShardState, StateKind
from gazette.runtime.clock import Clock
from gazette.runtime.tasks import BlockingPool

log = logging.getLogger(__name__)

_SHOWN_MAX: Final = 5

_FILES: Final = "state"


@dataclass(frozen=True, slots=True)
class PreviousState:
    """The state of a shard before a backfill replaces it."""

    checkpoint: Checkpoint = Checkpoint()
    """Checkpoint of the state; empty without a state."""
    head: Offset = -1
    """End of the recovery log when the state was read; -1 for a state in a database."""


async def read_previous_state(
    spec: ShardSpec,
    stored: ShardHints,
    backfill: Backfill,
    *,
    fqn: str,
    client: Client,
    clock: Clock,
    pool: BlockingPool,
    scratch: Path | None,
) -> PreviousState:
    """Read the state at the end of a shard's recovery log.

    Play the log back to the local disk: this takes as much time and disk space as a promotion. Raise
    ``NotAllowed`` if the log is unreadable, or its store unknown. Raise ``Broken`` if the local
    disk fails, and ``Retryable`` if a later attempt may succeed. Cancellation leaves no file.
    """
    stored_hints = dict.fromkeys(
        hints for hints in (stored.primary, *stored.backups) if hints is not None
    )
    # Try hints in the order in which a shard does. Hints without files come last: read the whole log.
    hints = sorted(stored_hints, key=lambda some: not some.live_nodes) or [
        FSMHints(log=spec.recovery_log)
    ]
    with scratch_directory(FORMER, scratch) as directory:
        files = directory / _FILES
        player = Player(hints[0], files, client, clock, pool, older_hints=hints[1:])
        player.finish()
        try:
            recovered = await player.play()
            checkpoint = await pool.run(_checkpoint_in, backfill, spec, recovered.fsm, files, fqn)
            return PreviousState(checkpoint, recovered.write_head)
        except (Retryable, Broken):
            raise
        except Exception as error:  # The application's store may raise any exception.
            if isinstance(error, OSError) or (
                isinstance(error, GazetteError) and "errno" in error.facts
            ):
                raise Broken(
                    f"the former state of {spec.id} cannot be read on this machine: {error}",
                    hint="Its log is played back to the local disk: free space there, or give another"
                    " --scratch-dir.",
                ) from error
            raise NotAllowed(
                f"the former state of {spec.id} cannot be read, so it may owe "
                f"acknowledgements of what it published last ({error})",
                hint="Repair its log, or let a member recover it. With --forget-publications the "
                "state is replaced all the same: if the shard published, its last messages "
                "may never become visible.",
                log=spec.recovery_log,
            ) from error


def _checkpoint_in(
    backfill: Backfill, spec: ShardSpec, fsm: RecoveryFSM, directory: Path, fqn: str
) -> Checkpoint:
    """Return the checkpoint in played-back files of any store: the application may have changed its store."""
    if not any(directory.iterdir()):
        return Checkpoint()
    with ShardState(directory, log=spec.recovery_log) as state:
        known_checkpoint = _checkpoint_of(state)
    if known_checkpoint is not None:
        return known_checkpoint
    with opened_files(backfill, spec, fsm, directory, fqn) as (_, checkpoint):
        return checkpoint


def _checkpoint_of(state: ShardState) -> Checkpoint | None:
    """Return the checkpoint; None for the state of a store that is not Gazette's."""
    if state.kind is StateKind.SQLITE:
        is_gazettes = state.query("SELECT 1 FROM sqlite_master WHERE name = 'gazette_checkpoint'")
        return state.checkpoint if is_gazettes else None
    try:
        return state.checkpoint
    except Invalid:
        if state.kind is not StateKind.FILES:
            raise
        return None


async def acknowledge(client: Client, journal: JournalName, intent: bytes) -> bool:
    """Append an owed acknowledgement. Return False, as a shard does, if the journal was deleted.

    May be repeated. Raise ``Unavailable`` if no broker answers, and other errors of an append. A cancelled
    call may have appended the acknowledgement.
    """
    try:
        await client.append(AppendParams(journal), intent)
    except NotFound:
        log.warning(
            "journal %(journal)s of an acknowledgement that a former state owes is gone",
            {"journal": journal},
        )
        return False
    return True


def require_published(
    previous: Mapping[str, PreviousState],
    specs: Mapping[str, ShardSpec],
    ends: Mapping[JournalName, Offset],
    *,
    publishes: bool,
) -> None:
    """Raise ``NotAllowed`` if a publishing shard's new state does not continue where the former one ended.

    A live shard publishes while it consumes. If only the new state has consumed a message, its publications
    are missing. If only the former state has consumed a message, the shard publishes them twice. ``ends`` are
    the ends of the history. With ``publishes``, all shards publish. Otherwise a shard counts as publishing
    if its last transaction has published.
    """
    gaps: dict[tuple[JournalName, Offset, Offset], str] = {}
    for shard, state in sorted(previous.items()):
        checkpoint = state.checkpoint
        if not publishes and not checkpoint.ack_intents:
            continue
        minimum = {source.journal: source.min_offset for source in specs[shard].sources}
        for source, progress in checkpoint.sources.items():
            begin = minimum.get(source)
            end = ends.get(split_journal_meta(source)[0], begin)
            if begin is not None and end is not None and end != max(begin, progress.read_through):
                gaps.setdefault((source, max(begin, progress.read_through), end), shard)
    if not gaps:
        return
    sentences = "; ".join(
        f"{shard} had read {journal} up to {read_end}, and would continue at {end}, so that "
        f"messages are {'never published' if end > read_end else 'published twice'}"
        for (journal, read_end, end), shard in list(gaps.items())[:_SHOWN_MAX]
    )
    offsets = {split_journal_meta(journal)[0]: read_end for journal, read_end, _ in gaps}
    raise NotAllowed(
        f"messages would be lost or published twice: {sentences}",
        hint="End the history where they ended, by "
        f"--offsets='{json.dumps(offsets, sort_keys=True)}'. Run one backfill for each of the shards "
        "that ended at different offsets of one source. If these messages do not matter, give "
        "--forget-publications.",
    )


def require_own(previous: Mapping[str, PreviousState], application: str) -> None:
    """Raise ``NotAllowed`` if a replaced state is of another application, as a shard does when it starts."""
    for shard, state in sorted(previous.items()):
        owner = state.checkpoint.application
        if owner and owner != application:
            raise NotAllowed(
                f"the state of shard {shard} belongs to application {owner}, and the "
                f"backfill is of application {application}",
                hint="Select other shards. If it is the same application under another name, "
                f"give --application={owner}.",
                shard=shard,
            )


def require_whole(
    previous: Mapping[str, PreviousState], new: Mapping[str, Checkpoint], *, publishes: bool
) -> None:
    """Raise ``NotAllowed`` if a publishing shard's former state ends within a source's transaction.

    A shard may commit after a part of a long transaction. A history has only whole transactions, so the new
    state cannot continue there.
    """
    for shard, state in sorted(previous.items()):
        if not publishes and not state.checkpoint.ack_intents:
            continue
        for journal, progress in state.checkpoint.sources.items():
            producers = new[shard].sources.get(journal, SourceCheckpoint()).producers
            for producer, former in progress.producers.items():
                built = producers.get(producer)
                if built is None or built.begin is None or former.last_ack <= built.last_ack:
                    continue
                raise NotAllowed(
                    f"{shard} publishes, and had ended within a transaction of {journal}: "
                    "what it published of that would be published again",
                    hint="Enable it until it has read on, disable it, and run this again; or give "
                    "--forget-publications.",
                    producer=producer.hex(),
                    begin=built.begin,
                )
