"""The answers of the console, by their routes: `Console`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NoReturn

from gazette.client.journals import FragmentsParams, ListedJournal
from gazette.client.shards import ListedShard
from gazette.errors import GazetteError, Invalid, NotFound, Unavailable
from gazette.gazctl.context import Context, each
from gazette.gazctl.journals.fragments import fragments_of
from gazette.gazctl.shards.hints import all_slots, heads_of
from gazette.gazctl.shards.list import status_text
from gazette.protocol.ids import JournalName
from gazette.protocol.journal_life import JournalLife
from gazette.protocol.text.duration import SECOND
from gazette.run.console import views
from gazette.run.console.changes import COMMANDS, perform_change
from gazette.run.console.cluster import ClusterWatch
from gazette.run.console.journal_reads import MESSAGES_MAX, JournalReads
from gazette.run.console.lineage import Lineage
from gazette.run.console.log_moments import last_commits
from gazette.run.console.server import Answer, Arguments
from gazette.run.console.states import States, StillRecovering
from gazette.run.console.timeline import timeline
from gazette.runtime.numbers import is_digits
from gazette.version import __version__

_LATE_MAX: Final = 10
"""Greatest number of shards on a page whose next messages are read for their times."""


class Console:
    """One console: what it knows of a cluster, and its answers. Loop-bound. Run it, and close it."""

    def __init__(self, context: Context, scratch: Path, *, allow_changes: bool) -> None:
        self._context = context
        self._watch = ClusterWatch(context)
        self._states = States(context, scratch, self._life_of)
        self._allow_changes = allow_changes

    async def run(self) -> NoReturn:
        await self._watch.run()

    def _life_of(self, name: JournalName) -> JournalLife | None:
        journal = self._watch.sampler.listed.journals.get(name)
        return None if journal is None else journal.life

    async def close(self) -> None:
        self._watch.close()
        await self._states.close()

    def reads(self) -> Mapping[str, Answer]:
        """Return the answers that change nothing, by the names of their routes."""
        return {
            "session": self._session,
            "cluster": self._cluster,
            "journals": self._journals,
            "journal": self._journal,
            "fragments": self._fragments,
            "messages": self._messages,
            "application": self._application,
            "shard": self._shard,
            "hints": self._hints,
            "moments": self._moments,
            "state": waiting(self._state),
            "query": waiting(self._query),
            "difference": waiting(self._difference),
            "trace": waiting(self._trace),
        }

    def changes(self) -> Mapping[str, Answer]:
        """Return the answers that change something. There are none unless changes are allowed."""
        return {name: self._changing(name) for name in COMMANDS} if self._allow_changes else {}

    def _changing(self, name: str) -> Answer:
        async def change(arguments: Arguments) -> dict[str, Any]:
            return await perform_change(
                self._context,
                name,
                required(arguments, "name"),
                dry_run=arguments.get("dry_run") != "no",
            )

        return change

    @property
    def _now(self) -> float:
        return self._context.clock.monotonic()

    async def _session(self, _arguments: Arguments) -> dict[str, Any]:
        return {
            "version": __version__,
            "context": self._context.in_use,
            "addresses": self._watch.addresses(),
            "changes": self._allow_changes,
        }

    async def _cluster(self, _arguments: Arguments) -> dict[str, Any]:
        await self._watch.opened()
        return views.cluster_document(self._watch, self._now)

    async def _journals(self, arguments: Arguments) -> dict[str, Any]:
        await self._watch.opened()
        watch = self._watch
        journals = views.matching(watch, arguments.get("search", ""), arguments.get("sort", "name"))
        shown, page = views.page_of(journals, arguments.get("page", "0"))
        await watch.opened([("journal", journal.spec.name) for journal in shown])
        return {"rows": [self._row(journal) for journal in shown], **page}

    def _row(self, journal: ListedJournal) -> dict[str, Any]:
        key = ("journal", journal.spec.name)
        problem = self._watch.problems().get(key, "")
        return views.journal_row(journal, self._watch.sampler.rows.get(key), problem)

    # -- One journal

    async def _listed(self, arguments: Arguments) -> ListedJournal:
        """Return the journal that a request names. Raise ``NotFound`` if the list lacks it."""
        await self._watch.opened()
        name = required(arguments, "name")
        journal = self._watch.sampler.listed.journals.get(name)
        if journal is None:
            self._require_listed("broker")
            raise NotFound(
                f"there is no journal {name[:200]}",
                hint="It may be newer than the last list, or your token does not cover it.",
            )
        return journal

    def _require_listed(self, what: str) -> None:
        """Raise ``Unavailable`` if the last list failed: an item that it lacks may exist."""
        if problem := self._watch.sampler.problems.get(what):
            raise Unavailable(f"the {what} does not answer: {problem}", hint="It is asked again.")

    async def _journal(self, arguments: Arguments) -> dict[str, Any]:
        journal, watch = await self._listed(arguments), self._watch
        spec, key = journal.spec, ("journal", journal.spec.name)
        await watch.opened([key])
        return {
            **self._row(journal),
            "endpoints": list(journal.route.endpoints),
            "labels": {label.name: label.value for label in spec.labels.labels},
            "stores": list(spec.fragment.stores),
            "codec": spec.fragment.codec.name,
            "fragment_bytes": spec.fragment.length,
            "retention_s": spec.fragment.retention_ns / SECOND,
            "verdicts": views.verdicts_about(watch, "journal", spec.name, "broker", journal.route),
            "shards": [
                {"id": shard.spec.id, "reads": name in views.sources_of(shard)}
                for shard in watch.sampler.listed.shards.values()
                for name in [spec.name]
                if name in (*views.sources_of(shard), shard.spec.recovery_log)
            ][:100],
        }

    async def _fragments(self, arguments: Arguments) -> dict[str, Any]:
        journal, context = await self._listed(arguments), self._context
        client, name = await context.broker(), journal.spec.name
        row = self._watch.sampler.rows.get(("journal", name))
        stored = await fragments_of(context, client, FragmentsParams(name))
        head = 0 if row is None else row.position or 0
        return {**timeline(stored, head), "now": int(context.clock.now())}

    async def _messages(self, arguments: Arguments) -> dict[str, Any]:
        reads = JournalReads(await self._context.broker(), await self._listed(arguments))
        reads.require_messages()
        count = min(number(arguments, "count", 25), MESSAGES_MAX)
        if "time_ms" in arguments:
            return await reads.at_time(number(arguments, "time_ms"), count)
        if "offset" in arguments:
            return await reads.at_offset(number(arguments, "offset"), count)
        if "next" in arguments:  # The page follows the journal: a message begins there.
            seen = number(arguments, "seen")
            return await reads.following(number(arguments, "next"), count, seen)
        return await reads.last(count)

    # -- The application and its shards

    async def _application(self, arguments: Arguments) -> dict[str, Any]:
        await self._watch.opened()
        watch, listed = self._watch, self._watch.sampler.listed
        described = views.described_by_id(watch)
        words = arguments.get("search", "").lower().split()
        shards = [
            shard
            for shard in listed.shards.values()
            if all(word in f"{shard.spec.id} {status_text(shard)}".lower() for word in words)
        ]
        shown, page = views.page_of(shards, arguments.get("page", "0"))
        await watch.opened([("shard", shard.spec.id) for shard in shown])
        rows = [views.shard_row(watch, shard, described) for shard in shown]
        late = [row for row in rows if row["lag_bytes"]][:_LATE_MAX]
        ages = await each("ages", late, self._age_of)
        for row, age in zip(late, ages, strict=True):
            row["lag_s"] = None if isinstance(age, GazetteError) else age
        return {
            "name": views.application_name(listed.shards.values()),
            "rows": rows,
            **page,
            "edges": views.edges_of(watch, described),
            "verdicts": views.grouped_verdicts(watch, ("consumer", "shard", "token")),
        }

    async def _age_of(self, row: Mapping[str, Any]) -> float | None:
        """Return the age of the oldest message that a shard has not read, in seconds; None if unknown."""
        ages = []
        asked_at = self._context.clock.now() - self._now + (row["sampled_at"] or self._now)
        for name, offset in row["read_through"].items():
            journal = self._watch.sampler.listed.journals.get(name)
            if journal is not None:
                reads = JournalReads(await self._context.broker(), journal)
                _, head = await reads.bounds()
                for message in (await reads.window(offset, 1, head))["messages"]:
                    if "time_ms" in message:
                        ages.append(max(0.0, asked_at - message["time_ms"] / 1000))
        return max(ages, default=None)

    def _shard_of(self, shard_id: str) -> ListedShard:
        shard = self._watch.sampler.listed.shards.get(shard_id)
        if shard is None:
            self._require_listed("consumer")
            raise NotFound(
                f"there is no shard {shard_id[:200]}",
                hint="It may be newer than the last list, or no --consumer.address was given.",
            )
        return shard

    async def _shard(self, arguments: Arguments) -> dict[str, Any]:
        shard_id, watch = required(arguments, "id"), self._watch
        await watch.opened([("shard", shard_id)])
        shard, described = self._shard_of(shard_id), views.described_by_id(watch)
        heads = {
            name: row.position
            for name in views.sources_of(shard)
            if (row := watch.sampler.rows.get(("journal", name))) is not None
        }
        return {
            **views.shard_row(watch, shard, described),
            "heads": heads,
            "labels": {label.name: label.value for label in shard.spec.labels.labels},
            "verdicts": views.verdicts_about(watch, "shard", shard_id, "consumer", shard.route),
        }

    async def _hints(self, arguments: Arguments) -> dict[str, Any]:
        await self._watch.opened()
        shard, context = self._shard_of(required(arguments, "id")), self._context
        slots, errors = await all_slots(context, await context.consumer(), [shard])
        heads, head_errors = await heads_of(context, await context.broker(), slots)
        return {
            "slots": [
                {"slot": slot.slot, "log": slot.hints.log, "files": len(slot.hints.live_nodes)}
                | {"read_bytes": slot.bytes_read(heads)}
                for slot in slots
                if slot.hints is not None
            ],
            "errors": [*errors.values(), *head_errors.values()],
        }

    async def _moments(self, arguments: Arguments) -> dict[str, Any]:
        await self._watch.opened()
        shard = self._shard_of(required(arguments, "id"))
        if not shard.spec.recovery_log:
            raise Invalid(
                f"{shard.spec.id} has no recovery log: its state is in a database of your own",
                hint="Query that database itself.",
            )
        return await last_commits(await self._context.broker(), shard.spec.recovery_log, 200)

    async def _state(self, arguments: Arguments) -> dict[str, Any]:
        shard, at = self._shard_of(required(arguments, "id")), required(arguments, "at")
        state = await self._states.state(shard, at)
        if isinstance(checkpoint := state.checkpoint, GazetteError):
            raise checkpoint
        listing = "SELECT name, type, sql FROM sqlite_master WHERE type IN ('table', 'view') ORDER BY name"
        return {
            "kind": state.store.value,
            "offset": state.offset,
            "time_ms": None if state.time is None else int(state.time.timestamp() * 1000),
            "read_through": {
                name: source.read_through for name, source in checkpoint.sources.items()
            },
            "tables": (await self._states.query(shard, at, listing))["rows"],
        }

    async def _query(self, arguments: Arguments) -> dict[str, Any]:
        shard = self._shard_of(required(arguments, "id"))
        at, sql = required(arguments, "at"), required(arguments, "sql")
        return await self._states.query(shard, at, sql)

    async def _difference(self, arguments: Arguments) -> dict[str, Any]:
        shard = self._shard_of(required(arguments, "id"))
        before, after = required(arguments, "before"), required(arguments, "after")
        return {"tables": await self._states.difference(shard, before, after)}

    async def _trace(self, arguments: Arguments) -> dict[str, Any]:
        journal, listed = await self._listed(arguments), self._watch.sampler.listed
        described = views.described_by_id(self._watch)
        name = journal.spec.name
        shards = [shard for shard in listed.shards.values() if shard.spec.recovery_log]
        # Shards that are known to publish there come first. The descriptions may be some seconds old.
        shards.sort(key=lambda shard: name not in views.outputs_of(shard, described))
        lineage = Lineage(await self._context.broker(), self._states, listed.journals)
        return await lineage.trace(journal, number(arguments, "offset"), shards)


def waiting(make: Answer) -> Answer:
    """Return an answer that shows the progress while a state is being recovered."""

    async def answer(arguments: Arguments) -> dict[str, Any]:
        try:
            return await make(arguments)
        except StillRecovering as error:
            return {"recovering": str(error)}

    return answer


def required(arguments: Arguments, name: str) -> str:
    """Return an argument. Raise ``Invalid`` if it is missing."""
    if not arguments.get(name):
        raise Invalid("is missing", path=name)
    return arguments[name]


def number(arguments: Arguments, name: str, default: int = 0) -> int:
    """Return an argument as a number from 0 on. Raise ``Invalid`` for another text."""
    text = arguments.get(name, str(default))
    if not is_digits(text) or len(text) > 18:
        raise Invalid(f"invalid number ({text[:40]!r})", path=name)
    return int(text)
