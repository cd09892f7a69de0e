"""Specifications of journals: list, apply, edit."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format

from gazette.client.append.appender import AppendParams
from gazette.client.journals import JournalChange
from gazette.gazctl.context import Context
from gazette.gazctl.io.spec_editor import edit_specs
from gazette.gazctl.settings import prepare
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE
from gazette.protocol.journal import Suspend, SuspendLevel
from gazette.protocol.label_set import LabelSelector, LabelSet
from gazette.protocol.pb import broker_pb2
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from gazette.testing.broker import BrokerFixture, journal_spec
from tests.gazctl.runner import Runner, Streams

JSON_LINES = LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES))

TREE = """
name: a/
replication: 1
labels: [{name: env, value: test}]
fragment: {length: 65536, compression_codec: NONE, stores: ["file:///fragments/"], refresh_interval: 1m}
children:
- name: a/one
- name: a/two
"""


async def revisions(broker: BrokerFixture) -> dict[str, int]:
    listed = (await broker.client.list_journals()).journals
    return {one.spec.name: one.mod_revision for one in listed}


async def test_lists_are_tables_yaml_json_and_text_of_protocol_buffers(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    await broker.create(journal_spec("a/one", labels=JSON_LINES), journal_spec("b/two"))

    # Case: a table has names, and columns that are asked for.
    assert (await gazctl.ok("journals", "list")).out == "Name\na/one\nb/two\n"
    result = await gazctl.ok(
        "journals", "list", "-pr", "--rf", "--stores", "-L", "content-type,none"
    )
    assert result.out.split("\n")[0].split() == [
        "Name",
        "Primary",
        "Replicas",
        "RF",
        "Stores",
        "content-type",
        "none",
    ]
    one, two = result.rows
    store = "file:///fragments/"
    process = "local#broker-one"
    assert one == ["a/one", process, process, "1", store, CONTENT_JSON_LINES, "<none>"]
    assert two == ["b/two", process, process, "1", store, "<none>", "<none>"]

    # Case: selected by labels, by name, by prefix; nothing that matches is no error.
    for selector, expected in (
        ("content-type", ["a/one"]),
        ("name=b/two", ["b/two"]),
        ("name:prefix=a/", ["a/one"]),
        ("!content-type", ["b/two"]),
    ):
        rows = (await gazctl.ok("journals", "list", "-l", selector)).rows
        assert [row[0] for row in rows] == expected
    nothing = await gazctl.ok("journals", "list", "-l", "name=c")
    assert (nothing.out, nothing.err) == ("Name\n", "no journal matches\n")

    # Case: YAML is what apply reads, with revisions.
    yaml = (await gazctl.ok("journals", "list", "-l", "name=a/one", "-o", "yaml")).out
    assert f"revision: {(await revisions(broker))['a/one']}" in yaml
    applied = await gazctl.ok("journals", "apply", stdin=yaml.encode())
    assert "1 put, 0 deleted" in applied.err

    # Case: JSON is one document of the response; proto its text form.
    document = json.loads((await gazctl.ok("journals", "list", "-o", "json")).out)
    assert [one["spec"]["name"] for one in document["journals"]] == ["a/one", "b/two"]
    assert document["status"] == "OK"
    assert document["journals"][1]["spec"]["max_append_rate"] == "0"
    text = (await gazctl.ok("journals", "list", "-o", "proto")).out
    response = text_format.Parse(text, broker_pb2.ListResponse())
    assert [one.spec.name for one in response.journals] == ["a/one", "b/two"]


async def test_a_watch_lists_again_whenever_a_specification_changes(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    from gazette.gazctl.perform import run_in_loop

    await broker.create(journal_spec("a/one"))
    streams = Streams()
    argv = ["journals", "list", "--watch", "-o", "json"]
    async with TaskScope("test") as scope:
        watching = scope.spawn(run_in_loop(argv, gazctl.environ, streams.terminal), name="watch")
        while streams.out.getvalue().count(b"\n") < 1:
            await asyncio.wait({watching}, timeout=0.01)
        await broker.create(journal_spec("a/two"))
        while streams.out.getvalue().count(b"\n") < 2:
            await asyncio.wait({watching}, timeout=0.01)
        watching.cancel()
    # One document on each line.
    lists = [json.loads(line)["journals"] for line in streams.out.getvalue().splitlines()]
    assert [[one["spec"]["name"] for one in journals] for journals in lists] == [
        ["a/one"],
        ["a/one", "a/two"],
    ]


async def test_a_tree_is_applied_whole_or_not_at_all(broker: BrokerFixture, gazctl: Runner) -> None:
    # Case: a dry run prints the request, and does nothing.
    dry = await gazctl.ok("journals", "apply", "--dry-run", stdin=TREE.encode())
    request = text_format.Parse(dry.out, broker_pb2.ApplyRequest())
    assert [change.upsert.name for change in request.changes] == ["a/one", "a/two"]
    assert await revisions(broker) == {}

    # Case: journals are created; once more, they exist.
    await gazctl.ok("journals", "apply", stdin=TREE.encode())
    created = await revisions(broker)
    again = await gazctl("journals", "apply", stdin=TREE.encode())
    assert again.code == 1
    assert f"a/one is at revision {created['a/one']}, expected: it does not exist" in again.err

    # Case: one change that cannot be made keeps all others from being made.
    def tree(one: int, two: int) -> bytes:
        text = TREE.replace("a/one\n", f"a/one\n  revision: {one}\n")
        return text.replace("a/two\n", f"a/two\n  revision: {two}\n").encode()

    wrong = created["a/two"] + 1000
    result = await gazctl("journals", "apply", stdin=tree(wrong, created["a/two"]))
    assert result.code == 1
    assert f"a/one is at revision {created['a/one']}, expected: it is at revision" in result.err
    assert "a/two" not in result.err
    assert await revisions(broker) == created

    # Case: in several transactions, the first stand.
    stale = created["a/one"]
    result = await gazctl("journals", "apply", "--max-txn-size=1", stdin=tree(stale, wrong))
    assert result.code == 1
    assert "The first 1 of 2 changes were made." in result.err
    assert "a/two is at revision" in result.err
    assert "a/one is at revision" not in result.err  # That change was made.
    after = await revisions(broker)
    assert after["a/one"] > created["a/one"]
    assert after["a/two"] == created["a/two"]

    # Case: deleting takes a revision.
    delete = "name: a/\ndelete: true\nchildren: [{name: a/one}, {name: a/two}]"
    result = await gazctl("journals", "apply", stdin=delete.encode())
    assert result.code == 2
    assert "cannot delete a/one: it has no revision" in result.err
    delete = delete.replace("one}", "one, revision: -1}").replace("two}", "two, revision: -1}")
    assert "0 put, 2 deleted" in (await gazctl.ok("journals", "apply", stdin=delete.encode())).err
    assert await revisions(broker) == {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name: a/b\nreplicas: 1", "line 2: unknown field replicas"),
        ("name: a/b\nreplication: many", "line 2: expected an integer (many)"),
        ("name: a/bc\nreplication: 1", "a/bc.Fragment: invalid Length (0;"),
        ("name: a/\nchildren: [{name: b/c}]", "expected parent Name to prefix child (a/ vs b/c)"),
        ("name: [", "not YAML"),
        (
            "name: a/bc\nrevision: -2\n" + TREE.split("\n", 2)[2].split("children")[0],
            "invalid revision",
        ),
    ],
)
async def test_what_is_wrong_with_specifications_is_named(text: str, problem: str) -> None:
    """Before any broker is asked."""
    gazctl = Runner({"BROKER_ADDRESS": "http://127.0.0.1:1"})
    result = await gazctl("journals", "apply", stdin=text.encode())
    assert result.code == 2
    assert problem in result.err


async def test_a_dry_run_needs_no_broker() -> None:
    gazctl = Runner({"BROKER_ADDRESS": "http://127.0.0.1:1"})
    result = await gazctl.ok("journals", "apply", "--dry-run", stdin=TREE.encode())
    assert "a/two" in result.out
    assert "Cannot look up suspensions of journals" in result.err


async def test_too_many_changes_for_etcd_are_advised_about(gazctl: Runner) -> None:
    children = "".join(f"- name: a/part-{at:03d}\n" for at in range(140))
    tree = TREE.split("- name")[0] + children
    result = await gazctl("journals", "apply", stdin=tree.encode())
    assert result.code == 1
    assert "--max-txn-size=64" in result.err
    await gazctl.ok("journals", "apply", "--max-txn-size=100", stdin=tree.encode())


async def test_journals_that_lack_replicas_are_marked(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    await broker.create(journal_spec("a/one"))
    await broker.client.apply_journals([JournalChange(upsert=journal_spec("a/two", replication=2))])
    while not broker.service.context.state.assignments_of("a/two"):
        await broker.service.context.key_space.next_change()
    assert (await gazctl.ok("journals", "list")).out == "Name\na/one\na/two <1/2>\n"


async def test_an_update_keeps_the_suspension_that_it_does_not_mention(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    """A journal that lost it would begin at offset zero again, over what it had."""
    suspended = journal_spec("a/one", suspend=Suspend(SuspendLevel.FULL, 1234))
    await broker.client.apply_journals([JournalChange(upsert=suspended)])
    listed = (await gazctl.ok("journals", "list", "-o", "yaml")).out
    assert (await gazctl.ok("journals", "list")).out == "Name\na/one <S>\n"
    assert "suspend:\n  level: FULL\n  offset: 1234\n" in listed

    async def suspension() -> Suspend | None:
        return (await broker.client.get_journal("a/one")).spec.suspend

    # Case: nothing is said of it; revisions may be given, or be of no matter.
    without = listed.replace("suspend:\n  level: FULL\n  offset: 1234\n", "")
    result = await gazctl.ok("journals", "apply", stdin=without.encode())
    assert "a/one: its suspension is kept" in result.err
    assert await suspension() == Suspend(SuspendLevel.FULL, 1234)
    anyway = without[: without.index("revision")] + "revision: -1\n"
    await gazctl.ok("journals", "apply", stdin=anyway.encode())
    assert await suspension() == Suspend(SuspendLevel.FULL, 1234)

    # Case: another level is asked for, and no offset: that of the journal stays.
    partial = anyway + "suspend: {level: PARTIAL}\n"
    await gazctl.ok("journals", "apply", stdin=partial.encode())
    assert await suspension() == Suspend(SuspendLevel.PARTIAL, 1234)

    # Case: what is said in full is done.
    await gazctl.ok("journals", "apply", stdin=(anyway + "suspend: {offset: 99}\n").encode())
    assert await suspension() == Suspend(SuspendLevel.NONE, 99)


@pytest.fixture
def editor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write an editor that makes replacements: of each line ``old=>new`` of a file, one line a run."""
    script = tmp_path / "editor.py"
    script.write_text(
        "import pathlib, sys\n"
        "steps, log = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])\n"
        "path = pathlib.Path(sys.argv[3])\n"
        "text = path.read_text()\n"
        "log.write_text((log.read_text() if log.exists() else '') + text + '=====\\n')\n"
        "lines = steps.read_text().splitlines()\n"
        "steps.write_text('\\n'.join(lines[1:]))\n"
        "old, _, new = (lines[0] if lines else '').partition('=>')\n"
        "path.write_text(text.replace(old, new) if old else text)\n"
    )
    return script


