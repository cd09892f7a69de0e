"""ListFragments and FragmentStoreHealth against a real broker."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette.auth import Capability, Claims, KeyedAuth, bearer
from gazette.broker.api.fragments import select_page
from gazette.client.append.appender import AppendParams
from gazette.cluster.etcd.client import Etcd
from gazette.protocol.fragment import Codec, Fragment
from gazette.protocol.journal import JournalFlag, Suspend, SuspendLevel
from gazette.protocol.label_set import LabelSelector
from gazette.protocol.pb import broker_pb2
from gazette.protocol.status import Status
from gazette.protocol.text import duration
from gazette.runtime.clock import SystemClock
from gazette.testing.broker import STORE, BrokerFixture, journal_spec
from tests.facts import call_refused

JOURNAL = "a/journal"


@pytest.fixture
async def broker(etcd: Etcd, tmp_path: Path) -> AsyncIterator[BrokerFixture]:
    async with await BrokerFixture.start(etcd, tmp_path, lease_ttl_s=60.0) as broker:
        yield broker


async def fragments(broker: BrokerFixture, *, token: str = "", **fields: Any) -> Any:
    request = broker_pb2.FragmentsRequest(**{"journal": JOURNAL, **fields})
    stub = broker.client.channels.journal(broker.endpoint)
    return await stub.ListFragments(request, metadata=bearer(token))


async def health(broker: BrokerFixture, store: str, *, token: str = "", **fields: Any) -> Any:
    request = broker_pb2.FragmentStoreHealthRequest(fragment_store=store, **fields)
    stub = broker.client.channels.journal(broker.endpoint)
    return await stub.FragmentStoreHealth(request, metadata=bearer(token))


def store(broker: BrokerFixture, begin: int, end: int, mod_time: int, postfix: str = "") -> None:
    content = bytes(end - begin)
    fragment = Fragment(
        JOURNAL, begin, end, hashlib.sha1(content).digest(), Codec.NONE, path_postfix=postfix
    )
    path = broker.file_root / "fragments" / fragment.content_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    os.utime(path, (mod_time, mod_time))


def spans(response: Any) -> list[tuple[int, int]]:
    return [(one.spec.begin, one.spec.end) for one in response.fragments]


# --- ListFragments


async def test_stored_and_local_fragments_are_listed_by_time_and_page(
    broker: BrokerFixture,
) -> None:
    for begin, mod_time in ((0, 100), (10, 200), (20, 300), (30, 400)):
        store(broker, begin, begin + 10, mod_time, postfix="date=x" if begin else "")
    await broker.create(journal_spec(JOURNAL))
    await broker.client.append(AppendParams(JOURNAL, offset=40), b"local")

    everything = [(0, 10), (10, 20), (20, 30), (30, 40), (40, 45)]
    asked: tuple[tuple[dict[str, Any], list[tuple[int, int]], int], ...] = (
        ({}, everything, 0),
        ({"begin_mod_time": 300}, everything[2:], 0),
        ({"begin_mod_time": 200, "end_mod_time": 300}, everything[1:3], 0),
        ({"end_mod_time": 300}, everything[:3], 0),
        ({"page_limit": 2}, everything[:2], 20),
        ({"page_limit": 2, "next_page_token": 20}, everything[2:4], 40),
        ({"page_limit": 2, "next_page_token": 40}, everything[4:], 0),
        ({"page_limit": 5}, everything, 0),
        ({"next_page_token": 11}, everything[2:], 0),
        ({"next_page_token": 99}, [], 0),
    )
    for fields, expected, token in asked:
        response = await fragments(broker, **fields)
        assert response.status == Status.OK
        assert (spans(response), response.next_page_token) == (expected, token), fields
    first, second, *_, local = (await fragments(broker)).fragments
    assert (first.spec.mod_time, first.spec.backing_store) == (100, STORE)
    assert second.spec.path_postfix == "date=x"
    assert (local.spec.mod_time, local.spec.backing_store) == (0, "")
    assert (await fragments(broker)).header.route.primary == 0


async def test_urls_are_signed_for_what_is_stored_if_they_are_asked_for(
    broker: BrokerFixture,
) -> None:
    store(broker, 0, 10, 100)
    await broker.create(journal_spec(JOURNAL))
    await broker.client.append(AppendParams(JOURNAL, offset=10), b"local")
    plain = await fragments(broker)
    assert [one.signed_url for one in plain.fragments] == ["", ""]
    signed = await fragments(broker, signatureTTL=duration.to_pb(duration.MINUTE))
    urls = [one.signed_url for one in signed.fragments]
    assert urls[0].startswith("file:///fragments/a/journal/0000000000000000-")
    assert urls[1] == ""


async def test_statuses(broker: BrokerFixture) -> None:
    await broker.create(
        journal_spec("write/only", flags=JournalFlag.O_WRONLY),
        journal_spec("fully/suspended", suspend=Suspend(SuspendLevel.FULL, 5)),
    )
    for journal, status in (
        ("no/such", Status.JOURNAL_NOT_FOUND),
        ("write/only", Status.NOT_ALLOWED),
        ("fully/suspended", Status.SUSPENDED),
    ):
        response = await fragments(broker, journal=journal)
        assert response.status == status
        assert response.header.process_id.suffix == "broker-one"
    with call_refused(grpc.StatusCode.UNKNOWN, "PageLimit", "10001") as caught:
        await fragments(broker, page_limit=10_001)
    assert caught.value.code() is grpc.StatusCode.UNKNOWN


async def test_requests_are_proxied_and_authorized(etcd: Etcd, tmp_path: Path) -> None:
    auth = KeyedAuth.parse(SystemClock(), base64.b64encode(b"k" * 32).decode())
    async with (
        await BrokerFixture.start(
            etcd, tmp_path, id="broker-one", auth=auth, lease_ttl_s=60.0
        ) as one,
        await BrokerFixture.start(
            etcd, tmp_path, id="broker-two", auth=auth, journal_limit=0, lease_ttl_s=60.0
        ) as two,
    ):
        store(one, 0, 10, 100)
        await one.create(journal_spec(JOURNAL))
        await two.settled(JOURNAL)
        token = auth.sign(Claims.of_journal(Capability.READ, JOURNAL), 60)
        response = await fragments(two, token=token, journal=f"{JOURNAL};meta")
        assert spans(response) == [(0, 10)]
        assert response.header.process_id.suffix == "broker-one"
        refused = await fragments(two, token=token, do_not_proxy=True)
        assert refused.status == Status.NOT_JOURNAL_BROKER
        narrow = auth.sign(Claims(Capability.READ, LabelSelector.of(name="b/other")), 60)
        assert (await fragments(two, token=narrow)).status == Status.JOURNAL_NOT_FOUND
        for token in ("", auth.sign(Claims(Capability.APPEND), 60)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await fragments(two, token=token)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


fragment_lists = st.lists(st.tuples(st.integers(1, 5), st.sampled_from([0, 1, 2, 3])), max_size=12)


@given(
    fragment_lists,
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(0, 4),
)
def test_pages_add_up_to_what_the_filter_lets_through(
    shapes: list[tuple[int, int]], limit: int, begin: int, end: int
) -> None:
    """However it is paged, the same fragments come, once each and in order."""
    everything: list[Fragment] = []
    at = 0
    for length, mod_time in shapes:
        everything.append(Fragment(JOURNAL, at, at + length, mod_time=mod_time))
        at += length
    request = broker_pb2.FragmentsRequest(begin_mod_time=begin, end_mod_time=end)

    def wanted(one: Fragment) -> bool:
        late_enough = not one.mod_time or one.mod_time >= begin
        early_enough = end == 0 or 0 < one.mod_time <= end
        return late_enough and early_enough

    got: list[Fragment] = []
    token = 0
    while True:
        page, token = select_page([one for one in everything if one.begin >= token], request, limit)
        assert len(page) <= limit
        got += page
        if token == 0:
            break
    assert got == [one for one in everything if wanted(one)]


# --- FragmentStoreHealth


async def test_a_healthy_store_is_ok_and_nothing_is_left_of_the_delete_probe(
    broker: BrokerFixture,
) -> None:
    response = await health(broker, STORE, check_delete=True, check_delete_prefix="a/b/")
    assert (response.status, response.store_health_error) == (Status.OK, "")
    assert response.header.process_id.suffix == "broker-one"
    assert response.header.route.primary == -1
    left = [path for path in broker.file_root.rglob("*") if "probe" in path.name]
    assert left == []


async def test_what_is_wrong_with_a_store_is_said(broker: BrokerFixture) -> None:
    response = await health(broker, "file:///missing/")
    assert response.status == Status.FRAGMENT_STORE_UNHEALTHY
    assert "invalid file store directory" in response.store_health_error
    response = await health(broker, "s3://bucket/prefix/?unknown=1")
    assert response.status == Status.FRAGMENT_STORE_UNHEALTHY
    assert response.store_health_error
    with pytest.raises(grpc.aio.AioRpcError, match="FragmentStore"):
        await health(broker, "file:///no-slash")
    with pytest.raises(grpc.aio.AioRpcError, match="CheckDeletePrefix"):
        await health(broker, STORE, check_delete_prefix="a/")


async def test_a_store_that_no_journal_uses_stays_out_of_use(broker: BrokerFixture) -> None:
    stores = broker.service.context.blob_stores
    for check_delete in (False, True):
        response = await health(broker, STORE, check_delete=check_delete)
        assert (response.status, response.store_health_error) == (Status.OK, "")
        assert stores.in_use(STORE) is None
    # Case: one that is in use. The answer is its latest check.
    await broker.create(journal_spec(JOURNAL))
    used = stores.get(STORE)
    await used.wait_healthy()
    used.set_health("no permission")
    response = await health(broker, STORE)
    assert response.store_health_error == "no permission"


async def test_a_failing_delete_probe_is_unhealthy(broker: BrokerFixture) -> None:
    assert (await health(broker, STORE)).status == Status.OK
    (broker.file_root / "fragments" / "blocked").write_text("a file where a directory must be")
    response = await health(broker, STORE, check_delete=True, check_delete_prefix="blocked/")
    assert response.status == Status.FRAGMENT_STORE_UNHEALTHY
    assert response.store_health_error.startswith("delete-probe PUT failed:")
