"""The command line: commands, flags, settings, help and exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gazette.gazctl.command import Command
from gazette.gazctl.commands import COMMANDS
from gazette.gazctl.settings import schema_of
from gazette.version import __version__
from tests.gazctl.runner import offline


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_has_help_that_names_its_flags(command: Command) -> None:
    result = offline(*command.words, "--help")
    assert result.code == 0
    assert result.out.startswith(f"usage: gazctl {command.name} [FLAGS]")
    for option in schema_of(command).options:
        assert option.flag in result.out
        if option.short:
            assert f"-{option.short}, {option.flag}" in result.out
    assert command.summary in result.out


def test_usage_lists_all_there_is() -> None:
    """Without a command that is an error, with --help it is the answer."""
    bare, asked = offline(), offline("--help")
    assert (bare.code, bare.out) == (1, "")
    assert (asked.code, asked.out) == (0, bare.err)
    for word in ("journals", "store-health", "shards", "unassign", "attach-uuids", "print-config"):
        assert word in asked.out
    group = offline("journals", "--help")
    assert group.code == 0
    assert "reset-head" in group.out
    assert "attach-uuids" not in group.out
    assert offline("journals").code == 1
    assert offline("help", "journals", "read").out == offline("journals", "read", "--help").out
    assert offline("version").out == f"{__version__}\n"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["jurnals"], "gazctl: unknown command jurnals (did you mean journals?)"),
        (["journals", "lst"], "gazctl journals: unknown command lst (did you mean list?)"),
        (["journals", "--watch"], "gazctl journals: expected a command, got --watch"),
        (
            ["journals", "list", "--selectr=x"],
            "gazctl journals list: unknown flag --selectr (did you mean --selector?)",
        ),
        (["shards", "list", "--frmat", "json"], "(did you mean --format?)"),
        (["journals", "list", "-o", "xml"], "expected one of table, yaml, json, proto"),
        (["journals", "list", "stray"], 'unexpected argument "stray"'),
        (["journals", "read"], "--selector: a selector is required"),
        (["journals", "read", "-l", "a b c"], "--selector: could not match"),
        (["journals", "append", "-l", "x1", "-m", "modulo"], "framing none makes one append"),
        (["journals", "append", "-l", "x1", "--base64"], "line keys"),
        (["journals", "store-health"], "expected one store, got 0"),
        (["journals", "store-health", "ftp://x/"], "STORE_URL: invalid scheme"),
        (["journals", "apply", "--specs", "/no/such"], "cannot read /no/such: No such file"),
        (["journals", "fragments", "--from", "soon"], '--from: invalid time "soon"'),
        (["journals", "list", "--broker.address", "nonsense"], "--broker: not absolute"),
        (["shards", "recover", "--dir", "x"], "--id: a shard is required"),
        (["shards", "recover", "--id", "x"], "--dir: a directory is required"),
        (["completion", "tcsh"], "expected the name of a shell"),
    ],
)
def test_a_mistake_is_named_and_the_exit_code_is_2(argv: list[str], text: str) -> None:
    result = offline(*argv)
    assert result.code == 2
    assert text in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["journals", "list"], "cannot reach the broker at http://127.0.0.1:1: "),
        (["shards", "list"], "cannot reach the consumer at http://127.0.0.1:1: "),
    ],
)
def test_a_server_that_is_not_there_is_named_and_the_exit_code_is_1(
    argv: list[str], text: str
) -> None:
    address = "http://127.0.0.1:1"
    result = offline(*argv, BROKER_ADDRESS=address, CONSUMER_ADDRESS=address)
    assert result.code == 1
    assert text in result.err
    assert f"--{'broker' if argv[0] == 'journals' else 'consumer'}.address" in result.err


def test_all_addresses_that_were_tried_are_named() -> None:
    addresses = "http://127.0.0.1:1,http://127.0.0.1:2"
    result = offline("journals", "list", "--broker.address", addresses)
    assert result.code == 1
    assert "127.0.0.1:1" in result.err
    assert "127.0.0.1:2" in result.err


def test_shared_flags_may_precede_the_command() -> None:
    address = "http://127.0.0.1:1"
    for argv in (
        ["--broker.address", address, "journals", "list"],
        [f"--broker.address={address}", "--timeout", "5s", "journals", "list"],
    ):
        assert f"cannot reach the broker at {address}" in offline(*argv).err


def test_settings_come_from_flags_over_environment_over_the_file_of_all_commands(
    tmp_path: Path,
) -> None:
    """One file serves all commands: what others read from it is no error."""
    file = tmp_path / "cwd" / "gazctl.ini"
    file.write_text(
        "[options]\nzone = a-zone\n[broker]\naddress = http://file:1\n"
        "[consumer]\naddress = http://file:2\nauth-token = secret-token\n"
    )
    printed = offline("print-config", "--broker.cache.size=7", CONSUMER_ADDRESS="http://env:3").out
    assert "Zone = a-zone" in printed
    assert "Address = http://file:1" in printed
    assert "Address = http://env:3" in printed
    assert "Size = 7" in printed
    assert "secret-token" not in printed
    assert offline("attach-uuids", stdin=b"x\n").code == 0

    # What was printed can be read again, and says the same.
    file.write_text(printed)
    again = offline("print-config").out
    assert "Address = http://env:3" in again

    file.write_text("[consumer]\nadress = http://file:2\n")
    result = offline("attach-uuids")
    assert result.code == 0
    assert "unknown key consumer.adress (did you mean consumer.address?)" in result.err


def test_flags_of_a_command_come_from_the_command_line_only(tmp_path: Path) -> None:
    """``$FORMAT``, which anything may have set, is not ours; nor may a section of all commands have them."""
    result = offline(
        "journals", "list", FORMAT="xml", SELECTOR="a b c", BROKER_ADDRESS="http://127.0.0.1:1"
    )
    assert "cannot reach the broker" in result.err
    (tmp_path / "cwd" / "gazctl.ini").write_text("[options]\nformat = json\n")
    assert "unknown key options.format" in offline("journals", "list").err


def test_switches_do_not_take_what_follows_for_their_value() -> None:
    """``--skip-header FILE`` is a switch and a file; one-letter switches may be joined."""
    result = offline(
        "attach-uuids", "--skip-header", "-", "--template={{.Line}};", stdin=b"a\nb\nc\n"
    )
    assert (result.code, result.out) == (0, "b;c;")
    result = offline(
        "attach-uuids", "--skip-header=false", "--template={{.Line}};", stdin=b"a\nb\n"
    )
    assert result.out == "a;b;"
    clustered = offline("journals", "list", "-pr", "--broker.address=http://127.0.0.1:1")
    assert clustered.code == 1
    unknown = offline("journals", "list", "-px")
    assert unknown.code == 2


def test_what_follows_two_dashes_is_no_flag(tmp_path: Path) -> None:
    (tmp_path / "cwd" / "--help").write_text("x\n")
    result = offline("attach-uuids", "--template={{.Line}}!", "--", "--help")
    assert result.out == "x!"