def editing(script: Path, *steps: str) -> dict[str, Any]:
    """Return the environment in which ``script`` makes these steps."""
    (script.parent / "steps").write_text("\n".join(steps))
    (script.parent / "log").unlink(missing_ok=True)
    words = [sys.executable, script, script.parent / "steps", script.parent / "log"]
    return {"GAZ_EDITOR": " ".join(str(word) for word in words), "EDITOR": "false"}


async def test_specifications_are_edited(
    broker: BrokerFixture, gazctl: Runner, editor: Path
) -> None:
    await broker.create(journal_spec("a/one"), journal_spec("b/two"))
    edit = ("journals", "edit", "-l", "name=a/one")

    async def length() -> int:
        return (await broker.client.get_journal("a/one")).spec.fragment.length

    # Case: nothing is changed.
    assert "nothing was changed" in (await gazctl.ok(*edit, **editing(editor))).err

    # Case: a change is applied.
    environ = editing(editor, "length: 16777216=>length: 33554432")
    assert "1 put, 0 deleted" in (await gazctl.ok(*edit, **environ)).err
    assert await length() == 1 << 25
    assert "b/two" not in (editor.parent / "log").read_text()

    # Case: what cannot be read is opened again, with the error above it.
    environ = editing(editor, "length:=>lenth:", "lenth: 33554432=>length: 65536")
    await gazctl.ok(*edit, **environ)
    assert await length() == 1 << 16
    second = (editor.parent / "log").read_text().split("=====\n")[1]
    assert "unknown field lenth" in second.split("name:")[0]

    # Case: it is given up.
    result = await gazctl(*edit, **editing(editor, "length:=>lenth:"))
    assert result.code == 2
    assert "gave up: line" in result.err
    kept = Path(result.err.split("is kept in ")[1].split("\n")[0].rstrip("."))
    assert "lenth" in kept.read_text()
    assert "#" not in kept.read_text()
    kept.unlink()

    # Case: an editor that is a program makes the same mistake again and again.
    worse = editor.with_name("worse.py")
    worse.write_text("import sys\nwith open(sys.argv[1], 'a') as file: file.write('lenth: 1\\n')\n")
    result = await gazctl(*edit, GAZ_EDITOR=f"{sys.executable} {worse}")
    assert result.code == 2
    assert "gave up: " in result.err
    kept = Path(result.err.split("is kept in ")[1].split("\n")[0].rstrip("."))
    assert kept.read_text().count("lenth") == 6
    kept.unlink()

    # Case: what cannot be applied is kept, and so are the journals.
    result = await gazctl(*edit, **editing(editor, "revision: =>revision: 1"))
    assert result.code == 1
    kept = Path(result.err.split("is kept in ")[1].split("\n")[0].rstrip("."))
    assert "revision: 1" in kept.read_text()
    kept.unlink()
    assert await length() == 1 << 16

    # Case: there is nothing to edit, or no editor.
    assert (await gazctl("journals", "edit", "-l", "name=c")).code == 1
    result = await gazctl(*edit, EDITOR="false")
    assert (result.code, "exit code 1" in result.err) == (1, True)
    result = await gazctl(*edit, EDITOR="/no/such/editor")
    assert (result.code, "cannot run the editor" in result.err) == (2, True)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("file.write(b'# caf\\xe9\\n')", "no UTF-8"),
        ("file.write(b'# changed\\n'), file.close(), sys.exit(3)", "exit code 3"),
    ],
)
async def test_a_text_that_its_editor_saves_badly_is_kept(
    broker: BrokerFixture, gazctl: Runner, tmp_path: Path, script: str, says: str
) -> None:
    await broker.create(journal_spec("a/one"))
    editor = tmp_path / "bad.py"
    editor.write_text(f"import sys\nwith open(sys.argv[1], 'ab') as file: {script}\n")
    edit = ("journals", "edit", "-l", "name=a/one")
    result = await gazctl(*edit, GAZ_EDITOR=f"{sys.executable} {editor}")
    assert (result.code, says in result.err) == (1, True), result
    kept = Path(result.err.split("is kept in ")[1].split("\n")[0].rstrip("."))
    assert kept.read_bytes().endswith((b"# caf\xe9\n", b"# changed\n"))
    kept.unlink()


