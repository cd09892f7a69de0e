"""Appends that brokers refuse: a journal that a broker does not know yet, and refusals after an attempt with
an unknown outcome."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from gazette.client.append.appender import AppendParams, may_be_appended
from gazette.client.append.service import AppendService
from gazette.client.client import Client
from gazette.client.waits import LAG_S
from gazette.errors import GazetteError, NotFound
from gazette.protocol.status import Status
from gazette.runtime.tasks import await_future
from tests.facts import raises
from tests.support.instant_clock import InstantClock
from tests.support.stub_broker import Fail, LoseReply, Reply, StubBroker

JOURNAL = AppendParams("a/journal")

Append = Callable[[AppendParams, bytes], Awaitable[Any]]


@pytest.fixture(params=["client", "service"])
def append(request: pytest.FixtureRequest, client: Client, service: AppendService) -> Append:
    """Return both doors for an append in turn."""
    if request.param == "client":
        return client.append

    async def appended(params: AppendParams, content: bytes) -> Any:
        return await await_future(service.append(params, content))

    return appended


async def test_a_broker_that_lags_behind_etcd_is_asked_again(
    append: Append, broker: StubBroker
) -> None:
    """It may not know a journal that was created a moment ago."""
    broker.on_append(*[Reply(Status.JOURNAL_NOT_FOUND)] * 5)
    assert (await append(JOURNAL, b"x")).commit.end == 1


async def test_a_journal_that_stays_unknown_is_reported_in_time(
    append: Append, broker: StubBroker, instant: InstantClock
) -> None:
    broker.missing.add(JOURNAL.journal)
    with raises(NotFound, journal=JOURNAL.journal, status="JOURNAL_NOT_FOUND") as raised:
        await append(JOURNAL, b"x")
    assert LAG_S <= sum(instant.slept) < LAG_S + 1
    assert not may_be_appended(raised.value)


async def test_other_answers_begin_the_time_of_a_lagging_broker_again(
    append: Append, broker: StubBroker, instant: InstantClock
) -> None:
    """Brokers that start one after the other may all lag."""
    unknown, unassigned = (
        Reply(Status.JOURNAL_NOT_FOUND),
        Reply(Status.NO_JOURNAL_PRIMARY_BROKER),
    )
    broker.on_append(unknown, *[unassigned] * 8, unknown)
    assert (await append(JOURNAL, b"x")).commit.end == 1
    assert sum(instant.slept) > LAG_S


@pytest.mark.parametrize("outcome", [LoseReply(), Fail()], ids=["appended", "not appended"])
@pytest.mark.parametrize(
    "refusal",
    [
        Reply(Status.REGISTER_MISMATCH),
        Reply(Status.WRONG_APPEND_OFFSET),
        Reply(Status.NOT_ALLOWED),
        Fail(grpc.StatusCode.PERMISSION_DENIED),
    ],
    ids=str,
)
async def test_a_refusal_after_an_attempt_without_an_answer_says_so(
    append: Append, broker: StubBroker, outcome: LoseReply | Fail, refusal: Reply | Fail
) -> None:
    """Otherwise a caller would append again what is there already."""
    broker.on_append(outcome, Reply(Status.NO_JOURNAL_PRIMARY_BROKER), refusal)
    with raises(GazetteError, earlier_attempt="may have been appended") as raised:
        await append(JOURNAL, b"x")
    assert may_be_appended(raised.value)


async def test_a_refusal_after_refusals_says_that_nothing_is_appended(
    append: Append, broker: StubBroker
) -> None:
    broker.on_append(Reply(Status.NO_JOURNAL_PRIMARY_BROKER), Reply(Status.NOT_ALLOWED))
    with pytest.raises(GazetteError) as raised:
        await append(JOURNAL, b"x")
    assert not may_be_appended(raised.value)
    assert "earlier_attempt" not in raised.value.facts
