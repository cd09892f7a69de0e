"""The types of the wheel reach the type checkers of users: mypy --strict and pyright."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.wheel import install_wheels

ROOT = Path(__file__).parents[1]
PUBLIC = {
    "gazette": (
        "Application ConsumerService Envelope Message Publisher Recorder Shard ShardRequest Store "
        "runconsumer shard_route shard_rpc"
    ),
    "gazette.stores.sqlite": "SQLiteStore",
    "gazette.stores.rocksdb": "RocksDBStore",
    "gazette.stores.json_file": "JSONFileStore",
    "gazette.stores.sql": "SQLStore",
    "gazette.client": "AppendService Client Reader RetryReader",
    "gazette.testing": "AppDriver",
    "gazette.spark": "Backfill GazetteDataSource session",
}
"""Names that applications import, by module."""
MISTAKES = '''
from gazette import Aplication  # wrong
from gazette.client import Clients  # wrong
from gazette import Application, Envelope, Message, Publisher, Recorder, Shard, runconsumer
from gazette.stores.sqlite import SQLiteStore


class Word(Message):
    word: str


class Wrong(Application[SQLiteStore]):
    message_type = Word

    def new_store(self, shard: Shard, recorder: Recorder | None) -> SQLiteStore:
        shard.publish_future(7)  # wrong
        return SQLiteStore(recorder, 7)  # wrong

    def consume_message(
        self, shard: Shard, store: SQLiteStore, envelope: Envelope[Word], publisher: Publisher
    ) -> None:
        store.execute(envelope.message.word, journal=1)  # wrong
        print(envelope.message.number, envelope.begin)  # wrong

    def finalize_transaction(self, shard: int, store: SQLiteStore, publisher: Publisher) -> None:  # wrong
        pass


runconsumer.main(Wrong)  # wrong
'''  # fmt: skip


QUERIED = '''
from gazette import (
    Application, ConsumerService, Envelope, Message, Publisher, Recorder, Shard, ShardRequest, shard_route
)
from gazette.stores.sqlite import SQLiteStore


class Word(Message):
    word: str


class Api:
    def __init__(self, service: ConsumerService) -> None:
        self.service = service

    @shard_route()
    def count(self, store: SQLiteStore, request: ShardRequest) -> dict[str, int]:
        return {"n": len(store.query("SELECT 1"))}


class Queried(Application[SQLiteStore]):
    message_type = Word

    async def initialize(self, service: ConsumerService) -> None:
        service.add_route("/shards/{shard}/count", Api(service).count)
        shards = service.shards_with_source("a/journal")
        print([shard.id for shard in shards], service.process_id, service.client.address)

    def new_store(self, shard: Shard, recorder: Recorder | None) -> SQLiteStore:
        return SQLiteStore(recorder)

    def consume_message(
        self, shard: Shard, store: SQLiteStore, envelope: Envelope[Word], publisher: Publisher
    ) -> None:
        pass
'''  # fmt: skip

DECLARED = '''
from datetime import datetime, timedelta

from gazette import Application, Message, Output, Publisher, Shard, Source
from gazette.stores.sqlite import SQLiteStore
from gazette.windows import StreamJoin, TableJoin


class B(Message):
    x: int


class C(Message):
    z: int


class Declares(Application[SQLiteStore]):
    b = Output("b", B, key="x")
    c = Source("c", C, key=lambda message: str(message.z))
    bad = Source("bad", C, key=lambda message: str(message.x))  # wrong
    both = Output[B | C]("both", B | C)
    table = TableJoin("table", value_type=B, row_type=int)
    rows = TableJoin("rows", row_type=int)
    plain = TableJoin("plain")
    stream = StreamJoin(
        "stream", before=timedelta(0), after=timedelta(0), left_type=B, right_type=C
    )
    open = StreamJoin("open", before=timedelta(0), after=timedelta(0))


def use(app: Declares, publisher: Publisher, shard: Shard, store: SQLiteStore, at: datetime) -> None:
    publisher.publish_uncommitted(app.b.mapping(), B(x=1))
    publisher.publish_uncommitted(app.b.mapping(), C(z=1))  # wrong
    publisher.publish_uncommitted(app.b.mapping(), 7)  # wrong
    publisher.publish_committed(app.b.mapping(), C(z=1))  # wrong
    publisher.publish_committed_batch(app.b.mapping(), [B(x=1)])
    publisher.publish_committed_batch(app.b.mapping(), [C(z=1)])  # wrong
    publisher.publish_uncommitted(app.both.mapping(), B(x=1))
    publisher.publish_uncommitted(app.both.mapping(), C(z=1))
    publisher.publish_uncommitted(app.both.mapping(), "x")  # wrong
    app.table.add(shard, store, "k", at, B(x=1))
    app.table.add(shard, store, "k", at, C(z=1))  # wrong
    app.table.put(shard, store, "k", at, "x")  # wrong
    app.rows.put(shard, store, "k", at, "x")  # wrong
    app.plain.put(shard, store, "k", at, "x")
    for one in app.stream.add_left(shard, store, "k", at, B(x=1)).pairs:
        if one.left is not None and one.right is not None:
            print(one.left.x, one.right.z)
            print(one.left.z)  # wrong
    app.stream.add_right(shard, store, "k", at, B(x=1))  # wrong
    app.open.add_left(shard, store, "k", at, C(z=1))
    row: str | None = app.table.latest(store, "k")  # wrong
    print(row)
'''  # fmt: skip
"""Journals and joins with types, and messages and rows that are not of them."""


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a project of a user: ``bin/python`` has the wheel, and what it depends on."""
    project = tmp_path_factory.mktemp("user")
    install_wheels(project)
    return project


