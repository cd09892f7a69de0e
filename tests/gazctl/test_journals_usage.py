"""`gazctl journals usage`: bytes in stores by journal, against the files themselves."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from gazette.client.append.appender import AppendParams
from gazette.protocol.fragment import Codec
from gazette.protocol.journal import JournalSpec
from gazette.testing.broker import STORE, BrokerFixture, journal_spec
from gazette.testing.stored import write_fragment
from tests.gazctl.runner import Runner
from tests.gazctl.stored import store

TEMPLATE = 'date={{ .Spool.FirstAppendTime.Format "2006-01-02" }}'
DAY = 86400


def with_template(name: str) -> JournalSpec:
    spec = journal_spec(name)
    return replace(spec, fragment=replace(spec.fragment, path_postfix_template=TEMPLATE))


def file_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


async def test_sums_are_those_of_the_files(broker: BrokerFixture, gazctl: Runner) -> None:
    """Compressed objects, subdirectories of templates, journals within journals, and what is of none."""
    root = broker.file_root
    for begin in (0, 5000):
        write_fragment(root, STORE, "a/one", begin, b"x" * 5000, Codec.GZIP)
    store(broker, "a/one", b"y" * 100, begin=20, mod_time=DAY)  # Another covers it.
    store(broker, "a/one/below", b"z" * 300, begin=0, mod_time=DAY)
    for day in ("01", "02"):
        content = b"d" * 50
        begin = 50 * int(day)
        store(broker, "a/dated", content, begin=begin, mod_time=DAY, postfix=f"date=2026-01-{day}")
        store(broker, "gone/j", content, begin=begin, mod_time=DAY, postfix=f"2026/01/{day}")
    (root / "fragments" / "notes.txt").write_text("a note")
    store(broker, "a/one", b"u" * 7, begin=0, mod_time=DAY, postfix="strange")
    specs = [journal_spec("a/one"), journal_spec("a/one/below"), journal_spec("empty/j")]
    await broker.create(*specs, with_template("a/dated"))
    result = await gazctl.ok("journals", "usage", STORE)
    directory = root / "fragments"
    compressed = file_bytes(directory / "a" / "one") - 300 - 7
    found = {row[0]: row[1:] for row in result.rows if row[0] != "(no"}
    assert found["a/one"][0] == "3"
    assert found["a/one"][1:3] == [str(compressed), "B"]
    assert found["a/one"][3:5] == ["9.9", "KiB"]
    assert found["a/one/below"] == ["1", "300", "B", "300", "B", STORE]
    assert found["a/dated"] == ["2", "100", "B", "100", "B", STORE]
    assert "empty/j" not in found
    document = json.loads((await gazctl.ok("journals", "usage", STORE, "-o", "json")).out)
    (whole,) = document["stores"]
    assert whole["stored_bytes"] == file_bytes(directory)
    others = {one["directory"]: one["stored_bytes"] for one in whole["others"]}
    others.pop(".test", None)
    assert others == {"gone/j": 100, "": 6, "a/one/strange": 7}
    assert document["journals"] == whole["journals"]
    assert (
        yaml.safe_load((await gazctl.ok("journals", "usage", STORE, "-o", "yaml")).out) == document
    )


async def test_a_selector_lists_only_its_journals(broker: BrokerFixture, gazctl: Runner) -> None:
    store(broker, "a/one", b"x" * 10, begin=0, mod_time=DAY)
    store(broker, "a/one/below", b"y" * 20, begin=0, mod_time=DAY)
    store(broker, "b/two", b"z" * 40, begin=0, mod_time=DAY)
    (broker.file_root / "older").mkdir()
    write_fragment(broker.file_root, "file:///older/", "b/two", 0, b"z" * 40)
    two = journal_spec("b/two", stores=(STORE, "file:///older/"))
    await broker.create(journal_spec("a/one"), journal_spec("a/one/below"), two)
    result = await gazctl.ok("journals", "usage", "-l", "name=a/one")
    assert [row[:2] for row in result.rows] == [["a/one", "1"], ["=", "all"]]
    result = await gazctl.ok("journals", "usage", "-l", "name:prefix=a/", "-o", "json")
    (whole,) = json.loads(result.out)["stores"]
    assert (whole["objects"], whole["stored_bytes"], whole["others"]) == (2, 30, [])
    document = json.loads((await gazctl.ok("journals", "usage", "-o", "json")).out)
    assert [one["store"] for one in document["stores"]] == [STORE, "file:///older/"]
    by_name = {one["journal"]: one["stored_bytes"] for one in document["journals"]}
    assert by_name == {"a/one": 10, "a/one/below": 20, "b/two": 80}
    nothing = await gazctl.ok("journals", "usage", "-l", "name=none")
    assert nothing.err == "no journal matches\n"


async def test_a_store_that_renames_journals_is_listed_by_their_names(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    store(broker, "old/one", b"x" * 10, begin=0, mod_time=DAY)
    url = f"{STORE}?find=new/&replace=old/"
    await broker.create(journal_spec("new/one", stores=(url,)))
    result = await gazctl.ok("journals", "usage")
    assert result.rows[0] == ["new/one", "1", "10", "B", "10", "B", url]


async def test_what_brokers_store_is_counted(broker: BrokerFixture, gazctl: Runner) -> None:
    await broker.create(journal_spec("a/one", length=1 << 10))
    for _ in range(5):
        await broker.client.append(AppendParams("a/one"), os.urandom(2000))
    while True:
        result = await gazctl.ok("journals", "usage", "-l", "name=a/one", "-o", "json")
        (whole,) = json.loads(result.out)["stores"]
        if whole["content_bytes"] >= 8000:  # The last fragment may be open.
            break
    assert whole["stored_bytes"] == whole["content_bytes"]


async def test_a_store_that_cannot_be_listed_hides_no_other(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    store(broker, "a/one", b"x" * 10, begin=0, mod_time=DAY)
    await broker.create(journal_spec("a/one"))
    result = await gazctl("journals", "usage", STORE, "fsspec+nothing://here/")
    assert result.code == 1
    assert "fsspec+nothing://here/: " in result.err
    assert result.rows[0][0] == "a/one"
    result = await gazctl("journals", "usage", STORE, BROKER_FILE_ROOT="")
    assert result.code == 1
    assert "file" in result.err
    result = await gazctl("journals", "usage", "nowhere")
    assert result.code == 2
    assert "STORE_URL" in result.err


@pytest.mark.parametrize("seed", range(3))
async def test_each_object_is_counted_once(
    broker: BrokerFixture, gazctl: Runner, seed: int
) -> None:
    """Over nested journals, deleted ones, and files with any name."""
    rng = random.Random(seed)
    names = [
        f"{a}{b}" for a in ("tops", "tops/mid", "tops/mid/low", "side") for b in ("", "/x", "-y")
    ]
    existing = rng.sample(names, 6)
    sizes: dict[str, int] = {}
    for name in names:
        for number in range(rng.randrange(4)):
            content = bytes([rng.randrange(256)]) * rng.randrange(1, 2000)
            store(broker, name, content, begin=number * 5000, mod_time=DAY)
            sizes[name] = sizes.get(name, 0) + len(content)
    await broker.create(*(journal_spec(name) for name in existing))
    document = json.loads((await gazctl.ok("journals", "usage", STORE, "-o", "json")).out)
    (whole,) = document["stores"]
    found = {one["journal"]: one["stored_bytes"] for one in whole["journals"]}
    found |= {one["directory"]: one["stored_bytes"] for one in whole["others"]}
    found.pop(".test", None)
    assert found == sizes
    assert {one["journal"] for one in whole["journals"]} == set(existing) & set(sizes)
