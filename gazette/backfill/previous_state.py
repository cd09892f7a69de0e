"""What the state that a shard had before still owes: acknowledgements of what it published last.

A transaction of a shard that publishes is committed by its checkpoint, and only then do acknowledgements
make what it published visible, journal by journal. If the shard ended in between, its next owner finds
them in the checkpoint, as *ACK intents*, and appends them before it commits anything. A backfill replaces
that checkpoint, so it pays what is owed:

- Of a **recovery log** the driver plays the former state back, and again if the log has grown until its own
  fence is there: from then on nobody can commit to that state, so its checkpoint is the last one. It
  appends the intents before it appends, let alone publishes, anything of the new state.
- A **database** commits the new state on whichever machine builds it. There the intents of the row that the
  transaction has locked go on in the new checkpoint, whose shard appends them when it starts
  (`gazette.stores.claims`).

Either way they may be appended again, by whoever comes next: a reader passes over an acknowledgement that
it has seen. They also roll back what the former state had begun to publish, and never committed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gazette.backfill.definition import Backfill
from gazette.backfill.verify import opened_files
from gazette.client.append.appender import AppendParams
from gazette.client.client import Client
from gazette.client.shards import ShardHints
from gazette.errors import Broken, GazetteError, Invalid, NotAllowed, NotFound, Retryable
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

_TOLD: Final = 5

_FILES: Final = "state"


@dataclass(frozen=True, slots=True)
class FormerState:
    """What is known of the state that a shard has until it gets another."""

    checkpoint: Checkpoint = Checkpoint()
    """Empty: there is no state."""
    head: Offset = -1
    """Where its recovery log ended when it was read; -1: its state is in a database."""


async def read_former(
    spec: ShardSpec,
    stored: ShardHints,
    backfill: Backfill,
    *,
    fqn: str,
    client: Client,
    clock: Clock,
    pool: BlockingPool,
    scratch: Path | None,
) -> FormerState:
    """The state that a shard's recovery log holds, at the log's end.

    The log is played back as a promotion does, onto the local disk, which takes as long and as much room.
    Raises ``NotAllowed`` when the log does not allow that, or the state's store is not known, ``Broken`` when
    the local disk does not, and ``Retryable`` when it may be done later. Cancellation leaves nothing.
    """
    stored_hints = dict.fromkeys(
        one for one in (stored.primary, *stored.backups) if one is not None
    )
    # In a shard's order: hints without files say to read the log from its first byte.
    hints = sorted(stored_hints, key=lambda one: not one.live_nodes) or [
        FSMHints(log=spec.recovery_log)
    ]
    with scratch_directory(FORMER, scratch) as directory:
        files = directory / _FILES
        player = Player(hints[0], files, client, clock, pool, older_hints=hints[1:])
        player.finish()
        try:
            recovered = await player.play()
            found = await pool.run(_checkpoint_in, backfill, spec, recovered.fsm, files, fqn)
            return FormerState(found, recovered.write_head)
        except (Retryable, Broken):
            raise
        except Exception as error:  # what the application's own store raises, too
            if isinstance(error, OSError) or (
                isinstance(error, GazetteError) and "errno" in error.facts
            ):
                raise Broken(
                    f"the former state of {spec.id} cannot be read on this machine: {error}",
                    hint="Its log is played back to the local disk: free space there, or give another"
                    " --scratch-dir.",
                ) from error
            raise NotAllowed(
                f"the former state of {spec.id} cannot be read, so nobody knows whether it owes"
                f" acknowledgements of what it published last ({error})",
                hint="Mend its log, or let a member recover it; with"
                " --forget-publications the state is replaced nonetheless: if the shard published, what it"
                " published last may never become visible.",
                log=spec.recovery_log,
            ) from error


def _checkpoint_in(
    backfill: Backfill, spec: ShardSpec, fsm: RecoveryFSM, directory: Path, fqn: str
) -> Checkpoint:
    """Of files that were played back, whichever store wrote them: the application's may be another now."""
    if not any(directory.iterdir()):
        return Checkpoint()
    with ShardState(directory, log=spec.recovery_log) as state:
        found = _checkpoint_of(state)
    if found is not None:
        return found
    with opened_files(backfill, spec, fsm, directory, fqn) as (_, checkpoint):
        return checkpoint


