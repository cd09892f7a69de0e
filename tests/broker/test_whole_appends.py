"""Appends that arrive as a whole, many at a time, on a broker's own port: as if each had come alone."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import pytest

from gazette.auth import Capability, Claims, KeyedAuth
from gazette.broker.api.whole_append import WholeAppend
from gazette.client.append.appender import AppendParams
from gazette.cluster.etcd.client import Etcd
from gazette.http2 import frames as fr
from gazette.http2.headers import Fields, HeaderDecoder, encode_fields
from gazette.http2.messages import PREFIX_BYTES, prefixed
from gazette.http2.metadata import status_of
from gazette.protocol import label_set
from gazette.protocol.append_session import LEDGER_KEY, SessionAppend
from gazette.protocol.content import COMMIT, append_content
from gazette.protocol.fragment import Fragment
from gazette.protocol.label_set import EMPTY_LABELS, LabelSelector, LabelSet
from gazette.protocol.pb import broker_pb2
from gazette.protocol.route import Header
from gazette.protocol.status import Status
from gazette.runtime.clock import SystemClock
from gazette.testing.broker import BrokerFixture, journal_spec
from tests.support.fixed_cluster import FixedBroker
from tests.support.replicas import replica_of
from tools.bench.load import APPEND

JOURNAL = "a/journal"


class Wire:
    """Sends whole appends in one piece, and collects their answers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        self._decoder = HeaderDecoder()
        self._next = 1
        self._content: dict[int, bytes] = {}
        self._ended: dict[int, Fields] = {}
        self._acknowledged = False
        settings = {fr.INITIAL_WINDOW_SIZE: fr.WINDOW_MAX}
        room = fr.window_update(0, fr.WINDOW_MAX - fr.WINDOW_DEFAULT)
        writer.write(fr.PREFACE + fr.settings(settings) + room)

    @classmethod
    async def connect(cls, broker: BrokerFixture | FixedBroker) -> Wire:
        host, _, port = broker.endpoint.rpartition("/")[2].rpartition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    def send(
        self,
        *requests: tuple[broker_pb2.AppendRequest, bytes],
        token: str = "",
        session: SessionAppend | None = None,
    ) -> list[int]:
        """Send appends in one piece. Return the numbers of their streams."""
        out, streams = b"", []
        for opening, content in requests:
            stream, self._next = self._next, self._next + 2
            head = [
                (b":method", b"POST"),
                (b":scheme", b"http"),
                (b":path", APPEND.encode()),
                (b"content-type", b"application/grpc"),
            ]
            if token:
                head.append((b"authorization", f"Bearer {token}".encode()))
            for key, value in () if session is None else session.metadata():
                head.append((key.encode(), value.encode()))
            messages = (opening.SerializeToString(), append_content(content), COMMIT)
            body = b"".join(map(prefixed, messages))
            out += fr.frame(fr.HEADERS, fr.END_HEADERS, stream, encode_fields(head))
            out += fr.frame(fr.DATA, fr.END_STREAM, stream, body)
            streams.append(stream)
        self.writer.write(out)
        return streams

    async def answer(self, stream: int) -> broker_pb2.AppendResponse:
        """Return the response of a call that ends well."""
        code, details = await self.status(stream)
        assert code is grpc.StatusCode.OK, details
        return broker_pb2.AppendResponse.FromString(self._content[stream][PREFIX_BYTES:])

    async def status(self, stream: int) -> tuple[grpc.StatusCode, str]:
        while stream not in self._ended:
            await self._read_frame()
        return status_of(self._ended[stream])

    async def _read_frame(self) -> None:
        head = await self._reader.readexactly(fr.HEAD_BYTES)
        length, kind, flags, of = fr.read_head(head, 0)
        payload = await self._reader.readexactly(length)
        if kind == fr.DATA:
            self._content[of] = self._content.get(of, b"") + payload
        if kind == fr.HEADERS:
            fields = self._decoder.decode(payload)
            if flags & fr.END_STREAM:
                self._ended[of] = fields
        if kind == fr.PING:
            self._acknowledged = True

    async def ping(self) -> None:
        """Return once the server has read all that was sent."""
        self.writer.write(fr.ping(bytes(8), ack=False))
        self._acknowledged = False
        while not self._acknowledged:
            await self._read_frame()

    def trailing(self, stream: int) -> dict[str, str]:
        """Return the trailing metadata of a call that has ended."""
        return {name.decode(): value.decode() for name, value in self._ended[stream]}


