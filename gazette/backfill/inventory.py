"""What runs of backfills have left: the runs of a staging area, and everything that no run needs.

Three places can hold such *orphans*: the staging area (attempts that do not count, what died in mid-upload),
recovery logs (branches that no hints name), and local disks (builds whose process has died). A database
holds none: what was not committed is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from gazette.backfill.plan import Plan
from gazette.backfill.staging import (
    APPENDED,
    APPENDING,
    MANIFEST,
    PLAN,
    PUBLISHED,
    STATES,
    StagedObject,
    Staging,
    appending_shard,
    garbage_of,
    runs_of,
    shard_of,
)
from gazette.client.shards import ShardClient, ShardHints
from gazette.errors import Corrupt, NotFound
from gazette.protocol.hints import FSMHints
from gazette.recoverylog.scratch import abandoned

STAGED: Final = "staged object"
BRANCH: Final = "branch of a log"
SCRATCH: Final = "local directory"
_CALLS_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run of a staging area. ``bytes`` are those that are staged; ``changed_s`` in Unix seconds."""

    run_id: str
    backfill: str
    shards: int
    step: str
    """The last one that is done: ``begun``, ``planned``, ``built``, ``appended`` or ``published``."""
    objects: int
    bytes: int
    changed_s: float


@dataclass(frozen=True, slots=True)
class Orphan:
    """Something that nothing needs. ``changed_s`` in Unix seconds, zero where it is not known."""

    kind: str
    where: str
    bytes: int
    changed_s: float
    reason: str
    remedy: str
    """The command that removes it."""


class Intent(msgspec.Struct, frozen=True):
    """Noted before a state is appended to a log: that ``author`` writes there, from ``begin`` on."""

    log: str
    author: int
    begin: int
    size: int

    @classmethod
    def from_json(cls, data: bytes) -> Intent:
        """Raises ``Corrupt``."""
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise Corrupt(f"not a note of what was about to be appended: {error}") from error


def list_runs(staging: Staging) -> list[RunInfo]:
    """All runs. Blocks. Raises what the staging area does, and ``Corrupt`` for what is no plan."""
    return [_info(staging, run, objects) for run, objects in sorted(runs_of(staging).items())]


def _info(staging: Staging, run: str, objects: Sequence[StagedObject]) -> RunInfo:
    names = {one.name.partition("/")[2] for one in objects}
    plan = Plan.from_json(staging.read(f"{run}/{PLAN}")) if PLAN in names else None
    return RunInfo(
        run,
        "" if plan is None else plan.backfill,
        0 if plan is None else len(plan.shards),
        step_of(names, 0 if plan is None else len(plan.shards)),
        len(objects),
        sum(one.size for one in objects),
        max(one.mod_time for one in objects),
    )


def step_of(names: Iterable[str], shards: int) -> str:
    """The last step that is done, of a run with these objects."""
    found = set(names)
    if PUBLISHED in found:
        return "published"
    if MANIFEST in found:
        appended = {shard_of(name)[0] for name in found if name.startswith(APPENDED)}
        return "appended" if shards and len(appended) == shards else "built"
    return "planned" if PLAN in found else "begun"


def staged_orphans(staging: Staging) -> list[Orphan]:
    """Objects that no run needs, however young. Blocks.

    Of a run that has no manifest yet those are the states that another attempt has staged as well, and
    what is not whole: it may be that an attempt is about to complete it.
    """
    found: list[Orphan] = []
    for run, objects in sorted(runs_of(staging).items()):
        for one in garbage_of(staging, run, objects):
            found.append(_staged(one.object, one.reason))
        names = {one.name for one in objects}
        if not names & {f"{run}/{MANIFEST}", f"{run}/{PUBLISHED}"}:
            found += [_staged(one, reason) for one, reason in _surplus(run, objects)]
    return found


def _surplus(run: str, objects: Sequence[StagedObject]) -> list[tuple[StagedObject, str]]:
    """Of a run that is not built: all attempts of a shard but one, and what is not whole."""
    whole = [
        shard_of(one.name)
        for one in objects
        if one.name.startswith(f"{run}/{STATES}") and one.name.endswith(".json")
    ]
    kept = dict(whole)  # As a run that is resumed does: the last of each shard.
    found: list[tuple[StagedObject, str]] = []
    for one in objects:
        if not one.name.startswith(f"{run}/{STATES}"):
            continue
        shard, attempt = shard_of(one.name)
        if (shard, attempt) not in whole:
            found.append((one, "not whole: its attempt died, or is about to complete it"))
        elif kept[shard] != attempt:
            found.append((one, "another attempt has built the same state"))
    return found


def _staged(one: StagedObject, reason: str) -> Orphan:
    return Orphan(STAGED, one.name, one.size, one.mod_time, reason, "gazctl shards backfill --gc")


def scratch_orphans(parent: Path | None, before_s: float) -> list[Orphan]:
    """Local directories of processes that have died, of this machine. Blocks."""
    return [
        Orphan(
            SCRATCH,
            str(one.path),
            one.size,
            one.mod_time,
            "the process that built there has died",
            "gazctl shards backfill --gc, or the next build on this machine",
        )
        for one in abandoned(parent, before_s)
    ]


def intents_of(staging: Staging) -> dict[str, list[tuple[Intent, StagedObject]]]:
    """By shard, what was ever about to be appended to its log, in order of where. Blocks."""
    found: dict[str, list[tuple[Intent, StagedObject]]] = {}
    for run, objects in runs_of(staging).items():
        for one in objects:
            if not one.name.startswith(f"{run}/{APPENDING}"):
                continue
            shard = appending_shard(one.name)
            with suppress(NotFound):  # Removed meanwhile.
                intent = Intent.from_json(staging.read(one.name))
                found.setdefault(shard, []).append((intent, one))
    return {shard: sorted(pairs, key=lambda pair: pair[0].begin) for shard, pairs in found.items()}


async def branch_orphans(
    intents: dict[str, list[tuple[Intent, StagedObject]]], shards: ShardClient
) -> list[Orphan]:
    """Branches of logs that no hints name: a state was appended, in part or whole, and not published,
    or the shard has gone on without it. Raises what asking for hints does."""
    limit = asyncio.Semaphore(_CALLS_MAX)

    async def one(shard: str) -> list[Orphan]:
        hints: ShardHints | None = None
        async with limit:
            with suppress(NotFound):  # The shard is gone: nothing names what is in its log.
                hints = await shards.get_hints(shard)
        stored = () if hints is None else (hints.primary, *hints.backups)
        needed = in_force([intent for intent, _ in intents[shard]], stored)
        return [
            Orphan(
                BRANCH,
                f"{intent.log}@{intent.begin}",
                intent.size,
                noted.mod_time,
                f"no hints of {shard} name it",
                "gazctl shards prune, once the shard has stored hints of its own",
            )
            for intent, noted in intents[shard]
            if intent not in needed
        ]

    return [
        orphan for found in await asyncio.gather(*map(one, sorted(intents))) for orphan in found
    ]


def in_force(intents: Sequence[Intent], stored: Sequence[FSMHints | None]) -> set[Intent]:
    """Those that hints name: of several by the same author, the last that begins before what they name."""
    found: set[Intent] = set()
    for hints in stored:
        if hints is None:
            continue
        for node in hints.live_nodes:
            for segment in node.segments:
                before = [
                    one
                    for one in intents
                    if one.author == segment.author
                    and one.log == (segment.log or hints.log)
                    and one.begin <= segment.first_offset
                ]
                if before:
                    found.add(max(before, key=lambda one: one.begin))
    return found
