"""docs/gazctl.md says what --help does: every command, every flag, every default."""

from __future__ import annotations

from pathlib import Path

import pytest

from gazette.config.schema import Option, options_of
from gazette.gazctl.command import Command
from gazette.gazctl.commands import COMMANDS
from gazette.gazctl.flags import SharedFlags
from gazette.gazctl.settings import GROUPS, flags_of

DOCS = Path(__file__).parents[2] / "docs" / "gazctl.md"


def default_text(option: Option) -> str:
    text = option.render(option.default).replace("\n", "\\n")
    return f"`{text}`" if text and not option.secret else ""


def flags_table(command: Command) -> str:
    """Return the flags of a command alone, as the page has them."""
    rows = ["| flag | | default |", "|---|---|---|"]
    for option in options_of("", flags_of(command)):
        if option.flag_only:
            names = f"`-{option.short}`, `{option.flag}`" if option.short else f"`{option.flag}`"
            choices = f" ({', '.join(option.choices)})" if option.choices else ""
            default = "" if option.default is False else default_text(option)
            rows.append(f"| {names} | {option.help}{choices} | {default} |".replace("  ", " "))
    return "\n".join(rows) + "\n"


def shared_table() -> str:
    """Return the flags that commands share."""
    rows = ["| flag | environment | | default |", "|---|---|---|---|"]
    for group, cls in {"": SharedFlags, **GROUPS}.items():
        for option in options_of(group, cls):
            text = f"| `{option.flag}` | `{option.env}` | {option.help} | {default_text(option)} |"
            rows.append(text.replace("  ", " "))
    return "\n".join(rows) + "\n"


def section(command: Command) -> str:
    """Return the part of the page about a command."""
    text = DOCS.read_text()
    head = f"### gazctl {command.name}"
    assert f"\n{head}" in text, f"there is no section {head!r}"
    begin = text.index(f"\n{head}") + 1
    ends = [text.find(mark, begin + 3) for mark in ("\n### ", "\n## ")]
    return text[begin : min((end for end in ends if end > 0), default=len(text))] + "\n"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_is_on_the_page_with_its_flags(command: Command) -> None:
    about = section(command)
    title = about.splitlines()[0]
    assert title == f"### gazctl {command.name} {command.arguments}".rstrip()
    if any(option.flag_only for option in options_of("", flags_of(command))):
        assert flags_table(command) in about
    else:
        assert "| flag |" not in about
    for example in command.examples.split("\n"):
        assert example.strip() in about


def test_shared_flags_are_on_the_page() -> None:
    assert shared_table() in DOCS.read_text()


def test_the_page_has_no_command_that_there_is_not() -> None:
    titles = [
        line.removeprefix("### gazctl ")
        for line in DOCS.read_text().splitlines()
        if line.startswith("### gazctl ")
    ]
    assert titles == [f"{one.name} {one.arguments}".rstrip() for one in COMMANDS]
