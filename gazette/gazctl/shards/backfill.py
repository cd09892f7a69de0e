"""``gazctl shards backfill``: build the state of shards from history. The shards continue from that state."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import msgspec

from gazette.blobs.fsspec import check_protocols
from gazette.consumer.application_name import checked_name
from gazette.errors import Invalid, not_installed
from gazette.gazctl.context import Context, parse_selector
from gazette.gazctl.flags import BrokerFlags, ShardsBackfillFlags
from gazette.gazctl.io.output import Table
from gazette.gazctl.io.time_args import parse_moment
from gazette.gazctl.shards.backfill_list import collect, list_all
from gazette.gazctl.shards.backfill_waits import report_stalls
from gazette.history.backfill.definition import load_backfill
from gazette.history.backfill.local import LocalRunner
from gazette.history.backfill.report import Progress, Report
from gazette.history.backfill.run import BackfillRun
from gazette.history.backfill.runner import Runner
from gazette.history.backfill.settings import HistoryEnd, RunSettings
from gazette.history.source import Access
from gazette.protocol.label_set import LabelSelector
from gazette.runtime.decoders import json_decoder
from gazette.runtime.numbers import bytes_text, counted
from gazette.runtime.tasks import TaskScope

_RUN_ID_BITS: Final = 32


async def run(context: Context) -> int:
    flags = context.flags(ShardsBackfillFlags)
    if not flags.staging:
        raise Invalid(
            "a staging area is required",
            path="--staging",
            hint="Give a directory, or a bucket, that all processes of this backfill reach.",
        )
    if flags.gc and flags.list:
        raise Invalid("--list and --gc exclude each other", path="--list")
    if flags.gc:
        return await collect(context, flags)
    if flags.list:
        return await list_all(context, flags)
    if len(context.loaded.arguments) != 1:
        raise Invalid(
            "expected one backfill", path="APP", hint="Give module:Class, or path.py:Class."
        )
    if flags.verify and flags.verify_shards < 1:
        raise Invalid(
            f"invalid number of shards to compare ({flags.verify_shards}; expected >= 1)",
            path="--verify-shards",
        )
    if flags.jobs < 0:
        raise Invalid(f"invalid number of processes ({flags.jobs}; expected >= 0)", path="--jobs")
    name = context.loaded.arguments[0]
    backfill = load_backfill(name)
    selector = _shards(flags)
    run_id = flags.run_id or f"{name.rpartition(':')[2].lower()}-{_random_hex(context)}"
    settings = RunSettings(
        selector,
        flags.staging,
        run_id,
        _history_end(flags, context.clock.now()),
        flags.enable,
        flags.overwrite,
        flags.forget_publications,
        flags.verify_shards if flags.verify else 0,
        flags.scratch_dir,
        flags.prefix.rstrip("/"),
        checked_name(flags.application, "--application") if flags.application else "",
    )
    runner = _runner(flags)
    consumer, client = await context.consumer(), await context.broker()
    job = BackfillRun(
        backfill,
        name,
        settings,
        runner,
        _access(context, flags),
        client,
        consumer,
        context.clock,
        context.rng,
    )

    def begun() -> None:
        context.terminal.note(
            f"run {run_id} with {runner.description}; to resume it: --run-id={run_id}"
        )

    progress = job.progress

    def amounts() -> tuple[int, int]:
        return progress.done, max(progress.total, progress.done)

    waits = report_stalls(
        {"broker": client, "consumer": consumer}, progress, context.terminal, context.clock
    )
    async with (
        context.reporting_progress(lambda: (progress.step, progress.unit), amounts),
        TaskScope("waits") as scope,
    ):
        scope.daemon(waits, name="waits")
        report = await job.run(dry_run=flags.dry_run, on_begin=begun)
        scope.cancel()
    _report(context, flags, report, progress)
    return 0


def _shards(flags: ShardsBackfillFlags) -> LabelSelector:
    try:
        return parse_selector(flags.shards, required=True)
    except Invalid as error:
        raise Invalid(error.message, path="--shards", hint=error.hint) from error


def _random_hex(context: Context) -> str:
    return f"{context.rng.getrandbits(_RUN_ID_BITS):08x}"


def _runner(flags: ShardsBackfillFlags) -> Runner:
    if flags.local and flags.master:
        raise Invalid("--local and --master exclude each other", path="--local")
    if not flags.master:
        return LocalRunner(flags.jobs)
    try:
        from gazette.history.spark.backfill import SparkRunner
    except ImportError as error:
        raise not_installed(
            "a run on Spark",
            str(error.name),
            "spark",
            path="--master",
            hint="Or leave the flag out, to use the cores of this machine.",
        ) from error
    runner: Runner = SparkRunner(flags.master)
    return runner


def _access(context: Context, flags: ShardsBackfillFlags) -> Access:
    """Return the access of tasks: the same brokers as this command."""
    brokers = context.loaded.group(BrokerFlags)
    protocols = check_protocols(brokers.fsspec_protocols, "broker.fsspec-protocols")
    return Access(brokers, brokers.file_root, flags.direct, protocols)


def _history_end(flags: ShardsBackfillFlags, now_s: float) -> HistoryEnd:
    """Return the end of the history. Raise ``Invalid`` for two ends, or for one in the future."""
    if flags.until and flags.offsets:
        raise Invalid(
            "--until and --offsets exclude each other",
            path="--until",
            hint="Give one of them: each ends the history of all journals.",
        )
    until_s = parse_moment(flags.until, now_s, "--until")
    if until_s > now_s:
        raise Invalid(
            f"the time is in the future ({flags.until})",
            path="--until",
            hint="Leave it out to read everything.",
        )
    return HistoryEnd(_offsets(flags.offsets), until_s)


def _offsets(text: str) -> Mapping[str, int]:
    """Return offsets by journal, from a text or a file of JSON.

    Raise ``Invalid`` for a file that cannot be opened, and for other content.
    """
    if not text:
        return {}
    try:
        data = os.fsencode(text) if text.lstrip().startswith("{") else Path(text).read_bytes()
    except OSError as error:
        raise Invalid(f"cannot read {text}: {error.strerror}", path="--offsets") from error
    try:
        offsets = json_decoder(dict[str, int]).decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Invalid(
            f"not offsets by journal: {error}",
            path="--offsets",
            hint='Give JSON such as {"words/part-000": 1048576}, or the name of a JSON file.',
        ) from error
    if negative := [journal for journal, offset in offsets.items() if offset < 0]:
        raise Invalid(f"an offset of {negative[0]} is negative", path="--offsets")
    return offsets


def _report(
    context: Context, flags: ShardsBackfillFlags, report: Report, progress: Progress
) -> None:
    if flags.format == "json":
        value: dict[str, Any] = asdict(report)
        context.terminal.write(json.dumps(value) + "\n")
        return
    if report.shards:
        table = Table(
            ["Shard", "Messages", "State", "Goes on at", "Open"],
            numbers=frozenset({"Messages", "State", "Open"}),
        )
        for shard in report.shards:
            table.add(
                shard.shard,
                str(shard.messages) if report.published else "-",
                bytes_text(shard.bytes) if report.published else "-",
                ", ".join(
                    f"{journal}: {offset}" for journal, offset in sorted(shard.sources.items())
                ),
                str(shard.open_producers),
            )
        context.terminal.write(table.text(context.terminal))
    if not report.published:
        context.terminal.note(
            f"would read {bytes_text(report.history_bytes)} with {report.history_messages} "
            f"messages; the first pass took {report.seconds:.1f} s, and the second takes "
            f"about {max(1.0, 2 * report.seconds):.0f} s plus the time of the build; nothing "
            "was changed"
        )
        for refusal in report.refusals:
            context.terminal.note(f"the run would be refused now: {refusal}")
        return
    if not report.shards:
        context.terminal.note(f"run {report.run_id} is published already; nothing was changed")
        return
    verified = f"; equal to a replay: {', '.join(report.verified)}" if report.verified else ""
    acknowledged = (
        f"; appended {counted(report.acknowledged, 'acknowledgement')} that former states owed"
        if report.acknowledged
        else ""
    )
    enabled = "enabled" if flags.enable else "still disabled: it starts once it is enabled"
    context.terminal.note(
        f"published {counted(len(report.shards), 'shard')} from {bytes_text(report.history_bytes)}"
        f" in {report.seconds:.1f} s{verified}{acknowledged}; each is {enabled}"
    )
