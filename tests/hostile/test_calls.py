"""Calls of every RPC with messages that are none, and with mutated ones: refused, and still served."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import grpc
import grpc.aio
import pytest

from gazette.auth import Claims
from gazette.client.append.appender import AppendParams
from gazette.protocol.pb import broker_pb2, consumer_pb2
from gazette.testing.broker import BrokerFixture, journal_spec
from gazette.testing.consumer import ConsumerFixture
from tests.hostile.conftest import Matrix, mutated
from tests.test_authorization import (
    ALL,
    AUTH,
    CORE_ERROR,
    JOURNAL_CALLS,
    SHARD_CALLS,
    broker,
    member,
    replicate_opening,
)

__all__ = ["broker", "member"]

BEFORE: Final = {"UNAUTHENTICATED", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED"}
"""All that a caller without a token is answered."""
MALFORMED: Final = (
    b"\xff\xff\xff",
    b"\x0a\x05",
    b"\x0a\x02\xff\xfe",
    b"\x80" * 64,
    b"\x0a\xff\xff\xff\xff\x0f",
    b"\x0b" * 10_000,
    b"\x00",
    b"{}",
    b"",
)
LOG_LINES_MAX: Final = 20


async def ask(channel: Any, path: str, messages: list[bytes], token: str) -> tuple[str, str]:
    """Return the code and the text that a call of raw messages ends with.

    A server that ends a call while a message is being written may lose its code on gRPC's way back.
    """
    while True:
        answer = await ask_once(channel, path, messages, token)
        if answer[1] != CORE_ERROR:
            return answer


async def ask_once(channel: Any, path: str, messages: list[bytes], token: str) -> tuple[str, str]:
    metadata = (("authorization", token),) if token else ()
    call = channel.stream_stream(path)(
        iter(messages), metadata=metadata, timeout=0.5 if token.startswith("Bearer") else 30.0
    )
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code().name, error.details() or ""
    return "OK", ""


async def attack(
    channel: Any, paths: dict[str, list[list[bytes]]], token: str, results: Matrix
) -> None:
    for path, inputs in paths.items():
        for messages in inputs:
            code, text = await ask(channel, path, messages, token)
            assert code != "INTERNAL", (path, messages, text)
            assert "Unexpected <class" not in text, (path, messages, text)
            if not token:
                assert code in BEFORE, (path, messages, code, text)
            results.count("served" if code == "OK" else "refused")


def seeds(calls: Any, opening: list[Any]) -> dict[str, list[bytes]]:
    """Return the messages of a valid call, by the name of the RPC."""
    found: dict[str, list[bytes]] = {}
    for name, row in calls.items():
        made = opening if name == "Replicate" else row.request()
        messages = made if isinstance(made, list) else [made]
        found[name] = [one.SerializeToString() for one in messages]
    return found


def paths_of(descriptor: Any, service: str) -> dict[str, str]:
    found = descriptor.services_by_name[service]
    return {one.name: f"/{found.full_name}/{one.name}" for one in found.methods}


def inputs_of(
    dice: random.Random, valid: dict[str, list[bytes]], paths: dict[str, str], count: int
) -> dict[str, list[list[bytes]]]:
    found: dict[str, list[list[bytes]]] = {}
    for name, path in paths.items():
        inputs = [[one] for one in MALFORMED]
        for _ in range(count):
            messages = list(valid[name])
            at = dice.randrange(len(messages))
            messages[at] = mutated(dice, messages[at])
            inputs.append(messages)
        found[path] = inputs
    return found


@pytest.mark.parametrize("with_token", [False, True], ids=["no token", "right token"])
async def test_brokers(
    broker: BrokerFixture,
    with_token: bool,
    dice: random.Random,
    scale: int,
    matrix: Callable[[str], Matrix],
    log_lines: Callable[[], list[str]],
) -> None:
    token = f"Bearer {AUTH.sign(Claims(ALL), 600)}" if with_token else ""
    results = matrix(f"calls of brokers x malformed and mutated, {token[:6] or 'no token'}")
    paths = paths_of(broker_pb2.DESCRIPTOR, "Journal")
    valid = seeds(JOURNAL_CALLS, replicate_opening(broker))
    async with grpc.aio.insecure_channel(broker.endpoint.removeprefix("http://")) as channel:
        await attack(channel, inputs_of(dice, valid, paths, 12 * scale), token, results)
        # Metadata that is too much.
        for size in (10_000, 60_000):
            code, _ = await ask(channel, paths["List"], [b""], "x" * size)
            assert code in BEFORE
            results.count("refused")
    assert len(log_lines()) <= LOG_LINES_MAX, log_lines()
    await broker.create(journal_spec("still/served"))
    appended = await broker.client.append(AppendParams("still/served"), b"yes")
    assert appended.commit.end == 3


@pytest.mark.parametrize("with_token", [False, True], ids=["no token", "right token"])
async def test_members(
    member: ConsumerFixture,
    with_token: bool,
    dice: random.Random,
    scale: int,
    matrix: Callable[[str], Matrix],
    log_lines: Callable[[], list[str]],
) -> None:
    token = f"Bearer {AUTH.sign(Claims(ALL), 600)}" if with_token else ""
    results = matrix(f"calls of members x malformed and mutated, {token[:6] or 'no token'}")
    paths = paths_of(consumer_pb2.DESCRIPTOR, "Shard")
    async with grpc.aio.insecure_channel(member.endpoint.removeprefix("http://")) as channel:
        inputs = inputs_of(dice, seeds(SHARD_CALLS, []), paths, 12 * scale)
        await attack(channel, inputs, token, results)
        assert len(log_lines()) <= LOG_LINES_MAX, log_lines()
        header = f"Bearer {AUTH.sign(Claims(ALL), 60)}"
        assert (await ask(channel, paths["List"], [b""], header))[0] == "OK"
