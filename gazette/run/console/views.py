"""Documents of JSON that the pages show, made from the last answers in a `ClusterWatch`. No IO."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

from gazette.client.journals import ListedJournal
from gazette.client.shards import ListedShard
from gazette.consumer.contract.poison import DeadLetter
from gazette.errors import Invalid
from gazette.gazctl.shards.list import status_text
from gazette.gazctl.top.rows import TopRow
from gazette.labels import CONTENT_TYPE, MESSAGE_TYPE
from gazette.protocol.ids import ProcessId, split_journal_meta
from gazette.protocol.journal import SuspendLevel
from gazette.protocol.route import Route
from gazette.run.console.cluster import ClusterWatch, SeenMember
from gazette.run.console.verdicts import Verdict, grouped, journal_verdicts, shard_verdicts

PAGE_ROWS: Final = 50
FAMILIES: Final = ("broker", "consumer", "journal", "shard", "token")
VERDICTS_MAX: Final = 50

Described: TypeAlias = Mapping[tuple[ProcessId, str], Mapping[str, Any]]
"""Descriptions of shards by members, by id of the member and of the shard."""


def cluster_document(watch: ClusterWatch, now: float) -> dict[str, Any]:
    """Return the overview: verdicts and members."""
    listed = watch.sampler.listed
    verdicts = grouped_verdicts(watch)
    return {
        "verdicts": verdicts[:VERDICTS_MAX],
        "verdicts_total": len(verdicts),
        "journals": len(listed.journals),
        "shards": len(listed.shards),
        "age_s": now - min(listed.at.values()) if listed.at else None,
        "members": [member_document(member) for member in watch.members.values()],
        "application": application_name(listed.shards.values()),
    }


def grouped_verdicts(
    watch: ClusterWatch, families: Container[str] = FAMILIES, names: Container[str] | None = None
) -> list[dict[str, Any]]:
    """Return the verdicts on the cluster, or on some families or names."""
    groups = grouped(
        verdict
        for verdict in all_verdicts(watch)
        if verdict.family in families and (names is None or verdict.name in names)
    )
    for group in groups:
        if command := group["command"]:
            group["command"] = command + watch.flags_for(command)
    return groups


def verdicts_about(
    watch: ClusterWatch, family: str, name: str, server: str, route: Route
) -> list[dict[str, Any]]:
    """Return the verdicts on a journal or a shard, on its members, and on their lists."""
    names = {name, *map(str, route.members), watch.addresses().get(server, "")}
    return grouped_verdicts(watch, (family, server), names)


def all_verdicts(watch: ClusterWatch) -> Iterator[Verdict]:
    """Yield the verdicts on the cluster, its members, journals and shards."""
    for what, reason in watch.sampler.problems.items():
        address = watch.addresses().get(what, "")
        advice = f"Check that it runs, and that {address} is its address. What is shown is old."
        if error := watch.sampler.listed.refusals.get(what):
            reason, advice = f"the {what} refuses to list: {error}", error.hint
        else:
            reason = f"the {what} does not answer: {reason}"
        yield Verdict(0, what, address, reason, advice)
    if watch.refusal is not None and watch.refusal not in watch.sampler.listed.refusals.values():
        yield Verdict(0, "token", "", str(watch.refusal), watch.refusal.hint)
    if "consumer" not in watch.addresses():
        advice = "Start the console with --consumer.address, or with a context that has it."
        yield Verdict(
            2, "consumer", "", "no consumer address is given: shards are not shown", advice
        )
    for member in watch.members.values():
        name = str(member.listed.id)
        if member.error:
            advice = "It may have died: its lease then expires, and others take its work."
            yield Verdict(1, member.listed.kind, name, f"asking it failed: {member.error}", advice)
        elif member.not_ready:
            advice = "See its log. A member that stops or starts says so here."
            reason = f"it does not serve: {member.not_ready}"
            yield Verdict(1, member.listed.kind, name, reason, advice)
    problems, listed = watch.problems(), watch.sampler.listed
    yield from journal_verdicts(listed.journals.values(), problems)
    described = described_by_id(watch)
    yield from shard_verdicts(
        listed.shards.values(),
        problems,
        {
            id: described[member, id]
            for member, id in described
            if described[member, id].get("slot") == 0
        },
    )


def described_by_id(watch: ClusterWatch) -> Described:
    return {
        (member.listed.id, shard["id"]): shard
        for member in watch.members.values()
        for shard in member.shards
    }


def member_document(member: SeenMember) -> dict[str, Any]:
    listed, scrape = member.listed, member.scrape
    samples = {} if scrape is None else scrape.samples
    return {
        "kind": listed.kind,
        "zone": listed.id.zone,
        "id": listed.id.suffix,
        "endpoint": listed.endpoint,
        "primary": listed.primary,
        "replicas": listed.replicas,
        "version": dict(next(iter(samples.get("gazette_build_info", [()])))).get("version", ""),
        "sampled_at": None if scrape is None else scrape.at,
        "cpu_s": samples.get("process_cpu_seconds_total", {}).get(()),
        "memory": samples.get("process_resident_memory_bytes", {}).get(()),
        "state": member.error or member.not_ready or ("ready" if scrape else "not asked yet"),
        "serves": not (member.error or member.not_ready),
    }


def application_name(shards: Iterable[ListedShard]) -> str:
    """Return the name of the application whose members are asked, by the prefixes of its recovery logs."""
    names = Counter(shard.spec.recovery_log_prefix.rpartition("/")[2] for shard in shards)
    return next((name for name, _ in names.most_common() if name), "")


# -- Pages of rows


def page_of(rows: Sequence[Any], page: str) -> tuple[Sequence[Any], dict[str, int]]:
    """Return the rows of a page, and its place among all. Raise ``Invalid`` unless ``page`` is a number."""
    if not page.isdecimal() or len(page) > 9:
        raise Invalid(f"invalid page ({page[:20]!r}; expected a number)", path="page")
    pages = max(1, -(-len(rows) // PAGE_ROWS))
    number = min(int(page), pages - 1)
    shown = rows[number * PAGE_ROWS : (number + 1) * PAGE_ROWS]
    return shown, {"page": number, "pages": pages, "total": len(rows)}


def matching(watch: ClusterWatch, search: str, sort: str) -> list[ListedJournal]:
    """Return the journals that have all words in their names or labels, in the order of a column."""
    words = search.lower().split()
    rows = watch.sampler.rows

    def matches(journal: ListedJournal) -> bool:
        labels = " ".join(f"{label.name}={label.value}" for label in journal.spec.labels.labels)
        text = f"{journal.spec.name} {labels}".lower()
        return all(word in text for word in words)

    journals = [
        journal
        for journal in watch.sampler.listed.journals.values()
        if not words or matches(journal)
    ]
    if sort in ("rate", "head"):

        def amount(journal: ListedJournal) -> float:
            row = rows.get(("journal", journal.spec.name))
            value = None if row is None else row.rate if sort == "rate" else row.position
            return 1.0 if value is None else -float(value)

        return sorted(journals, key=amount)
    return journals


def journal_row(journal: ListedJournal, row: TopRow | None, problem: str) -> dict[str, Any]:
    spec, route = journal.spec, journal.route
    return {
        "name": spec.name,
        "primary": str(route.primary_id or ""),
        "replicas": [str(member) for member in route.members],
        "replication": spec.replication,
        "suspended": "" if spec.suspend_level is SuspendLevel.NONE else spec.suspend_level.name,
        "content_type": spec.labels.value_of(CONTENT_TYPE) or "",
        "head": None if row is None else row.position,
        "rate": None if row is None else row.rate,
        "problem": problem or ("" if row is None else row.error),
    }


# -- Applications and shards


def shard_row(watch: ClusterWatch, shard: ListedShard, described: Described) -> dict[str, Any]:
    """Return the facts about a shard, from its status, its members' descriptions and their metrics."""
    spec = shard.spec
    row = watch.sampler.rows.get(("shard", spec.id))
    primary_id = shard.route.primary_id
    primary = {} if primary_id is None else described.get((primary_id, spec.id), {})
    lag = None if row is None else row.lag
    counters = _counters(watch.primary_of(shard), spec.id)
    return {
        "id": spec.id,
        "status": status_text(shard),
        "error": "" if row is None else row.error,
        "waits_for": _text(primary.get("waits_for")),
        "play_back": _text(primary.get("play_back")),
        "lag_bytes": lag,
        "lag_messages": _messages_in(lag, counters),
        "horizon_bytes": primary.get("recovery_horizon_bytes"),
        "backlog_bytes": primary.get("append_backlog_bytes"),
        "replicas": _replicas_of(shard, described),
        "sources": sources_of(shard),
        "read_through": _offsets(primary.get("read_through")),
        "publish_at": _offsets(primary.get("publish_at")),
        "recovery_log": spec.recovery_log,
        **counters,
    }