def _checkpoint_of(state: ShardState) -> Checkpoint | None:
    """None, if the state is of a store that is none of Gazette's."""
    if state.kind is StateKind.SQLITE:
        ours = state.query("SELECT 1 FROM sqlite_master WHERE name = 'gazette_checkpoint'")
        return state.checkpoint if ours else None
    try:
        return state.checkpoint
    except Invalid:
        if state.kind is not StateKind.FILES:
            raise
        return None


async def acknowledge(client: Client, journal: JournalName, intent: bytes) -> bool:
    """Append what a checkpoint owes to a journal; whether it is there. May be repeated.

    A journal that is gone is passed over, as a shard does. Raises what an append does. Cancellation: it
    may have been appended.
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
    former: Mapping[str, FormerState],
    specs: Mapping[str, ShardSpec],
    ends: Mapping[JournalName, Offset],
    *,
    publishes: bool,
) -> None:
    """Require of shards that publish that their new states go on where the former ones ended.

    What a live shard publishes of a message it publishes as it consumes it. So messages that only the new
    state has in it are never published, and those that only the former one has had are published again.
    ``ends`` are those of the history. ``publishes``: the application does; otherwise it is known of shards
    whose last transaction did. Raises ``NotAllowed``.
    """
    gaps: dict[tuple[JournalName, Offset, Offset], str] = {}
    for shard, state in sorted(former.items()):
        checkpoint = state.checkpoint
        if not publishes and not checkpoint.ack_intents:
            continue
        minimum = {one.journal: one.min_offset for one in specs[shard].sources}
        for source, read in checkpoint.sources.items():
            begin = minimum.get(source)
            end = ends.get(split_journal_meta(source)[0], begin)
            if begin is not None and end is not None and end != max(begin, read.read_through):
                gaps.setdefault((source, max(begin, read.read_through), end), shard)
    if not gaps:
        return
    told = "; ".join(
        f"{shard} had read {journal} up to {before}, and would go on at {end}, so that messages are"
        f" {'never published' if end > before else 'published twice'}"
        for (journal, before, end), shard in list(gaps.items())[:_TOLD]
    )
    offsets = {split_journal_meta(journal)[0]: before for journal, before, _ in gaps}
    raise NotAllowed(
        f"the shards publish, and would not go on where they ended: {told}",
        hint=f"End the history where they ended, by --offsets='{json.dumps(offsets, sort_keys=True)}'"
        " (with a run for each shard, where shards of the same source ended at different offsets); or"
        " give --forget-publications, if nobody needs them.",
    )


def require_own(former: Mapping[str, FormerState], application: str) -> None:
    """Require that states which are replaced belong to the application, as a shard does.

    Raises ``NotAllowed``.
    """
    for shard, state in sorted(former.items()):
        owner = state.checkpoint.application
        if owner and owner != application:
            raise NotAllowed(
                f"the state of shard {shard} belongs to application {owner}, and the backfill is of"
                f" application {application}",
                hint=f"Select other shards. If it is the same application under another name, give"
                f" --application={owner}.",
                shard=shard,
            )


def require_whole(
    former: Mapping[str, FormerState], new: Mapping[str, Checkpoint], *, publishes: bool
) -> None:
    """Require that the former states of shards that publish do not end in the midst of a transaction.

    A shard may commit while it has consumed some of a long transaction of its source, whose end it has
    not passed then. A history has whole transactions, and no offset ends one there. Raises ``NotAllowed``.
    """
    for shard, state in sorted(former.items()):
        if not publishes and not state.checkpoint.ack_intents:
            continue
        for journal, read in state.checkpoint.sources.items():
            producers = new[shard].sources.get(journal, SourceCheckpoint()).producers
            for producer, before in read.producers.items():
                after = producers.get(producer)
                if after is None or after.begin is None or before.last_ack <= after.last_ack:
                    continue
                raise NotAllowed(
                    f"{shard} publishes, and had ended in the midst of a transaction in {journal}: what it"
                    " has published of that would be published again",
                    hint="Enable it until it has read on, disable it, and run this again; or give"
                    " --forget-publications.",
                    producer=producer.hex(),
                    begin=after.begin,
                )
