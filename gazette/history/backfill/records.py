"""Records of a run in its staging area: its plan, the attempts that count, and its finished steps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from gazette.errors import Conflict, Corrupt
from gazette.history.backfill.build import Attempt, staged_attempt
from gazette.history.backfill.inventory import Intent
from gazette.history.backfill.plan import Plan
from gazette.history.backfill.staging import (
    MANIFEST,
    PLAN,
    PUBLISHED,
    STATES,
    appended_name,
    appending_name,
    check_run_id,
    decoded,
    manifest_attempts,
    open_staging,
    shard_of,
    state_name,
)
from gazette.protocol.checkpoint import Checkpoint
from gazette.runtime.tasks import BlockingPool

T = TypeVar("T")

_THREADS: Final = 4


class _Appended(msgspec.Struct, frozen=True):
    base: int


class RunRecords:
    """The objects of one run. Loop-bound; calls of the staging area run on ``pool``.

    Every method may raise ``Unavailable`` or ``NotAllowed``, if the staging area fails or refuses. A
    cancelled call has stored an object completely, or not at all.
    """

    def __init__(self, staging_url: str, run_id: str) -> None:
        """Open the staging area. Raise ``Invalid`` for an invalid URL or an invalid name of a run."""
        check_run_id(run_id)
        self.run_id = run_id
        self.staging = open_staging(staging_url)
        self.pool = BlockingPool("backfill", _THREADS)

    def close(self) -> None:
        """End the pool."""
        self.pool.close()

    async def blocking(self, call: Callable[..., T], *arguments: object) -> T:
        return await self.pool.run(call, *arguments)

    def _object(self, name: str) -> str:
        return f"{self.run_id}/{name}"

    async def _find(self, name: str) -> bytes | None:
        return await self.blocking(self.staging.find, name)

    async def _create(self, name: str, data: bytes) -> bool:
        return await self.blocking(self.staging.create, name, data)

    async def plan(self) -> Plan | None:
        """Return the plan; None if there is no object. Raise ``Corrupt`` if the object is no plan."""
        data = await self._find(self._object(PLAN))
        return None if data is None else Plan.from_json(data)

    async def make_plan(self, plan: Plan) -> None:
        """Store the plan. Raise ``Conflict`` if another driver has stored a plan."""
        if not await self._create(self._object(PLAN), plan.to_json()):
            raise Conflict(
                "another driver has begun the same run just now",
                hint="Let it finish, or give another --run-id.",
                run_id=self.run_id,
            )

    async def manifest(self) -> set[tuple[str, str]] | None:
        """Return the manifest's (shard, attempt) pairs; None without a manifest. Raise ``Corrupt`` if it is
        damaged."""
        data = await self._find(self._object(MANIFEST))
        return None if data is None else manifest_attempts(data)

    async def make_manifest(self, attempts: Mapping[str, str]) -> bool:
        """Store, by shard, the attempt that counts. Return False if a manifest was stored before."""
        data = msgspec.json.encode({"attempts": attempts})
        return await self._create(self._object(MANIFEST), data)

    async def is_published(self) -> bool:
        return await self._find(self._object(PUBLISHED)) is not None

    async def mark_published(self, now_s: float) -> None:
        """Note that the run is published. ``now_s`` is in Unix seconds."""
        data = msgspec.json.encode({"at": time_text(now_s)})
        await self._create(self._object(PUBLISHED), data)

    async def staged(self, shard: str, attempt: str) -> Attempt:
        """Return an attempt. Raise ``NotFound`` if the attempt was removed."""
        return await self.blocking(staged_attempt, self.staging, self.run_id, shard, attempt)

    async def staged_before(self, checkpoints: Mapping[str, Checkpoint]) -> dict[str, Attempt]:
        """Return, by shard, staged states of an earlier driver that have exactly these checkpoints.

        Leave out states of another application: the comparison of checkpoints ignores the application.
        """

        def names() -> list[str]:
            prefix = self._object(STATES)
            return [obj.name for obj in self.staging.list(prefix) if obj.name.endswith(".json")]

        attempts: dict[str, Attempt] = {}
        for name in await self.blocking(names):
            shard, attempt = shard_of(name)
            staged = await self.staged(shard, attempt)
            wanted, built = checkpoints.get(shard), staged.built.checkpoint
            if wanted is not None and (wanted, wanted.application) == (built, built.application):
                attempts[shard] = staged
        return attempts

    async def fetch(self, attempt: Attempt, directory: Path) -> Path:
        """Return a built state as a local file below ``directory``. Raise ``Corrupt`` if it was changed."""
        path = directory / attempt.attempt
        if not path.exists():
            name = state_name(self.run_id, attempt.shard, attempt.attempt)
            await self.blocking(self.staging.fetch, name, path)
            if await self.blocking(_digest, path) != attempt.built.sha256:
                raise Corrupt(
                    "a staged state differs from the state that was built",
                    object=name,
                    hint="Run the backfill again with a new --run-id.",
                )
        return path

    async def remove(self, attempt: Attempt) -> None:
        """Remove a staged state, but not its description."""
        name = state_name(self.run_id, attempt.shard, attempt.attempt)
        await self.blocking(self.staging.remove, name)

    async def note_appending(self, attempt: Attempt, head: int, number: str) -> None:
        """Note, before an append, that the log gets a state at offset ``head`` or later. ``number`` tells the
        notes of one attempt apart."""
        name = appending_name(self.run_id, attempt.shard, attempt.attempt, number)
        built = attempt.built
        intent = Intent(built.log, built.branch.author, head, built.size)
        await self._create(name, msgspec.json.encode(intent))

    async def appended(self, attempt: Attempt) -> int | None:
        """Return a state's first offset in its log; None if no append is noted. Raise ``Corrupt`` for a
        malformed note."""
        name = appended_name(self.run_id, attempt.shard, attempt.attempt)
        if (data := await self._find(name)) is None:
            return None
        return decoded(data, _Appended, "a note of what was appended", object=name).base

    async def note_appended(self, attempt: Attempt, base: int) -> None:
        """Note that the whole state is in its log, from ``base`` on. Keep an earlier note."""
        name = appended_name(self.run_id, attempt.shard, attempt.attempt)
        await self._create(name, msgspec.json.encode(_Appended(base)))


def time_text(unix_s: float) -> str:
    """Return a time for the objects of a run, in UTC."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
