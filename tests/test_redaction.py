"""Secrets in settings are not in what a program prints, wherever they are."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gazette.broker.flags import BrokerFlags
from gazette.client.flags import BrokerClientFlags, ConsumerClientFlags
from gazette.cluster.process.groups import DebugFlags, EtcdFlags, LogFlags
from gazette.cluster.process.member import ProcessFlags
from gazette.config.ini_file import ini_value
from gazette.config.option import Option, setting
from gazette.config.schema import Schema
from gazette.runconsumer.flags import ConsumerFlags
from gazette.runtime.redaction import CUT, is_plain, shown_url
from tests.secrets import FORMS, NAMES, SECRETS, require_absent


@dataclasses.dataclass(frozen=True)
class Own:
    """Settings of an application, which does not say which ones are secret."""

    database: str = setting("", "a database")
    words: tuple[str, ...] = setting((), "words")


_FIELDS = {re.sub(r"[-._]", "", one.lower()): re.sub(r"[-.]", "_", one.lower()) for one in NAMES}
NAMED: Any = dataclasses.make_dataclass(
    "Named",
    [(name, str, setting("", "a secret")) for name in _FIELDS.values()],
    frozen=True,
)
GROUPS: Any = {
    "": ProcessFlags,
    "broker": BrokerFlags,
    "consumer": ConsumerFlags,
    "client": BrokerClientFlags,
    "asked": ConsumerClientFlags,
    "etcd": EtcdFlags,
    "log": LogFlags,
    "debug": DebugFlags,
    "own": Own,
    "named": NAMED,
}
SCHEMA = Schema("program", GROUPS, file_stem="program")
TEXTS = [
    one
    for one in SCHEMA.options
    if one.kind in ("str", "list") and not one.choices and not one.flag_only
]


NOTHING = SCHEMA.render_ini(
    SCHEMA.load([], {"HOME": "/nonexistent"}, directory=Path("/nonexistent"))
)


def printed(option: Option, text: str, source: str, directory: Path) -> str:
    """Return the configuration that is printed if a setting has a text from a source."""
    argv = [f"{option.flag}={text}"] if source == "flag" else []
    environ = {option.env: text} if source == "environment" else {}
    line = f"{option.name} = {ini_value(text)}" if source == "file" else ""
    (directory / "program.ini").write_text(f"[{option.group or 'options'}]\n{line}\n")
    loaded = SCHEMA.load(argv, {"HOME": "/nonexistent", **environ}, directory=directory)
    rendered = option.render(getattr(loaded.groups[option.group], option.field))
    assert rendered, "the setting was not given"
    return SCHEMA.render_ini(loaded)


@pytest.mark.parametrize("form", FORMS)
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    option=st.sampled_from(TEXTS),
    secret=SECRETS,
    source=st.sampled_from(["flag", "environment", "file"]),
)
def test_a_secret_in_a_setting_is_not_printed(
    form: str, option: Option, secret: str, source: str, tmp_path: Path
) -> None:
    """The setting takes text. It is ours or an application's, and comes from anywhere."""
    # A value in a file has one line.
    texts = [
        FORMS[form](one).replace("\n", "?" if source == "file" else "\n") for one in (secret, "x")
    ]
    text, template = (printed(option, one, source, tmp_path) for one in texts)
    require_absent(secret, text, template)


@pytest.mark.parametrize(
    "option", [one for one in TEXTS if one.secret or one.group == "named"], ids=lambda one: one.key
)
@settings(
    max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(secret=SECRETS)
def test_a_setting_whose_name_means_a_secret_is_not_printed(
    option: Option, secret: str, tmp_path: Path
) -> None:
    """Whatever its text is, and whether it says so or not."""
    require_absent(secret, printed(option, secret, "flag", tmp_path), NOTHING)


@pytest.mark.parametrize(
    "key",
    [
        "K7gNU3sdo+OL0wNhqoVWhr3g6s1xYv72ol/pe/Unols=",
        "K7gNU3sdo+OL0wNhqoVWhr3g6s1xYv72ol/pe/Un",
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4",
        "AKIAIOSFODNN7EXAMPLE",
        "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
        "eyJhbGciOiJIUzI1NiJ9",
    ],
)
def test_a_key_alone_is_not_plain(key: str) -> None:
    assert not is_plain("database", key)
    assert not is_plain("database", f"a,{key},b")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "http://localhost:8080",
        "http://a.svc:1,https://[::1]:2",
        "unix:///run/etcd.sock",
        "/etc/gazette/tls/server-key.pem",
        "/var/run/secrets/tls.crt",
        "/gazette/cluster",
        "eu-west-1a",
        "broker-7d9c5b6f8d-abcde",
        "*.example.com",
        "Hello, world!",
        "a, b; c",
    ],
)
def test_plain_values_are_shown(text: str, tmp_path: Path) -> None:
    """So what is printed is a file that sets them again."""
    assert is_plain("name", text)
    database = next(one for one in SCHEMA.options if one.key == "own.database")
    if text:
        assert f"Database = {ini_value(text)}" in printed(database, text, "flag", tmp_path)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://broker:8080", "http://broker:8080"),
        ("http://broker:8080/", "http://broker:8080/"),
        ("https://[::1]:8080/debug", f"https://[::1]:8080/{CUT}"),
        ("s3://bucket/prefix/?profile=x", f"s3://bucket/{CUT}"),
        ("file:///", "file:///"),
        ("file:///fragments", f"file:///{CUT}"),
        ("s3://key:hunter2@bucket/", CUT),
        ("postgresql://u:pass/w@rd@h/db", CUT),
        ("s3://key:hunter2/x", CUT),
        ("hunter2", CUT),
    ],
)
def test_urls_show_their_scheme_and_host(text: str, shown: str) -> None:
    assert shown_url(text) == shown


@given(st.text())
def test_any_text_is_judged(text: str) -> None:
    assert isinstance(is_plain(text, text), bool)
    assert shown_url(text)


@pytest.mark.parametrize("unit", ["a", "a1", "1", "+", "eyJ", "s3://", "pass", "://", "a-"])
def test_long_text_takes_time_in_proportion(unit: str) -> None:
    """(The time limit of tests is what this would run into.)"""
    text = unit * (200_000 // len(unit))
    is_plain(text, text)
    shown_url(text)
