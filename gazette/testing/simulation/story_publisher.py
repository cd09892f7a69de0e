"""Publishes the messages of a story: alone, twice, in transactions, or in transactions that never commit."""

from __future__ import annotations

import random
from typing import Any

from gazette.client.append.appender import AppendParams
from gazette.client.append.service import AppendService
from gazette.client.read.reader import ReadParams
from gazette.client.read.retry_reader import RetryReader
from gazette.message.publisher import Publisher
from gazette.runtime.tasks import await_future
from gazette.testing.simulation.loop import NodeClock, SimNode
from gazette.testing.simulation.storage import Threads
from gazette.testing.simulation.story import Send, SendForm


class StoryPublisher:
    """Publishes the messages of one producer, at their times."""

    def __init__(
        self,
        node: SimNode,
        cluster: Any,
        broker: str,
        sends: list[Send],
        acknowledged: dict[str, int],
        seed: int,
    ) -> None:
        """Create a publisher. It notes the ends of acknowledged messages in ``acknowledged``, by journal."""
        self._node = node
        self._cluster = cluster
        self._broker = broker
        self._sends = sends
        self._acknowledged = acknowledged
        self._rng = random.Random(seed)
        self.clock = NodeClock(cluster.loop, node)
        cluster.clocks.append(self.clock)
        self._open: list[Send] = []

    async def run(self) -> None:
        await self._node.spawn(self._run(), "publisher")

    async def _run(self) -> None:
        cluster = self._cluster
        self._client = cluster.client(self._node, self._broker)
        threads = Threads(self._node, random.Random(self._rng.getrandbits(64)))
        self._appends = AppendService(self._client, pool=threads.pool("spill", 1))
        self._publisher = self._unfinished = self._new_publisher()
        self._unfinished = self._new_publisher()
        for send in self._sends:
            await self.clock.sleep(max(0.0, send.at - cluster.loop.now))
            if send.form is not SendForm.TOGETHER:
                await self._commit()
            await self._send(send)
        await self._commit()
        await self._appends.flush()

    def _new_publisher(self) -> Publisher:
        return Publisher.standalone(self._appends, self.clock, self._rng)

    async def _send(self, send: Send) -> None:
        message, mapping = send.sent.message, send.sent.mapping
        match send.form:
            case SendForm.TOGETHER:
                self._publisher.publish_uncommitted(mapping, message)
                self._open.append(send)
                if len(self._open) > 3:
                    await self._commit()
            case SendForm.UNFINISHED:
                self._unfinished.publish_uncommitted(mapping, message)
                self._unfinished.flush()
                self._unfinished = self._new_publisher()
            case SendForm.MALFORMED:
                journal = mapping(message).journal
                await self._append(journal, b"no message\n")
            case _:
                result = await await_future(self._publisher.publish_committed(mapping, message))
                begin, end = result.commit.begin, result.commit.end
                journal = mapping(message).journal
                self._note(journal, end)
                if send.form is SendForm.TWICE:
                    params = ReadParams(journal, begin, block=True, end_offset=end)
                    reader = RetryReader(self._client, params, clock=self.clock)
                    content = await reader.read(end - begin)
                    reader.close()
                    await self._append(journal, content)

    async def _append(self, journal: str, content: bytes) -> int:
        """Append, and return the end of the appended bytes."""
        result = await await_future(self._appends.append(AppendParams(journal), content))
        return int(result.commit.end)

    def _note(self, journal: str, end: int) -> None:
        self._acknowledged[journal] = max(end, self._acknowledged.get(journal, 0))

    async def _commit(self) -> None:
        """Commit the messages that were sent together."""
        if self._open:
            self._open = []
            for journal, intent in self._publisher.build_ack_intents().items():
                self._note(journal, await self._append(journal, intent))
