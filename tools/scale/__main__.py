"""``python -m tools.scale``: the costs of large clusters by their size, and the exponents of their growth.

::

    python -m tools.scale brokers|members [--only views|convergence|plans] [--sizes 1000,3000]

Brokers: a broker for 1,000 journals with three replicas each. Members: a member for 50 shards with one
hot standby each. There are three zones. The mirror, the allocator and the servers of lists are the true
ones. etcd and the other members are on paper, and take no time beside the latency of etcd. Times are of
the processor. Only ``converged`` adds the latencies. A ``turn`` is the longest time for which the event
loop ran nothing else. The last column is the exponent of growth between the two greatest sizes.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from dataclasses import asdict
from typing import Final

from tools.scale.allocation import converge
from tools.scale.clusters import KINDS, Kind
from tools.scale.plans import plan
from tools.scale.views import view

_LINEAR: Final = 1.1
_NOTICED: Final = 0.05
"""A time below this is not marked, however fast it grows."""
_PARTS: Final = ("views", "convergence", "plans")
Rows = dict[str, float]


def _measured(part: str, kind: Kind, size: int, latency_s: float, events: int) -> Rows:
    """Measure one size in this process."""
    if part == "views":
        rows: Rows = {}
        for figure in view(kind, size):
            rows[f"{figure.name} [{figure.unit}]"] = figure.value
            if figure.turn_s:
                rows[f"{figure.name}, turn [s]"] = figure.turn_s
        return rows
    if part == "plans":
        return plan(kind, size)
    units = {"_s": " [s]", "es": " [B]"}
    return {
        f"{event.event}: {name.removesuffix('_s').replace('_', ' ')}{units.get(name[-2:], '')}": value
        for event in converge(kind, size, latency_s, events)
        for name, value in asdict(event).items()
        if name != "event"
    }


def _print(title: str, sizes: list[int], columns: list[Rows]) -> None:
    print(f"\n| {title} | {' | '.join(f'{size:,}' for size in sizes)} | exponent |")
    print(f"|---|{'---|' * (len(sizes) + 1)}")
    for name in columns[-1]:
        values = [column.get(name, 0.0) for column in columns]
        cells = " | ".join(f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values)
        print(f"| {name} | {cells} | {_exponent(sizes, values)} |", flush=True)


def _exponent(sizes: list[int], values: list[float]) -> str:
    if len(sizes) < 2 or min(values[-2:]) <= 0:
        return ""
    exponent = math.log(values[-1] / values[-2]) / math.log(sizes[-1] / sizes[-2])
    return (
        f"**{exponent:.2f}**" if exponent > _LINEAR and values[-1] > _NOTICED else f"{exponent:.2f}"
    )


def main() -> None:
    """Measure each size in a process of its own, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--sizes", default="")
    parser.add_argument("--latency", type=float, default=0.005, metavar="SECONDS")
    parser.add_argument("--only", choices=_PARTS)
    parser.add_argument("--events", type=int, default=6, help="how many, from nothing on")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    kind = KINDS[args.kind]
    sizes = [int(size) for size in args.sizes.split(",") if size] or list(kind.sizes)
    for part in [args.only] if args.only else _PARTS:
        if args.here:
            print(json.dumps(_measured(part, kind, sizes[0], args.latency, args.events)))
            return
        columns = []
        for size in sizes:
            command = [sys.executable, "-m", "tools.scale", kind.name, "--here", "--only", part]
            command += ["--sizes", str(size), "--latency", str(args.latency)]
            command += ["--events", str(args.events)]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
            columns.append(json.loads(output))
            print(f"{part}: {size:,} done", file=sys.stderr, flush=True)
        title = f"{kind.item}s: {part}"
        _print(title + (f", {args.latency:g} s" if part == "convergence" else ""), sizes, columns)


if __name__ == "__main__":
    main()
