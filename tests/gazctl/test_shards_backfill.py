"""``gazctl shards backfill``: what it says, what it refuses, and with which exit code."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from gazette.client.client import Client
from gazette.errors import Invalid
from gazette.gazctl.shards.backfill_waits import report_stalls
from gazette.history.backfill.definition import load_backfill
from gazette.history.backfill.report import Progress
from gazette.runtime.clock import SystemClock
from gazette.runtime.tasks import TaskScope
from gazette.stores.sql.store import create_checkpoint_table, create_engine, create_tables
from tests.backfill.apps import METADATA, Rows, Words, WordsBackfill
from tests.backfill.cluster import Cluster, history, shard_settings, source
from tests.backfill.conftest import start as start
from tests.backfill.test_drive import expected
from tests.facts import raises
from tests.gazctl.runner import Runner, Streams, offline

APP = "tests.backfill.apps:WordsBackfill"
JOURNAL = "words/part-000"
SHARD = "shard-one"


class Scene:
    """A disabled shard with a history, and the command that builds its state."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.lines: list[bytes] = []
        self.gazctl = Runner(
            {
                "BROKER_ADDRESS": cluster.broker.endpoint,
                "BROKER_FILE_ROOT": str(cluster.broker.file_root),
                "CONSUMER_ADDRESS": cluster.consumer.endpoint,
            }
        )

    async def prepare(self, count: int = 60, *, log: bool = True) -> None:
        fields: dict[str, Any] = {} if log else {"log": False}
        await self.cluster.broker.create(source(JOURNAL))
        await self.cluster.create(shard_settings(SHARD, JOURNAL, **fields))
        self.lines = history(random.Random(count), count)
        await self.cluster.append(JOURNAL, self.lines)

    async def __call__(self, *flags: str, app: str = APP, shards: str = f"id={SHARD}") -> Any:
        return await self.gazctl(
            *("shards", "backfill", app, f"--shards={shards}"),
            f"--staging={self.cluster.staging}",
            f"--scratch-dir={self.cluster.scratch}",
            *([] if any(one.startswith("--jobs") for one in flags) else ["--jobs=1"]),
            *flags,
        )

    def has_changed_nothing(self) -> bool:
        return not self.cluster.staging.exists() and not list(self.cluster.scratch.iterdir())


@pytest.fixture
async def scene(start: Any) -> Scene:
    scene = Scene(await start(Words()))
    await scene.prepare()
    return scene


async def test_from_a_dry_run_to_a_run_that_is_done_already(scene: Scene) -> None:
    dry_run = await scene("--dry-run")
    assert dry_run.code == 0
    assert "nothing was changed" in dry_run.err
    assert scene.has_changed_nothing()
    # Case: of nothing, nothing is reported.
    for flag in ("--list", "--gc"):
        none = await scene.gazctl("shards", "backfill", flag, f"--staging={scene.cluster.staging}")
        assert none.code == 1
        assert "there is no staging area at" in none.err
    # Case: verified, published, enabled; as JSON.
    ran = await scene("--run-id=first", "--verify", "--enable", "--format=json")
    assert ran.code == 0, ran
    report = json.loads(ran.out)
    assert (report["published"], report["verified"]) == (True, [SHARD])
    assert "--run-id=first" in ran.err
    await scene.cluster.consumer.await_primary(SHARD)
    state = await scene.cluster.state(SHARD, WordsBackfill())
    assert state[0] == expected(scene.lines)
    # Case: once more.
    again = await scene("--run-id=first")
    assert (again.code, again.out) == (0, "")
    assert "is published already" in again.err
    # Case: as another run, which may not replace the state.
    other = await scene()
    assert other.code == 1
    assert "has a state already" in other.err
    assert "--overwrite" in other.err
    # Case: what there is.
    listed = await scene.gazctl.ok(
        "shards", "backfill", "--list", f"--staging={scene.cluster.staging}"
    )
    assert "published" in listed.out
    assert "staged object" in listed.out
    assert "1 runs" in listed.err
    removed = await scene.gazctl.ok(
        "shards", "backfill", "--gc", "--gc-age=0s", f"--staging={scene.cluster.staging}"
    )
    assert "objects removed" in removed.err
    left = [path.name for path in scene.cluster.staging.rglob("*") if path.is_file()]
    assert left == ["PUBLISHED.json"]