@pytest.fixture(params=[1, 2])
async def brokers(
    request: pytest.FixtureRequest, etcd: Etcd, tmp_path: Path
) -> AsyncIterator[list[BrokerFixture]]:
    """Start brokers. The first is primary of a journal with as many replicas."""
    found = [
        await BrokerFixture.start(etcd, tmp_path, zone=f"zone-{index}", id=f"broker-{index}")
        for index in range(request.param)
    ]
    await found[0].create(journal_spec(JOURNAL, replication=request.param))
    route = (await found[0].client.list_journals(LabelSelector.of(name=JOURNAL))).journals[0].route
    found.sort(key=lambda one: one.service.process_id != route.primary_id)
    yield found
    for one in found:
        await one.stop()


@dataclass
class Model:
    """Applies appends to a journal, one after the other."""

    content: bytes = b""
    registers: LabelSet = EMPTY_LABELS
    appends: list[tuple[broker_pb2.AppendRequest, bytes]] = field(default_factory=list)
    expected: list[tuple[Status, int, LabelSet]] = field(default_factory=list)

    def random_append(self, rng: random.Random) -> None:
        kind, content = rng.random(), rng.randbytes(rng.choice((1, 1, 30, 300)))
        opening = broker_pb2.AppendRequest(journal=JOURNAL)
        value = str(rng.randrange(3))
        if kind < 0.1:
            opening.offset = len(self.content) + rng.choice((0, 0, 7))
        if 0.1 <= kind < 0.3:
            opening.check_registers.CopyFrom(LabelSelector.of(value=value).to_pb())
        if 0.2 <= kind < 0.4:
            opening.union_registers.CopyFrom(LabelSet.of(("value", value)).to_pb())
            opening.subtract_registers.CopyFrom(
                LabelSet.of(*(("value", str(one)) for one in range(3))).to_pb()
            )
        self.appends.append((opening, content))
        self.expected.append((self._apply(opening, content), len(self.content), self.registers))

    def _apply(self, opening: broker_pb2.AppendRequest, content: bytes) -> Status:
        check = LabelSelector.from_pb(opening.check_registers)
        if (
            opening.HasField("check_registers")
            and self.registers
            and not check.matches(self.registers)
        ):
            return Status.REGISTER_MISMATCH
        if opening.offset and opening.offset != len(self.content):
            return Status.WRONG_APPEND_OFFSET
        subtracted = LabelSet.from_pb(opening.subtract_registers)
        kept = label_set.subtract(self.registers, subtracted)
        self.registers = label_set.union(LabelSet.from_pb(opening.union_registers), kept)
        self.content += content
        return Status.OK


@pytest.mark.parametrize("seed", range(4))
async def test_they_are_answered_as_one_after_the_other(
    brokers: list[BrokerFixture], seed: int
) -> None:
    rng = random.Random(seed)
    wire = await Wire.connect(brokers[0])
    model = Model()
    for _ in range(6):
        model.appends, model.expected = [], []
        for _ in range(rng.choice((1, 5, 40, 100))):
            model.random_append(rng)
        streams = wire.send(*model.appends)
        for stream, (_, content), (status, end, registers) in zip(
            streams, model.appends, model.expected, strict=True
        ):
            response = await wire.answer(stream)
            assert response.status == status.value
            served_by = Header.from_pb(response.header).process_id
            assert served_by == brokers[0].service.process_id
            if status is Status.OK:
                commit = Fragment.from_pb(response.commit)
                assert (commit.begin, commit.end) == (end - len(content), end)
                assert commit.sum == hashlib.sha1(content).digest()
                assert response.total_chunks == 2
            if status is not Status.WRONG_APPEND_OFFSET:
                assert LabelSet.from_pb(response.registers) == registers
    wire.writer.close()
    for broker in brokers:
        index = replica_of(broker.service.context.resolver, JOURNAL).index
        assert index.end_offset == len(model.content)
        # The fragment of the first append may be in the store, and let go here.
        assert index.local
        for span in index.local:
            found = span.pread(span.begin, span.end - span.begin)
            assert found == model.content[span.begin : span.end]


async def test_a_journal_with_a_limited_rate_takes_all_in_time(etcd: Etcd, tmp_path: Path) -> None:
    """Those that follow lead in the task of the one before, and wait in tasks of their own."""
    broker = await BrokerFixture.start(etcd, tmp_path)
    await broker.create(journal_spec(JOURNAL, max_append_rate=2_000))
    wire = await Wire.connect(broker)
    opening = broker_pb2.AppendRequest(journal=JOURNAL)
    streams = wire.send(*[(opening, b"x" * 1_500)] * 3)
    responses = [await wire.answer(stream) for stream in streams]
    assert [one.commit.end for one in responses] == [1_500, 3_000, 4_500]
    assert [one.total_chunks for one in responses] == [2, 2, 2]
    assert sum(one.delayed_chunks for one in responses) > 0
    wire.writer.close()
    await broker.stop()


