"""gazctl support-bundle, against real members, and with parts that are not there."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

from gazette.client.append.appender import AppendParams
from gazette.gazctl.support_bundle import http_guesses
from gazette.runtime.redaction import CUT
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
    head = "2026-11-22T10:00:00.000Z info gazette.broker.pulse:"
    log.write_text(
        f"first line\nGET Authorization: Bearer {TOKEN}\n{head} pulse of {JOURNAL} failed: {TOKEN}\n"
    )
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
    assert found["logs/broker.log"] == f"{CUT}\n{head} pulse of {JOURNAL} failed: {CUT}\n"
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
    assert "cannot reach the broker" in result.err
    assert parts["journals.json"] == "Unavailable"


async def test_logs_of_one_name_stay_apart(gazctl_alone: Runner, tmp_path: Path) -> None:
    target = tmp_path / "bundle.tar.gz"
    for number in (1, 2, 3):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}" / "broker.log").write_text("INFO x\n" * number)
    logs = [tmp_path / f"{number}" / "broker.log" for number in (1, 2, 3)]
    unreachable = ("--broker.address", "http://127.0.0.1:1", "--timeout", "1s")
    await gazctl_alone.ok("support-bundle", "-o", target, *unreachable, *logs)
    with tarfile.open(target) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert [name for name in names if name.startswith("logs/")] == [
        "logs/broker.log",
        "logs/broker.log.2",
        "logs/broker.log.3",
    ]
    parts = json.loads(contents(target)["manifest.json"])["parts"]
    assert parts["logs/broker.log.3"] == "ok"


async def test_a_file_is_not_replaced(gazctl_alone: Runner, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("precious")
    result = await gazctl_alone("support-bundle", "-o", target)
    assert (result.code, target.read_text()) == (2, "precious")
    assert "is not replaced" in result.err


async def test_a_bundle_needs_the_name_of_a_file(gazctl_alone: Runner) -> None:
    result = await gazctl_alone("support-bundle", "-o", "-")
    assert (result.code, Path("-").exists()) == (2, False)
    assert "not written to standard output" in result.err


def test_where_members_may_serve_http() -> None:
    assert http_guesses("http://host:8080") == ["http://host:8081", "http://host:8080"]
    assert http_guesses("https://[::1]:65535") == ["https://[::1]:65535"]
    assert http_guesses("unix://host/path") == []
