"""From declarations to specifications, and the changes that a cluster needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from gazette import Application, DeadLetter, Message, MessageTime, Output, PoisonPolicy, Source
from gazette.consumer.declare.changes import DeclaredChanges, changes_of
from gazette.consumer.declare.declaration import Declaration, declaration_of
from gazette.consumer.declare.specs import (
    DEVELOPMENT,
    SpecSettings,
    journal_specs,
    journals_yaml,
    log_specs,
    shard_specs,
    shards_yaml,
)
from gazette.errors import Conflict, Invalid, NotAllowed
from gazette.gazctl.journals.apply import parse_changes
from gazette.labels import (
    CONTENT_JSON_LINES,
    CONTENT_TYPE,
    DECLARED_BY,
    MESSAGE_KEY,
    MESSAGE_KEY_TYPE,
    MESSAGE_PARTITIONS,
    MESSAGE_TIME,
)
from gazette.protocol.journal import JournalFlag, JournalSpec, Suspend, SuspendLevel
from gazette.protocol.shard import ShardSource, ShardSpec
from gazette.protocol.shard_list import ShardList
from gazette.protocol.text import duration

SETTINGS = SpecSettings(stores=("s3://bucket/prefix/",))


class Word(Message):
    word: str = ""


class App(Application[Any]):
    application_name = "shop"

    def new_store(self, shard: Any, recorder: Any) -> Any:
        raise NotImplementedError

    def consume_message(self, *args: Any) -> None:
        raise NotImplementedError


def declared(*, logs: bool = True, name: str = "", **attributes: Any) -> Declaration:
    kind: Any = type("Shop", (App,), {**attributes, "recovery_logs": logs})
    return declaration_of(kind(), name=name)


WORDS = Source("words", Word, partitions=2, key="word", retention=timedelta(days=30))
USERS = Source("users", Word, partitions=2, key="word")
COUNTS = Output("counts", Word)
SHOP = declared(words=WORDS, counts=COUNTS)


@dataclass(frozen=True)
class Listed:
    spec: Any
    mod_revision: int = 7


def after(changes: DeclaredChanges) -> tuple[list[Listed], list[Listed]]:
    """Return the journals and shards of a cluster that had none, once changes are applied."""
    return [Listed(one.spec) for one in changes.journals], [
        Listed(one.spec) for one in changes.shards
    ]


def applied(declaration: Declaration) -> tuple[list[Listed], list[Listed]]:
    return after(changes_of(declaration, SETTINGS, [], []))


# --- Specifications

JOURNALS = """\
replication: 3
fragment:
  length: 268435456
  compression_codec: ZSTANDARD
  stores:
  - s3://bucket/prefix/
  refresh_interval: 5m0s
  flush_interval: 1h0m0s
children:
- name: counts/part-000
  labels:
  - name: app.gazette.dev/message-partitions
    value: '1'
  - name: app.gazette.dev/message-type
    value: Word
  - name: content-type
    value: application/x-ndjson
- name: recovery/shop/
  labels:
  - name: content-type
    value: application/x-gazette-recoverylog
  children:
  - name: recovery/shop/shard-000
  - name: recovery/shop/shard-001
- name: words/
  labels:
  - name: app.gazette.dev/declared-by
    value: shop/message-key
  - name: app.gazette.dev/message-key
    value: word
  - name: app.gazette.dev/message-key-type
    value: text
  - name: app.gazette.dev/message-partitions
    value: '2'
  - name: app.gazette.dev/message-type
    value: Word
  - name: content-type
    value: application/x-ndjson
  fragment:
    retention: 720h0m0s
  children:
  - name: words/part-000
  - name: words/part-001
"""
SHARDS = """\
common:
  recovery_log_prefix: recovery/shop
  hint_prefix: /gazette/hints/shop
  hint_backups: 2
  max_txn_duration: 1s
  hot_standbys: 1
shards:
- id: shard-000
  sources:
  - journal: words/part-000
- id: shard-001
  sources:
  - journal: words/part-001
