"""Problems of a cluster, most urgent first. Each has its reason and the command that mends it. No IO."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gazette.client.journals import ListedJournal
from gazette.client.shards import ListedShard
from gazette.protocol.journal import SuspendLevel
from gazette.protocol.shard import ReplicaCode

CRITICAL: Final = 0
WARNING: Final = 1
NOTE: Final = 2
_NAMED: Final = 20
"""Greatest number of names of one verdict."""
_MEMBERS: Final = "gazctl members"
_ROOM: Final = "Start a broker, or look at the log of one: all that run may be full."
_LEASE: Final = (
    "This ends once the lease of a process that died has expired. If not, see what runs."
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Something that is wrong with things of one family. ``command`` is empty if no command mends it."""

    severity: int
    family: str
    name: str
    reason: str
    advice: str
    command: str = ""


def journal_verdicts(
    journals: Iterable[ListedJournal], problems: Mapping[tuple[str, str], str]
) -> Iterator[Verdict]:
    """Yield what is wrong with journals. ``problems`` are reports of brokers."""
    for journal in journals:
        spec, route = journal.spec, journal.route
        severity, reason, advice, command = CRITICAL, "", _LEASE, _MEMBERS
        if problem := problems.get(("journal", spec.name)):
            more = _journal_advice(spec.name, problem, journal)
            yield Verdict(WARNING, "journal", spec.name, problem, *more)
        if spec.suspend_level is not SuspendLevel.NONE:
            continue
        if not route.members:
            reason, advice = "no broker has it: appends and reads wait", _ROOM
        elif route.primary is None:
            reason = "it has no primary: appends wait"
        elif len(route.members) < spec.replication:
            reason = f"it has {len(route.members)} of {spec.replication} replicas"
            severity, advice = WARNING, _ROOM
        if reason:
            yield Verdict(severity, "journal", spec.name, reason, advice, command)


def _journal_advice(name: str, problem: str, journal: ListedJournal) -> tuple[str, str]:
    """Return the advice for a problem of a broker with a journal, and the command for it."""
    stores = journal.spec.fragment.stores
    if "whose they are" in problem:
        advice = "Say whether these fragments are of the journal. See docs/stores.md."
        return advice, _command("journals", "decide-fragments", "-l", f"name={name}", "--dry-run")
    if "reset-head" in problem:
        advice = "Find out which bytes are lost before you move the head. See docs/operating.md."
        return advice, _command("journals", "reset-head", "-l", f"name={name}", "--dry-run")
    if stores:
        return "Look at its store.", _command("journals", "store-health", stores[0])
    return "See the log of its brokers.", _command("journals", "list", "-l", f"name={name}")


def _command(*words: str) -> str:
    """Return a command line for a shell. Specifications have URLs that a shell would interpret."""
    return shlex.join(("gazctl", *words))


def shard_verdicts(
    shards: Iterable[ListedShard],
    problems: Mapping[tuple[str, str], str],
    described: Mapping[str, Mapping[str, Any]],
) -> Iterator[Verdict]:
    """Yield what is wrong with shards. ``described`` are descriptions by their primaries, by id."""
    for shard in shards:
        spec = shard.spec
        if spec.disable:
            continue
        errors = [error for status in shard.status for error in status.errors]
        problem = problems.get(("shard", spec.id))
        codes = [status.code for status in shard.status]
        verdict = _shard_verdict(shard, codes, errors, problem, described.get(spec.id, {}))
        if verdict is not None:
            severity, reason, advice, command = verdict
            yield Verdict(severity, "shard", spec.id, reason, advice, command)


def _shard_verdict(
    shard: ListedShard,
    codes: Sequence[ReplicaCode],
    errors: Sequence[str],
    problem: str | None,
    description: Mapping[str, Any],
) -> tuple[int, str, str, str] | None:
    """Return severity, reason, advice and command; None for a shard that is as it should be."""
    shard_id, standbys = shard.spec.id, shard.spec.hot_standbys
    if ReplicaCode.FAILED in codes:
        reason = f"it has failed: {errors[0] if errors else 'without an error'}"
        advice = "Remove the cause, then let it start again."
        return (
            CRITICAL,
            reason,
            advice,
            _command("shards", "unassign", "--failed", "-l", f"id={shard_id}"),
        )
    if not codes:
        reason = "no member has it: its messages wait"
        return CRITICAL, reason, "Start a member, or raise --consumer.limit.", _MEMBERS
    if shard.route.primary is None:
        return CRITICAL, "it has no primary: its messages wait", _LEASE, _MEMBERS
    if problem:
        command = _command("shards", "list", "-l", f"id={shard_id}", "--lag")
        return WARNING, f"it {problem}", "See docs/operating.md, shards that wait.", command
    if codes[shard.route.primary] is not ReplicaCode.PRIMARY:
        play_back = description.get("play_back")
        progress = f": {play_back}" if isinstance(play_back, str) else ""
        advice = "It serves once it has read its recovery log. A hot standby makes this shorter."
        command = _command("shards", "hints", "-l", f"id={shard_id}")
        return NOTE, f"it is being recovered{progress}", advice, command
    if len(codes) < 1 + standbys:
        reason = f"it has {len(codes) - 1} of {standbys} hot standbys"
        return WARNING, reason, "Start another member of the application.", _MEMBERS
    return None


def grouped(verdicts: Iterable[Verdict]) -> list[dict[str, Any]]:
    """Return verdicts for the page, most urgent first. Verdicts of one reason become one, with all names."""
    groups: dict[tuple[int, str, str, str], list[Verdict]] = {}
    for verdict in verdicts:
        key = (verdict.severity, verdict.family, verdict.reason, verdict.advice)
        groups.setdefault(key, []).append(verdict)
    ordered = sorted(groups.items(), key=lambda group: (group[0][0], -len(group[1]), group[0][2]))
    return [
        {
            "severity": ("critical", "warning", "note")[severity],
            "family": family,
            "names": [verdict.name for verdict in group[:_NAMED]],
            "count": len(group),
            "reason": reason,
            "advice": advice,
            "command": group[0].command,
        }
        for (severity, family, reason, advice), group in ordered
    ]
