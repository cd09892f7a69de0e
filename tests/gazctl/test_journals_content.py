"""Content of journals: append and read."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gazette.blobs.blob_store import BlobInfo
from gazette.blobs.file import FileStore
from gazette.client.append.appender import AppendParams
from gazette.client.journals import JournalChange
from gazette.client.read.reader import ReadParams
from gazette.cluster.etcd.client import Etcd
from gazette.errors import NotYet, Unavailable
from gazette.gazctl.io.terminal import Terminal
from gazette.gazctl.journals import append as journals_append
from gazette.gazctl.journals import append_status as append_waits
from gazette.gazctl.perform import run_in_loop
from gazette.labels import CONTENT_JSON_LINES, CONTENT_PROTO_FIXED, CONTENT_TYPE
from gazette.message.mapping import Partition, Partitions, modulo_mapping, rendezvous_mapping
from gazette.protocol.fragment import FragmentStoreUrl
from gazette.protocol.journal import Suspend, SuspendLevel
from gazette.protocol.label_set import LabelSet
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import BrokerFixture, journal_spec
from tests.gazctl.runner import Runner, Streams
from tests.gazctl.stored import store
from tests.support.loop_time import LoopTime

PARTS = ("a/part-000", "a/part-001", "a/part-002")


async def create_parts(broker: BrokerFixture, content_type: str = CONTENT_JSON_LINES) -> None:
    labels = LabelSet.of((CONTENT_TYPE, content_type), ("topic", "parts"))
    await broker.create(*(journal_spec(name, labels=labels) for name in PARTS))


async def content(broker: BrokerFixture, journal: str) -> bytes:
    """Return all of a journal, read by the client."""
    found = b""
    async with broker.client.retry_reader(ReadParams(journal)) as reader:
        try:
            async for chunk in reader.chunks():
                found += chunk
        except NotYet:
            return found
    raise AssertionError


async def contents(broker: BrokerFixture) -> dict[str, bytes]:
    return {name: await content(broker, name) for name in PARTS}


async def until(condition: object, task: asyncio.Task[int]) -> None:
    """Return once a condition holds, while a command goes on."""
    while not condition():  # type: ignore[operator]
        await asyncio.wait({task}, timeout=0.005)
        assert not task.done(), task.result()


async def test_an_input_is_appended_whole_or_by_records(
    broker: BrokerFixture, gazctl: Runner, tmp_path: Path
) -> None:
    await create_parts(broker)

    # Case: all of it, as one append to one journal.
    text = b"one\ntwo\nthree"
    result = await gazctl.ok("journals", "append", "-l", "topic=parts", stdin=text)
    assert sorted((await contents(broker)).values()) == [b"", b"", text]
    assert result.err.startswith("appended 13 bytes, in 1 record, to a/part-00")

    # Case: nothing at all.
    result = await gazctl.ok("journals", "append", "-l", "name=a/part-000", "-f", "lines")
    assert "the input was empty" in result.err

    # Case: lines, each to a journal of its own; together they are the input.
    before = await contents(broker)
    lines = [f"line {at}\n".encode() for at in range(300)]
    (tmp_path / "input").write_bytes(b"".join(lines).rstrip(b"\n"))
    command = ("journals", "append", "-l", "topic=parts", "-f", "lines")
    await gazctl.ok(*command, "-i", str(tmp_path / "input"))
    added = {name: data[len(before[name]) :] for name, data in (await contents(broker)).items()}
    assert all(added.values())
    assert sorted(b"".join(added.values()).splitlines(keepends=True)) == sorted(lines)

    # Case: within a journal, in order.
    numbers = [int(line.split()[1]) for line in added["a/part-001"].splitlines()]
    assert numbers == sorted(numbers)


async def test_keys_map_records_to_journals_as_publishers_do(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    await create_parts(broker)
    keys = [f"key-{at}" for at in range(20)]
    lines = b"".join(f"{key}\nrecord of {key}\n".encode() for key in keys)
    partitions = Partitions([Partition(name, "") for name in PARTS])
    for mapping, function in (("modulo", modulo_mapping), ("rendezvous", rendezvous_mapping)):
        before = await contents(broker)
        command = ("journals", "append", "-l", "topic=parts", "-f", "lines", "-m", mapping)
        await gazctl.ok(*command, stdin=lines)
        expected = dict.fromkeys(PARTS, b"")
        mapped = function(lambda: partitions, lambda key: key)
        for key in keys:
            expected[mapped(key).journal] += f"record of {key}\n".encode()
        after = await contents(broker)
        assert {name: after[name][len(before[name]) :] for name in PARTS} == expected


async def test_keys_may_be_names_base64_or_frames(broker: BrokerFixture, gazctl: Runner) -> None:
    await create_parts(broker)

    def frame(data: bytes) -> bytes:
        return struct.pack("<4sI", bytes.fromhex("66339336"), len(data)) + data

    append = ("journals", "append", "-l", "topic=parts")
    # Case: every name works, the first and the last as well.
    named = b"".join(f"{name}\nto {name}\n".encode() for name in PARTS)
    await gazctl.ok(*append, "-f", "lines", "-m", "direct", stdin=named)
    assert await contents(broker) == {name: f"to {name}\n".encode() for name in PARTS}

    # Case: fixed frames are kept as they are, and their keys left out.
    frames = frame(b"a/part-001") + frame(b"\n\x00payload")
    await gazctl.ok(*append, "-f", "fixed", "-m", "direct", stdin=frames)
    assert (await content(broker, "a/part-001")).endswith(frame(b"\n\x00payload"))

    # Case: base64 of a name.
    await gazctl.ok(
        *append, "-f", "lines", "-m", "direct", "--base64", stdin=b"YS9wYXJ0LTAwMg==\nx\n"
    )
    assert await content(broker, "a/part-002") == b"to a/part-002\nx\n"

    # Case: what is wrong with the input.
    for stdin, framing, mapping, code, text in (
        (b"a/part-009\nx\n", "lines", "direct", 1, "no journal of this name"),
        (b"a/part-001\n", "lines", "direct", 2, "but no record follows"),
        (b"garbage that is no frame", "fixed", "random", 2, "no fixed header at offset 0"),
        (frame(b"x")[:-1], "fixed", "random", 2, "the input ends within the record"),
    ):
        result = await gazctl(*append, "-f", framing, "-m", mapping, stdin=stdin)
        assert (result.code, text in result.err) == (code, True), result

    # Case: what is wrong comes behind records that are appended.
    for stdin, mapping in (
        (b"a/part-001\none\na/part-009\nx\n", "direct"),
        (b"a/part-001\none\na/part-001\n", "direct"),
    ):
        result = await gazctl(*append, "-f", "lines", "-m", mapping, stdin=stdin)
        assert result.code == 1, result
        assert "appended 4 bytes, in 1 record, to a/part-001, and then" in result.err
    assert (await content(broker, "a/part-001")).endswith(b"one\none\n")
    result = await gazctl("journals", "append", "-l", "topic=none", stdin=b"x")
    assert (result.code, "no journal matches" in result.err) == (1, True)


class FailingInput(io.BytesIO):
    """An input whose disk fails after its content."""

    def read1(self, size: int | None = -1) -> bytes:
        if data := super().read1(size):
            return data
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("framing", ["lines", "none"])
async def test_an_input_that_fails_says_what_was_appended(
    broker: BrokerFixture, gazctl: Runner, framing: str
) -> None:
    await broker.create(journal_spec("a/journal"))
    streams = Streams()
    source = FailingInput(b"one\ntwo\nhalf")
    terminal = Terminal(source, streams.out, streams.err)
    argv = ["journals", "append", "-l", "name=a/journal", "-f", framing]
    assert await run_in_loop(argv, gazctl.environ, terminal) == 1
    said = streams.err.getvalue()
    assert "cannot read the input: Input/output error" in said
    summary = "appended 8 bytes, in 2 records, to a/journal, and then the input failed"
    assert (summary in said) == (framing == "lines")
    expected = b"one\ntwo\n" if framing == "lines" else b""
    assert await content(broker, "a/journal") == expected


class SlowToList(FileStore):
    """Lists nothing until it may."""

    go_on = threading.Event()

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        self.go_on.wait(30)
        return super().list(prefix)


async def test_an_append_that_waits_says_what_for(etcd: Etcd, tmp_path: Path) -> None:
    """A broker does not append before it knows what its stores have, which may take long."""
    SlowToList.go_on.clear()

    def construct(url: FragmentStoreUrl) -> FileStore:
        return SlowToList(tmp_path / "root", url)

    async with (
        await BrokerFixture.start(
            etcd,
            tmp_path,
            constructors={"file": construct},
            listing_timeout_s=0.3,
            lease_ttl_s=60.0,
        ) as broker,
        TaskScope("gazctl") as scope,
    ):
        await broker.client.apply_journals([JournalChange(upsert=journal_spec("a/journal"))])
        streams = Streams(b"content")
        argv = ["journals", "append", "-l", "name=a/journal"]
        environ = {"BROKER_ADDRESS": broker.endpoint}
        task = scope.spawn(run_in_loop(argv, environ, streams.terminal), name="append")
        time = LoopTime()
        await time.pass_until(
            lambda: "have not been listed yet" in streams.err.getvalue() or task.done(),
            append_waits.QUIET_S / 10,
        )
        time.go_on()
        SlowToList.go_on.set()
        assert await task == 0
        said = streams.err.getvalue()
        assert "waiting for a/journal: Read: the journal's fragment stores have" in said
        assert said.count("have not been listed yet") == 1, "once, and not every time"
        assert said.endswith("to a/journal\n")


class Broken(FileStore):
    """A store whose listings fail."""

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        raise Unavailable("the disk is on fire")


@pytest.mark.long
async def test_an_append_ends_with_the_reason_that_the_broker_gave_last(
    etcd: Etcd, tmp_path: Path
) -> None:
    """It tries again, and the broker keeps each attempt for as long as it may wait itself."""

    def construct(url: FragmentStoreUrl) -> FileStore:
        return Broken(tmp_path / "root", url)

    async with await BrokerFixture.start(
        etcd,
        tmp_path,
        constructors={"file": construct},
        listing_timeout_s=0.2,
        lease_ttl_s=60.0,
        store_check_timeout_s=5.0,
    ) as broker:
        await broker.client.apply_journals([JournalChange(upsert=journal_spec("a/journal"))])
        gazctl = Runner({"BROKER_ADDRESS": broker.endpoint})
        append = ("journals", "append", "-l", "name=a/journal", "--timeout=200ms")
        with pytest.MonkeyPatch.context() as patch:
            # The broker holds an attempt for 5 s, and there are two: the first introduces its session.
            patch.setattr(journals_append, "_ANSWER_S", 90)
            result = await gazctl(*append, stdin=b"content")
        assert result.code == 1
        assert "not appended within 0.2 s: a/journal: " in result.err
        assert "the disk is on fire" in result.err


async def test_a_journal_that_may_not_be_written_ends_the_append(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    await broker.create(journal_spec("a/read-only", flags=1))
    result = await gazctl(
        "journals", "append", "-l", "name=a/read-only", "-f", "lines", stdin=b"x\n"
    )
    assert result.code == 1
    assert "NOT_ALLOWED" in result.err


async def test_journals_are_merged_between_messages(
    broker: BrokerFixture, gazctl: Runner, tmp_path: Path
) -> None:
    """Every message is whole, and those of a journal are in order, wherever pieces end."""
    await create_parts(broker)
    expected: dict[str, list[str]] = {}
    for name in PARTS:
        expected[name] = [f'{{"of":"{name}","n":{n},"x":"{"y" * (n % 70)}"}}' for n in range(9000)]
        await broker.client.append(AppendParams(name), "\n".join(expected[name]).encode() + b"\n")

    result = await gazctl.ok("journals", "read", "-l", "topic=parts")
    found: dict[str, list[str]] = {name: [] for name in PARTS}
    for line in result.out.splitlines():
        found[json.loads(line)["of"]].append(line)
    assert found == expected

    # Case: to a file, with offsets; what comes later is read from there.
    out, offsets = tmp_path / "out", tmp_path / "offsets.json"
    await gazctl.ok("journals", "read", "-l", "topic=parts", "-o", out, "--offsets-out", offsets)
    assert sorted(out.read_text().splitlines()) == sorted(result.out.splitlines())
    heads = json.loads(offsets.read_text())
    assert heads == {name: len("\n".join(expected[name])) + 1 for name in PARTS}
    offsets.write_text(json.dumps(heads | {"other/journal": 7}))
    await broker.client.append(AppendParams("a/part-001"), b'{"later":1}\n')
    both = ("--offsets", offsets, "--offsets-out", offsets)
    assert (await gazctl.ok("journals", "read", "-l", "topic=parts", *both)).out == '{"later":1}\n'
    # The former offsets are kept, and those of journals that were not read are carried on.
    previous = json.loads((tmp_path / "offsets.json.previous").read_text())
    assert previous["a/part-001"] == heads["a/part-001"]
    assert json.loads(offsets.read_text()) == heads | {
        "a/part-001": heads["a/part-001"] + 12,
        "other/journal": 7,
    }
    assert (await gazctl.ok("journals", "read", "-l", "topic=parts", *both)).out == ""

    # Case: offsets that cannot be used.
    for text in ("[]", '{"a/part-001": -1}', '{"a/part-001": "x"}', "{", '{"a": true}'):
        offsets.write_text(text)
        result = await gazctl("journals", "read", "-l", "topic=parts", "--offsets", offsets)
        assert (result.code, "--offsets" in result.err) == (2, True)
    result = await gazctl(
        "journals", "read", "-l", "topic=parts", "--offsets", tmp_path / "missing"
    )
    assert (result.code, "cannot read" in result.err) == (2, True)


async def test_a_blocking_read_follows_the_head_and_the_selector(
    broker: BrokerFixture, gazctl: Runner, tmp_path: Path
) -> None:
    """--tail leaves out what there is; of a journal that is created later, nothing is left out."""
    from gazette.gazctl.journals.read import Reading

    labels = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES), ("topic", "parts"))
    await broker.create(journal_spec("a/old", labels=labels))
    await broker.client.append(AppendParams("a/old"), b"before\n")
    offsets = tmp_path / "offsets.json"
    streams = Streams()
    argv = ["journals", "read", "-l", "topic=parts", "--block", "--tail"]
    argv += ["--offsets-out", str(offsets)]
    readings: list[Reading] = []
    follow = Reading.follow

    async def noted(self: Reading, selector: object) -> None:
        readings.append(self)
        await follow(self, selector)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reading, "follow", noted)
        async with TaskScope("test") as scope:
            reading = scope.spawn(run_in_loop(argv, gazctl.environ, streams.terminal), name="read")
            await until(lambda: readings and "a/old" in readings[0].offsets, reading)
            await broker.client.append(AppendParams("a/old"), b"after\n")
            await until(lambda: streams.out.getvalue() == b"after\n", reading)
            await broker.create(journal_spec("a/new", labels=labels))
            await broker.client.append(AppendParams("a/new"), b"new\n")
            await until(lambda: streams.out.getvalue() == b"after\nnew\n", reading)
            # Case: a message that has begun is held back, and not counted.
            await broker.client.append(AppendParams("a/new"), b"half of a mess")
            await broker.client.append(AppendParams("a/old"), b"more\n")
            await until(lambda: streams.out.getvalue().endswith(b"more\n"), reading)
            assert streams.out.getvalue() == b"after\nnew\nmore\n"
            # Case: a journal that ceases to match is read no more, the others are.
            current = await broker.client.get_journal("a/old")
            await gazctl.ok(
                "journals",
                "apply",
                stdin=(await gazctl.ok("journals", "list", "-l", "name=a/old", "-o", "yaml"))
                .out.replace("value: parts", "value: other")
                .encode(),
            )
            assert current.spec.labels == labels
            await until(lambda: "a/old" not in readings[0]._reads, reading)
            await broker.client.append(AppendParams("a/new"), b"age\n")
            await until(lambda: streams.out.getvalue().endswith(b"half of a message\n"), reading)
            # Case: what is held when it is interrupted is left to the next read.
            await broker.client.append(AppendParams("a/new"), b"end\nhalf")
            await until(lambda: streams.out.getvalue().endswith(b"end\n"), reading)
            assert readings[0].on_signal()
        assert reading.result() == 0
    assert streams.out.getvalue().endswith(b"end\n")
    assert json.loads(offsets.read_text()) == {"a/old": 18, "a/new": 4 + 18 + 4}


async def test_a_blocking_read_goes_on_with_a_journal_that_was_created_again(
    etcd: Etcd, broker: BrokerFixture, gazctl: Runner
) -> None:
    """A watch may show both changes as one, for example when its broker has restarted meanwhile."""
    await broker.create(journal_spec("a/journal"))
    await broker.client.append(AppendParams("a/journal"), b"a former life")
    argv = ["journals", "read", "-l", "name=a/journal", "--block"]
    streams = Streams()
    async with TaskScope("test") as scope:
        reading = scope.spawn(run_in_loop(argv, gazctl.environ, streams.terminal), name="read")
        await until(lambda: streams.out.getvalue() == b"a former life", reading)
        (broker.file_root / "other").mkdir()
        again = journal_spec("a/journal", stores=("file:///other/",))
        (key,) = (kv.key for kv in (await etcd.range("")).kvs if b"/items/" in kv.key)
        await etcd.delete(key)
        await etcd.put(key, again.to_pb().SerializeToString())
        await until(lambda: "created again" in streams.err.getvalue(), reading)
        await broker.settled("a/journal")
        await broker.client.append(AppendParams("a/journal"), b", a new one")
        await until(lambda: streams.out.getvalue().endswith(b", a new one"), reading)
        scope.cancel()


async def test_journals_that_cannot_be_read_are_reported(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    spec = journal_spec("a/suspended", suspend=Suspend(SuspendLevel.FULL, 10))
    from gazette.client.journals import JournalChange

    await broker.client.apply_journals([JournalChange(upsert=spec)])
    result = await gazctl.ok("journals", "read", "-l", "name=a/suspended")
    assert result.err == "skipped a/suspended: it is fully suspended\n"
    assert (await gazctl.ok("journals", "read", "-l", "name=none")).err == "no journal matches\n"
    await broker.create(journal_spec("a/write-only", flags=2))
    result = await gazctl("journals", "read", "-l", "name=a/write-only")
    assert (result.code, "NOT_ALLOWED" in result.err) == (1, True)
    for out in ("/no/such/directory/offsets.json", "/", "."):
        result = await gazctl("journals", "read", "-l", "name=none", "--offsets-out", out)
        assert (result.code, f"cannot write to {out}" in result.err) == (2, True)
    result = await gazctl("journals", "read", "-l", "name=none", "-o", "/no/such/file")
    assert (result.code, "cannot write to /no/such/file" in result.err) == (2, True)


async def test_frames_of_several_journals_are_merged_whole(
    broker: BrokerFixture, gazctl: Runner, tmp_path: Path
) -> None:
    await create_parts(broker, CONTENT_PROTO_FIXED)
    frames = {}
    for at, name in enumerate(PARTS):
        payload = bytes([at]) * 300_000
        frames[name] = struct.pack("<4sI", bytes.fromhex("66339336"), len(payload)) + payload
        await broker.client.append(AppendParams(name), frames[name] * 3)
    await gazctl.ok("journals", "read", "-l", "topic=parts", "-o", tmp_path / "out")
    data = (tmp_path / "out").read_bytes()
    length = len(frames[PARTS[0]])
    found = [data[at : at + length] for at in range(0, len(data), length)]
    assert sorted(found) == sorted(list(frames.values()) * 3)


async def test_a_journal_is_read_from_its_store_from_a_time_on_and_over_gaps(
    broker: BrokerFixture, gazctl: Runner, tmp_path: Path
) -> None:
    now = int(time.time())  # noqa: TID251 - stores and brokers are in real time
    store(broker, "a/journal", b"old ", begin=10, mod_time=now - 9 * 86400)
    store(broker, "a/journal", b"new", begin=14, mod_time=now - 60)
    await broker.create(journal_spec("a/journal"))
    await broker.client.append(AppendParams("a/journal", offset=17), b" local")
    read = ("journals", "read", "-l", "name=a/journal")
    for more in ((), ("--broker.cache.size=16",), ("--file-root", str(broker.file_root))):
        result = await gazctl.ok(*read, *more, "--offsets-out", tmp_path / "offsets")
        assert result.out == "old new local"
        assert result.err == "a/journal: no content at offset 0; continuing at 10\n"
        assert json.loads((tmp_path / "offsets").read_text()) == {"a/journal": 23}
        assert (await gazctl.ok(*read, *more, "--from", "24h")).out == "new local"
    # Without the directory of the store, brokers give all of it.
    assert (await gazctl.ok(*read, BROKER_FILE_ROOT="")).out == "old new local"
