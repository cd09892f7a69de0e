"""The rate at which one process publishes small messages: ``python benchmarks/bench_publish.py [--json]``.

Messages of about a hundred bytes go from one thread, over some partitions, through a `Publisher` and
the real `AppendService`, in gRPC to a broker in another process that keeps them in memory. Beside it
the ceilings of the same run: encoding alone, and publishing into a service that drops everything.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Self, TypeAlias

import msgspec

from gazette.client.append.appender import AppendParams
from gazette.client.append.service import AppendService
from gazette.client.client import Client
from gazette.labels import CONTENT_JSON_LINES
from gazette.message.mapping import Mapping, Partition, Partitions, modulo_mapping
from gazette.message.message import Message
from gazette.message.publisher import Appends, Publisher
from gazette.message.uuid import Clock, clock_at
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import BlockingPool, OpFuture, resolved
from tests.support.stub_broker import StubBroker

BATCH = 1000


class Word(Message):
    word: str
    count: int


class Dropping:
    """An append service that drops everything."""

    must_wait = False

    def journal(self, params: AppendParams, /) -> Self:
        return self

    def enqueue(self, content: bytearray, /) -> OpFuture[Any]:
        return DONE

    def in_place(
        self, write: Callable[[Any, int, bytearray], None], flags: int, length_max: int, /
    ) -> Callable[[Any], OpFuture[Any]]:
        buffer = bytearray()

        def enqueue_item(item: Any) -> OpFuture[Any]:
            write(item, flags, buffer)
            buffer.clear()
            return DONE

        return enqueue_item

    def await_room(self) -> None:
        pass


DONE: OpFuture[Any] = resolved(None)


def words_of(count: int) -> list[Word]:
    return [Word(f"message-{number % 5000:05d}-text", number) for number in range(count)]


def publisher_of(appends: Appends) -> Publisher:
    clock = Clock(clock_at(1_700_000_000 * 10**9))
    return Publisher(appends, producer=b"\x01bench", clock=clock)


def mapping_of(partitions: int) -> Mapping[Word]:
    current = Partitions(
        Partition(f"bench/part-{number:03d}", CONTENT_JSON_LINES) for number in range(partitions)
    )
    return modulo_mapping(lambda: current, lambda message: message.word)


def uncommitted(publisher: Publisher, mapping: Mapping[Word], messages: list[Word]) -> None:
    publish = publisher.publish_uncommitted
    for begin in range(0, len(messages), 100_000):
        for message in messages[begin : begin + 100_000]:
            publish(mapping, message)
        publisher.build_ack_intents()


def committed(publisher: Publisher, mapping: Mapping[Word], messages: list[Word]) -> None:
    publish = publisher.publish_committed
    for message in messages:
        publish(mapping, message)


def in_batches(publisher: Publisher, mapping: Mapping[Word], messages: list[Word]) -> None:
    for begin in range(0, len(messages), BATCH):
        publisher.publish_committed_batch(mapping, messages[begin : begin + BATCH])


Way: TypeAlias = Callable[[Publisher, Mapping[Word], list[Word]], None]
WAYS: dict[str, Way] = {
    "publish_uncommitted": uncommitted,
    "publish_committed": committed,
    f"publish_committed_batch of {BATCH}": in_batches,
}


def best(repeat: int, work: Callable[[], object]) -> float:
    """Return the seconds of the fastest run."""
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


async def serve() -> None:
    async with StubBroker() as broker:
        print(broker.endpoint, flush=True)
        while True:
            await SystemClock().sleep(1)
            for journal in broker.journals.values():
                # Keep memory flat.
                journal.begin, length = journal.end, len(journal.content)
                del journal.content[:length]
            broker.appends.clear()
            broker.commits.clear()


async def through_broker(arguments: argparse.Namespace, messages: list[Word]) -> dict[str, float]:
    """Return the seconds until everything is in the journals, by way of publishing."""
    broker = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--serve", stdout=asyncio.subprocess.PIPE
    )
    assert broker.stdout is not None
    endpoint = (await broker.stdout.readline()).decode().strip()
    pool = BlockingPool("bench", 1)
    seconds = {}
    try:
        async with Client(endpoint) as client:
            for name, way in WAYS.items():
                service = AppendService(client)
                publisher = publisher_of(service)
                mapping = mapping_of(arguments.partitions)

                def work(
                    way: Way = way,
                    service: AppendService = service,
                    publisher: Publisher = publisher,
                    mapping: Mapping[Word] = mapping,
                ) -> None:
                    way(publisher, mapping, messages)
                    for future in service.pending_except(""):
                        future.result(120)

                seconds[name] = await pool.run(best, arguments.repeat, work)
                await service.close()
    finally:
        broker.terminate()
        await broker.wait()
        pool.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--partitions", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve())
        return
    messages = words_of(arguments.messages)
    count = len(messages)
    publisher = publisher_of(Dropping())
    mapping = mapping_of(arguments.partitions)
    encode = msgspec.json.Encoder().encode
    figures = {
        "encode only": count
        / best(arguments.repeat, lambda: [encode(message) for message in messages])
    }
    for name, way in WAYS.items():
        seconds = best(arguments.repeat, partial(way, publisher, mapping, messages))
        figures[f"{name}, dropped"] = count / seconds
    for name, seconds in asyncio.run(through_broker(arguments, messages)).items():
        figures[f"{name}, to a broker"] = count / seconds
    size = len(encode(messages[0])) + 1
    if arguments.json:
        print(json.dumps({"bytes": size, "messages_per_s": figures}))
        return
    print(f"messages of {size} bytes, over {arguments.partitions} partitions")
    for name, rate in figures.items():
        print(f"{name:50s} {rate / 1e3:9.0f} k messages/s")


if __name__ == "__main__":
    main()