"""


def test_the_yaml_is_what_an_operator_would_write() -> None:
    assert journals_yaml(SHOP, SETTINGS) == JOURNALS
    assert shards_yaml(SHOP, SETTINGS) == SHARDS


def test_gazctl_takes_the_yaml() -> None:
    """What it reads from the text are the specifications that `apply` puts."""
    specs = [*journal_specs(SHOP, SETTINGS), *log_specs(SHOP, SETTINGS)]
    read = [change.upsert for change in parse_changes(journals_yaml(SHOP, SETTINGS))]
    assert read == sorted(specs, key=lambda spec: spec.name)
    listed = ShardList.parse(shards_yaml(SHOP, SETTINGS)).push_down()
    assert [entry.spec for entry in listed.shards] == shard_specs(SHOP, SETTINGS)


def test_a_shard_reads_the_same_partition_of_every_source() -> None:
    shards = shard_specs(declared(words=WORDS, users=USERS), SETTINGS)
    assert [[one.journal for one in shard.sources] for shard in shards] == [
        ["users/part-000", "words/part-000"],
        ["users/part-001", "words/part-001"],
    ]


def test_a_store_of_its_own_needs_no_log() -> None:
    shop = declared(words=WORDS, logs=False)
    assert log_specs(shop, SETTINGS) == []
    assert [shard.recovery_log for shard in shard_specs(shop, SETTINGS)] == ["", ""]
    assert "recovery" not in journals_yaml(shop, SETTINGS)


def test_development_needs_one_broker_and_no_standby() -> None:
    (spec, *_) = journal_specs(SHOP, DEVELOPMENT)
    assert (spec.replication, spec.fragment.stores) == (1, ("file:///",))
    assert shard_specs(SHOP, DEVELOPMENT)[0].hot_standbys == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"replication": 6}, "Replication"),
        ({"fragment_bytes": 1}, "Length"),
        ({"flush_interval_ns": duration.SECOND}, "FlushInterval"),
        ({"refresh_interval_ns": 0}, "RefreshInterval"),
        ({"stores": ("nowhere",)}, "Stores[0]"),
    ],
)
def test_settings_that_no_journal_may_have_are_named(change: dict[str, Any], says: str) -> None:
    with pytest.raises(Invalid, match=r"words/part-000|counts/part-000") as caught:
        journal_specs(SHOP, replace(SETTINGS, **change))
    assert says in str(caught.value)


def test_a_shard_that_never_commits_is_refused() -> None:
    with pytest.raises(Invalid, match="MaxTxnDuration"):
        shard_specs(SHOP, replace(SETTINGS, max_txn_duration_ns=0))


def test_without_a_store_it_says_which_flag() -> None:
    with pytest.raises(Invalid, match="no blob store") as caught:
        SpecSettings(stores=())
    assert "--store s3://" in caught.value.hint


# --- Changes


def test_everything_is_created_once() -> None:
    changes = changes_of(SHOP, SETTINGS, [], [])
    assert [one.spec.name for one in changes.journals] == [
        "words/part-000",
        "words/part-001",
        "counts/part-000",
        "recovery/shop/shard-000",
        "recovery/shop/shard-001",
    ]
    assert [one.spec.id for one in changes.shards] == ["shard-000", "shard-001"]
    assert {one.revision for one in changes.journals} == {0}
    assert {one.revision for one in changes.shards} == {0}
    again = changes_of(SHOP, SETTINGS, *after(changes))
    assert (again.journals, again.shards, again.unchanged) == ((), (), 7)
    assert again.lines() == ["= 7 unchanged"]


def by_shard(app: Any, shard: Any) -> PoisonPolicy | None:
    """Return a journal that nothing declares for shard 0, and an output for shard 1."""
    return {"shard-000": PoisonPolicy("dead"), "shard-001": PoisonPolicy("dead-words/part-000")}[
        shard.id
    ]


def test_dead_letter_journals_are_created_once() -> None:
    dead = Output("dead-words", DeadLetter)
    declaration = declared(words=WORDS, dead=dead, poison_policy=by_shard)
    journals, shards = applied(declaration)
    (made,) = [one.spec for one in journals if one.spec.name == "dead"]
    assert made.labels.value_of(CONTENT_TYPE) == CONTENT_JSON_LINES
    assert "dead" in journals_yaml(declaration, SETTINGS)
    assert changes_of(declaration, SETTINGS, journals, shards).journals == ()


def test_a_policy_that_needs_an_initialized_application_creates_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is asked again by the shard, so nothing is refused."""
    declaration = declared(words=WORDS, poison_policy=lambda app, shard: app.policy)
    assert declaration.dead_letters == ()
    assert "poison_policy" in caplog.text