async def test_shards_that_are_not_there_or_may_run_are_refused(scene: Scene) -> None:
    unknown = await scene(shards="id=no-such-shard")
    assert unknown.code == 1
    assert "no shard matches" in unknown.err
    assert "--run-id" not in unknown.err, "there is nothing to resume"
    await scene.cluster.enable(SHARD)
    dry_run = await scene("--dry-run")
    assert dry_run.code == 0
    assert (
        "would be refused now: 1 of 1 shards are live: shard-one: it is not disabled" in dry_run.err
    )
    assert "would be refused now: the shard has a state already" in dry_run.err
    enabled = await scene()
    assert enabled.code == 1
    assert "it is not disabled" in enabled.err
    assert "disable: true" in enabled.err
    assert scene.has_changed_nothing()


@pytest.mark.parametrize(
    ("offsets", "reason"),
    [
        ('{"words/other": 5}', "offsets are given for journals that are not read: words/other"),
        (f'{{"{JOURNAL}": -1}}', "negative"),
        ('{"words', "not offsets by journal"),
        (f'{{"{JOURNAL}": "ten"}}', "not offsets by journal"),
        ("/no/such/file.json", "cannot read /no/such/file.json"),
        (f'{{"{JOURNAL}": 1000000}}', f"--offsets: the end of {JOURNAL} is beyond its known bytes"),
    ],
)
async def test_offsets_that_cannot_be_are_refused(scene: Scene, offsets: str, reason: str) -> None:
    found = await scene(f"--offsets={offsets}", "--dry-run")
    assert found.code in (1, 2)
    assert reason in found.err
    assert scene.has_changed_nothing()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--until=2100-01-01"], "--until: the time is in the future (2100-01-01)"),
        (["--until=1h", "--offsets={}"], "--until and --offsets exclude each other"),
        (
            ["--verify", "--verify-shards=0"],
            "--verify-shards: invalid number of shards to compare (0",
        ),
        (["--jobs=-1"], "--jobs: invalid number of processes (-1"),
        (["--scratch-dir=/no/such"], "--scratch-dir: cannot make a temporary directory"),
    ],
)
async def test_flags_that_cannot_be_are_refused(
    scene: Scene, flags: list[str], reason: str
) -> None:
    found = await scene(*flags)
    assert found.code == 2
    assert reason in found.err


def test_a_class_that_is_not_there_is_reported_with_those_that_are() -> None:
    with raises(Invalid, path="APP", says="Nothing") as raised:
        load_backfill("tests.backfill.apps:Nothing")
    assert "Words, WordsBackfill" in raised.value.hint


async def test_a_history_ends_at_given_offsets(scene: Scene, tmp_path: Path) -> None:
    end = len(b"".join(scene.lines[:20]))
    file = tmp_path / "offsets.json"
    file.write_text(json.dumps({JOURNAL: end}))
    found = await scene(f"--offsets={file}", "--dry-run", "--format=json")
    assert found.code == 0, found
    report = json.loads(found.out)
    assert report["shards"][0]["sources"] == {JOURNAL: end}
    file.write_bytes(b'{"\xff": 1}')
    found = await scene(f"--offsets={file}", "--dry-run")
    assert (found.code, "not offsets by journal" in found.err) == (2, True), found


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ((APP, "-l", "id=a"), "a staging area is required"),
        (("-l", "id=a", "--staging=/s"), "expected one backfill"),
        ((APP, APP, "-l", "id=a", "--staging=/s"), "expected one backfill"),
        ((APP, "--staging=/s"), "--shards"),
        ((APP, "-l", "id in (", "--staging=/s"), "--shards"),
        (("no_such_module:App", "-l", "id=a", "--staging=/s"), "cannot import no_such_module"),
        (("tests.backfill.apps", "-l", "id=a", "--staging=/s"), "expected module:Class"),
        (
            ("tests.backfill.apps:Word", "-l", "id=a", "--staging=/s"),
            "neither a Backfill nor an Application",
        ),
        ((APP, "-l", "id=a", "--staging=/s", "--local", "--master=local[1]"), "exclude each other"),
        ((APP, "-l", "id=a", "--staging=/s", "--until=yesterdayish"), "--until"),
        (("--gc", "--list", "--staging=/s"), "exclude each other"),
    ],
)
def test_flags_that_make_no_sense_are_refused(argv: tuple[str, ...], reason: str) -> None:
    result = offline("shards", "backfill", *argv)
    assert result.code == 2, result
    assert reason in result.err


