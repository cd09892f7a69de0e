"""Lists the runs of a staging area, and *orphans*: leftovers of backfills that no run needs.

Orphans are in three places. The staging area may have attempts that do not count, and incomplete uploads.
Recovery logs may have branches that no hints name. Local disks may have builds of dead processes. A database
never has orphans: it rolls uncommitted states back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from gazette.client.shards import ShardClient, ShardHints
from gazette.errors import NotFound
from gazette.history.backfill.plan import Plan
from gazette.history.backfill.staging import (
    APPENDED,
    APPENDING,
    MANIFEST,
    PLAN,
    PUBLISHED,
    STATES,
    StagedObject,
    Staging,
    appending_shard,
    decoded,
    garbage_of,
    runs_of,
    shard_of,
)
from gazette.protocol.hints import FSMHints
from gazette.recoverylog.scratch import abandoned

STAGED: Final = "staged object"
BRANCH: Final = "branch of a log"
SCRATCH: Final = "local directory"
_CALLS_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run of a staging area. ``bytes`` counts staged bytes. ``changed_s`` is in Unix seconds."""

    run_id: str
    backfill: str
    shards: int
    step: str
    """The last step that is done: ``begun``, ``planned``, ``built``, ``appended`` or ``published``."""
    objects: int
    bytes: int
    changed_s: float


@dataclass(frozen=True, slots=True)
class Orphan:
    """An object that no run needs. ``changed_s`` is in Unix seconds; zero if unknown."""

    kind: str
    where: str
    bytes: int
    changed_s: float
    reason: str
    remedy: str
    """The command that removes the orphan."""


class Intent(msgspec.Struct, frozen=True):
    """A note that precedes the append of a state: ``author`` will write to a log at ``begin`` or later."""

    log: str
    author: int
    begin: int
    size: int


def list_runs(staging: Staging) -> list[RunInfo]:
    """Return all runs. Blocks. Raise ``Unavailable`` if the area fails, ``Corrupt`` for a bad plan."""
    return [_info(staging, run, objects) for run, objects in sorted(runs_of(staging).items())]


def _info(staging: Staging, run: str, objects: Sequence[StagedObject]) -> RunInfo:
    names = {item.name.partition("/")[2] for item in objects}
    plan = Plan.from_json(staging.read(f"{run}/{PLAN}")) if PLAN in names else None
    return RunInfo(
        run,
        "" if plan is None else plan.backfill,
        0 if plan is None else len(plan.shards),
        step_of(names, 0 if plan is None else len(plan.shards)),
        len(objects),
        sum(item.size for item in objects),
        max(item.mod_time for item in objects),
    )


def step_of(names: Iterable[str], shards: int) -> str:
    """Return the last step of a run that is done, from the names of its objects."""
    object_names = set(names)
    if PUBLISHED in object_names:
        return "published"
    if MANIFEST in object_names:
        appended = {shard_of(name)[0] for name in object_names if name.startswith(APPENDED)}
        return "appended" if shards and len(appended) == shards else "built"
    return "planned" if PLAN in object_names else "begun"


def staged_orphans(staging: Staging) -> list[Orphan]:
    """Return objects that no run needs, of any age. Blocks.

    For a run without a manifest, these are duplicate states of a shard, and incomplete states, which their
    attempts may still complete.
    """
    orphans: list[Orphan] = []
    for run, objects in sorted(runs_of(staging).items()):
        for item in garbage_of(staging, run, objects):
            orphans.append(_staged(item.object, item.reason))
        names = {item.name for item in objects}
        if not names & {f"{run}/{MANIFEST}", f"{run}/{PUBLISHED}"}:
            orphans += [_staged(item, reason) for item, reason in _surplus(run, objects)]
    return orphans


def _surplus(run: str, objects: Sequence[StagedObject]) -> list[tuple[StagedObject, str]]:
    """Return the objects that a run without a manifest does not need, each with the reason.

    These objects are incomplete states, and all attempts of each shard except the last attempt.
    """
    complete = [
        shard_of(item.name)
        for item in objects
        if item.name.startswith(f"{run}/{STATES}") and item.name.endswith(".json")
    ]
    kept_attempts = dict(complete)  # Keep the last attempt of each shard, as a resumed run does.
    surplus: list[tuple[StagedObject, str]] = []
    for item in objects:
        if not item.name.startswith(f"{run}/{STATES}"):
            continue
        shard, attempt = shard_of(item.name)
        if (shard, attempt) not in complete:
            surplus.append((item, "incomplete: its attempt died, or is about to complete it"))
        elif kept_attempts[shard] != attempt:
            surplus.append((item, "another attempt has built the same state"))
    return surplus


def _staged(item: StagedObject, reason: str) -> Orphan:
    return Orphan(
        STAGED, item.name, item.size, item.mod_time, reason, "gazctl shards backfill --gc"
    )


def scratch_orphans(parent: Path | None, before_s: float) -> list[Orphan]:
    """Return directories of dead processes on this machine. Blocks."""
    return [
        Orphan(
            SCRATCH,
            str(directory.path),
            directory.size,
            directory.mod_time,
            "the process that built there has died",
            "gazctl shards backfill --gc, or the next build on this machine",
        )
        for directory in abandoned(parent, before_s)
    ]


def intents_of(staging: Staging) -> dict[str, list[tuple[Intent, StagedObject]]]:
    """Return, by shard, all notes of appends to its log, in order of their offsets. Blocks."""
    notes: dict[str, list[tuple[Intent, StagedObject]]] = {}
    for run, objects in runs_of(staging).items():
        for item in objects:
            if not item.name.startswith(f"{run}/{APPENDING}"):
                continue
            shard = appending_shard(item.name)
            with suppress(NotFound):  # The note was removed meanwhile.
                data = staging.read(item.name)
                intent = decoded(data, Intent, "a note of what was about to be appended")
                notes.setdefault(shard, []).append((intent, item))
    return {shard: sorted(pairs, key=lambda pair: pair[0].begin) for shard, pairs in notes.items()}


async def branch_orphans(
    intents: dict[str, list[tuple[Intent, StagedObject]]], shards: ShardClient
) -> list[Orphan]:
    """Return branches of logs that no hints name.

    Such a branch is a state that was appended and never published, or that the shard does not use any
    more. Raise ``Unavailable`` if members do not answer requests for hints.
    """
    limit = asyncio.Semaphore(_CALLS_MAX)

    async def orphans_of(shard: str) -> list[Orphan]:
        hints: ShardHints | None = None
        async with limit:
            with suppress(NotFound):  # The shard is gone: no hints name a branch.
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
        orphan
        for group in await asyncio.gather(*map(orphans_of, sorted(intents)))
        for orphan in group
    ]


def in_force(intents: Sequence[Intent], stored: Sequence[FSMHints | None]) -> set[Intent]:
    """Return the notes of the branches that stored hints name.

    Hints have the author and an offset of each branch. The note of a branch is the last one of its author
    that begins at or before that offset.
    """
    named: set[Intent] = set()
    for hints in stored:
        if hints is None:
            continue
        for node in hints.live_nodes:
            for segment in node.segments:
                candidates = [
                    intent
                    for intent in intents
                    if intent.author == segment.author
                    and intent.log == (segment.log or hints.log)
                    and intent.begin <= segment.first_offset
                ]
                if candidates:
                    named.add(max(candidates, key=lambda intent: intent.begin))
    return named