def test_lines_say_what_changes() -> None:
    lines = changes_of(SHOP, SETTINGS, [], []).lines()
    assert lines[0] == (
        "+ journal words/part-000  3 replicas, in s3://bucket/prefix/, kept 720h0m0s"
    )
    assert "+ shard shard-000  reads words/part-000; 1 hot standbys" in lines
    only = changes_of(SHOP, SETTINGS, [], []).lines(shards=False)
    assert not any("+ shard" in line for line in only)


def test_what_an_operator_has_set_stays() -> None:
    """Also if defaults of the settings differ, unless a flag was given."""
    journals, shards = applied(SHOP)
    journals = [
        Listed(
            replace(
                one.spec,
                replication=2,
                flags=JournalFlag.O_RDWR,
                max_append_rate=9,
                suspend=Suspend(SuspendLevel.PARTIAL, 5),
                labels=one.spec.labels.with_value("team", "blue"),
            )
        )
        for one in journals
    ]
    shards = [
        Listed(replace(one.spec, hot_standbys=2, disable=True, ring_buffer_size=9))
        for one in shards
    ]
    assert changes_of(SHOP, SETTINGS, journals, shards).unchanged == 7
    changes = changes_of(SHOP, SETTINGS, journals, shards, given={"replication", "hot_standbys"})
    assert {one.text for one in changes.journals} == {"replication 2 → 3"}
    assert {one.text for one in changes.shards} == {"hot standbys 2 → 1"}
    for journal, listed in zip(changes.journals, journals, strict=False):
        assert journal.spec == replace(listed.spec, replication=3)
        assert journal.revision == 7
    assert all(one.spec.disable and one.spec.ring_buffer_size == 9 for one in changes.shards)


def test_recovery_logs_follow_what_was_given_and_nothing_else() -> None:
    journals, shards = applied(SHOP)
    moved = replace(SETTINGS, stores=("s3://other/",), replication=1)
    assert not changes_of(SHOP, moved, journals, shards).journals
    changes = changes_of(SHOP, moved, journals, shards, given={"stores", "replication"})
    names = {one.spec.name for one in changes.journals}
    assert names == {one.spec.name for one in journals}, "recovery logs are among them"
    for one in changes.journals:
        assert (one.spec.fragment.stores, one.spec.replication) == (("s3://other/",), 1)
        assert "are not read any more" in one.text


def test_retention_follows_the_declaration() -> None:
    journals, shards = applied(SHOP)
    longer = declared(words=replace(WORDS, retention=timedelta(days=60)), counts=COUNTS)
    changes = changes_of(longer, SETTINGS, journals, shards)
    assert [one.text for one in changes.journals] == ["retention 720h0m0s → 1440h0m0s"] * 2
    silent = declared(words=replace(WORDS, retention=None), counts=COUNTS)
    assert changes_of(silent, SETTINGS, journals, shards).journals == ()


def test_stores_and_lengths_change_if_they_are_given() -> None:
    journals, shards = applied(SHOP)
    settings = replace(SETTINGS, stores=("s3://other/",), fragment_bytes=1 << 20)
    assert changes_of(SHOP, settings, journals, shards).journals == ()
    changes = changes_of(SHOP, settings, journals, shards, given={"stores", "fragment_bytes"})
    assert changes.journals[0].text == (
        "fragment length 268435456 → 1048576; stores s3://bucket/prefix/ → s3://other/; "
        "fragments in s3://bucket/prefix/ are not read any more"
    )


def test_a_missing_partition_or_log_is_created_again() -> None:
    journals, shards = applied(SHOP)
    lacking = [one for one in journals if one.spec.name != "counts/part-000"]
    changes = changes_of(SHOP, SETTINGS, lacking, shards)
    assert [one.spec.name for one in changes.journals] == ["counts/part-000"]


def test_a_new_source_is_read_by_the_shards_that_exist() -> None:
    journals, shards = applied(SHOP)
    first = replace(shards[0].spec, sources=(ShardSource("words/part-000", 1234),))
    both = declared(words=WORDS, users=USERS, counts=COUNTS)
    changes = changes_of(both, SETTINGS, journals, [Listed(first), shards[1]])
    assert changes.shards[0].text == "reads users/part-000 as well"
    assert changes.shards[0].spec.sources == (
        ShardSource("users/part-000"),
        ShardSource("words/part-000", 1234),
    )


