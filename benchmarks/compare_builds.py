"""Ratios of `gazette bench` on several interpreters or machines, side by side.

::

    GAZETTE_GO=DIRECTORY one/bin/gazette bench small --rounds 7 --json one.json
    GAZETTE_GO=DIRECTORY two/bin/gazette bench small --rounds 7 --json two.json
    python benchmarks/compare_builds.py one.json two.json [--into PAGE]

Each row is a figure with a target. A column is a run: the median of its rounds' ratios, and their least and
greatest. A target is met if the median of each run meets it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Final

BEGIN: Final = "<!-- compare_builds -->"
END: Final = "<!-- end of compare_builds -->"


def rows(runs: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the table, in Markdown."""
    names = [f"Python {run['machine']['python']}" for run in runs]
    lines = [
        *(f"- {name}: {_machine(run)}" for name, run in zip(names, runs, strict=True)),
        "",
        f"| figure | {' | '.join(names)} | target | met |",
        f"|---|{'---|' * len(names)}---|---|",
    ]
    others = [{figure["name"]: figure for figure in run["figures"]} for run in runs]
    for figure in runs[0]["figures"]:
        if (target := figure["target"]) is None or target["of"] != "ratio":
            continue
        same = [other[figure["name"]] for other in others]
        sign = "≥" if target["at_least"] else "≤"
        met = "yes" if all(other["met"] for other in same) else "no"
        cells = " | ".join(_ratio(other) for other in same)
        lines.append(f"| {figure['name']} | {cells} | {sign} {target['bound']:g} × | {met} |")
    return lines


def _machine(run: dict[str, Any]) -> str:
    machine = run["machine"]
    date = machine["date"].replace("T", " at ").replace("+00:00", " UTC")
    loads = [f"{machine[name][0]:.1f}" for name in ("load_at_start", "load_at_end")]
    place = f"{machine['cpu']}, {machine['cores']} cores"
    command = run["command"].partition(" --json")[0]
    return f"`{command}`, {date}, {place}, load {' and '.join(loads)}"


def _ratio(figure: dict[str, Any]) -> str:
    pairs = zip(figure["values"], figure["baseline"]["values"], strict=True)
    ratios = [value / beside for value, beside in pairs if beside > 0]
    return f"{figure['ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="JSON")
    parser.add_argument(
        "--into", type=Path, help="page whose table between two comments is replaced"
    )
    flags = parser.parse_args()
    lines = rows([json.loads(path.read_text()) for path in flags.runs])
    print("\n".join(lines))
    if flags.into is not None:
        page = flags.into.read_text()
        before, _, rest = page.partition(BEGIN)
        after = rest.partition(END)[2]
        flags.into.write_text("\n".join((f"{before}{BEGIN}", "", *lines, "", f"{END}{after}")))


if __name__ == "__main__":
    main()