async def test_a_text_is_kept_when_its_apply_is_interrupted(tmp_path: Path) -> None:
    editor = tmp_path / "editor.py"
    editor.write_text("import sys\nwith open(sys.argv[1], 'a') as file: file.write('changed\\n')\n")
    environ = {"GAZ_EDITOR": f"{sys.executable} {editor}"}
    streams, applying = Streams(), asyncio.Event()
    prepared = prepare(["journals", "edit", "-l", "name=a"], environ, streams.terminal)
    assert not isinstance(prepared, int)
    context = Context(prepared[1], environ, streams.terminal, SystemClock(), random.Random())

    async def hang(text: str) -> None:
        applying.set()
        await asyncio.get_running_loop().create_future()

    async with TaskScope("test") as scope:
        edit = scope.spawn(edit_specs("name: a\n", hang, context), name="edit")
        await applying.wait()
        edit.cancel()
    kept = Path(streams.err.getvalue().split("is kept in ")[1].split("\n")[0].rstrip("."))
    assert kept.read_text() == "name: a\nchanged\n"
    kept.unlink()


async def test_a_journal_can_be_used_after_all_that(broker: BrokerFixture, gazctl: Runner) -> None:
    await gazctl.ok("journals", "apply", stdin=TREE.encode())
    await broker.settled("a/one")
    await broker.client.append(AppendParams("a/one"), b"content")
    assert (await gazctl.ok("journals", "read", "-l", "name=a/one")).out == "content"


async def test_apply_waits_until_journals_have_their_brokers(
    broker: BrokerFixture, gazctl: Runner
) -> None:
    text = (
        "name: a/fresh\nreplication: 1\n"
        "fragment: {length: 1024, compression_codec: NONE, refresh_interval: 5m}\n"
    )
    apply = ("journals", "apply", "--wait")
    await gazctl.ok(*apply, stdin=text.encode())
    (listed,) = (await broker.client.list_journals(LabelSelector.of(name="a/fresh"))).journals
    assert listed.route.primary == 0
    # Case: of two brokers there is one.
    text = text.replace("a/fresh", "a/wide").replace("replication: 1", "replication: 2")
    result = await gazctl(*apply, "--timeout=300ms", stdin=text.encode())
    assert result.code == 1
    assert "after 0.3 s, brokers are still too few for 1 journal, such as a/wide" in result.err