@pytest.mark.parametrize(
    ("opening", "answer"),
    [
        (broker_pb2.AppendRequest(journal="not/there"), Status.JOURNAL_NOT_FOUND),
        (broker_pb2.AppendRequest(journal=JOURNAL, offset=-1), "invalid Offset"),
        (broker_pb2.AppendRequest(journal=JOURNAL, suspend=9), "invalid Suspend"),  # type: ignore[arg-type]
    ],
)
async def test_what_must_be_refused_is_refused_by_the_handler(
    etcd: Etcd, tmp_path: Path, opening: broker_pb2.AppendRequest, answer: Status | str
) -> None:
    broker = await BrokerFixture.start(etcd, tmp_path)
    await broker.create(journal_spec(JOURNAL))
    wire = await Wire.connect(broker)
    bad, good = wire.send((opening, b"x"), (broker_pb2.AppendRequest(journal=JOURNAL), b"ok"))
    if isinstance(answer, Status):
        assert (await wire.answer(bad)).status == answer.value
    else:
        code, details = await wire.status(bad)
        assert code is grpc.StatusCode.UNKNOWN
        assert answer in details
    assert (await wire.answer(good)).commit.end == 2
    wire.writer.close()
    await broker.stop()


async def test_tokens_are_checked(etcd: Etcd, tmp_path: Path) -> None:
    auth = KeyedAuth(SystemClock(), (b"k" * 32,))
    broker = await BrokerFixture.start(etcd, tmp_path, auth=auth)
    await broker.create(journal_spec(JOURNAL))
    wire = await Wire.connect(broker)
    opening = broker_pb2.AppendRequest(journal=JOURNAL)
    may = auth.sign(Claims.of_journal(Capability.APPEND, JOURNAL), 60)
    other = auth.sign(Claims.of_journal(Capability.APPEND, "another/journal"), 60)
    reader = auth.sign(Claims.of_journal(Capability.READ, JOURNAL), 60)
    for token in ("", reader, "junk"):
        (stream,) = wire.send((opening, b"x"), token=token)
        assert (await wire.status(stream))[0] is grpc.StatusCode.UNAUTHENTICATED
    (stream,) = wire.send((opening, b"x"), token=other)
    assert (await wire.answer(stream)).status == Status.JOURNAL_NOT_FOUND.value
    (stream,) = wire.send((opening, b"yes"), token=may)
    assert (await wire.answer(stream)).commit.end == 3
    wire.writer.close()
    await broker.stop()


async def test_nothing_is_answered_without_a_lease(
    brokers: list[BrokerFixture], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = brokers[0]
    registers = LabelSet.of(("lock", "mine"))
    await broker.client.append(AppendParams(JOURNAL, union_registers=registers), b"before")
    wire = await Wire.connect(broker)

    class Gone:
        remaining_s = -1.0

    lease = broker.service.context.lease
    monkeypatch.setattr(lease, "_lease", Gone())
    # Another broker may have changed the registers.
    check = LabelSelector.parse("lock = other").to_pb()
    opening = broker_pb2.AppendRequest(journal=JOURNAL, check_registers=check)
    (stream,) = wire.send((opening, b"zero"))
    code, details = await wire.status(stream)
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "the broker's lease may have ended" in details
    opening = broker_pb2.AppendRequest(journal=JOURNAL)
    for stream in wire.send((opening, b"one"), (opening, b"two")):
        code, details = await wire.status(stream)
        assert code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN)
        assert "the broker's lease may have ended" in details
    monkeypatch.undo()
    wire.writer.close()


async def test_appends_that_wait_are_refused_by_a_broker_that_is_torn_down(
    etcd: Etcd, tmp_path: Path
) -> None:
    broker = await BrokerFixture.start(etcd, tmp_path)
    await broker.create(journal_spec(JOURNAL))
    context = broker.service.context
    replica = replica_of(context.resolver, JOURNAL)
    held = await replica.pipeline.take()
    wire = await Wire.connect(broker)
    opening = broker_pb2.AppendRequest(journal=JOURNAL)
    streams = wire.send(*[(opening, b"x")] * 3)
    while replica.line.waiting < 3:
        await SystemClock().sleep(0)
    await context.scope.stop()
    for stream in streams[1:]:
        assert (await wire.status(stream))[0] is grpc.StatusCode.UNAVAILABLE
    assert replica.line.waiting == 0
    assert context.scope.failure is None
    replica.pipeline.give(held)
    wire.writer.close()
    await broker.crash()


