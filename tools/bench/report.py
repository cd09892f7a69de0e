"""Results of `gazette bench`: figures beside their baselines, as a table and as JSON."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import sys
import sysconfig
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from rich.table import Table

from gazette.errors import NotFound
from gazette.runtime.clock import Clock
from gazette.version import __version__

SCHEMA: Final = 1
_LIBRARIES: Final = ("grpcio", "protobuf", "msgspec", "apsw", "zstandard", "numpy")

_OPTIMISATIONS: Final = {"--enable-optimizations": "PGO", "--with-lto": "LTO"}

Of = Literal["ratio", "value"]


@dataclass(frozen=True, slots=True)
class Target:
    """A row of the design's table: a bound of the figure, or of its ratio to the baseline."""

    bound: float
    of: Of
    at_least: bool
    text: str

    def met_by(self, figure: float) -> bool:
        return figure >= self.bound if self.at_least else figure <= self.bound


def ratio_at_least(bound: float) -> Target:
    return Target(bound, "ratio", at_least=True, text=f"≥ {bound:g} ×")


def ratio_at_most(bound: float) -> Target:
    return Target(bound, "ratio", at_least=False, text=f"≤ {bound:g} ×")


def value_at_least(bound: float, unit: str) -> Target:
    return Target(bound, "value", at_least=True, text=f"≥ {number(bound)} {unit}")


def value_at_most(bound: float, unit: str) -> Target:
    return Target(bound, "value", at_least=False, text=f"≤ {number(bound)} {unit}")


@dataclass(frozen=True, slots=True)
class Baseline:
    """The value that a figure is compared with. ``values`` were measured in turn with the figure's."""

    name: str
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value. ``values`` are the rounds' values, in order; the median is the figure.

    The ratio to a baseline is the median of the rounds' ratios. Each ratio compares two
    measurements made one right after the other. So other load of the machine matters less.
    """

    suite: str
    name: str
    unit: str
    values: tuple[float, ...]
    baseline: Baseline | None = None
    target: Target | None = None
    note: str = ""

    @property
    def value(self) -> float:
        return statistics.median(self.values)

    @property
    def ratio(self) -> float | None:
        if self.baseline is None:
            return None
        pairs = zip(self.values, self.baseline.values, strict=False)
        ratios = [value / beside for value, beside in pairs if beside > 0]
        return statistics.median(ratios) if ratios else None

    @property
    def met(self) -> bool | None:
        """True if the target is met; None without a target."""
        if self.target is None:
            return None
        figure = self.value if self.target.of == "value" else self.ratio
        return None if figure is None else self.target.met_by(figure)

    def as_json(self) -> dict[str, Any]:
        baseline, target = self.baseline, self.target
        return {
            "suite": self.suite,
            "name": self.name,
            "unit": self.unit,
            "value": self.value,
            "values": list(self.values),
            "baseline": None
            if baseline is None
            else {
                "name": baseline.name,
                "value": statistics.median(baseline.values),
                "values": list(baseline.values),
            },
            "ratio": self.ratio,
            "target": None
            if target is None
            else {"of": target.of, "at_least": target.at_least, "bound": target.bound},
            "met": self.met,
            "note": self.note,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """All results of one run."""

    figures: tuple[Figure, ...]
    machine: Mapping[str, Any]
    command: str
    seconds: float
    suites: Mapping[str, float] = field(default_factory=dict)
    """By suite, the seconds it took."""

    def as_json(self) -> dict[str, Any]:
        met = [one.met for one in self.figures if one.met is not None]
        return {
            "schema": SCHEMA,
            "command": self.command,
            "machine": dict(self.machine),
            "seconds": round(self.seconds, 1),
            "suites": dict(self.suites),
            "targets": len(met),
            "targets_met": sum(met),
            "figures": [one.as_json() for one in self.figures],
        }

    def table(self) -> Table:
        table = Table(title="gazette bench", title_justify="left")
        table.add_column("figure", overflow="fold")
        table.add_column("measured", justify="right", no_wrap=True)
        table.add_column("beside", overflow="fold")
        table.add_column("ratio", justify="right", no_wrap=True)
        table.add_column("target", no_wrap=True)
        table.add_column("met", no_wrap=True)
        suite = ""
        for one in self.figures:
            if suite and one.suite != suite:
                table.add_section()
            suite = one.suite
            table.add_row(*_row(one))
        return table

    def markdown(self, command: str) -> str:
        """Return the table for a page of the documentation, after how and on what it was measured."""
        machine = self.machine
        loads = [machine[name][0] for name in ("load_at_start", "load_at_end") if machine.get(name)]
        load = f" The load was {' before, and '.join(f'{one:.1f}' for one in loads)} after."
        date = machine["date"].replace("T", " at ").replace("+00:00", " UTC")
        python = f"Python {machine['python']} ({machine['python_build']})"
        load = load if len(loads) == 2 else ""
        lines = [
            f"`{command}`, on {date}, on {machine['cores']} cores, by {python}.{load}",
            "",
            "| figure | measured | beside | ratio | target | met |",
            "|---|---|---|---|---|---|",
        ]
        for one in self.figures:
            met = {None: "", True: "yes", False: "no"}[one.met]
            lines.append(f"| {' | '.join((*_row(one)[:-1], met))} |")
        return "\n".join(lines)

    def notes(self) -> list[str]:
        """Return what a reader has to know of the figures, one line each."""
        return [f"{one.name}: {one.note}" for one in self.figures if one.note]


def _row(figure: Figure) -> tuple[str, ...]:
    baseline, target = figure.baseline, figure.target
    beside = ""
    if baseline is not None:
        median = statistics.median(baseline.values)
        beside = f"{number(median)} {figure.unit} {baseline.name}"
    mark = {None: "", True: "[green]yes[/]", False: "[red]no[/]"}[figure.met]
    return (
        figure.name,
        f"{number(figure.value)} {figure.unit}",
        beside,
        "" if figure.ratio is None else f"{figure.ratio:.2f} ×",
        "" if target is None else target.text,
        mark,
    )


def number(value: float) -> str:
    """Return a number with three significant digits."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def percentile(samples: Collection[float], percent: float) -> float:
    """Return the least sample that ``percent`` of the samples do not exceed."""
    ordered = sorted(samples)
    if not ordered:
        raise NotFound("no sample was taken", hint="Measure for longer: --seconds.")
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def machine_facts(clock: Clock) -> dict[str, Any]:
    """Return what the figures depend on, beside the code."""
    versions: dict[str, str] = {}
    for name in _LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "date": datetime.fromtimestamp(clock.now(), UTC).isoformat(timespec="seconds"),
        "gazette": __version__,
        "python": sys.version.split()[0],
        "python_build": python_build(str(sysconfig.get_config_var("CONFIG_ARGS") or "")),
        "platform": platform.platform(),
        "cpu": _proc_field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory": _proc_field("/proc/meminfo", "MemTotal"),
        "load_at_start": load_average(),
        "libraries": versions,
    }


def python_build(arguments: str) -> str:
    """Return how an interpreter was optimised, by the arguments with which it was configured."""
    named = [name for flag, name in _OPTIMISATIONS.items() if f"'{flag}" in arguments]
    return " and ".join(named) or "no PGO and LTO by its configuration"


def load_average() -> list[float]:
    """Return the load of the last 1, 5 and 15 minutes. Above the number of cores, others are busy."""
    try:
        return [round(one, 2) for one in os.getloadavg()]
    except OSError:
        return []


def _proc_field(path: str, name: str) -> str:
    try:
        lines: Iterable[str] = Path(path).read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