def run(command: list[str], *, codes: tuple[int, ...] = (0,), cwd: Path | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)
    assert done.returncode in codes, f"{command}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def mypy(project: Path, name: str) -> dict[int, str]:
    """Return the errors of ``mypy --strict``, by line."""
    python = str(project / "bin" / "python")
    options = [
        "--strict",
        "--no-error-summary",
        "--no-pretty",
        "--config-file=",
        "--python-executable",
        python,
    ]
    out = run([sys.executable, "-m", "mypy", *options, name], codes=(0, 1), cwd=project)
    found = re.findall(rf"^{re.escape(name)}:(\d+): error: (.*)$", out, re.MULTILINE)
    assert len(found) == out.count(": error: "), out
    return {int(line): message for line, message in found}


def pyright(project: Path, name: str) -> dict[int, str]:
    """Return the errors of pyright with its default rules, by line."""
    python = str(project / "bin" / "python")
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", python, name]
    out = json.loads(run(command, codes=(0, 1), cwd=project))
    return {
        one["range"]["start"]["line"] + 1: one["message"]
        for one in out["generalDiagnostics"]
        if one["severity"] == "error"
    }


def wrong_lines(text: str) -> set[int]:
    return {at for at, line in enumerate(text.splitlines(), 1) if "# wrong" in line}


Checker: TypeAlias = Callable[[Path, str], Mapping[int, str]]
CHECKERS = pytest.mark.parametrize("checker", [mypy, pyright])


@pytest.mark.long
@CHECKERS
def test_the_application_of_the_readme_has_no_errors(user: Path, checker: Checker) -> None:
    readme = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert readme is not None
    (user / "app.py").write_text(readme.group(1))
    assert checker(user, "app.py") == {}


@pytest.mark.long
@CHECKERS
def test_an_application_that_answers_queries_has_no_errors(user: Path, checker: Checker) -> None:
    (user / "queried.py").write_text(QUERIED)
    assert checker(user, "queried.py") == {}


@pytest.mark.long
@CHECKERS
def test_mistakes_of_an_application_are_errors(user: Path, checker: Checker) -> None:
    (user / "mistakes.py").write_text(MISTAKES)
    assert checker(user, "mistakes.py").keys() == wrong_lines(MISTAKES)


@pytest.mark.long
@CHECKERS
def test_messages_and_rows_of_other_types_than_declared_are_errors(
    user: Path, checker: Checker
) -> None:
    (user / "declared.py").write_text(DECLARED)
    assert checker(user, "declared.py").keys() == wrong_lines(DECLARED)


@pytest.mark.long
@CHECKERS
def test_every_public_name_has_a_type(user: Path, checker: Checker) -> None:
    """A name of type ``Any`` would pass for an integer."""
    text = "".join(
        f"from {module} import {name}\nnumber_of_{name}: int = {name}  # wrong\n"
        for module, names in PUBLIC.items()
        for name in names.split()
    )
    (user / "public.py").write_text(text)
    assert checker(user, "public.py").keys() == wrong_lines(text)
