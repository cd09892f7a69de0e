"""gazctl support-bundle, against real members, and with parts that are not there."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest

from gazette.client.append.appender import AppendParams
from gazette.gazctl.support_bundle import http_guesses
from gazette.runtime.redaction import REDACTED, redact
from gazette.testing.broker import BrokerFixture, journal_spec
from gazette.testing.consumer import ConsumerFixture
from tests.gazctl.runner import Runner

JOURNAL = "a/journal"
TOKEN = "eyJhbGciOiJIUzI1NiJ9.eyJjYXAiOjJ9.c2lnbmF0dXJl"


def contents(path: Path) -> dict[str, str]:
    with tarfile.open(path) as archive:
        found = {}
        for member in archive.getmembers():
            file = archive.extractfile(member)
            assert file is not None
            assert member.mode == 0o600
            found[member.name.partition("/")[2]] = io.TextIOWrapper(file).read()
        return found


async def test_everything_that_can_be_had_is_in_it(
    broker: BrokerFixture, consumer: ConsumerFixture, gazctl: Runner, tmp_path: Path
) -> None:
    await broker.create(journal_spec(JOURNAL))
    await broker.client.append(AppendParams(JOURNAL), b"content that is a secret text")
    log = tmp_path / "broker.log"
    log.write_text(f"first line\nGET Authorization: Bearer {TOKEN}\nlast line\n")
    target = tmp_path / "bundle.tar.gz"
    # The end of the log begins within its first line, which is left out.
    words: tuple[str | Path, ...] = (
        "support-bundle",
        "-o",
        target,
        f"--log-bytes={log.stat().st_size - 5}",
    )
    # The fixtures' HTTP ports are any free ones.
    words += ("--http", broker.http, "--http", consumer.http)
    result = await gazctl.ok(*words, log)
    assert result.out == f"{target}\n"
    found = contents(target)

    (journal,) = json.loads(found["journals.json"])["journals"]
    assert journal["spec"]["name"] == JOURNAL
    assert "shards" in json.loads(found["shards.json"])
    (line,) = map(json.loads, found["fragments.jsonl"].splitlines())
    assert (line["journal"], line["end"], line["unpersisted"]) == (JOURNAL, 29, 1)
    port = broker.http.rpartition(":")[2]
    assert found[f"members/127.0.0.1_{port}/ready.txt"] == "ready\n"
    assert "gazette_build_info{" in found[f"members/127.0.0.1_{port}/metrics.txt"]
    assert "task " in found[f"members/127.0.0.1_{port}/stacks.txt"]
    assert found["logs/broker.log"] == f"GET Authorization: {REDACTED}\nlast line\n"
    everything = "".join(found.values())
    assert TOKEN not in everything
    assert "a secret text" not in everything
    manifest = json.loads(found["manifest.json"])
    assert manifest["parts"]["journals.json"] == "ok"
    assert target.stat().st_mode & 0o777 == 0o600


async def test_parts_that_are_not_there_are_named(gazctl_alone: Runner, tmp_path: Path) -> None:
    target = tmp_path / "bundle.tar.gz"
    unreachable = "http://127.0.0.1:1"
    result = await gazctl_alone.ok(
        "support-bundle",
        *("-o", target, "--broker.address", unreachable, "--consumer.address", unreachable),
        *("--timeout", "5s", tmp_path / "no-such.log"),
    )
    parts = json.loads(contents(target)["manifest.json"])["parts"]
    for part in ("journals.json", "shards.json", "members/127.0.0.1_1", "logs/no-such.log"):
        assert parts[part] != "ok"
        assert f"without {part}: " in result.err
    assert "cannot reach the broker" in parts["journals.json"]


async def test_a_file_is_not_replaced(gazctl_alone: Runner, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("precious")
    result = await gazctl_alone("support-bundle", "-o", target)
    assert (result.code, target.read_text()) == (2, "precious")
    assert "is not replaced" in result.err


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("s3://key:hunter2@bucket/prefix/", "hunter2"),
        (f"token {TOKEN} of a call", TOKEN),
        ("Authorization: Bearer abcdefgh12345678", "abcdefgh12345678"),
        ("Authorization: Basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
        ("BROKER_AUTH_KEYS=c2VjcmV0LW9uZQ==", "c2VjcmV0LW9uZQ"),
        ("--broker.auth-keys c2VjcmV0LW9uZQ==", "c2VjcmV0LW9uZQ"),
        ("--broker.auth-keys=c2VjcmV0LW9uZQ==", "c2VjcmV0LW9uZQ"),
        ("https://x/y?X-Amz-Signature=0123abcd&X-Amz-Date=1", "0123abcd"),
        ("https://x/y?se=2026&sig=AbC%3D&sp=r", "AbC%3D"),
        ('{"account_key": "c2VjcmV0"}', "c2VjcmV0"),
        ("password: hunter2", "hunter2"),
        ("key AKIAABCDEFGHIJKLMNOP is used", "AKIAABCDEFGHIJKLMNOP"),
        ("-----BEGIN PRIVATE KEY-----\nabc\ndef\n-----END PRIVATE KEY-----", "abc"),
    ],
)
def test_what_looks_like_a_secret_is_taken_out(text: str, secret: str) -> None:
    assert secret not in redact(text)
    assert REDACTED in redact(text)


def test_what_is_none_stays() -> None:
    text = (
        "journal a/journal at http://broker:8080 offset=12 tokens, keys and a bearer of news;"
        " X-Amz-Date=1 s3://bucket/prefix/?profile=x"
    )
    assert redact(text) == text


def test_where_members_may_serve_http() -> None:
    assert http_guesses("http://host:8080") == ["http://host:8081", "http://host:8080"]
    assert http_guesses("https://[::1]:65535") == ["https://[::1]:65535"]
    assert http_guesses("unix://host/path") == []
