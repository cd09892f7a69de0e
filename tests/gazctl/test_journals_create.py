"""`gazctl journals create`: journals without YAML."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette.client.append.appender import AppendParams
from gazette.errors import Invalid
from gazette.gazctl.journals.create import labels_of
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.protocol.label_set import LabelSet
from gazette.testing.broker import BrokerFixture, journal_spec
from tests.gazctl.runner import Runner

STORE = "--store=file:///made/"


@pytest.fixture(autouse=True)
def stores(broker: BrokerFixture) -> None:
    """Make the directories of the stores."""
    for name in ("made", "older"):
        (broker.file_root / name).mkdir()


async def names(broker: BrokerFixture) -> list[str]:
    return [one.spec.name for one in (await broker.client.list_journals()).journals]


async def test_journals_are_created_alike_and_take_appends(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    result = await gazctl.ok(
        *("journals", "create", "b/two", "b/one", STORE, "--store=file:///older/", "--wait"),
        *("--label", f"{CONTENT_TYPE}={CONTENT_JSON_LINES}", "--label=env=a=b", "--label=env=c"),
        "--retention=48h",
    )
    assert "created b/one: replication 1, in file:///made/, file:///older/\n" in result.err
    assert "warning: 1 broker runs, and journals get a replication of 1" in result.err
    listed = (await broker.client.list_journals()).journals
    assert [one.spec.name for one in listed] == ["b/one", "b/two"]
    for one in listed:
        assert one.spec.labels == LabelSet.of(
            (CONTENT_TYPE, CONTENT_JSON_LINES), ("env", "a=b"), ("env", "c")
        )
        assert one.spec.fragment.retention_ns == 48 * 3600 * 10**9
        assert one.route.primary is not None
    appended = await broker.client.append(AppendParams("b/two"), b"{}\n")
    assert appended.commit.end == 3


async def test_a_dry_run_prints_what_apply_reads(broker: BrokerFixture, gazctl: Runner) -> None:
    argv = ("journals", "create", "a/one", "a/two", STORE, "--label=env=test", "--replication=2")
    yaml = (await gazctl.ok(*argv, "--dry-run")).out
    assert await names(broker) == []
    await gazctl.ok("journals", "apply", stdin=yaml.encode())
    by_apply = [one.spec for one in (await broker.client.list_journals()).journals]
    listed = (await gazctl.ok("journals", "list", "-o", "yaml")).out
    await gazctl.ok("journals", "apply", stdin=f"delete: true\n{listed}".encode())
    created = await gazctl.ok(*argv)
    assert "a replication of 2 needs 2: journals take no appends" in created.err
    assert [one.spec for one in (await broker.client.list_journals()).journals] == by_apply


async def test_a_journal_that_exists_is_named_and_none_is_created(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    await broker.create(journal_spec("a/one"), journal_spec("a/three"))
    result = await gazctl("journals", "create", "a/two", "a/three", "a/one", STORE)
    assert result.code == 1
    assert "a/one, a/three exist already" in result.err
    assert await names(broker) == ["a/one", "a/three"]


async def test_of_two_at_once_one_creates_and_the_other_says_so(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    argv = ("journals", "create", "a/one", STORE)
    results = await asyncio.gather(*(gazctl(*argv) for _ in range(4)))
    assert sorted(one.code for one in results) == [0, 1, 1, 1]
    assert await names(broker) == ["a/one"]


async def test_more_journals_than_one_transaction_takes(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    many = [f"many/part-{number:03d}" for number in range(130)]
    await gazctl.ok("journals", "create", *many, STORE)
    assert await names(broker) == many


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([STORE], "no journal is named"),
        (["a/one", "b/one", "a/one", STORE], "a/one is named twice"),
        (["a/one"], "--store: no blob store is given"),
        (["a/one", "--store=nowhere"], "Stores[0]"),
        (["a b", STORE], "Name"),
        (["a//b", STORE], "Name"),
        (["a/one", STORE, "--replication=9"], "Replication"),
        (["a/one", STORE, "--replication=-1"], "Replication"),
        (["a/one", STORE, "--label=env"], "'env' is no label"),
        (["a/one", STORE, "--label==x"], "'=x' is no label"),
        (["a/one", STORE, "--label=name=x"], 'label "name"'),
        (["a/one", STORE, "--label=en v=x"], "--label"),
        (
            ["a/one", STORE, "--label=app.gazette.dev/message-type=Word"],
            "expected content-type label",
        ),
        (["a/one", STORE, "--retention=soon"], "--retention"),
        (["a/one", STORE, "--retention=-48h"], "invalid Retention (-48h0m0s"),
    ],
)
async def test_mistakes_are_named_and_create_nothing(
    broker: BrokerFixture, gazctl: Runner, argv: list[str], says: str
) -> None:
    result = await gazctl("journals", "create", *argv)
    assert result.code == 2, result
    assert says in result.err
    assert await names(broker) == []


async def test_a_store_that_brokers_cannot_use_creates_nothing(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    (broker.file_root / "made").rmdir()
    result = await gazctl("journals", "create", "a/one", STORE)
    assert result.code == 1
    assert "file:///made/ is unhealthy" in result.err
    assert await names(broker) == []


@given(
    st.dictionaries(
        st.text("abcXYZ019-_./", min_size=2), st.text("abcXYZ019-_./=%", max_size=9), max_size=5
    )
)
def test_labels_are_the_pairs_or_refused(pairs: dict[str, str]) -> None:
    """No value is cut at an equals sign, and no name is taken for another."""
    labels = None
    with suppress(Invalid):
        labels = labels_of(f"{name}={value}" for name, value in pairs.items())
    assert labels is None or {one.name: one.value for one in labels.labels} == pairs
