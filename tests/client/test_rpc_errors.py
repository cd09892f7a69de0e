"""Statuses and codes become errors that say what to do next."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest

from gazette.client.rpc.channel import Channels
from gazette.client.rpc.errors import (
    map_errors,
    rpc_error,
    shard_status_error,
    status_error,
    status_of,
)
from gazette.errors import (
    Broken,
    Closed,
    Fenced,
    GazetteError,
    Invalid,
    Moved,
    NotAllowed,
    NotFound,
    NotYet,
    Retryable,
    Unavailable,
)
from gazette.protocol.status import ShardStatus, Status
from gazette.runtime.tasks import TaskScope
from tests.facts import raises


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.OK])
def test_every_status_has_an_error_with_a_hint(status: Status) -> None:
    error = status_error(status, "detail", journal="a/journal")
    assert error.hint
    assert status_of(error) == status.name
    assert "a/journal" in str(error)
    assert "detail" in str(error)


@pytest.mark.parametrize(
    "status", [status for status in ShardStatus if status is not ShardStatus.OK]
)
def test_every_shard_status_has_an_error(status: ShardStatus) -> None:
    assert shard_status_error(status).facts["status"] == status.name


def test_errors_say_what_to_do() -> None:
    assert isinstance(status_error(Status.REGISTER_MISMATCH), Fenced)
    assert isinstance(status_error(Status.OFFSET_NOT_YET_AVAILABLE), NotYet)
    assert isinstance(status_error(Status.NOT_JOURNAL_BROKER), Moved)
    assert isinstance(status_error(Status.JOURNAL_NOT_FOUND), NotFound)
    assert isinstance(status_error(Status.NO_JOURNAL_PRIMARY_BROKER), Retryable)
    assert status_of(ValueError()) == status_of(GazetteError("x")) == ""


def call_error(code: grpc.StatusCode, details: str = "") -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details, None)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, Unavailable),
        (grpc.StatusCode.CANCELLED, Unavailable),
        (grpc.StatusCode.UNAUTHENTICATED, NotAllowed),
        (grpc.StatusCode.INVALID_ARGUMENT, Invalid),
        (grpc.StatusCode.UNKNOWN, Broken),
        (grpc.StatusCode.INTERNAL, Broken),
    ],
)
def test_codes_of_grpc_become_ours(code: grpc.StatusCode, kind: type[GazetteError]) -> None:
    with pytest.raises(kind) as caught, map_errors("Read", Channels(), journal="a/journal"):
        raise call_error(code, "text of the server")
    assert "Read: text of the server" in str(caught.value)
    assert caught.value.facts["code"] == code.name
    assert code.name in str(rpc_error(call_error(code), "Read"))


async def test_a_cancellation_of_the_channel_is_not_one_of_the_task() -> None:
    """It is retried, unless it was the client that was closed."""
    channels = Channels()
    with raises(Unavailable, says="Read"), map_errors("Read", channels):
        raise asyncio.CancelledError
    await channels.close()
    with pytest.raises(Closed), map_errors("Read", channels):
        raise asyncio.CancelledError


async def test_a_cancellation_of_the_task_passes() -> None:
    seen: list[BaseException] = []

    async def work() -> None:
        try:
            with map_errors("Read", Channels()):
                await asyncio.Event().wait()
        except BaseException as error:
            seen.append(error)
            raise

    async with TaskScope("test") as scope:
        task = scope.spawn(work(), name="work")
        await asyncio.wait([task], timeout=0)
        task.cancel()
    assert isinstance(seen[0], asyncio.CancelledError)
