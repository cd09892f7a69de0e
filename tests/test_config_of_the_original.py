"""Configuration files and command lines of the Go original: each of its names is understood here.

The names are those that its ``gazette print-config`` and ``gazctl print-config`` list, and those of the
configuration of its consumers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NoReturn

import pytest

from gazette import Application
from gazette.broker.main import print_config, schema
from gazette.config.ini_file import ini_entries
from gazette.config.schema import Loaded, Schema
from gazette.errors import Invalid
from gazette.gazctl.commands import COMMANDS
from gazette.gazctl.settings import find_command, schema_of, shared_schema
from gazette.runconsumer.process import schema as consumer_schema
from tests.gazctl.runner import offline

_SERVICE = {
    "Zone": "a",
    "ID": "some-id",
    "Host": "host",
    "Port": "8080",
    "ServerCertFile": "/a",
    "ServerCertKeyFile": "/b",
    "ServerCAFile": "/c",
    "PeerCertFile": "/d",
    "PeerCertKeyFile": "/e",
    "PeerCAFile": "/f",
    "MaxGRPCRecvSize": "1",
    "AllowOrigin": "http://a",
    "WatchDelay": "1s",
    "AuthKeys": "c2VjcmV0",
}
_ADDRESS = {"Address": "http://b:1", "CertFile": "/a", "CertKeyFile": "/b", "TrustedCAFile": "/c"}
_CLIENT = _ADDRESS | {"AuthKeys": "c2VjcmV0", "AuthToken": "t", "Size": "7", "TTL": "2m"}
_ETCD = _ADDRESS | {"LeaseTTL": "40s", "Prefix": "/p"}
_LOGGING = {"Level": "debug", "Format": "json"}
_COMMON = {"Etcd": _ETCD, "Logging": _LOGGING, "Debug": {"Port": "1", "Private": "true"}}
_TXN = {"MaxTxnSize": "3"}
_APPLY = _TXN | {"SpecsPath": "/s", "DryRun": "true"}
_PRUNE = {"Selector": "a=b", "DryRun": "true"}
_COLUMNS = {"Labels": "x", "Primary": "true", "Replicas": "true", "RF": "true"}
_LIST = {"Selector": "a=b", "Format": "yaml"} | _COLUMNS
_TIMES = {"FromUnix": "5"}

BROKER = {
    "Broker": _SERVICE
    | {
        "Limit": "5",
        "FileRoot": "/r",
        "FileOnly": "true",
        "MaxAppendRate": "6",
        "MaxReplication": "2",
        "MinAppendRate": "7",
        "AutoSuspend": "true",
    },
    **_COMMON,
}
CONSUMER = {
    "Consumer": _SERVICE | {"Limit": "5", "MaxHotStandbys": "2"},
    "Broker": _CLIENT | {"FileRoot": "/r"},
    **_COMMON,
}
GAZCTL = {
    "attach-uuids": {"Template": '"{{.Line}}\\n"', "MaxLength": "9", "SkipHeader": "true"},
    "journals": {"Zone": "a"},
    "journals.Logging": _LOGGING,
    "journals.Broker": _CLIENT,
    "journals.append": {
        "Selector": "a=b",
        "Input": "/i",
        "Framing": "lines",
        "Mapping": "modulo",
        "Base64": "true",
    },
    "journals.apply": _APPLY,
    "journals.edit": _TXN,
    "journals.fragments": _TIMES
    | {"Selector": "a=b", "Format": "json", "ToUnix": "6", "SigTTL": "1m"},
    "journals.list": _LIST | {"Stores": "true", "Watch": "true"},
    "journals.prune": _PRUNE,
    "journals.read": _TIMES
    | {
        "Selector": "a=b",
        "Block": "true",
        "Tail": "true",
        "Output": "/o",
        "OffsetsPath": "/1",
        "OffsetsOutPath": "/2",
        "FileRoot": "/r",
    },
    "journals.reset-head": {"Selector": "a=b"},
    "journals.store-health": {"CheckDeletePrefix": "recovery/"},
    "journals.suspend": {"Selector": "a=b", "Force": "true"},
    "shards": {"Zone": "a"},
    "shards.Logging": _LOGGING,
    "shards.Consumer": _CLIENT,
    "shards.Broker": _CLIENT,
    "shards.apply": _APPLY,
    "shards.edit": _TXN,
    "shards.list": _LIST | {"Lag": "true"},
    "shards.prune": _PRUNE,
    "shards.recover": {"ID": "s", "Dir": "/d"},
    "shards.unassign": _PRUNE | {"Failed": "true"},
}


def _ini(sections: dict[str, dict[str, str]]) -> str:
    return "\n".join(
        f"[{section}]\n" + "\n".join(f"\t{key} = {value}" for key, value in entries.items())
        for section, entries in sections.items()
    )


def _given(loaded: Loaded) -> int:
    return sum(source.startswith("file ") for source in loaded.sources.values())


class _Nothing(Application[Any]):
    message_type = bytes

    def new_store(self, shard: Any, recorder: Any) -> NoReturn:
        raise NotImplementedError

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> NoReturn:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("program", "sections"),
    [(schema(), BROKER), (consumer_schema(_Nothing(), "app"), CONSUMER)],
    ids=["broker", "consumer"],
)
def test_every_key_of_a_configuration_file_of_the_original_is_understood(
    program: Schema, sections: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    (tmp_path / "gazette.ini").write_text(_ini(sections))
    loaded = program.load([], {}, directory=tmp_path)
    assert loaded.warnings == ()
    assert _given(loaded) == sum(len(entries) for entries in sections.values())


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_key_of_gazctl_ini_is_understood_by_the_commands_that_it_is_for(
    command: Any, tmp_path: Path
) -> None:
    (tmp_path / "gazctl.ini").write_text(_ini(GAZCTL))
    loaded = schema_of(command).load([], {}, directory=tmp_path)
    assert loaded.warnings == ()
    family = command.words[0] if len(command.words) > 1 else ""
    sections = [".".join(command.words)]
    if family:
        sections += [family, f"{family}.Logging", f"{family}.Broker"]
        sections += ["shards.Consumer"] if family == "shards" else []
    assert _given(loaded) == sum(len(GAZCTL.get(section, {})) for section in sections)


def test_a_section_of_a_group_of_commands_goes_before_one_of_all(tmp_path: Path) -> None:
    (tmp_path / "gazctl.ini").write_text(
        "[journals.Broker]\nAddress = http://journals:1\n[broker]\naddress = http://all:1\n"
    )
    found = {
        scope: shared_schema(scope).load([], {}, directory=tmp_path).groups["broker"].address
        for scope in ("journals", "shards")
    }
    assert found == {"journals": "http://journals:1", "shards": "http://all:1"}


def test_an_unknown_key_of_an_ini_file_is_warned_of_with_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "gazette.ini").write_text("[Broker]\nMaxApendRate = 5\nZone = b\n[Other]\nX = 1\n")
    loaded = schema().load([], {}, directory=tmp_path)
    assert loaded.sources["broker.zone"].startswith("file ")
    assert [re.sub("^.*?: ", "", one) for one in loaded.warnings] == [
        "unknown key Broker.MaxApendRate (did you mean broker.max-append-rate?); it is ignored",
        "unknown key Other.X; it is ignored",
    ]


def test_gazctl_warns_of_unknown_keys_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gazctl.ini").write_text("[journals.Broker]\nAdress = http://a:1\n")
    result = offline("print-config")
    assert result.code == 0
    assert "warning: gazctl.ini: unknown key journals.Broker.Adress (did you mean" in result.err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[A]\n  x = 1\n    y = 2", [("A.x", "1"), ("A.y", "2")]),
        ("x.y = 1", [("x.y", "1")]),
        ("[A]\nx = a ; b = c", [("A.x", "a ; b = c")]),
        ("[A]\nx = http://h:1\ny=\n# no\n; no", [("A.x", "http://h:1")]),
        ('[A]\nx = "a\\n\\"b"\ny = ""', [("A.x", 'a\n"b'), ("A.y", "")]),
        ("[A]\nx = 1\n[B]\nx = 2\n[A]\nx = 3", [("A.x", "1"), ("B.x", "2"), ("A.x", "3")]),
    ],
)
def test_lines_are_read_as_the_original_reads_them(
    text: str, expected: list[tuple[str, str]]
) -> None:
    assert list(ini_entries(text)) == expected


@pytest.mark.parametrize("text", ["[A\nx = 1", "[]\n", "[A]\nx: 1", '[A]\nx = "a'])
def test_lines_that_the_original_refuses_are_refused(text: str) -> None:
    with pytest.raises(Invalid, match=r"^line [12]: "):
        list(ini_entries(text))


def test_keys_that_are_repeated_are_one_list(tmp_path: Path) -> None:
    (tmp_path / "gazette.ini").write_text(
        "[Broker]\nAllowOrigin = http://a\nAllowOrigin = http://b\n"
    )
    loaded = schema().load([], {}, directory=tmp_path)
    assert loaded.groups["broker"].allow_origin == ("http://a", "http://b")


def test_the_printed_configuration_has_the_names_of_the_original(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert print_config(["--broker.zone=b", "--broker.allow-origin=a,b"], {}) == 0
    text = capsys.readouterr().out
    keys: dict[str, set[str]] = {}
    for line in text.splitlines():
        if line.startswith("["):
            entries = keys.setdefault(line.strip("[]"), set())
        elif match := re.match(r"(?:; )?(\w+) = ", line):
            entries.add(match[1])
    for section, names in BROKER.items():
        assert set(names) - keys[section] <= {"AuthKeys"}, section
    settled = [line for line in text.splitlines() if line and line[0] not in ";["]
    assert settled == ["Zone = b", "AllowOrigin = a", "AllowOrigin = b"]


def test_gazctl_prints_sections_of_the_original() -> None:
    printed = offline("print-config", "--broker.address=http://a:1", "--zone=z").out
    sections = re.findall(r"^\[(.*)\]$", printed, re.MULTILINE)
    assert sections == [
        "journals",
        "journals.Broker",
        "journals.Logging",
        "shards",
        "shards.Consumer",
        "shards.Broker",
        "shards.Logging",
    ]
    settled = [line for line in printed.splitlines() if line and line[0] not in ";["]
    assert settled == ["Zone = z", "Address = http://a:1"] * 2


@pytest.mark.parametrize(
    "argv",
    [
        ["journals", "--broker.address", "http://b:1", "list", "-l", "a=b"],
        ["--broker.address", "http://b:1", "journals", "list", "-l=a=b"],
        ["journals", "--broker.address=http://b:1", "list", "--selector=a=b"],
    ],
)
def test_shared_flags_may_follow_the_group(argv: list[str], tmp_path: Path) -> None:
    command, rest = find_command(argv)
    assert not isinstance(command, str)
    loaded = schema_of(command).load(rest, {}, directory=tmp_path)
    assert (command.name, loaded.groups["broker"].address) == ("journals list", "http://b:1")
    assert loaded.groups[""].selector == "a=b"


def test_all_commands_of_shards_take_flags_of_brokers() -> None:
    for command in COMMANDS:
        if command.words[0] == "shards":
            flags = {option.flag for option in schema_of(command).options}
            assert {"--broker.address", "--consumer.address", "--broker.cache.ttl"} <= flags
