"""``gazctl shards backfill --list`` and ``--gc``: list and remove leftovers of runs."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Final

from gazette.errors import GazetteError, NotFound
from gazette.gazctl.context import Context
from gazette.gazctl.flags import ShardsBackfillFlags
from gazette.gazctl.io.output import Table
from gazette.history.backfill.inventory import (
    Orphan,
    RunInfo,
    branch_orphans,
    intents_of,
    list_runs,
    scratch_orphans,
    staged_orphans,
)
from gazette.history.backfill.staging import DirectoryStaging, Staging, garbage, open_staging
from gazette.recoverylog.scratch import abandoned
from gazette.runtime.numbers import bytes_text, counted
from gazette.runtime.tasks import BlockingPool

_NEVER: Final = "-"


def _require_there(staging: Staging, flags: ShardsBackfillFlags) -> None:
    """Raise ``NotFound`` if the staging area is absent: a wrong name must not look like an empty area."""
    if isinstance(staging, DirectoryStaging) and not staging.directory.exists():
        raise NotFound(
            f"there is no staging area at {flags.staging}",
            hint="The first run of a backfill creates it. Give the same --staging.",
        )


async def list_all(context: Context, flags: ShardsBackfillFlags) -> int:
    """List all runs of the staging area, and all leftovers."""
    staging = open_staging(flags.staging)
    _require_there(staging, flags)
    consumer = await context.consumer()
    pool = BlockingPool("backfill-list", 1)
    try:
        runs = await pool.run(list_runs, staging)
        orphans = await pool.run(staged_orphans, staging)
        orphans += await branch_orphans(await pool.run(intents_of, staging), consumer)
        now = context.clock.now()
        orphans += await pool.run(scratch_orphans, flags.scratch_dir, now)
    finally:
        pool.close()
    if flags.format == "json":
        value = {
            "runs": [asdict(run) for run in runs],
            "orphans": [asdict(orphan) for orphan in orphans],
        }
        context.terminal.write(json.dumps(value) + "\n")
        return 0
    if runs:
        context.terminal.write(_runs_table(runs).text(context.terminal))
    if orphans:
        context.terminal.write(_orphans_table(orphans).text(context.terminal))
    size = sum(orphan.bytes for orphan in orphans)
    context.terminal.note(
        f"{len(runs)} runs; {len(orphans)} orphans that no run needs, {bytes_text(size)}"
    )
    return 0


def _runs_table(runs: list[RunInfo]) -> Table:
    table = Table(
        ["Run", "Backfill", "Shards", "Step", "Objects", "Size", "Changed"],
        numbers=frozenset({"Shards", "Objects", "Size"}),
    )
    for run in runs:
        table.add(
            run.run_id,
            run.backfill,
            str(run.shards),
            run.step,
            str(run.objects),
            bytes_text(run.bytes),
            _when(run.changed_s),
        )
    return table


def _orphans_table(orphans: list[Orphan]) -> Table:
    table = Table(
        ["Orphan", "Where", "Size", "Changed", "Why", "Removed by"], numbers=frozenset({"Size"})
    )
    for orphan in orphans:
        size, changed = bytes_text(orphan.bytes), _when(orphan.changed_s)
        table.add(orphan.kind, orphan.where, size, changed, orphan.reason, orphan.remedy)
    return table


def _when(seconds: float) -> str:
    if not seconds:
        return _NEVER
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def collect(context: Context, flags: ShardsBackfillFlags) -> int:
    """List leftovers, and remove them unless this is a dry run. Return the exit code."""
    staging = open_staging(flags.staging)
    _require_there(staging, flags)
    pool = BlockingPool("backfill-gc", 1)
    try:
        now = context.clock.now()
        items = await pool.run(garbage, staging, now, flags.gc_age)
        builds = await pool.run(lambda: list(abandoned(flags.scratch_dir, now - flags.gc_age)))
        table = Table(["Object", "Size", "Reason"], numbers=frozenset({"Size"}))
        for item in items:
            table.add(item.object.name, bytes_text(item.object.size), item.reason)
        for build in builds:
            table.add(str(build.path), bytes_text(build.size), "the process that built there died")
        if items or builds:
            context.terminal.write(table.text(context.terminal))
        failed = 0
        if not flags.dry_run:
            for item in items:
                try:
                    await pool.run(staging.remove, item.object.name)
                except GazetteError as error:
                    failed += 1
                    context.terminal.note(f"{item.object.name}: {error}")
            for build in builds:
                try:
                    await pool.run(shutil.rmtree, build.path)
                except OSError as error:
                    failed += 1
                    context.terminal.note(f"{build.path}: {error}")
    finally:
        pool.close()
    verb = "would be removed" if flags.dry_run else "removed"
    size = sum(item.object.size for item in items) + sum(build.size for build in builds)
    objects = counted(len(items) + len(builds) - failed, "object")
    context.terminal.note(f"{objects} {verb}, {bytes_text(size)}")
    return 1 if failed else 0