def sources_of(shard: ListedShard) -> list[str]:
    """Return the journals that a shard reads."""
    return [split_journal_meta(source.journal)[0] for source in shard.spec.sources]


def outputs_of(shard: ListedShard, described: Described) -> list[str]:
    """Return the journals that a shard has published to, as its primary says."""
    primary_id = shard.route.primary_id
    primary = {} if primary_id is None else described.get((primary_id, shard.spec.id), {})
    return sorted(_offsets(primary.get("publish_at")))


def edges_of(watch: ClusterWatch, described: Described) -> list[dict[str, Any]]:
    """Return the journals that each shard reads and writes, for the graph."""
    letters = {
        journal.spec.name
        for journal in watch.sampler.listed.journals.values()
        if journal.spec.labels.value_of(MESSAGE_TYPE) == DeadLetter.__name__
    }
    return [
        {
            "id": shard.spec.id,
            "sources": sources_of(shard),
            "outputs": (outputs := outputs_of(shard, described)),
            "dead_letters": [name for name in outputs if name in letters],
            "bad": status_text(shard) not in ("PRIMARY", "DISABLED"),
        }
        for shard in watch.sampler.listed.shards.values()
    ]


def _replicas_of(shard: ListedShard, described: Described) -> list[dict[str, Any]]:
    replicas = []
    for index, (member_id, status) in enumerate(
        zip(shard.route.members, shard.status, strict=False)
    ):
        seen = described.get((member_id, shard.spec.id), {})
        replicas.append(
            {
                "member": str(member_id),
                "primary": index == shard.route.primary,
                "status": status.code.name,
                "errors": list(status.errors)[:3],
                "lag_bytes": seen.get("standby_lag_bytes"),
                "lag_s": seen.get("standby_lag_seconds"),
            }
        )
    return replicas


