"""Fragments of the changelog have their form, and a release moves each text once."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from tools.release import AREAS, KINDS, OTHER, Fragment, parse, read, release

ROOT = Path(__file__).parents[1]
DATE = datetime.date(2026, 11, 27)
PAGE = """# Changelog

## Unreleased

Changes since the version below are in `changelog.d/`, one file each.

## 0.1.0 (2026-01-01)

### Added

- All.
"""


def test_each_fragment_has_its_form() -> None:
    read(ROOT / "changelog.d")


def test_the_page_says_where_newer_changes_are(tmp_path: Path) -> None:
    """A release finds its place in it."""
    (tmp_path / "changelog.d").mkdir()
    (tmp_path / "CHANGELOG.md").write_text((ROOT / "CHANGELOG.md").read_text())
    assert release(tmp_path, "9.9.9", DATE) == 0
    assert "\n## 9.9.9 (2026-11-27)\n" in (tmp_path / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Added",
        "Added\n\n",
        "Repaired\nIt works.",
        "Added:\nIt works.",
        "Added: Engines\nIt works.",
        "It works.\n",
        "Fixed\n## Brokers\nIt works.",
    ],
)
def test_a_planted_fragment_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^short-name\.md: "):
        parse("short-name.md", text)


def test_each_kind_and_area_is_permitted() -> None:
    for kind in KINDS:
        for area in AREAS:
            assert parse("a.md", f"{kind}: {area}\n\nIt\nworks.\n") == Fragment(
                kind, area, "- It\n  works."
            )
        assert parse("a.md", f"{kind}\n- It works.\n- Both.").area == OTHER


def test_a_release_moves_each_text_by_kind_and_area(tmp_path: Path) -> None:
    fragments = tmp_path / "changelog.d"
    fragments.mkdir()
    (tmp_path / "CHANGELOG.md").write_text(PAGE)
    for name, text in {
        "README.md": "# Changes",
        "a.md": "Fixed\nNo area.",
        "b.md": "Fixed: Applications\nShards\nwait.",
        "c.md": "Added: Brokers\n- One.\n- Two.",
        "d.md": "Fixed: Brokers\nAppends end.",
    }.items():
        (fragments / name).write_text(text)

    assert release(tmp_path, "0.2.0", DATE) == 4

    assert [path.name for path in fragments.iterdir()] == ["README.md"]
    before, after = PAGE.split("## 0.1.0")
    assert (tmp_path / "CHANGELOG.md").read_text() == (
        f"{before}## 0.2.0 (2026-11-27)\n\n"
        "### Added\n\n**Brokers**\n\n- One.\n- Two.\n\n"
        "### Fixed\n\n**Brokers**\n\n- Appends end.\n\n**Applications**\n\n- Shards\n  wait.\n\n"
        f"**Other**\n\n- No area.\n\n## 0.1.0{after}"
    )