async def test_a_staging_area_or_a_run_that_cannot_be_is_refused(scene: Scene) -> None:
    relative = await scene("--staging=here")
    assert relative.code == 2
    assert "absolute path" in relative.err
    named = await scene("--run-id=a/b")
    assert named.code == 2
    assert "--run-id" in named.err


async def test_no_java_is_reported_before_anything_is_changed(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyspark")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "nowhere"))
    found = await scene("--master=local[1]")
    assert found.code == 1
    assert "there is no Java to run Spark on" in found.err
    assert "unset JAVA_HOME" in found.err
    assert scene.has_changed_nothing()


async def test_a_master_that_is_not_valid_is_reported(scene: Scene) -> None:
    pytest.importorskip("pyspark")
    for master in ("nonsense", "spark://", "local[", "http://localhost:7077"):
        found = await scene(f"--master={master}")
        assert found.code == 2, found
        assert "--master" in found.err
    assert scene.has_changed_nothing()


async def test_a_state_in_a_database_is_verified(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path}/state.db"
    engine = create_engine(url)
    create_checkpoint_table(engine)
    create_tables(engine, METADATA)
    monkeypatch.setattr(Rows, "url", url)
    scene = Scene(await start(Rows()))
    await scene.prepare(log=False)
    prefix = "--prefix=/gazette/consumers/test"
    wrong = await scene("--verify", prefix, app="tests.backfill.apps:WrongRowsBackfill")
    assert wrong.code == 1
    assert "differs from a replay through the application" in wrong.err
    nowhere = await scene("--verify", app="tests.backfill.apps:RowsBackfill")
    assert nowhere.code == 2
    assert "--prefix" in nowhere.err
    ran = await scene("--verify", prefix, app="tests.backfill.apps:RowsBackfill")
    assert ran.code == 0, ran
    assert f"equal to a replay: {SHARD}" in ran.err
    with engine.connect() as connection:
        found = connection.exec_driver_sql("SELECT word, n FROM words ORDER BY word").all()
    assert [("counts", tuple(row)) for row in found] == expected(scene.lines)
    engine.dispose()


async def test_a_master_that_does_not_answer_is_reported_at_once(scene: Scene) -> None:
    pytest.importorskip("pyspark")
    found = await scene("--master=spark://127.0.0.1:9")
    assert found.code == 1
    assert "cannot reach Spark at 127.0.0.1:9" in found.err
    assert scene.has_changed_nothing()


async def test_a_broker_that_is_gone_is_reported_while_a_run_waits_for_it(scene: Scene) -> None:
    """Once, with the step; and not while the run gets on, or waits for something else."""
    streams, clock = Streams(), SystemClock()
    client, progress = Client(scene.cluster.broker.endpoint, clock=clock), Progress()
    progress.begin("appending", 100)

    async def awaited(text: str) -> None:
        while text not in streams.err.getvalue():
            await clock.sleep(0.01)

    async with TaskScope("waits") as scope:
        waits = report_stalls({"broker": client}, progress, streams.terminal, clock, 0.02)
        scope.daemon(waits, name="waits")
        await clock.sleep(0.2)
        assert not streams.err.getvalue()
        await scene.cluster.broker.crash()
        await awaited("appending: cannot reach the broker at http://127.0.0.1:")
        assert "--run-id" in streams.err.getvalue()
        progress.begin("publishing", 0)
        await awaited("publishing: cannot reach the broker")
        scope.cancel()
    await client.close()
    assert streams.err.getvalue().count("appending: ") == 1
