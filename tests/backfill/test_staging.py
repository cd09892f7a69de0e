"""Staging areas: a directory, a bucket over real HTTP, and what fsspec reaches; and how they fail."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gazette.blobs.s3.access import S3Settings
from gazette.errors import Broken, GazetteError, Invalid, NotAllowed, NotFound, Unavailable
from gazette.history.backfill.staging import (
    MANIFEST,
    PLAN,
    PUBLISHED,
    DirectoryStaging,
    S3Staging,
    Staging,
    garbage,
    open_staging,
    state_name,
)
from gazette.runtime.clock import SystemClock
from tests.backfill.apps import Words, WordsBackfill
from tests.backfill.cluster import history, shard_settings, source
from tests.backfill.test_drive import BUILT, SOURCES, expected
from tests.blobs.s3_endpoint import BUCKET, FaultProxy, store_url
from tests.facts import raises

IMPATIENT = S3Settings(connect_timeout_s=1.0, read_timeout_s=0.3, attempts=1)
PATIENT = S3Settings(connect_timeout_s=20.0, read_timeout_s=20.0, attempts=1)


@pytest.fixture(params=["directory", "s3", "fsspec"])
def staging(request: pytest.FixtureRequest, tmp_path: Path) -> Staging:
    if request.param == "directory":
        return open_staging(str(tmp_path / "staging"))
    if request.param == "fsspec":
        pytest.importorskip("fsspec")
        return open_staging(f"memory://{uuid.uuid4()}/staging")
    return open_staging(store_url(request.getfixturevalue("s3_proxy").endpoint, "/a/staging"))


def test_what_every_staging_area_does(staging: Staging, tmp_path: Path) -> None:
    began = SystemClock().now()
    assert list(staging.list()) == []
    assert staging.find("run/PLAN.json") is None
    with pytest.raises(NotFound):
        staging.read("run/PLAN.json")
    with pytest.raises(NotFound):
        staging.fetch("run/PLAN.json", tmp_path / "fetched")

    # Case: made once.
    assert staging.create("run/PLAN.json", b"one")
    assert not staging.create("run/PLAN.json", b"two")
    assert staging.read("run/PLAN.json") == b"one"

    # Case: files, with names of shards that are no names of files.
    content = random.Random(1).randbytes(3 << 20)
    (tmp_path / "built").write_bytes(content)
    name = state_name("run", "a/shard id", "0123")
    staging.put(name, tmp_path / "built")
    staging.fetch(name, tmp_path / "fetched")
    assert (tmp_path / "fetched").read_bytes() == content

    # Case: listed by directory.
    assert staging.create("run-2/PLAN.json", b"")
    found = list(staging.list())
    assert [(one.name, one.size) for one in found] == [
        ("run-2/PLAN.json", 0),
        ("run/PLAN.json", 3),
        (name, len(content)),
    ] or [one.name for one in found] == ["run/PLAN.json", name, "run-2/PLAN.json"]
    assert all(abs(one.mod_time - began) < 3600 for one in found)
    assert [one.name for one in staging.list("run/states/")] == [name]
    assert list(staging.list("nothing/")) == []

    # Case: removed, also what is not there.
    for _ in range(2):
        staging.remove(name)
    assert staging.find(name) is None
    with raises(Invalid, says="../elsewhere"):
        staging.read("../elsewhere")


def test_objects_of_unknown_age_are_not_old() -> None:
    memory = pytest.importorskip("fsspec.implementations.memory")
    area = f"{uuid.uuid4()}/staging"
    staging = open_staging(f"memory://{area}")
    names = [f"published/{PUBLISHED}", f"published/{PLAN}", f"abandoned/{PLAN}"]
    for name in names:
        staging.create(name, b"{}")
    later = SystemClock().now() + 3600
    assert sorted(one.object.name for one in garbage(staging, later, 60)) == [names[2], names[1]]
    for name in names:
        memory.MemoryFileSystem.store[f"/{area}/{name}"].created = datetime.fromtimestamp(0, UTC)
    assert {one.mod_time for one in staging.list()} == {0}
    assert garbage(staging, later, 60) == []


def test_what_cannot_be_read_is_not_taken_for_empty(tmp_path: Path) -> None:
    """A directory, whose errors name whose disk it is: the staging area's, or this machine's."""
    area = DirectoryStaging(tmp_path / "area")
    assert list(area.list()) == []
    area.create("run/states/x", b"state")
    (tmp_path / "file").write_bytes(b"")
    with raises(Unavailable, "path", says="Not a directory"):
        list(DirectoryStaging(tmp_path / "file").list())
    with raises(Unavailable, "path", says="Not a directory"):
        DirectoryStaging(tmp_path / "file").remove("run/states/x")
    with raises(Broken, "path", says="No such file") as raised:
        area.fetch("run/states/x", tmp_path / "missing" / "x")
    assert "--scratch-dir" in raised.value.hint
    with raises(Unavailable, "path", says="Is a directory"):
        (area.directory / "run" / "states" / "y").mkdir()
        (area.directory / "run" / "states" / "y" / "z").touch()
        area.put("run/states/y", tmp_path / "file")
    assert [one.name for one in area.list()] == ["run/states/x", "run/states/y/z"]


def test_a_url_that_is_no_staging_area() -> None:
    with raises(Invalid, path="--staging", says="relative/path"):
        open_staging("relative/path")
    with raises(Invalid, path="--staging", says="ssh-or-so://host/path"):
        open_staging("ssh-or-so://host/path")
    with raises(Invalid, path="--staging", says="sftp://") as raised:
        open_staging("sftp://host/path")
    assert "s3://" in raised.value.hint
    with raises(Invalid, path="--staging", says="Reigon"):
        open_staging("s3://bucket/path?Reigon=x")


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ({"status": 403, "code": "AccessDenied", "times": 99}, NotAllowed, "AccessDenied"),
        ({"status": 404, "code": "NoSuchBucket", "times": 99}, NotAllowed, "NoSuchBucket"),
        ({"status": 503, "code": "SlowDown", "times": 99}, Unavailable, "SlowDown"),
        ({"hold": True, "times": 99}, Unavailable, "[Tt]imed? ?out"),
    ],
    ids=["forbidden", "no bucket", "overloaded", "silent"],
)
def test_errors_of_a_bucket_are_reported(
    s3_proxy: FaultProxy, tmp_path: Path, fault: dict[str, Any], kind: Any, message: str
) -> None:
    settings = IMPATIENT if "hold" in fault else PATIENT
    staging = S3Staging(store_url(s3_proxy.endpoint, "/staging/"), settings)
    (tmp_path / "built").write_bytes(b"state")
    calls: list[Callable[[], object]] = [
        lambda: staging.create("run/PLAN.json", b"x"),
        lambda: staging.put("run/states/x", tmp_path / "built"),
    ]
    if kind is NotAllowed:  # The others are tried again, which takes its time.
        calls += [lambda: staging.read("run/PLAN.json"), lambda: list(staging.list())]
    s3_proxy.fail(**fault)
    for call in calls:
        with pytest.raises(kind, match=message) as raised:
            call()
        assert raised.value.facts["bucket"] == BUCKET
    s3_proxy.heal()
    # Nothing was half done.
    assert list(S3Staging(store_url(s3_proxy.endpoint, "/staging/"), PATIENT).list()) == []


def test_hiccups_of_a_bucket_are_passed_over(
    s3_proxy: FaultProxy, s3_target: tuple[str, int], tmp_path: Path
) -> None:
    direct = S3Staging(store_url("http://{}:{}".format(*s3_target), "/staging/"), PATIENT)
    staging = S3Staging(store_url(s3_proxy.endpoint, "/staging/"), PATIENT)
    (tmp_path / "built").write_bytes(b"state" * 1000)
    s3_proxy.fail("PUT", times=1, status=503, code="SlowDown")
    staging.put("run/states/x", tmp_path / "built")
    # What is made once may have been made by a request whose answer was lost: it is there then.
    made = lambda: direct.create("run/PLAN.json", b"x")  # noqa: E731
    s3_proxy.fail("PUT", times=1, status=503, code="InternalError", action=made)
    assert not staging.create("run/PLAN.json", b"x")
    assert staging.read("run/PLAN.json") == b"x"
    s3_proxy.fail("GET", times=1, truncate=1000)
    staging.fetch("run/states/x", tmp_path / "fetched")
    assert (tmp_path / "fetched").read_bytes() == b"state" * 1000


async def test_a_run_whose_staging_area_fails_loses_nothing(
    start: Any, s3_proxy: FaultProxy
) -> None:
    """The old state stays in force; the run goes on, by its id, when the bucket can be reached again."""
    cluster = await start(Words())
    lines = history(random.Random(1), 300)
    await cluster.broker.create(source(SOURCES[0]))
    await cluster.create(shard_settings(BUILT, SOURCES[0]))
    await cluster.append(SOURCES[0], lines[:100])
    await cluster.enable(BUILT)
    await cluster.consumer.read_to_heads(BUILT)
    await cluster.disable(BUILT)
    await cluster.append(SOURCES[0], lines[100:200])
    before = (await cluster.consumer.shards.get_hints(BUILT)).primary
    cluster.staging_url = store_url(s3_proxy.endpoint, "/staging")

    async def fails(kind: type[GazetteError], message: str) -> None:
        with pytest.raises(kind, match=message):
            await cluster.backfill(WordsBackfill(), overwrite=True)
        s3_proxy.heal()
        assert (await cluster.consumer.shards.get_hints(BUILT)).primary == before

    # Case: it may not write at all; not the state; not what says which attempts count.
    for part in (PLAN, "/states/", MANIFEST):
        s3_proxy.fail("PUT", part, status=403, code="AccessDenied", times=99)
        await fails(NotAllowed, "AccessDenied")

    # Case: the state is gone when it is to be appended.
    s3_proxy.fail("GET", f"/states/{BUILT}", status=404, code="NoSuchKey", times=99)
    await fails(NotFound, "no such object|is gone")

    report = await cluster.backfill(WordsBackfill(), overwrite=True)
    assert report.published
    assert report.resumed
    await cluster.append(SOURCES[0], lines[200:])
    await cluster.enable(BUILT)
    assert (await cluster.state(BUILT, WordsBackfill()))[0] == expected(lines)
    # What is left is reported as garbage, but for the record of the run.
    staging = open_staging(cluster.staging_url)
    left = {one.object.name for one in garbage(staging, SystemClock().now() + 3600, 60)}
    assert {f"run/{PUBLISHED}"} == {one.name for one in staging.list()} - left
