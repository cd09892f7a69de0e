"""UUIDs of messages in ``gazctl``: their place, and values of others in it."""

from __future__ import annotations

import json

import pytest

from gazette.client.append.appender import AppendParams
from gazette.client.read.reader import ReadParams
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE, MESSAGE_UUID
from gazette.message.envelope_reader import CommittedReader
from gazette.message.message import Message
from gazette.message.publishing.client_publisher import ClientPublisher
from gazette.message.uuid import (
    ACK_TXN,
    CONTINUE_TXN,
    OUTSIDE_TXN,
    build_uuid,
    parse_text,
    parse_uuid,
    uuid_text,
)
from gazette.protocol.label_set import LabelSet
from gazette.testing.broker import BrokerFixture, journal_spec
from tests.gazctl.runner import Runner, offline

PLACE = "_meta.uuid"
RANDOM = "f81d4fae-7dec-41d0-a765-00a0c91e6bf6"
PLAIN, LABELLED = "orders/plain", "orders/labelled"
ALPHA = bytes([1, 0, 0, 0, 0, 1])
LINES = [{"uuid": RANDOM, "n": 1}, {"uuid": "A-17", "n": 2}, {"uuid": RANDOM, "n": 3}]


class Order(Message):
    n: int


@pytest.fixture
async def journals(broker: BrokerFixture) -> None:
    content = (CONTENT_TYPE, CONTENT_JSON_LINES)
    await broker.create(
        journal_spec(PLAIN, labels=LabelSet.of(content)),
        journal_spec(LABELLED, labels=LabelSet.of(content, (MESSAGE_UUID, PLACE))),
    )


def lines_of(documents: list[dict[str, object]]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in documents)


def read(text: str) -> list[dict[str, object]]:
    return [json.loads(one) for one in text.splitlines()]


@pytest.mark.usefixtures("journals")
async def test_lines_with_fields_of_their_own_are_refused_or_written_whole(gazctl: Runner) -> None:
    for document in LINES:
        refused = await gazctl("produce", PLAIN, stdin=lines_of([{"n": 0}, document]))
        assert refused.code != 0
        assert "line 2" in refused.err
        assert str(document["uuid"]) in refused.err
    assert read((await gazctl.ok("read", PLAIN)).out) == []
    for journal, flags in (
        (PLAIN, [f"--uuid={PLACE}"]),
        (LABELLED, []),
        (LABELLED, [f"--uuid={PLACE}"]),
    ):
        await gazctl.ok("produce", journal, *flags, "--one-transaction", stdin=lines_of(LINES))
    for journal, flags, count in ((PLAIN, [f"--uuid={PLACE}"], 1), (LABELLED, [], 2)):
        found = read((await gazctl.ok("read", journal, *flags)).out)
        uuids = [parse_text(one.pop("_meta")["uuid"]) for one in found]  # type: ignore[index]
        assert found == LINES * count
        assert {parse_uuid(one).flags for one in uuids} == {CONTINUE_TXN}
        assert len({*uuids}) == len(found)
    other = await gazctl("produce", LABELLED, "--uuid=id", stdin=lines_of(LINES))
    assert other.code != 0
    assert PLACE in other.err


@pytest.mark.usefixtures("journals")
async def test_messages_of_a_label_are_committed_by_their_place(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    texts = [
        uuid_text(build_uuid(ALPHA, clock, flags))
        for clock, flags in [(1, CONTINUE_TXN), (1, CONTINUE_TXN), (2, ACK_TXN), (3, CONTINUE_TXN)]
    ]
    content = lines_of([{"uuid": RANDOM, "_meta": {"uuid": text}} for text in texts])
    await broker.client.append(AppendParams(LABELLED), content)
    assert len(read((await gazctl.ok("read", LABELLED)).out)) == 1
    assert len(read((await gazctl.ok("read", LABELLED, "--uncommitted")).out)) == 3


@pytest.mark.usefixtures("journals")
async def test_a_client_goes_by_the_label_too(broker: BrokerFixture) -> None:
    async with ClientPublisher(broker.client) as publisher:
        await publisher.publish(LABELLED, dict(LINES[0]))
    async with (
        ClientPublisher(broker.client, uuid=PLACE) as publisher,
        publisher.transaction() as transaction,
    ):
        await transaction.publish(PLAIN, dict(LINES[1]))
    for journal, place, document in ((LABELLED, "", LINES[0]), (PLAIN, PLACE, LINES[1])):
        reader = CommittedReader(broker.client, ReadParams(journal), dict, uuid=place)
        (batch,) = [batch async for batch in reader.batches()]
        assert [(one.message["uuid"], one.message["n"]) for one in batch] == [
            (document["uuid"], document["n"])
        ]


# attach-uuids


def test_a_uuid_goes_into_the_object_of_each_line() -> None:
    documents: list[dict[str, object]] = [
        {"uuid": RANDOM, "big": 12345678901234567890123, "x": 1.10},
        {"_meta": {"by": "me", "uuid": None}},
        {"_meta": None, "text": "\u00e9"},
        {},
    ]
    result = offline("attach-uuids", f"--uuid={PLACE}", stdin=lines_of(documents))
    assert result.code == 0
    found = read(result.out)
    uuids = [parse_uuid(parse_text(one["_meta"].pop("uuid"))) for one in found]  # type: ignore[attr-defined]
    assert {one.flags for one in uuids} == {OUTSIDE_TXN}
    assert len({one.clock for one in uuids}) == len(found)
    assert found[0] == {**documents[0], "_meta": {}}
    assert found[1]["_meta"] == {"by": "me"}
    assert "1.10" in result.out or "1.1" in result.out
    assert "12345678901234567890123" in result.out


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"uuid":"%s"}' % RANDOM.encode(), RANDOM),
        (b'{"uuid":7}', "7"),
        (b"[1]", "object"),
        (b"{", "object"),
    ],
)
def test_a_line_that_takes_no_uuid_is_named(line: bytes, says: str) -> None:
    result = offline("attach-uuids", "--uuid=uuid", stdin=b'{"n":1}\n' + line + b"\n")
    assert result.code != 0
    assert "line 2" in result.err
    assert says in result.err


def test_a_place_that_cannot_be_and_two_forms_at_once_are_refused() -> None:
    assert "--uuid" in offline("attach-uuids", "--uuid=a..b", stdin=b"{}\n").err
    both = offline("attach-uuids", "--uuid=a", "--template={{.UUID}}{{.Line}}", stdin=b"{}\n")
    assert both.code != 0
    assert "--template" in both.err
