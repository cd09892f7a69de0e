"""Publication of built states: append them to recovery logs, then store their hints in one transaction.

This is safe because:

- **Only shards that cannot run are changed.** A shard must be disabled, and have no assignments. It
  can run again only after a change of its specification, and the publication compares the revision of
  the specification. So the publication fails if the shard is enabled, edited or published meanwhile.
- **Appended bytes have no effect** before the publication: they are a branch (see
  `recoverylog.log_file`). A register fences the log, so that a concurrent author is noticed.
- **All shards or none**: one transaction of etcd stores the hints of up to `SHARDS_MAX` shards. More shards
  need several transactions. If the driver dies between two transactions, a resumed run publishes the rest.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from gazette.client.append.appender import AppendParams
from gazette.client.client import Client
from gazette.client.new_journals import once_known
from gazette.client.shards import ListedShard, ShardChange, ShardClient, ShardHints
from gazette.errors import Conflict, Corrupt, Fenced, Invalid, NotAllowed, NotFound
from gazette.labels import CONTENT_RECOVERY_LOG, CONTENT_TYPE
from gazette.protocol.hints import FSMHints
from gazette.protocol.ids import Offset
from gazette.protocol.label_set import EVERYTHING, LabelSelector, LabelSet
from gazette.recoverylog.log.log_file import moved_hints
from gazette.recoverylog.log.ops import FENCE_LABEL
from gazette.recoverylog.log.recorder import fence, fence_check
from gazette.runtime.clock import Clock
from gazette.runtime.failpoints import reach
from gazette.runtime.tasks import BlockingPool
from gazette.stores.state_builder import BuiltState

SHARDS_MAX: Final = 60
"""Greatest number of shards of a transaction: etcd accepts 128 operations, and each shard needs two."""


def why_live(shard: ListedShard) -> str:
    """Return why a shard may run, so that its state must not be replaced; empty if it cannot run."""
    if not shard.spec.disable:
        return "it is not disabled"
    if shard.route.members:
        return f"{len(shard.route.members)} members still hold it"
    return ""


def require_idle(shards: Collection[ListedShard]) -> None:
    """Raise ``NotAllowed`` naming shards that may run."""
    live = {live_shard.spec.id: reason for live_shard in shards if (reason := why_live(live_shard))}
    if live:
        reasons = "; ".join(f"{shard}: {reason}" for shard, reason in sorted(live.items())[:10])
        raise NotAllowed(
            f"{len(live)} of {len(shards)} shards are live: {reasons}",
            hint="Set `disable: true` in their specifications (gazctl shards edit), and wait "
            "until they have no members. With --enable, publication enables them again.",
        )


def require_unchanged(before: Sequence[ListedShard], now: Sequence[ListedShard]) -> None:
    """Raise ``Conflict`` if shards were changed, or ``NotAllowed`` if they are not idle."""
    shards_now = {shard_now.spec.id: shard_now for shard_now in now}
    for shard in before:
        shard_now = shards_now.get(shard.spec.id)
        if shard_now is None or shard_now.mod_revision != shard.mod_revision:
            raise Conflict(
                "the shard was deleted since the run began"
                if shard_now is None
                else "the shard was changed since the run began: it was edited, enabled or published",
                hint="Nothing was published. Run the backfill again with a new --run-id.",
                shard=shard.spec.id,
            )
        require_idle([shard_now])


@dataclass(frozen=True, slots=True)
class Target:
    """A shard as of the begin of the run, and its new state."""

    shard: ListedShard
    built: BuiltState
    base: Offset
    """Offset in the shard's recovery log at which the state begins; 0 without a log."""

    @property
    def id(self) -> str:
        return self.shard.spec.id


def is_published(built: BuiltState, stored: ShardHints) -> bool:
    """Return True if the shard's hints, or a backup, name this state or its successors."""
    return any(
        segment.author == built.branch.author and segment.first_seq_no >= built.branch.first_seq_no
        for hints in (stored.primary, *stored.backups)
        if hints is not None
        for node in hints.live_nodes
        for segment in node.segments
    )