def _counters(member: SeenMember | None, shard_id: str) -> dict[str, Any]:
    """Return the counters of a shard, from the metrics of its primary. The page shows how fast they grow."""
    scrape = None if member is None else member.scrape
    counts = {} if scrape is None else scrape.shards.get(shard_id, {})

    def total(name: str) -> float:
        return sum(counts.get(f"gazette_shard_{name}_total", {}).values())

    names = ("read_messages", "read_bytes", "transactions", "restarts", "poison_messages")
    phases = counts.get("gazette_shard_phase_seconds_total", {})
    return {
        "sampled_at": None if scrape is None else scrape.at,
        **{name: total(name) for name in names},
        "phases": {dict(labels).get("phase", ""): number for labels, number in phases.items()},
    }


def _messages_in(lag: int | None, counters: Mapping[str, Any]) -> int | None:
    """Return about how many messages a lag has, by the mean size of messages that were read."""
    if not lag or not counters["read_bytes"] or not counters["read_messages"]:
        return 0 if lag == 0 else None
    mean_bytes: float = counters["read_bytes"] / counters["read_messages"]
    return max(round(lag / mean_bytes), 1)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _offsets(value: Any) -> dict[str, int]:
    """Return offsets by journal, of a description that another version may have written."""
    if not isinstance(value, dict):
        return {}
    return {name: offset for name, offset in value.items() if isinstance(offset, int)}
