"""Brokers and members with a provider: its tokens are taken in all calls, beside those of shared keys."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import pytest

from gazette.auth import Capability, Claims, StaticToken, bearer
from gazette.client.append.appender import AppendParams
from gazette.client.client import Client
from gazette.client.journals import JournalChange
from gazette.client.oidc.verifier import OidcAuth
from gazette.cluster.etcd.client import Etcd
from gazette.errors import NotAllowed
from gazette.protocol.pb import broker_pb2, consumer_pb2
from gazette.protocol.pb.broker_pb2_grpc import JournalStub
from gazette.protocol.pb.consumer_pb2_grpc import ShardStub
from gazette.protocol.route import grpc_target
from gazette.runtime.clock import SystemClock
from gazette.testing.broker import BrokerFixture, journal_spec
from gazette.testing.consumer import ConsumerFixture
from tests.consumer.apps import Tally
from tests.facts import raises
from tests.oidc.conftest import auth_of
from tests.support.oidc_provider import Provider, SigningKey

JOURNAL = "orders/new"


@pytest.fixture
def provider(keys: list[SigningKey]) -> Iterator[Provider]:
    with Provider(SystemClock(), keys[:2]).serving() as provider:
        yield provider


@pytest.fixture
def auth(provider: Provider, roles: Path) -> OidcAuth:
    return auth_of(provider, roles, SystemClock())


@pytest.fixture
async def brokers(etcd: Etcd, tmp_path: Path, auth: OidcAuth) -> AsyncIterator[list[BrokerFixture]]:
    first = await BrokerFixture.start(etcd, tmp_path, id="broker-1", auth=auth)
    async with first, await BrokerFixture.start(etcd, tmp_path, id="broker-2", auth=auth) as second:
        yield [first, second]


def client_of(broker: BrokerFixture, token: str) -> Client:
    return Client(broker.endpoint, signer=StaticToken(token))


async def test_a_caller_of_the_provider(brokers: list[BrokerFixture], provider: Provider) -> None:
    """Brokers sign among themselves by shared keys: a caller needs no right to replicate."""
    async with client_of(brokers[0], provider.token()) as operator:
        spec = replace(journal_spec(JOURNAL), replication=2)
        await operator.apply_journals([JournalChange(spec)])
        for broker in brokers:
            async with client_of(broker, provider.token()) as appender:
                await appender.append(AppendParams(JOURNAL), b"a")
    async with client_of(brokers[1], provider.token(groups=["orders"])) as reader:
        assert [listed.spec.name for listed in (await reader.list_journals()).journals] == [JOURNAL]
        with raises(NotAllowed, says="APPEND"):
            await reader.append(AppendParams(JOURNAL), b"b")
    async with client_of(brokers[1], provider.token(groups=["sales"])) as other:
        assert (await other.list_journals()).journals == ()
    url = brokers[0].endpoint.rstrip("/") + f"/{JOURNAL}"
    async with httpx.AsyncClient() as http:
        right = {"Authorization": f"Bearer {provider.token(groups=['orders'])}"}
        assert (await http.get(f"{url}?offset=0", headers=right)).content == b"aa"
        wrong = {"Authorization": f"Bearer {provider.token(aud='other')}"}
        assert (await http.get(f"{url}?offset=0", headers=wrong)).status_code == 401


async def code_of(endpoint: str, token: str) -> grpc.StatusCode:
    """Return the code of a call with a token."""
    async with grpc.aio.insecure_channel(grpc_target(endpoint)[0]) as channel:
        call = JournalStub(channel).List(broker_pb2.ListRequest(), metadata=bearer(token))
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_keys_that_are_not_known_now_are_no_refusal(
    etcd: Etcd, tmp_path: Path, keys: list[SigningKey], roles: Path
) -> None:
    """Clients repeat a call that is answered so. A token that is wrong is refused for good."""
    provider = Provider(SystemClock(), keys[:1])
    with provider.serving():
        pass
    away = auth_of(provider, roles, SystemClock())
    async with await BrokerFixture.start(etcd, tmp_path, auth=away) as broker:
        token = provider.token()
        assert await code_of(broker.endpoint, token) is grpc.StatusCode.UNAVAILABLE
        text = away.sign(Claims(Capability.LIST), 60)
        assert await code_of(broker.endpoint, text) is grpc.StatusCode.OK
        async with httpx.AsyncClient() as http:
            url, headers = broker.endpoint.rstrip("/"), {"Authorization": f"Bearer {token}"}
            answers = [
                await http.get(f"{url}/{JOURNAL}?offset=0", headers=headers),
                await http.post(f"{url}/v1/journals/list", headers=headers, json={}),
            ]
        assert [answer.status_code for answer in answers] == [503, 503]
        assert provider.issuer in answers[1].json()["error"]["message"]


async def test_a_member_of_an_application(
    etcd: Etcd, tmp_path: Path, brokers: list[BrokerFixture], auth: OidcAuth, provider: Provider
) -> None:
    member = await ConsumerFixture.start(etcd, brokers[0], Tally(), tmp_path, auth=auth)
    try:
        async with grpc.aio.insecure_channel(grpc_target(member.endpoint)[0]) as channel:
            for token, code in (
                (provider.token(), grpc.StatusCode.OK),
                (provider.token(aud="other"), grpc.StatusCode.UNAUTHENTICATED),
            ):
                call = ShardStub(channel).List(consumer_pb2.ListRequest(), metadata=bearer(token))
                assert await call.code() is code
    finally:
        await member.crash()
