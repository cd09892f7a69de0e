"""Fragments below a journal's directory of which nothing says whose they are: no journal is served as if
they were not there.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from gazette.client.append.appender import AppendParams
from gazette.client.journals import FragmentsParams, JournalChange
from gazette.client.read.reader import WRITE_HEAD, ReadParams
from gazette.cluster.allocator.model import item_key
from gazette.cluster.etcd.client import Etcd
from gazette.errors import GazetteError, NotYet, Unavailable
from gazette.fragment.unexplained import COMMAND
from gazette.labels import FOREIGN_FRAGMENTS, FORMER_POSTFIX
from gazette.protocol.fragment import Codec, Fragment
from gazette.protocol.fragment_labels import (
    former_templates,
    with_foreign_directory,
    with_former_template,
)
from gazette.protocol.journal import JournalSpec
from gazette.protocol.label_set import LabelSet
from gazette.runtime.clock import SystemClock
from gazette.testing.broker import BrokerFixture, journal_spec
from tests.facts import raises

JOURNAL = "a/journal"
DAY = '{{ .Spool.FirstAppendTime.Format "2006/01/02" }}'
HOUR = 'x{{ .Spool.FirstAppendTime.Format "15" }}'
OLD_S = 3600


def spec_of(name: str = JOURNAL, template: str = "", **fields: object) -> JournalSpec:
    spec = journal_spec(name, **fields)  # type: ignore[arg-type]
    return replace(spec, fragment=replace(spec.fragment, path_postfix_template=template))


def write(root: Path, content: bytes, begin: int, directory: str, journal: str = JOURNAL) -> Path:
    """Write a fragment as a broker of the original does, of an hour ago."""
    sum = hashlib.sha1(content).digest()
    name = Fragment(journal, begin, begin + len(content), sum, Codec.NONE).content_name()
    path = root / "fragments" / journal / directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    then = path.stat().st_mtime - OLD_S
    os.utime(path, (then, then))
    return path


async def read(broker: BrokerFixture, offset: int = 0, journal: str = JOURNAL) -> bytes:
    content = b""
    while True:
        try:
            async with broker.client.reader(ReadParams(journal, offset)) as reader:
                while chunk := await reader.read():
                    content += chunk
                    offset = reader.offset
        except NotYet:
            return content


async def change(broker: BrokerFixture, spec: JournalSpec) -> None:
    await broker.client.apply_journals([JournalChange(upsert=spec, expect_mod_revision=-1)])


async def until_served(broker: BrokerFixture, journal: str = JOURNAL) -> None:
    """Wait for the listing that follows a decision."""
    while True:
        try:
            await broker.client.list_fragments(FragmentsParams(journal))
            return
        except Unavailable:
            await SystemClock().sleep(0.05)


async def refused(broker: BrokerFixture, journal: str = JOURNAL) -> None:
    """Require that appends, reads and lists fail, and say what decides."""
    for call in (
        broker.client.append(AppendParams(journal), b"over it"),
        read(broker, journal=journal),
        read(broker, WRITE_HEAD, journal),
        broker.client.list_fragments(FragmentsParams(journal)),
    ):
        with raises(Unavailable) as caught:
            await call
        assert COMMAND in str(caught.value)


@pytest.fixture
async def broker(etcd: Etcd, tmp_path: Path) -> AsyncIterator[BrokerFixture]:
    async with await BrokerFixture.start(etcd, tmp_path) as broker:
        yield broker


@pytest.mark.parametrize("directory", ["2025/06/01", "2025-06-01 10", "old"])
async def test_a_cold_start_gives_out_no_offset_again(
    broker: BrokerFixture, directory: str
) -> None:
    """A journal whose fragments another cluster stored under another template does not start empty."""
    stored = write(broker.file_root, b"first bytes", 0, directory)
    await broker.create(spec_of(template=HOUR))
    await refused(broker)
    assert stored.read_bytes() == b"first bytes"
    # Case: they are removed. The journal then starts.
    stored.unlink()
    await until_served(broker)
    assert (await broker.client.append(AppendParams(JOURNAL), b"new")).commit.begin == 0


async def test_a_new_journal_is_told_of_left_overs(
    broker: BrokerFixture, caplog: pytest.LogCaptureFixture
) -> None:
    """Of its own former life, and of those that nothing explains. A store that is away delays nothing."""
    write(broker.file_root, b"of a former life", 0, "", journal="b/journal")
    write(broker.file_root, b"whose?", 0, "2025/06/01")
    with caplog.at_level(logging.WARNING, "gazette.client.journals"):
        await broker.create(spec_of(), spec_of("b/journal"), spec_of("b/clean"))
    notes = [one.getMessage() for one in caplog.records if one.name == "gazette.client.journals"]
    assert [JOURNAL in note or "b/journal" in note for note in notes] == [True, True]
    caplog.clear()
    write(broker.file_root, b"of another", 0, "", journal="c/journal")
    with caplog.at_level(logging.WARNING, "gazette.client.journals"):
        await broker.create(spec_of("c/journal"), *(spec_of(f"c/{n:03}") for n in range(9)))
    assert "2 more new journals were not looked at" in caplog.text
    caplog.clear()
    missing = spec_of("b/away", stores=("file:///not-there/",))
    await broker.create(missing)
    await change(broker, spec_of("b/journal", labels=LabelSet.of(("a-label", "x"))))
    assert not [one for one in caplog.records if one.name == "gazette.client.journals"]


async def test_the_former_template_explains_them(broker: BrokerFixture) -> None:
    write(broker.file_root, b"first", 0, "2025/06/01")
    write(broker.file_root, b"second", 5, "2025/06/02")
    await broker.create(spec_of(template=HOUR))
    await refused(broker)
    await change(broker, spec_of(template=HOUR, labels=with_former_template(LabelSet(), DAY)))
    await until_served(broker)
    assert await read(broker) == b"firstsecond"
    with raises(GazetteError) as caught:  # The head is unknown to brokers: reset-head confirms it.
        await broker.client.append(AppendParams(JOURNAL), b"third")
    assert caught.value.facts["status"] == "INDEX_HAS_GREATER_OFFSET"
    appended = await broker.client.append(AppendParams(JOURNAL, offset=11), b"third")
    assert appended.commit.begin == 11
    assert await read(broker) == b"firstsecondthird"


async def test_a_former_template_with_braces_in_a_constant_is_kept(broker: BrokerFixture) -> None:
    former = '{{ if eq .Name "{{" }}x{{ end }}'
    await broker.create(spec_of(template=former))
    await change(broker, spec_of(template=HOUR))
    (listed,) = (await broker.client.list_journals()).journals
    assert former_templates(listed.spec.labels) == [former]
    await change(broker, listed.spec)


async def test_foreign_ones_are_not_read(broker: BrokerFixture) -> None:
    write(broker.file_root, b"of another", 0, "other/journal")
    await broker.create(spec_of())
    await refused(broker)
    await change(broker, spec_of(labels=with_foreign_directory(LabelSet(), "other")))
    await until_served(broker)
    assert (await broker.client.append(AppendParams(JOURNAL), b"own")).commit.begin == 0
    assert await read(broker) == b"own"
    # Case: a specification that names neither label keeps them. One that names a label replaces it.
    await change(broker, spec_of())
    spec = (await broker.client.get_journal(JOURNAL)).spec
    assert spec.labels.values_of(FOREIGN_FRAGMENTS) == ("other",)
    await change(broker, spec_of(labels=LabelSet.of((FOREIGN_FRAGMENTS, "else"))))
    spec = (await broker.client.get_journal(JOURNAL)).spec
    assert spec.labels.values_of(FOREIGN_FRAGMENTS) == ("else",)


async def test_a_changed_template_stays_known(etcd: Etcd, tmp_path: Path) -> None:
    """In Apply, for any caller; also behind a restart of all brokers."""
    async with await BrokerFixture.start(etcd, tmp_path) as broker:
        await broker.create(spec_of(template=DAY))
        await broker.client.append(AppendParams(JOURNAL), b"by day")
        for template in (HOUR, "", HOUR):
            await change(broker, spec_of(template=template))
            await broker.client.append(AppendParams(JOURNAL), template.encode() or b"plain")
        spec = (await broker.client.get_journal(JOURNAL)).spec
        assert sorted(former_templates(spec.labels)) == sorted([DAY, HOUR])
    async with await BrokerFixture.start(etcd, tmp_path, id="broker-two") as broker:
        await until_served(broker)
        assert await read(broker) == b"by day" + HOUR.encode() + b"plain" + HOUR.encode()
        await broker.client.append(AppendParams(JOURNAL), b"on")


async def test_a_template_that_only_the_original_understands_keeps_its_fragments(
    broker: BrokerFixture, etcd: Etcd
) -> None:
    """It is put to etcd, as by a broker of the original. Apply refuses it, and keeps it when replaced."""
    template = '{{ printf "%04d" .Spool.FirstAppendTime.Year }}'
    write(broker.file_root, b"of a year", 0, "2025")
    await broker.create(spec_of())
    await refused(broker)
    key = item_key(broker.service.settings.root, JOURNAL)
    spec = spec_of(template=template)
    await etcd.put(key, spec.to_pb().SerializeToString())
    await until_served(broker)
    assert await read(broker) == b"of a year"
    with raises(GazetteError, says="printf"):
        await change(broker, spec)
    await change(broker, spec_of(template=DAY))
    labels = (await broker.client.get_journal(JOURNAL)).spec.labels
    assert former_templates(labels) == [template]
    await change(broker, spec_of(template=HOUR, labels=labels))
    await until_served(broker)
    assert await read(broker) == b"of a year"


async def test_a_template_that_no_label_can_keep_is_not_changed(broker: BrokerFixture) -> None:
    await broker.create(spec_of(template="{{/*" + " " * 400 + "*/}}" + DAY))
    with raises(GazetteError) as caught:
        await change(broker, spec_of(template=HOUR))
    assert "PathPostfixTemplate" in str(caught.value)


async def test_a_deleted_journal_does_not_stop_the_one_above(broker: BrokerFixture) -> None:
    """Its name is kept, so its fragments are explained; also if it is created and deleted once more."""
    above, below = spec_of(), spec_of(f"{JOURNAL}/below")
    await broker.create(above, below)
    for begin in (0, 12):
        params = AppendParams(below.name, offset=begin)  # Its former life has left fragments.
        await broker.client.append(params, b"of the lower")
        directory = broker.file_root / "fragments" / below.name
        while not any(directory.glob("*.raw")):
            await SystemClock().sleep(0.02)
        await broker.client.apply_journals(
            [JournalChange(delete=below.name, expect_mod_revision=-1)]
        )
        await until_served(broker)
        assert (await broker.client.append(AppendParams(JOURNAL), b"x")).commit.end <= 2
        await broker.create(below)
    assert await read(broker) == b"xx"


async def test_the_deleted_one_was_there_before_the_one_above(broker: BrokerFixture) -> None:
    """Nothing was known of the upper journal then, so it waits."""
    below = spec_of(f"{JOURNAL}/below")
    await broker.create(below)
    await broker.client.append(AppendParams(below.name), b"of the lower")
    await broker.client.apply_journals([JournalChange(delete=below.name, expect_mod_revision=-1)])
    while broker.service.context.persister.unpersisted:
        await SystemClock().sleep(0.02)
    write(broker.file_root, b"of the lower", 0, "below")
    await broker.create(spec_of())
    await refused(broker)


async def test_what_harms_no_offset_stops_nothing(broker: BrokerFixture) -> None:
    """Copies below offsets that the journal has, and ``key=value`` directories of any former template."""
    write(broker.file_root, b"0123456789", 0, "")
    write(broker.file_root, b"234", 2, "backup")
    write(broker.file_root, b"abc", 10, "date=2020-01-01/hour=3")
    await broker.create(spec_of())
    await until_served(broker)
    assert await read(broker) == b"0123456789abc"
    # Case: behind the begin of a journal whose first fragments are gone, the reader gets the reason.
    write(broker.file_root, b"by which", 0, "lost", journal="b/journal")
    write(broker.file_root, b"later", 8, "", journal="b/journal")
    await broker.create(spec_of("b/journal"))
    with raises(Unavailable):
        await read(broker, journal="b/journal")
    assert await read(broker, 8, "b/journal") == b"later"
    assert (await broker.client.append(AppendParams("b/journal", offset=13), b"!")).commit.end == 14


def test_labels_keep_any_text() -> None:
    labels = with_former_template(LabelSet(), DAY)
    labels.validate()
    assert former_templates(labels) == [DAY]
    assert labels.values_of(FORMER_POSTFIX)[0].startswith("%7B%7B")