async def test_an_append_of_an_unknown_session_is_refused_before_it_waits(
    etcd: Etcd, tmp_path: Path
) -> None:
    """Its client repeats it, with the ledger that it learns. Only then it waits, once."""
    async with await BrokerFixture.start(etcd, tmp_path) as broker:
        await broker.create(journal_spec(JOURNAL))
        replica = replica_of(broker.service.context.resolver, JOURNAL)
        held = await replica.pipeline.take()
        wire = await Wire.connect(broker)
        opening = broker_pb2.AppendRequest(journal=JOURNAL)
        (waits,) = wire.send((opening, b"before"))
        session = SessionAppend("1" * 32, 1)
        (stream,) = wire.send((opening, b"x"), session=session)
        code, details = await wire.status(stream)
        assert code is grpc.StatusCode.ABORTED, details
        ledger = wire.trailing(stream)[LEDGER_KEY]
        (stream,) = wire.send((opening, b"x"), session=replace(session, ledger=ledger))
        while replica.line.waiting < 2:
            await SystemClock().sleep(0)
        replica.pipeline.give(held)
        assert (await wire.answer(waits)).commit.end == 6
        assert (await wire.answer(stream)).commit.end == 7
        wire.writer.close()


async def test_the_lease_is_looked_at_again_right_before_the_answer(
    etcd: Etcd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends between the commit and the answer: the outcome is unknown to the caller."""
    broker = await BrokerFixture.start(etcd, tmp_path)
    await broker.create(journal_spec(JOURNAL))
    await broker.client.append(AppendParams(JOURNAL), b"before")
    wire = await Wire.connect(broker)

    index = replica_of(broker.service.context.resolver, JOURNAL).index

    class Ending:
        @property
        def remaining_s(self) -> float:
            # It holds for the proposal and its acknowledgement, which shows the bytes to readers.
            return -1.0 if index.write_head == len(b"before" + b"one") else 1.0

    monkeypatch.setattr(broker.service.context.lease, "_lease", Ending())
    (stream,) = wire.send((broker_pb2.AppendRequest(journal=JOURNAL), b"one"))
    code, details = await wire.status(stream)
    assert code is grpc.StatusCode.UNKNOWN
    assert details.startswith("answer: the broker's lease may have ended")
    monkeypatch.undo()
    wire.writer.close()
    await broker.stop()


async def test_nothing_is_kept_of_an_append_whose_caller_leaves(etcd: Etcd, tmp_path: Path) -> None:
    """Its content was kept until its token expired: some tokens are valid for a year."""

    def kept() -> int:
        gc.collect()
        return sum(isinstance(each, WholeAppend) for each in gc.get_objects())

    auth = KeyedAuth(SystemClock(), (b"k" * 32,))
    broker = await BrokerFixture.start(etcd, tmp_path, auth=auth)
    await broker.create(journal_spec(JOURNAL))
    replica = replica_of(broker.service.context.resolver, JOURNAL)
    pipeline = await replica.pipeline.take()
    wire = await Wire.connect(broker)
    opening = broker_pb2.AppendRequest(journal=JOURNAL)
    token = auth.sign(Claims.of_journal(Capability.APPEND, JOURNAL), 3600)
    streams = wire.send(*[(opening, b"x")] * 3, token=token)
    while replica.line.waiting < 3:
        await SystemClock().sleep(0)
    assert kept() == 3
    for stream in streams:
        wire.writer.write(fr.rst_stream(stream, fr.FaultCode.CANCEL))
    while replica.line.waiting:
        await SystemClock().sleep(0)
    replica.pipeline.give(pipeline)
    (stream,) = wire.send((opening, b"y"), token=token)
    assert (await wire.answer(stream)).commit.end == 1
    assert kept() == 0
    wire.writer.close()
    await broker.stop()


async def test_a_wait_ends_with_the_caller_s_claims(etcd: Etcd, tmp_path: Path) -> None:
    """The leader's, and of those behind it. The journal has nothing of them."""
    auth = KeyedAuth(SystemClock(), (b"k" * 32,))
    broker = await BrokerFixture.start(etcd, tmp_path, auth=auth)
    await broker.create(journal_spec(JOURNAL))
    replica = replica_of(broker.service.context.resolver, JOURNAL)
    held = await replica.pipeline.take()
    wire = await Wire.connect(broker)
    opening = broker_pb2.AppendRequest(journal=JOURNAL)
    short = auth.sign(Claims.of_journal(Capability.APPEND, JOURNAL), -3)  # Within the leeway.
    long = auth.sign(Claims.of_journal(Capability.APPEND, JOURNAL), 60)
    leads, waits = wire.send((opening, b"x"), (opening, b"y"), token=short)
    (stays,) = wire.send((opening, b"z"), token=long)
    for stream in (leads, waits):
        code, details = await wire.status(stream)
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert "authorization expired during the append" in details
    replica.pipeline.give(held)
    assert (await wire.answer(stays)).commit.end == 1
    assert replica.line.waiting == 0
    wire.writer.close()
    await broker.stop()