class Publication:
    """Appends built states, and publishes them. Loop-bound."""

    def __init__(
        self, client: Client, shards: ShardClient, clock: Clock, rng: random.Random
    ) -> None:
        self._client = client
        self._shards = shards
        self._clock = clock
        self._rng = rng
        self.appended_bytes = 0
        """Bytes appended so far, of all states."""

    async def check_log(self, log: str) -> None:
        """Raise ``NotFound`` or ``Invalid`` if a journal is not a recovery log."""
        try:
            journal = await once_known(self._client, log, lambda: self._client.get_journal(log))
        except NotFound as error:
            raise NotFound(
                f"recovery log {log} does not exist",
                hint=f"Create the journal, with the label {CONTENT_TYPE}={CONTENT_RECOVERY_LOG}.",
            ) from error
        if journal.spec.labels.value_of(CONTENT_TYPE) != CONTENT_RECOVERY_LOG:
            raise Invalid(f"{log} is not labeled as a recovery log", path=CONTENT_TYPE)

    async def append(
        self,
        built: BuiltState,
        path: Path,
        pool: BlockingPool,
        on_begin: Callable[[int], Awaitable[None]],
        on_fenced: Callable[[Offset], Awaitable[None]],
    ) -> int:
        """Append a state to its log. Return the state's first offset. The state has no effect yet.

        Await ``on_begin(head)`` before the first append: this must check that the shard is idle. If a member
        takes the log over after this check, the first append fails: it requires the same owner as before.
        Await ``on_fenced(offset)`` once the log has our fence, before the state is appended: the log up to
        ``offset`` is then final. Do not call ``on_fenced`` for an empty log.

        Raise ``Fenced`` when another author writes the log meanwhile, ``Corrupt`` when the file differs from
        the state that was built. A cancelled call may have appended a part, which has no effect: call again.
        """
        client, log = self._client, built.log
        await self.check_log(log)
        probe = await client.append(AppendParams(log), b"")
        head = probe.commit.end
        await on_begin(head)
        opening = built.branch.opening(self._rng, empty=head == 0)
        author = built.branch.author
        first = AppendParams(
            log, check_registers=_owned_as(probe.registers), union_registers=fence(author)
        )
        try:
            fenced = await client.append(first, opening)
        except Fenced as error:
            raise _overtaken(built) from error
        base = fenced.commit.end
        await reach("backfill.fenced", built.shard, self._clock)
        if head:
            await on_fenced(fenced.commit.begin)
        params = AppendParams(log, check_registers=fence_check(author))
        begin = 0
        for end in built.ends:
            await reach("backfill.appending", built.shard, self._clock)
            data = await pool.run(_read, path, begin, end - begin)
            await client.append(params, data)
            self.appended_bytes += end - begin
            begin = end
        await self.require_ours(built)
        return base

    async def require_ours(self, built: BuiltState) -> None:
        """Raise ``Fenced`` if another author has written the log since the state was appended."""
        params = AppendParams(built.log, check_registers=fence_check(built.branch.author))
        try:
            result = await self._client.append(params, b"")
        except Fenced as error:
            raise _overtaken(built) from error
        if result.registers and not fence_check(built.branch.author).matches(result.registers):
            raise _overtaken(built)

    async def publish(self, targets: Sequence[Target], *, enable: bool) -> None:
        """Store the hints of appended states, moved to the offsets of the states: the states take effect.

        With ``enable``, also enable the shards. Raise ``Conflict`` when a shard was changed since the run
        began, ``NotAllowed`` when it is live, ``Fenced`` when its log has another author. After an error
        nothing is published; but of more than `SHARDS_MAX` shards, some may be published. A cancelled call
        may have published, too: a resumed run sees what was published.
        """
        for begin in range(0, len(targets), SHARDS_MAX):
            await self._publish_batch(targets[begin : begin + SHARDS_MAX], enable=enable)

    async def _publish_batch(self, batch: Sequence[Target], *, enable: bool) -> None:
        """Publish at most `SHARDS_MAX` states in one transaction, or raise ``Conflict`` if a shard was
        changed."""
        shards_now = (await self._shards.list_shards(EVERYTHING)).shards
        require_unchanged([target.shard for target in batch], shards_now)
        current = {shard.spec.id: shard for shard in shards_now}
        changes: list[ShardChange] = []
        for target in batch:
            now = current[target.id]
            spec = replace(now.spec, disable=now.spec.disable and not enable)
            hints: FSMHints | None = None
            if target.built.log:
                if target.built.log != now.spec.recovery_log:
                    raise Conflict("the shard has another recovery log now", shard=target.id)
                await self.require_ours(target.built)
                hints = moved_hints(target.built.hints, target.base)
            elif not enable:
                continue  # The shard's database has the state already.
            changes.append(
                ShardChange(upsert=spec, expect_mod_revision=now.mod_revision, primary_hints=hints)
            )
        for target in batch:
            await reach("backfill.publishing", target.id, self._clock)
        if not changes:
            return
        try:
            await self._shards.apply_shards(changes)
        except Conflict as error:
            raise Conflict(
                "a shard was changed while it was about to be published: nothing was published",
                hint="Look at its specification. Run the backfill again with a new --run-id.",
            ) from error
        for target in batch:
            await reach("backfill.published", target.id, self._clock)


def _owned_as(registers: LabelSet) -> LabelSelector:
    """Return a selector that requires the present owner of a log: its register, or no register at all."""
    owner = registers.value_of(FENCE_LABEL)
    if owner:
        return LabelSelector(include=LabelSet.of((FENCE_LABEL, owner)))
    return LabelSelector(exclude=LabelSet.of((FENCE_LABEL, "")))


def _read(path: Path, offset: int, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(length)
    if len(data) != length:
        raise Corrupt("a built state is shorter than it was", path=str(path), expected=length)
    return data


def _overtaken(built: BuiltState) -> Fenced:
    return Fenced(
        "another author wrote the shard's recovery log since the state was appended",
        hint="The shard ran, or another backfill did: nothing was published. Run this again.",
        shard=built.shard,
        log=built.log,
    )
