"""Scripts that complete command lines."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from gazette.gazctl.commands import COMMANDS
from gazette.gazctl.settings import schema_of
from tests.gazctl.runner import offline

_COMPLETE = """
source {script}
complete_words() {{
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _gazctl
    echo "${{COMPREPLY[*]}}"
}}
"""


@pytest.fixture
def bash(tmp_path: Path) -> list[str]:
    path = tmp_path / "completion.bash"
    path.write_text(offline("completion", "bash").out)
    (tmp_path / "ask.bash").write_text(_COMPLETE.format(script=path))
    return ["bash", "--norc", str(tmp_path / "ask.bash")]


def completed(bash: list[str], *lines: list[str]) -> list[list[str]]:
    """Return what bash would offer for the last word of each line."""
    script = Path(bash[-1])
    calls = [" ".join(["complete_words", *(f"'{word}'" for word in line)]) for line in lines]
    script.write_text(script.read_text() + "\n".join(calls) + "\n")
    done = subprocess.run(bash, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return [line.split() for line in done.stdout.splitlines()]


def test_bash_completes_commands_flags_and_values(bash: list[str]) -> None:
    found = completed(
        bash,
        ["gazctl", ""],
        ["gazctl", "jour"],
        ["gazctl", "journals", "s"],
        ["gazctl", "journals", "list", "--form"],
        ["gazctl", "journals", "list", "--format", ""],
        ["gazctl", "journals", "list", "--format", "=", "j"],
        ["gazctl", "journals", "list", "-o", "y"],
        ["gazctl", "journals", "list", "--watch", "--broker.addr"],
        ["gazctl", "journals", "list", "-l", ""],
        ["gazctl", "completion", "z"],
        ["gazctl", "shards", "recover", "--f"],
    )
    assert set(found[0]) == {command.words[0] for command in COMMANDS}
    assert found[1:] == [
        ["journals"],
        ["suspend", "store-health"],
        ["--format"],
        ["table", "yaml", "json", "proto"],
        ["json"],
        ["yaml"],
        ["--broker.address"],
        [],
        ["zsh"],
        ["--force"],
    ]


def test_bash_knows_every_flag_of_every_command(bash: list[str]) -> None:
    lines = [["gazctl", *command.words, "-"] for command in COMMANDS]
    for command, words in zip(COMMANDS, completed(bash, *lines), strict=True):
        for option in schema_of(command).options:
            assert option.flag in words
            assert not option.short or f"-{option.short}" in words


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_name_every_command_and_parse(shell: str, tmp_path: Path) -> None:
    """By the shell itself, where it is installed."""
    script = offline("completion", shell).out
    for command in COMMANDS:
        assert command.words[-1] in script
    assert "recovery logs that no shard needs" in script or shell == "bash"
    if shutil.which(shell) is None:
        return
    path = tmp_path / "script"
    path.write_text(script)
    subprocess.run([shell, "-n", str(path)], check=True)
