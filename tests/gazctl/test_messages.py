"""``gazctl read``, ``produce`` and ``members``."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path

import pytest
from word_count import ngram_pb2

from gazette.client.append.appender import AppendParams
from gazette.client.journals import JournalChange
from gazette.gazctl.perform import run_in_loop
from gazette.labels import CONTENT_CSV, CONTENT_JSON_LINES, CONTENT_PROTO_FIXED, CONTENT_TYPE
from gazette.message.framing.framing import framing_of
from gazette.message.mapping import Partitions, modulo_mapping
from gazette.message.uuid import ACK_TXN, CONTINUE_TXN, OUTSIDE_TXN, build_uuid, uuid_text
from gazette.protocol.journal import Suspend, SuspendLevel
from gazette.protocol.label_set import LabelSelector, LabelSet
from gazette.testing.broker import BrokerFixture, journal_spec
from gazette.testing.consumer import ConsumerFixture
from gazette.testing.stored import json_line
from tests.gazctl.runner import Runner, Streams
from tests.support.instant_clock import eventually

ALPHA = bytes([1, 0, 0, 0, 0, 1])
ONE, TWO = "words/part-000", "words/part-001"


def labels(content_type: str = CONTENT_JSON_LINES) -> LabelSet:
    return LabelSet.of((CONTENT_TYPE, content_type))


def line(clock: int, flags: int, **fields: object) -> bytes:
    return json_line(fields, build_uuid(ALPHA, clock, flags))


def documents(text: str) -> list[dict[str, object]]:
    return [json.loads(one) for one in text.splitlines()]


def words(text: str) -> list[object]:
    return [one["word"] for one in documents(text)]


@pytest.fixture(autouse=True)
async def journals(broker: BrokerFixture) -> None:
    await broker.create(journal_spec(ONE, labels=labels()), journal_spec(TWO, labels=labels()))


async def test_committed_messages_are_written_once(broker: BrokerFixture, gazctl: Runner) -> None:
    append = broker.client.append
    await append(AppendParams(ONE), line(1, CONTINUE_TXN, word="a") * 2 + line(2, ACK_TXN))
    await append(AppendParams(TWO), line(1, OUTSIDE_TXN, word="b"))
    await append(AppendParams(TWO), line(2, CONTINUE_TXN, word="pending"))
    assert words((await gazctl.ok("read", ONE)).out) == ["a"]
    assert words((await gazctl.ok("read", "-l", "name:prefix=words/")).out) == ["a", "b"]
    assert words((await gazctl.ok("read", TWO, ONE, "--limit=1")).out) == ["a"]
    uncommitted = await gazctl.ok("read", ONE, TWO, "--uncommitted")
    assert words(uncommitted.out) == ["a", "a", "b", "pending"]
    (one,) = documents((await gazctl.ok("read", ONE, "--meta")).out)
    assert one["journal"] == ONE
    assert one["offset"] == 0
    assert one["message"] == {"uuid": uuid_text(build_uuid(ALPHA, 1, CONTINUE_TXN)), "word": "a"}
    assert (await gazctl.ok("read", ONE, "--tail")).out == ""
    begin = len(line(1, OUTSIDE_TXN, word="b"))
    assert (await gazctl.ok("read", TWO, f"--begin={begin}")).out == ""


async def test_every_content_type(broker: BrokerFixture, gazctl: Runner) -> None:
    await broker.create(
        journal_spec("rows/csv", labels=labels(CONTENT_CSV)),
        journal_spec("counts/protobuf", labels=labels(CONTENT_PROTO_FIXED)),
        journal_spec("bare/journal"),
    )
    uuid = build_uuid(ALPHA, 1, OUTSIDE_TXN)
    await broker.client.append(AppendParams("rows/csv"), f"{uuid_text(uuid)},a,1\n".encode())
    framing = framing_of(CONTENT_PROTO_FIXED, ngram_pb2.NGramCount)
    counted = ngram_pb2.NGramCount(uuid=uuid, n_gram="of the", count=3)
    await broker.client.append(AppendParams("counts/protobuf"), framing.encode(counted))
    assert json.loads((await gazctl.ok("read", "rows/csv")).out) == [uuid_text(uuid), "a", "1"]
    message = "--message=word_count.ngram_pb2:NGramCount"
    (found,) = documents((await gazctl.ok("read", "counts/protobuf", message)).out)
    assert found["nGram"] == "of the"
    for argv, says in [
        (["counts/protobuf"], "--message"),
        (["counts/protobuf", "--message=nothing:Here"], "nothing"),
        (["bare/journal"], "content-type is not set"),
    ]:
        result = await gazctl("read", *argv)
        assert result.code == 2
        assert says in result.err


async def test_what_is_no_message(broker: BrokerFixture, gazctl: Runner) -> None:
    await broker.client.append(AppendParams(ONE), b"nothing\n" + line(1, OUTSIDE_TXN, word="a"))
    result = await gazctl("read", ONE)
    assert result.code == 1
    assert "not a message" in result.err
    result = await gazctl.ok("read", ONE, "--skip-malformed")
    assert words(result.out) == ["a"]
    assert "skipped: " in result.err


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["read"], 2, "gazctl: give either names of journals, or a selector"),
        (["read", ONE, "-l", "name=a"], 2, "names of journals, or a selector"),
        (["read", "words/part-009"], 1, "no journal matches"),
        (["read", "words"], 1, "words is no journal: 2 journals are below it (words/part-000, …)"),
        (["produce", "words/"], 1, "-l name:prefix=words/"),
        (["read", ONE, "--limit=-1"], 2, "--limit"),
        (["produce"], 2, "names of journals, or a selector"),
        (["produce", "words/part-009"], 1, "See `gazctl journals list` for names"),
        (["produce", ONE, "--mapping=random"], 2, "modulo"),
    ],
)
async def test_what_cannot_be_read_or_published_is_named(
    gazctl: Runner, argv: list[str], code: int, says: str
) -> None:
    result = await gazctl(*argv, stdin=b'{"word":"a"}\n')
    assert result.code == code
    assert says in result.err
    assert "gazctl: gazctl" not in result.err


async def test_reading_goes_on_until_the_limit(broker: BrokerFixture, gazctl: Runner) -> None:
    """Over the head, and into a journal that is created meanwhile."""
    streams = Streams()
    argv = ["read", "-l", "name:prefix=words/", "--follow", "--limit=3"]
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(run_in_loop(argv, gazctl.environ, streams.terminal))
        await broker.client.append(AppendParams(ONE), line(1, OUTSIDE_TXN, word="a"))
        await eventually(lambda: streams.out.getvalue().count(b"\n") == 1)
        await broker.client.append(AppendParams(TWO), line(1, OUTSIDE_TXN, word="b"))
        await eventually(lambda: streams.out.getvalue().count(b"\n") == 2)
        await broker.create(journal_spec("words/part-002", labels=labels()))
        await broker.client.append(AppendParams("words/part-002"), line(1, OUTSIDE_TXN, word="c"))
    assert reading.result() == 0
    assert words(streams.out.getvalue().decode()) == ["a", "b", "c"]


async def test_following_goes_on_when_journals_are_deleted_suspended_and_resumed(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    streams = Streams()
    client = broker.client

    def read_through(word: str) -> bool:
        return word in streams.out.getvalue().decode()

    async def put(name: str, suspend: Suspend = Suspend()) -> None:
        listed = await client.list_journals(LabelSelector.of(name=name))
        revision = listed.journals[0].mod_revision if listed.journals else 0
        spec = journal_spec(name, labels=labels(), suspend=suspend)
        await client.apply_journals([JournalChange(upsert=spec, expect_mod_revision=revision)])

    await put("words/part-002", Suspend(SuspendLevel.FULL, 0))
    await client.append(AppendParams(ONE), line(1, CONTINUE_TXN, word="early"))
    argv = ["read", "-l", "name:prefix=words/", "--follow", "--limit=5"]
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(run_in_loop(argv, gazctl.environ, streams.terminal))
        await client.append(AppendParams(TWO), line(1, OUTSIDE_TXN, word="first"))
        await eventually(lambda: read_through("first"))
        assert "skipped words/part-002" in streams.err.getvalue()
        await put("words/part-002")
        await client.append(AppendParams("words/part-002"), line(1, OUTSIDE_TXN, word="resumed"))
        await eventually(lambda: read_through("resumed"))
        listed = await client.get_journal(TWO)
        await client.apply_journals(
            [JournalChange(delete=TWO, expect_mod_revision=listed.mod_revision)]
        )
        await eventually(lambda: f"{TWO}: " in streams.err.getvalue())
        shutil.rmtree(broker.file_root / "fragments" / TWO)
        await put(TWO)
        await client.append(AppendParams(TWO), line(1, OUTSIDE_TXN, word="again"))
        await eventually(lambda: read_through("again"))
        head = len(line(1, CONTINUE_TXN, word="early"))
        await put(ONE, Suspend(SuspendLevel.FULL, head))
        await eventually(lambda: f"{ONE}: " in streams.err.getvalue())
        await put(ONE)
        await client.append(AppendParams(ONE), line(2, ACK_TXN))
        await eventually(lambda: read_through("early"))
        await client.append(AppendParams(ONE), line(3, OUTSIDE_TXN, word="last"))
    assert reading.result() == 0
    assert words(streams.out.getvalue().decode()) == ["first", "resumed", "again", "early", "last"]


async def test_lines_become_messages(broker: BrokerFixture, gazctl: Runner) -> None:
    stdin = b'{"word":"a","n":{"id":7}}\n\n{"word":"b"}'
    result = await gazctl.ok("produce", ONE, stdin=stdin)
    assert "published 2 messages" in result.err
    found = documents((await gazctl.ok("read", ONE)).out)
    assert [one["word"] for one in found] == ["a", "b"]
    assert all(one["uuid"] for one in found)
    # Case: one message.
    assert (await gazctl.ok("produce", ONE, stdin=b"{}")).err == "published 1 message\n"


async def test_equal_keys_go_to_the_same_journal(broker: BrokerFixture, gazctl: Runner) -> None:
    lines = [json.dumps({"word": str(n), "by": {"id": n % 5}}) for n in range(20)]
    argv = ["produce", "-l", "name:prefix=words/", "--key=by.id"]
    await gazctl.ok(*argv, stdin="\n".join(lines).encode())
    partitions = Partitions.of_specs([journal_spec(name, labels=labels()) for name in (ONE, TWO)])
    choose = modulo_mapping(lambda: partitions, str)
    for journal in (ONE, TWO):
        wanted = [str(n) for n in range(20) if choose(n % 5).journal == journal]
        assert words((await gazctl.ok("read", journal)).out) == wanted


@pytest.mark.parametrize("whole", [False, True])
async def test_a_line_that_cannot_be_published_ends_the_command(
    broker: BrokerFixture, gazctl: Runner, whole: bool
) -> None:
    """The lines before it that were ready earlier stay, unless all are one transaction."""
    read_end, write_end = os.pipe()
    streams = Streams()
    with open(read_end, "rb") as piped, open(write_end, "wb", buffering=0) as typed:
        terminal = type(streams.terminal)(piped, streams.out, streams.err)
        argv = ["produce", ONE, "--key=k", *(["--one-transaction"] if whole else [])]
        async with asyncio.TaskGroup() as tasks:
            producing = tasks.create_task(run_in_loop(argv, gazctl.environ, terminal))
            typed.write(b'{"word":"a","k":"1"}\n')
            if not whole:
                while words((await gazctl.ok("read", ONE)).out) != ["a"]:
                    pass
            typed.write(b'{"word":"b","k":"2"}\n{"word":"c"}\n')
            typed.close()
    assert producing.result() == 2
    assert "line 3" in streams.err.getvalue()
    assert (
        "after 0 committed messages)" if whole else "after 1 committed message)"
    ) in streams.err.getvalue()
    assert "no field k" in streams.err.getvalue()
    assert words((await gazctl.ok("read", ONE)).out) == ([] if whole else ["a"])
    for text in (b"7\n", b"{\n"):
        result = await gazctl("produce", ONE, stdin=text)
        assert result.code == 2
        assert "not a JSON object" in result.err


async def test_members_are_those_that_serve(
    broker: BrokerFixture, consumer: ConsumerFixture, gazctl: Runner
) -> None:
    result = await gazctl.ok("members")
    kinds = [row[0] for row in result.rows]
    assert kinds == ["broker", "consumer"]
    assert result.rows[0][2:4] == ["broker-one", broker.endpoint]
    assert result.rows[0][4:] == ["2", "2"]
    listed = documents((await gazctl.ok("members", "-o", "json")).out)
    assert [one["kind"] for one in listed] == ["broker", "consumer"]
    # It serves no shard yet: lists have the endpoints of members that do.
    assert (listed[1]["endpoint"], listed[1]["replicas"]) == ("", 0)
    alone = {name: value for name, value in gazctl.environ.items() if name != "CONSUMER_ADDRESS"}
    assert [row[0] for row in (await Runner(alone).ok("members")).rows] == ["broker"]


async def test_a_server_of_the_other_kind_is_named(
    broker: BrokerFixture, consumer: ConsumerFixture, gazctl: Runner
) -> None:
    result = await gazctl("journals", "list", f"--broker.address={consumer.endpoint}")
    assert result.code == 2
    assert f"the server at {consumer.endpoint} is a consumer" in result.err
    result = await gazctl("shards", "list", f"--consumer.address={broker.endpoint}")
    assert result.code == 2
    assert f"the server at {broker.endpoint} is a broker" in result.err


async def test_contexts(broker: BrokerFixture, gazctl: Runner, tmp_path: Path) -> None:
    """A flag and the environment go before a context, and a context before the file."""
    alone = Runner({"HOME": str(tmp_path)})
    assert "there are no contexts" in (await alone.ok("context", "list")).err
    here, away = f"--broker.address={broker.endpoint}", "--broker.address=http://127.0.0.1:1"
    await alone.ok("context", "set", "here", here)
    await alone.ok("context", "set", "away", away, "--consumer.address=http://127.0.0.1:2")
    (tmp_path / "cwd" / "gazctl.ini").write_text("[Broker]\nAddress = http://127.0.0.1:3\n")
    assert "127.0.0.1:3" in (await alone("journals", "list")).err
    await alone.ok("context", "use", "here")
    assert (await alone.ok("journals", "list")).rows
    result = await alone("journals", "list", "--context=away")
    assert result.code == 1
    assert "127.0.0.1:1" in result.err
    assert "the context away" in result.err
    assert (await alone.ok("journals", "list", "--context=away", here)).rows
    result = await alone(
        "journals", "list", BROKER_ADDRESS="http://127.0.0.1:4", GAZCTL_CONTEXT="away"
    )
    assert "127.0.0.1:4" in result.err
    assert "context" not in result.err
    rows = (await alone.ok("context", "list")).rows
    assert rows == [
        ["away", "http://127.0.0.1:1", "http://127.0.0.1:2"],
        ["*", "here", broker.endpoint, "<none>"],
    ]
    await alone.ok("context", "delete", "here")
    assert "127.0.0.1:3" in (await alone("journals", "list")).err
    for argv, says in [
        (["context", "use", "nothing"], "There are: away"),
        (["context", "use"], "name of one context"),
        (["context", "set", "here"], "no address is given"),
        (["context", "set", "here", here, "--broker.auth-token=secret"], "addresses only"),
        (["journals", "list", "--context=nothing"], "no context nothing"),
    ]:
        result = await alone(*argv)
        assert result.code in (1, 2)
        assert says in result.err
    file = tmp_path / ".config" / "gazette" / "contexts.yaml"
    file.write_text("contexts: [here]\n")
    result = await alone("journals", "list")
    assert result.code == 2
    assert str(file) in result.err
    result = await Runner({})("context", "set", "here", here)
    assert result.code == 2
    assert "HOME" in result.err