def test_a_shard_keeps_the_log_that_it_has() -> None:
    """Also one that YAML named: the state is there."""
    journals, shards = applied(SHOP)
    log = JournalSpec("my/logs/shard-000")
    first = replace(shards[0].spec, recovery_log_prefix="my/logs")
    kept = [one for one in journals if one.spec.name != "recovery/shop/shard-000"]
    changes = changes_of(SHOP, SETTINGS, [*kept, Listed(log)], [Listed(first), shards[1]])
    assert (changes.journals, changes.shards) == ((), ())


# --- Refusals


def refusal(
    declaration: Declaration,
    journals: Sequence[Listed],
    shards: Sequence[Listed],
    **options: Any,
) -> NotAllowed:
    with pytest.raises(NotAllowed) as caught:
        changes_of(declaration, SETTINGS, journals, shards, **options)
    return caught.value


def test_fewer_partitions_are_refused_whatever_is_given() -> None:
    fewer = declared(words=replace(WORDS, partitions=1), counts=COUNTS)
    error = refusal(fewer, *applied(SHOP), more_partitions=True)
    assert "words has 2 partitions, and the declaration says 1" in str(error)
    assert "Declare partitions=2" in error.hint


def test_more_partitions_need_a_flag_if_there_are_keys() -> None:
    journals, shards = applied(SHOP)
    # Of six remainders by 3, two have the same remainder by 2.
    three = declared(words=replace(WORDS, partitions=3), counts=COUNTS)
    assert "about 67 % of the keys would move" in str(refusal(three, journals, shards))
    more = declared(words=replace(WORDS, partitions=8), counts=COUNTS)
    error = refusal(more, journals, shards)
    assert "about 75 % of the keys would move" in str(error)
    assert "--more-partitions" in error.hint
    assert "docs/declaring.md" in error.hint
    changes = changes_of(more, SETTINGS, journals, shards, more_partitions=True)
    assert [one.spec.id for one in changes.shards] == [f"shard-{n:03d}" for n in range(2, 8)]
    # Those that exist are labelled with the new number.
    assert len(changes.journals) == 12 + 2


def test_more_partitions_without_keys_need_no_flag() -> None:
    spread = replace(WORDS, key=None)
    journals, shards = applied(declared(words=spread))
    changes = changes_of(declared(words=replace(spread, partitions=3)), SETTINGS, journals, shards)
    assert [one.spec.name for one in changes.journals if not one.revision] == [
        "words/part-002",
        "recovery/shop/shard-002",
    ]


# --- Keys


class Order(Message):
    customer: int = msgspec.field(default=0, name="customer id")
    word: str = ""


def by_word(message: Word) -> str:
    return message.word


KEYS = (MESSAGE_KEY, MESSAGE_KEY_TYPE, MESSAGE_PARTITIONS)
KEY_LABELS = (*KEYS, DECLARED_BY)


def labels_of(journals: Sequence[Any], name: str) -> list[str | None]:
    found = next(one.spec for one in journals if one.spec.name == name)
    return [found.labels.value_of(label) for label in KEYS]


def test_journals_are_labelled_with_their_key() -> None:
    """A field has the name that messages have for it, and a function a name that no field has."""
    orders = Source("orders", Order, partitions=2, key="customer")
    words = replace(WORDS, key=by_word)
    journals, _ = applied(declared(orders=orders, words=words, counts=COUNTS))
    assert labels_of(journals, "orders/part-001") == ["customer%20id", "integer", "2"]
    assert labels_of(journals, "words/part-000") == ["function=by_word", "any", "2"]
    assert labels_of(journals, "counts/part-000") == [None, None, "1"]


def without_labels(journals: Sequence[Listed]) -> list[Listed]:
    """Return journals as versions without labels of keys made them."""
    found = []
    for one in journals:
        labels = one.spec.labels
        for name in KEY_LABELS:
            labels = labels.without(name)
        found.append(Listed(replace(one.spec, labels=labels)))
    return found


def test_journals_without_labels_get_them() -> None:
    journals, shards = applied(SHOP)
    changes = changes_of(SHOP, SETTINGS, without_labels(journals), shards)
    changed = [one.spec.name for one in changes.journals]
    assert changed == ["words/part-000", "words/part-001"]
    assert labels_of(changes.journals, "words/part-000") == ["word", "text", "2"]
    # Case: a mere reader of the journals of others does not drop their key.
    reader = declared(words=replace(WORDS, key=None), name="reader")
    assert changes_of(reader, SETTINGS, without_labels(journals), shards).journals == ()
    assert changes_of(reader, SETTINGS, journals, shards).journals == ()


