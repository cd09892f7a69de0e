"""``gazctl produce`` into journals with a key: each line finds its partition, or is refused by number."""

from __future__ import annotations

import json

import pytest

from gazette.gazctl.journals.append import KEYED_NOTE
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE, MESSAGE_TIME, MESSAGE_TYPE
from gazette.message.key_hash import fnv32a
from gazette.message.key_rule import KeyRule
from gazette.message.keys import FLOAT
from gazette.protocol.label_set import LabelSet
from gazette.testing.broker import BrokerFixture, journal_spec
from tests.gazctl.runner import Runner

COUNT = 3
PARTS = [f"sales/part-{n:03d}" for n in range(COUNT)]
APP = """
from gazette import Application, Message, Source

class Sale(Message):
    shop: float
    item: str = ""

class Shop:
    sales = Source("sales", Sale, partitions=3, key="shop")
    other = 7
"""


def part(text: str) -> str:
    return PARTS[fnv32a(text.encode()) % COUNT]


@pytest.fixture(autouse=True)
async def journals(broker: BrokerFixture) -> None:
    rule = KeyRule.of_field("shop", FLOAT, COUNT)
    labels = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES), (MESSAGE_TYPE, "Sale"), *rule.labels)
    await broker.create(*(journal_spec(name, labels=labels) for name in PARTS))


async def shops(gazctl: Runner, journal: str) -> list[object]:
    found = await gazctl.ok("read", journal)
    return [json.loads(one)["shop"] for one in found.out.splitlines()]


async def test_lines_find_the_partition_of_their_key(gazctl: Runner) -> None:
    """A number has one key, however a line writes it."""
    texts = [text for n in range(6) for text in (f"{n}", f"{n}.0", f"{n}e0")]
    lines = "\n".join(f'{{"shop":{text}}}' for text in texts).encode()
    every = ["-l", "name:prefix=sales/"]
    for argv in (every, [*every, "--key=shop"], [*every, "--mapping=rendezvous"]):
        await gazctl.ok("produce", *argv, stdin=lines)
    for journal in PARTS:
        wanted = [float(text) for text in texts if part(text[0]) == journal] * 3
        assert await shops(gazctl, journal) == wanted


@pytest.mark.parametrize(
    ("argv", "line", "says"),
    [
        (["-l", "name:prefix=sales/"], '{"item":"x"}', "'shop'"),
        (["-l", "name:prefix=sales/"], '{"shop":null}', "None"),
        (["-l", "name:prefix=sales/", "--key=item"], '{"shop":1,"item":"2"}', "'2'"),
        (["-l", "name:prefix=sales/part-00,name!=sales/part-001"], '{"shop":1}', ""),
        (["-l", "name=sales/part-001"], '{"shop":1}', "1 of 3"),
        (["--declared=keyed_app:Shop.sales"], '{"shop":"x"}', "line 1"),
        (["--declared=keyed_app:Shop.sales", "sales/part-000"], '{"shop":1}', "--declared"),
        (["--declared=keyed_app:Shop.other"], '{"shop":1}', "Shop.other"),
        (["--declared=keyed_app:Shop.none"], '{"shop":1}', "none"),
    ],
)
async def test_a_line_without_its_key_is_refused(
    gazctl: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory,
    argv: list[str], line: str, says: str,
) -> None:  # fmt: skip
    directory = tmp_path_factory.mktemp("app")
    (directory / "keyed_app.py").write_text(APP)
    monkeypatch.syspath_prepend(directory)
    result = await gazctl("produce", *argv, stdin=line.encode())
    assert result.code
    assert says in result.err
    for journal in PARTS:
        assert await shops(gazctl, journal) == []


async def test_a_named_partition_takes_only_its_keys(gazctl: Runner) -> None:
    await gazctl.ok("produce", part("1"), stdin=b'{"shop":1}')
    other = next(name for name in PARTS if name != part("1"))
    result = await gazctl("produce", other, stdin=b'{"shop":1}')
    assert result.code
    assert part("1")[-1] in result.err
    assert await shops(gazctl, other) == []


async def test_a_declaration_gives_key_and_type(
    gazctl: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("app")
    (directory / "keyed_app.py").write_text(APP)
    monkeypatch.syspath_prepend(directory)
    await gazctl.ok("produce", "--declared=keyed_app:Shop.sales", stdin=b'{"shop":4}\n{"shop":5}')
    for text in ("4", "5"):
        assert float(text) in await shops(gazctl, part(text))


async def test_raw_bytes_are_appended_with_a_warning(gazctl: Runner) -> None:
    result = await gazctl.ok(
        "journals", "append", "-l", f"name={PARTS[0]}", "--framing=lines", stdin=b"{}\n"
    )
    assert KEYED_NOTE in result.err
    keyed = ["--mapping=modulo", "--framing=lines", "-l", "name:prefix=sales/"]
    assert KEYED_NOTE not in (await gazctl.ok("journals", "append", *keyed, stdin=b"1\n{}\n")).err


@pytest.mark.parametrize(
    ("label", "line", "says"),
    [
        ("at", '{"shop":1}', "missing"),
        ("at", '{"shop":1,"at":null}', "missing"),
        ("at", '{"shop":1,"at":"2026-01-01T00:00:00"}', "zone"),
        ("at", '{"shop":1,"at":"soon"}', "RFC3339"),
        ("at", '{"shop":1,"at":7}', "unit"),
        ("at", '{"shop":1,"at":"9000-01-01T00:00:00Z"}', "ahead"),
        ("at/ms", '{"shop":1,"at":"2026-01-01T00:00:00Z"}', "number"),
        ("at/ms", '{"shop":1,"at":true}', "bool"),
        ("at/days", '{"shop":1,"at":1}', "days"),
        ("time_of--/ms", '{"shop":1,"at":1}', "--declared"),
    ],
)
async def test_a_line_without_the_time_of_its_journal_is_refused(
    gazctl: Runner, broker: BrokerFixture, label: str, line: str, says: str
) -> None:
    labels = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES), (MESSAGE_TIME, label))
    await broker.create(journal_spec("timed/part-000", labels=labels))
    good = b'{"shop":1,"at":1}' if label == "at/ms" else b'{"shop":1,"at":"2026-01-01T00:00:00Z"}'
    for argv in (["timed/part-000"], ["-l", "name:prefix=timed/"]):
        result = await gazctl("produce", *argv, stdin=line.encode())
        assert result.code
        assert "line 1" in result.err
        assert says in result.err
        if label in ("at", "at/ms"):
            await gazctl.ok("produce", *argv, stdin=good)
    if label != "at/days":
        assert len(await shops(gazctl, "timed/part-000")) == 2 * (label in ("at", "at/ms"))
