"""Objects with threads, loops or connections in a process that was forked since: an error, and no wait."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gazette.client.read.reader import ReadParams
from gazette.client.read.retry_reader import RetryReader
from gazette.cluster.etcd.client import Etcd
from gazette.errors import NotYet
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE, MESSAGE_TYPE
from gazette.protocol.label_set import LabelSet
from gazette.testing.broker import BrokerFixture, journal_spec

ONE = "words/part-000"
WORDS = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES), (MESSAGE_TYPE, "Word"))

FORKED = """
import asyncio
import faulthandler
import os
import sys
import threading

import gazette
from gazette.client import AppendService, Client
from gazette.client.append.appender import AppendParams
from gazette.client.read.reader import ReadParams
from gazette.errors import Closed
from gazette.runtime.tasks import BlockingPool, LoopThread

JOURNAL = "words/part-000"
address = sys.argv[1]


class Word(gazette.Message):
    word: str


def refused(call, *arguments):
    try:
        result = call(*arguments)
        if asyncio.iscoroutine(result):
            asyncio.run(result)
    except Closed as error:
        assert error.facts["parent"] == os.getppid(), error.facts
        assert "after the fork" in error.hint
    else:
        raise AssertionError(f"{call} returned {result!r}")


def in_child(*calls):
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(20, exit=True)
        try:
            for call in calls:
                call()
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def publisher():
    with gazette.open_publisher(address) as publisher:
        publisher.publish(JOURNAL, Word(word="first"))
        with publisher.transaction() as transaction:
            transaction.publish(JOURNAL, Word(word="second"))
            in_child(
                lambda: refused(publisher.publish, JOURNAL, Word(word="child")),
                lambda: refused(publisher.transaction().__enter__),
                lambda: refused(transaction.publish, JOURNAL, Word(word="child")),
                lambda: refused(transaction.__exit__, None, None, None),
                publisher.close,
            )
        publisher.publish(JOURNAL, Word(word="third"))


def loops_and_pools():
    loop, pool = LoopThread("loop of a test"), BlockingPool("pool of a test", 1)
    pool.submit(int).result()
    in_child(
        lambda: refused(loop.run, asyncio.sleep(0)),
        lambda: refused(pool.submit, int),
        lambda: refused(pool.run, int),
        loop.close,
        pool.close,
    )
    loop.run(asyncio.sleep(0))
    pool.submit(int).result()
    loop.close()
    pool.close()


async def make():
    client = Client(address)
    await client.list_journals()
    return client, AppendService(client)


def service_and_client():
    loop = LoopThread("loop of a test")
    client, service = loop.run(make())
    params = AppendParams(JOURNAL)
    line = b'{"word":"appended"}\\n'
    service.append(params, line).result()
    journal = service.journal(params)
    held, give_back = threading.Event(), threading.Event()

    def hold():
        with service.start_append(params) as txn:
            held.set()
            give_back.wait()
            txn.write(line)

    # At the fork another thread has the turn of the journal, which it never gives back in the child.
    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    held.wait()
    other = service.start_append(AppendParams("words/part-001"))
    other.write(line)
    in_child(
        lambda: refused(service.start_append, params),
        lambda: refused(service.append, params, line),
        lambda: refused(service.append, params, line * 100_000),
        lambda: refused(service.journal, params),
        lambda: refused(journal.enqueue, line),
        lambda: refused(journal.in_place, lambda *_: None, None, 0, 100),
        lambda: refused(service.pending_except, ""),
        lambda: refused(other.release),
        lambda: refused(client.list_journals),
        lambda: refused(client.append, params, line),
        lambda: refused(client.retry_reader(ReadParams(JOURNAL)).chunks().__anext__),
        lambda: asyncio.run(service.close()),
        lambda: asyncio.run(client.close()),
    )
    give_back.set()
    holder.join()
    other.roll_back()
    journal.enqueue(line).result()
    loop.run(service.close())
    loop.run(client.close())
    loop.close()


def same_loop():
    # The child runs the event loop that its parent has used before, with the parent's connections.
    loop = asyncio.new_event_loop()
    client, params = loop.run_until_complete(opened()), AppendParams(JOURNAL)

    def appends(word):
        loop.run_until_complete(client.append(params, b'{"word":"%s"}\\n' % word))

    appends(b"before")
    in_child(lambda: refused(appends, b"child"))
    appends(b"after")
    loop.run_until_complete(client.close())
    loop.close()


async def opened():
    return Client(address)


{
    "publisher": publisher,
    "loops": loops_and_pools,
    "service": service_and_client,
    "same loop": same_loop,
}[sys.argv[2]]()
"""


@pytest.fixture
async def broker(etcd: Etcd, tmp_path: Path) -> AsyncIterator[BrokerFixture]:
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        await broker.create(journal_spec(ONE, labels=WORDS))
        yield broker


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("publisher", ["first", "second", "third"]),
        ("loops", []),
        ("service", ["appended"] * 3),
        ("same loop", ["before", "after"]),
    ],
)
async def test_a_forked_process_gets_an_error_and_its_parent_goes_on(
    broker: BrokerFixture, part: str, words: list[str]
) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", "-c", FORKED, broker.endpoint, part),
        stderr=subprocess.PIPE,
    )
    _, stderr = await process.communicate()
    assert process.returncode == 0, stderr.decode()
    assert stderr == b""
    reader = RetryReader(broker.client, ReadParams(ONE))
    content = b""
    with contextlib.suppress(NotYet):
        async for chunk in reader.chunks():
            content += chunk
    for word in words:
        assert content.count(f'"{word}"'.encode()) == words.count(word)
    assert b"child" not in content