UUIDS = replace(WORDS, key="uuid")
RANDOM = replace(WORDS, key=None)


@pytest.mark.parametrize(
    ("former", "now"),
    [
        (WORDS, UUIDS),
        (WORDS, replace(WORDS, key=by_word)),
        (replace(WORDS, key=by_word), WORDS),
        (RANDOM, WORDS),
    ],
)
def test_another_key_needs_a_flag(former: Any, now: Any) -> None:
    journals, shards = applied(declared(words=former))
    error = refusal(declared(words=now), journals, shards)
    assert "words/part-000" in str(error)
    assert "--changed-key" in error.hint
    changes = changes_of(declared(words=now), SETTINGS, journals, shards, changed_key=True)
    expected = labels_of(applied(declared(words=now))[0], "words/part-001")
    assert labels_of(changes.journals, "words/part-001") == expected


def test_another_type_of_the_key_needs_a_flag() -> None:
    texts: Any = msgspec.defstruct("Word", [("word", str), ("uuid", str, "")])
    numbers: Any = msgspec.defstruct("Word", [("word", float), ("uuid", str, "")])
    former, now = (declared(words=Source("words", kind, key="word")) for kind in (texts, numbers))
    assert "of type text" in str(refusal(now, *applied(former)))


def test_an_output_without_the_key_of_its_journals_is_refused() -> None:
    """It would spread messages whose key is declared elsewhere. A flag drops the key."""
    keyed = declared(words=WORDS, counts=replace(COUNTS, key="word"))
    journals, shards = applied(keyed)
    assert "counts/part-000" in str(refusal(SHOP, journals, shards))
    changes = changes_of(SHOP, SETTINGS, journals, shards, changed_key=True)
    assert labels_of(changes.journals, "counts/part-000") == [None, None, "1"]
    assert "message-key word → unset" in "\n".join(changes.lines())


def test_a_source_that_drops_its_key_needs_a_flag() -> None:
    """The labels say that this application has declared it."""
    journals, shards = applied(declared(words=WORDS))
    unkeyed = declared(words=RANDOM)
    assert "--changed-key" in refusal(unkeyed, journals, shards).hint
    changes = changes_of(unkeyed, SETTINGS, journals, shards, changed_key=True)
    assert labels_of(changes.journals, "words/part-000") == [None, None, "2"]
    assert not values_of(changes, DECLARED_BY)
    assert not changes_of(unkeyed, SETTINGS, *after_change(changes, journals, shards)).journals


class Timed(Message):
    word: str = ""
    at: int = 0


TIMED = Source("timed", Timed, partitions=2, time=MessageTime("at", unit="s"))
UNTIMED = replace(TIMED, time=None)


def values_of(changes: DeclaredChanges, label: str) -> set[str]:
    """Return the values of a label of all journals to put."""
    return {value for one in changes.journals for value in one.spec.labels.values_of(label)}


def after_change(
    changes: DeclaredChanges, journals: Sequence[Listed], shards: Sequence[Listed]
) -> tuple[list[Listed], list[Listed]]:
    """Return the journals and shards of a cluster once changes are applied."""
    puts = {one.spec.name: one.spec for one in changes.journals}
    changed = [Listed(puts.pop(one.spec.name, one.spec)) for one in journals]
    return [*changed, *map(Listed, puts.values())], list(shards)


@pytest.mark.parametrize("kind", ["source", "output"])
def test_a_time_that_is_no_longer_declared_is_removed(kind: str) -> None:
    outputs = [Output("timed", Timed, partitions=2, time=one.time) for one in (TIMED, UNTIMED)]
    former, now = (TIMED, UNTIMED) if kind == "source" else outputs
    other: dict[str, Any] = {} if kind == "source" else {"words": WORDS}
    cluster = applied(declared(timed=former, **other))
    assert labelled_times(cluster) == {"at/s"}
    changes = changes_of(declared(timed=now, **other), SETTINGS, *cluster)
    assert not values_of(changes, MESSAGE_TIME)
    assert "message-time at/s → unset" in "\n".join(changes.lines())
    cluster = after_change(changes, *cluster)
    assert labelled_times(cluster) == set()
    assert not changes_of(declared(timed=now, **other), SETTINGS, *cluster).journals


