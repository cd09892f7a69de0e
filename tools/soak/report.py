"""The report of a soak, for people and for scripts. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tools.soak.driver import Outcome


@dataclass(slots=True)
class Report:
    """``asdict`` is what ``--json`` prints. Times in seconds."""

    ok: bool = False
    seed: int = 0
    seconds: float = 0.0
    stores: list[str] = field(default_factory=list)
    streams: int = 0
    verified: int = 0
    transactions: int = 0
    """Number of transactions that published sums."""
    faults: int = 0
    by_kind: dict[str, dict[str, Any]] = field(default_factory=dict)
    latency: dict[str, float] = field(default_factory=dict)
    """Seconds from the acknowledgement of a stream's last chunk to its sum, under faults."""
    failed: dict[str, int] = field(default_factory=dict)
    """Shards that were FAILED and had to be unassigned, by fault."""
    restarted: dict[str, int] = field(default_factory=dict)
    """Number of times that shards were FAILED and restarted automatically, by fault."""
    service: dict[str, float] = field(default_factory=dict)
    """The longest time that a shard stood still, of all faults."""
    heads: dict[str, int] = field(default_factory=dict)
    """Journals whose heads were confirmed after all brokers had ended, by fault."""
    load: dict[str, float] = field(default_factory=dict)
    """Load average of the machine over a minute: at the beginning, in the mean, at most."""
    bad_exits: dict[str, int] = field(default_factory=dict)
    """By process and exit code: how often a process was asked to stop, and ended with a code other than 0."""
    violations: list[str] = field(default_factory=list)
    directory: str = ""

    def add_outcomes(self, outcomes: Sequence[Outcome]) -> None:
        by_kind: defaultdict[str, list[Outcome]] = defaultdict(list)
        failed: Counter[str] = Counter()
        restarted: Counter[str] = Counter()
        heads: Counter[str] = Counter()
        for outcome in outcomes:
            by_kind[outcome.kind].append(outcome)
            failed[outcome.kind] += len(outcome.failed)
            restarted[outcome.kind] += outcome.restarted
            heads[outcome.kind] += outcome.heads
        self.faults = len(outcomes)
        every = [one.service_s for one in outcomes]
        for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
            self.service[name] = round(quantile(every, share), 1)
        self.heads = {kind: count for kind, count in sorted(heads.items()) if count}
        self.restarted = {kind: count for kind, count in sorted(restarted.items()) if count}
        self.failed = {kind: count for kind, count in sorted(failed.items()) if count}
        for kind, outcomes_of_kind in sorted(by_kind.items()):
            service = [one.service_s for one in outcomes_of_kind]
            self.by_kind[kind] = {
                "times": len(outcomes_of_kind),
                "lasted_s": round(quantile([one.lasted_s for one in outcomes_of_kind], 0.5), 1),
                "service_s": round(quantile(service, 0.5), 1),
                "service_p99_s": round(quantile(service, 0.99), 1),
                "service_max_s": round(max(service), 1),
                "settled_max_s": round(max(one.settled_s for one in outcomes_of_kind), 1),
            }

    def add_latencies(self, seconds: Sequence[float]) -> None:
        for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0)):
            self.latency[name] = round(quantile(seconds, share), 3)

    def add_bad_exit(self, process: str, code: int | None) -> None:
        what = f"{process} with {code}"
        self.bad_exits[what] = self.bad_exits.get(what, 0) + 1

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the report as a table, in Markdown."""
        head = (
            f"{self.streams} streams, {self.verified} verified, {self.transactions} transactions that"
            f" published, {self.faults} faults, {len(self.violations)} violations,"
            f" {self.seconds:.0f} s (seed {self.seed})"
        )
        titles = [
            "fault",
            "times",
            "lasted",
            "a shard stood still: p50",
            "p99",
            "max",
            "as before, at most",
        ]
        lines = [head, "", f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
        lines += [
            f"| {kind} | {one['times']} | {one['lasted_s']} s | {one['service_s']} s |"
            f" {one['service_p99_s']} s | {one['service_max_s']} s | {one['settled_max_s']} s |"
            for kind, one in self.by_kind.items()
        ]
        if self.service:
            service = " | ".join(f"{self.service[name]} s" for name in ("p50", "p99", "max"))
            lines.append(f"| all | {self.faults} | | {service} | |")
        lines.append("")
        latency = ", ".join(f"{name} {value:.3g} s" for name, value in self.latency.items())
        lines.append(f"from the last chunk to its sum, faults included: {latency}")
        if self.failed:
            counts = ", ".join(f"{kind}: {count}" for kind, count in self.failed.items())
            lines.append(f"shards that had to be unassigned, by fault: {counts}")
        if self.restarted:
            counts = ", ".join(f"{kind}: {count}" for kind, count in self.restarted.items())
            lines.append(f"shards that restarted automatically, by fault: {counts}")
        if self.heads:
            counts = ", ".join(f"{kind}: {count}" for kind, count in self.heads.items())
            lines.append(f"journals whose heads were confirmed after all brokers ended: {counts}")
        if self.bad_exits:
            counts = ", ".join(f"{what}: {count}" for what, count in self.bad_exits.items())
            lines.append(f"processes that were asked to stop and ended badly: {counts}")
        if self.load:
            load = ", ".join(f"{name} {value:.1f}" for name, value in self.load.items())
            lines.append(f"load of the machine: {load}")
        lines += [f"VIOLATION {one}" for one in self.violations]
        return lines


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of all values do not exceed; 0 without values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]
