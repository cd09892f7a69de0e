"""Move the texts of ``changelog.d/`` into a section of ``CHANGELOG.md``, and remove their files.

Usage: ``python -m tools.release VERSION``. Set the same version in ``gazette/version.py``.

The first line of a file is a kind of change, and may name an area: ``Fixed: Brokers``. The rest is its
text, in sentences or as a list.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
KINDS: Final = ("Added", "Changed", "Removed", "Fixed", "Security")
AREAS: Final = (
    "Brokers",
    "Clients and publishers",
    "Applications",
    "Spark, tables and backfills",
    "Commands and operation",
    "Tests, examples and pages",
)
OTHER: Final = "Other"
"""Area of a fragment that names none."""
_UNRELEASED: Final = """## Unreleased

Changes since the version below are in `changelog.d/`, one file each.
"""


@dataclass(frozen=True, slots=True)
class Fragment:
    """One change: its kind, its area, and its text as items of a list."""

    kind: str
    area: str
    text: str


def parse(name: str, text: str) -> Fragment:
    """Return the fragment of a file. Raise ``ValueError`` for another first line, or without a text."""
    first, _, rest = text.partition("\n")
    kind, _, area = first.partition(": ")
    if kind not in KINDS:
        raise ValueError(f"{name}: the first line is {first!r}, and not one of {', '.join(KINDS)}")
    if (area or OTHER) not in (*AREAS, OTHER):
        raise ValueError(f"{name}: the area is {area!r}, and not one of {', '.join(AREAS)}")
    body = rest.strip()
    if not body or body.startswith("#"):
        raise ValueError(f"{name}: a text of one to three sentences has to follow the first line")
    if not body.startswith("- "):
        body = "- " + body.replace("\n", "\n  ")
    return Fragment(kind, area or OTHER, body)


def read(directory: Path) -> dict[Path, Fragment]:
    """Return the fragments of a directory by their files, in order. Raise ``ValueError`` for a wrong one."""
    return {
        path: parse(path.name, path.read_text())
        for path in sorted(directory.iterdir())
        if path.name != "README.md"
    }


def section(version: str, date: datetime.date, fragments: Sequence[Fragment]) -> str:
    """Return the section of a version, by kinds and areas."""
    parts = [f"## {version} ({date.isoformat()})"]
    for kind in KINDS:
        of_kind = [one for one in fragments if one.kind == kind]
        parts += [f"### {kind}"] if of_kind else []
        for area in (*AREAS, OTHER):
            items = [one.text for one in of_kind if one.area == area]
            parts += [f"**{area}**", "\n".join(items)] if items else []
    return "\n\n".join(parts) + "\n"


def release(root: Path, version: str, date: datetime.date) -> int:
    """Write the section of a version, remove its fragments, and return their number."""
    fragments = read(root / "changelog.d")
    page = root / "CHANGELOG.md"
    before, mark, after = page.read_text().partition(_UNRELEASED)
    if not mark:
        raise ValueError(f"{page} lacks the section that begins with {_UNRELEASED!r}")
    added = section(version, date, list(fragments.values()))
    page.write_text(f"{before}{mark}\n{added}{after}")
    for path in fragments:
        path.unlink()
    return len(fragments)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version")
    version = parser.parse_args(argv).version
    today = datetime.datetime.now(datetime.UTC).date()
    print(f"{release(ROOT, version, today)} changes of {version}")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