def labelled_times(cluster: tuple[list[Listed], list[Listed]]) -> set[str]:
    specs = [one.spec for one in cluster[0]]
    return {value for spec in specs for value in spec.labels.values_of(MESSAGE_TIME)}


def test_a_time_that_an_operator_has_set_stays() -> None:
    journals, shards = applied(declared(timed=UNTIMED))
    by_hand = [
        Listed(replace(one.spec, labels=one.spec.labels.with_value(MESSAGE_TIME, "at/ms")))
        for one in journals
    ]
    assert not changes_of(declared(timed=UNTIMED), SETTINGS, by_hand, shards).journals


def test_a_time_that_another_application_declares_stays() -> None:
    """The label goes with its last declaration."""
    timed_a, untimed_a, timed_b, untimed_b = (
        declared(timed=one, name=name, logs=False) for name in "ab" for one in (TIMED, UNTIMED)
    )
    cluster: tuple[list[Listed], list[Listed]] = ([], [])
    # Each application has members of its own, so no shards of the other.
    for declaration, times in [
        (timed_a, {"at/s"}),
        (untimed_b, {"at/s"}),
        (timed_b, {"at/s"}),
        (untimed_a, {"at/s"}),
        (untimed_b, set[str]()),
    ]:
        changes = changes_of(declaration, SETTINGS, cluster[0], [])
        cluster = after_change(changes, cluster[0], [])
        assert labelled_times(cluster) == times
        assert not changes_of(declaration, SETTINGS, cluster[0], []).journals


def test_more_partitions_of_an_output_move_keys_of_its_readers() -> None:
    keyed = replace(COUNTS, key="word")
    journals, shards = applied(declared(words=WORDS, counts=keyed))
    error = refusal(declared(words=WORDS, counts=replace(keyed, partitions=2)), journals, shards)
    assert "counts has 1 partitions" in str(error)


def test_another_framing_of_the_same_journal_is_refused() -> None:
    journals, shards = applied(SHOP)
    labels = journals[0].spec.labels.with_value("content-type", "text/csv")
    changed = [Listed(replace(journals[0].spec, labels=labels)), *journals[1:]]
    error = refusal(SHOP, changed, shards)
    assert "words/part-000 holds text/csv" in str(error)
    assert "content_type='text/csv'" in error.hint


def test_a_partition_of_another_name_is_refused() -> None:
    journals, shards = applied(SHOP)
    odd = Listed(replace(journals[1].spec, name="words/part-1"))
    error = refusal(SHOP, [journals[0], odd, *journals[2:]], shards)
    assert "words has a partition words/part-1" in str(error)


def test_a_source_that_is_gone_from_the_declaration_is_refused() -> None:
    both = applied(declared(words=WORDS, users=USERS, counts=COUNTS))
    error = refusal(SHOP, *both)
    assert "shard-000 reads users/part-000, which the declaration does not have" in str(error)
    assert "shards edit" in error.hint


def test_a_log_may_neither_come_nor_go() -> None:
    error = refusal(declared(words=WORDS, counts=COUNTS, logs=False), *applied(SHOP))
    assert "shard-000 has a recovery log" in str(error)
    assert "recovery_logs = True" in error.hint
    without = applied(declared(words=WORDS, counts=COUNTS, logs=False))
    assert "recovery_logs = False" in refusal(SHOP, *without).hint


def test_a_second_reader_of_the_same_messages_is_refused() -> None:
    journals, _ = applied(SHOP)
    other = ShardSpec("mine-000", sources=(ShardSource("words/part-001"),), max_txn_duration_ns=1)
    error = refusal(SHOP, journals, [Listed(other)])
    assert "shard mine-000 reads words/part-001 already" in str(error)
    changes_of(SHOP, SETTINGS, journals, [Listed(replace(other, disable=True))])


def test_a_lost_log_is_not_replaced_by_an_empty_one() -> None:
    journals, shards = applied(SHOP)
    lacking = [one for one in journals if one.spec.name != "recovery/shop/shard-001"]
    with pytest.raises(Conflict, match="recovery/shop/shard-001 of shard-001 does not exist"):
        changes_of(SHOP, SETTINGS, lacking, shards)
