"""``gazctl journals tail``: the last lines of a journal, and those that follow."""

from __future__ import annotations

import signal

import pytest

from gazette.client.append.appender import AppendParams
from gazette.client.journals import JournalChange
from gazette.gazctl.journals.tail import FIRST_BYTES
from gazette.labels import CONTENT_PROTO_FIXED, CONTENT_RECOVERY_LOG, CONTENT_TYPE
from gazette.protocol.label_set import LabelSet
from gazette.testing.broker import BrokerFixture, journal_spec
from tests.gazctl.runner import Runner
from tests.gazctl.stored import store
from tests.gazctl.test_process import ended, start

JOURNAL = "a/journal"


async def append(broker: BrokerFixture, content: bytes) -> None:
    await broker.client.append(AppendParams(JOURNAL), content)


async def tail(gazctl: Runner, *more: str) -> str:
    return (await gazctl.ok("journals", "tail", JOURNAL, "--no-follow", *more)).out


async def test_the_last_lines_are_those_of_the_journal(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    """Short and long ones, over several searches, with and without a newline at the end."""
    await broker.create(journal_spec(JOURNAL, length=FIRST_BYTES))
    assert await tail(gazctl) == ""
    lines = [f"{n} {'x' * (n * 317 % 5000)}\n" for n in range(400)]
    for at in range(0, 400, 20):
        await append(broker, "".join(lines[at : at + 20]).encode())
    assert await tail(gazctl) == "".join(lines[-10:])
    for number in (0, 1, 2, 33, 399, 400, 401, 1_000_000):
        assert await tail(gazctl, f"--lines={number}") == "".join(lines[400 - min(number, 400) :])
    await append(broker, b"no end")
    assert await tail(gazctl, "-n", "2") == lines[-1] + "no end"


async def test_a_line_that_is_longer_than_what_is_searched_is_shown_from_its_begin(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    await broker.create(journal_spec(JOURNAL))
    await append(broker, b"first\n" + b"y" * (FIRST_BYTES * 3) + b"\n")
    assert await tail(gazctl, "-n", "1") == "y" * (FIRST_BYTES * 3) + "\n"


async def test_bytes_that_were_pruned_are_passed_over(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    for journal, begin in ((JOURNAL, 1 << 33), ("b/journal", 1000)):
        store(broker, journal, b"one\ntwo\n", begin=begin, mod_time=1_000_000_000)
        await broker.create(journal_spec(journal))
        for number, expected in ((1, "two\n"), (2, "one\ntwo\n"), (3, "one\ntwo\n")):
            argv = ("journals", "tail", journal, "--no-follow", f"--lines={number}")
            result = await gazctl.ok(*argv)
            assert result.out == expected
            assert "no content" not in result.err


async def test_texts_of_others_cannot_change_the_terminal(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    await broker.create(journal_spec(JOURNAL))
    await append(broker, "\x1b]0;owned\x07 \x9b2J \u202e é\t.\n".encode() + b"\xff\xc3")
    assert await tail(gazctl) == "\\x1b]0;owned\\x07 \\x9b2J \\u202e é\t.\n\\xff\\xc3"


async def test_lines_that_come_are_shown_until_an_interrupt(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    await broker.create(journal_spec(JOURNAL))
    await append(broker, b"one\ntwo\n")
    process = await start(gazctl, "journals", "tail", JOURNAL, "-n", "1")
    assert process.stdout is not None
    assert await process.stdout.readline() == b"two\n"
    await append(broker, b"three\n\x1b")
    assert await process.stdout.readline() == b"three\n"
    process.send_signal(signal.SIGINT)
    code, _, err = await ended(process)
    assert (code, err) == (0, "")


async def test_a_journal_that_is_created_again_is_shown_from_its_first_byte(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    """The former offset would be waited for without end."""
    await broker.create(journal_spec(JOURNAL))
    await append(broker, b"a line of the former life\n")
    process = await start(gazctl, "journals", "tail", JOURNAL)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"a line of the former life\n"
    (broker.file_root / "other").mkdir()
    await broker.client.apply_journals([JournalChange(delete=JOURNAL, expect_mod_revision=-1)])
    await broker.create(journal_spec(JOURNAL, stores=("file:///other/",)))
    await append(broker, b"new\n")
    assert await process.stdout.readline() == b"new\n"
    process.send_signal(signal.SIGINT)
    code, _, err = await ended(process)
    assert (code, f"{JOURNAL} was created again" in err) == (0, True), err


async def test_what_cannot_be_shown_says_what_to_use(broker: BrokerFixture, gazctl: Runner) -> None:
    for content_type, advice in (
        (CONTENT_PROTO_FIXED, "gazctl read a/journal"),
        (CONTENT_RECOVERY_LOG, "gazctl shards query"),
    ):
        labels = LabelSet.of((CONTENT_TYPE, content_type))
        change = JournalChange(journal_spec(JOURNAL, labels=labels), expect_mod_revision=-1)
        await broker.client.apply_journals([change])
        result = await gazctl("journals", "tail", JOURNAL)
        assert (result.code, advice in result.err) == (2, True), result


@pytest.mark.parametrize(
    ("argv", "code", "problem"),
    [
        (["a/none"], 1, "there is no journal a/none"),
        ([], 2, "give the name of one journal"),
        ([""], 2, "NAME"),
        (["a/one", "a/two"], 2, "give the name of one journal"),
        ([JOURNAL, "--lines=-1"], 2, "--lines"),
    ],
)
async def test_a_wrong_call_is_refused(
    gazctl: Runner, argv: list[str], code: int, problem: str
) -> None:
    result = await gazctl("journals", "tail", *argv)
    assert (result.code, problem in result.err) == (code, True), result
