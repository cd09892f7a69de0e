"""What holds state on a local disk: readable by its owner only, and removed when its process has died."""

from __future__ import annotations

import errno
import os
import random
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gazette.errors import Invalid
from gazette.protocol.checkpoint import Checkpoint
from gazette.recoverylog import open_at
from gazette.recoverylog.log.recorder import Recorder
from gazette.recoverylog.playback.staged_files import STAGING, StagedFiles
from gazette.recoverylog.private_files import empty_private, make_private
from gazette.recoverylog.scratch import SHARDS, Scratch, abandoned, shard_prefix, sweep
from gazette.stores.json_file import JSONFileStore
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.recovery import MemoryLog, MemoryLogs, Replayer, take_over
from tests.facts import raises
from tests.support.left_scratch import left_scratch

SHARD: Any = None
SCHEMA = "CREATE TABLE IF NOT EXISTS t (k INTEGER PRIMARY KEY, v)"
OTHER_USER = 65_534

KILLED = """
import pathlib, sys, time
from gazette.recoverylog.scratch import Scratch, shard_prefix
scratch = Scratch(shard_prefix("a/shard"), pathlib.Path(sys.argv[1]))
(scratch.path / "files").mkdir()
(scratch.path / "files" / "primary.db").write_bytes(bytes(1000))
print(scratch.path, flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """Set the worst umask that a process may be started with."""
    before = os.umask(0)
    yield
    os.umask(before)


def exposed(directory: Path) -> list[str]:
    """Return what others than the owner may use, of a directory and all below it."""
    found = []
    for path in (directory, *sorted(directory.rglob("*"))):
        # A compaction of RocksDB may have removed the file meanwhile: it exposes nothing then.
        with suppress(FileNotFoundError):
            mode = stat.S_IMODE(path.lstat().st_mode)
            if mode & 0o077:
                found.append(f"{path} {mode:o}")
    return found


def has_default_acls(directory: Path) -> bool:
    try:
        os.getxattr(directory, "system.posix_acl_default")
    except OSError as error:
        return error.errno == errno.ENODATA
    return True


@pytest.mark.parametrize("make", [make_private, empty_private])
def test_files_that_others_make_in_a_private_directory_are_private(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    if not has_default_acls(tmp_path):
        pytest.skip("the file system of temporary files has no access control lists")
    make(tmp_path / "private")
    (tmp_path / "private" / "file").write_bytes(b"state")
    (tmp_path / "private" / "sub").mkdir()
    (tmp_path / "private" / "sub" / "file").write_bytes(b"state")
    assert exposed(tmp_path / "private") == []


def test_rocksdb_files_are_private_from_their_creation(tmp_path: Path) -> None:
    """Not only once the recording has looked at them: a flush or a compaction makes files at any time."""
    rocksdict = pytest.importorskip("rocksdict")
    if not has_default_acls(tmp_path):
        pytest.skip("the file system of temporary files has no access control lists")
    make_private(tmp_path / "private")
    database = rocksdict.Rdict(str(tmp_path / "private"), rocksdict.Options(raw_mode=True))
    for key in range(100):
        database[b"%d" % key] = bytes(1000)
    database.flush()
    found = exposed(tmp_path / "private")
    database.close()
    assert found == []


def new_rocksdb(recorder: Recorder) -> Any:
    pytest.importorskip("rocksdict")
    from gazette.stores.rocksdb.store import RocksDBStore

    return RocksDBStore(recorder, column_families=["f"])


OPEN: dict[str, Callable[[Recorder], Any]] = {
    "redo": lambda recorder: SQLiteStore(recorder, SCHEMA, databases=["archive"]),
    "vfs": lambda recorder: SQLiteStore(recorder, SCHEMA, mode="vfs", databases=["archive"]),
    "json": lambda recorder: JSONFileStore(recorder, dict[str, int], dict),
    "rocksdb": new_rocksdb,
}


def view_of(kind: str, directory: Path) -> Any:
    if kind == "json":
        return JSONFileStore.view(dict[str, int])
    if kind == "rocksdb":
        from gazette.stores.rocksdb.store import RocksDBStore

        return RocksDBStore.standby_view(directory)
    return SQLiteStore.view(directory)


@pytest.mark.parametrize("kind", OPEN)
def test_no_store_exposes_what_it_keeps(kind: str, tmp_path: Path) -> None:
    """The first owner's files, the next one's, those of a standby, and the state of the past."""
    log, rng = MemoryLog(), random.Random(1)
    for owner in range(2):
        scratch = Scratch(shard_prefix("a/shard"), tmp_path)
        recorder = take_over(log, scratch.path / "files", rng)
        store = OPEN[kind](recorder)
        for number in range(5):
            match kind:
                case "json":
                    store.state[f"{number}"] = number
                case "rocksdb":
                    store.put(b"%d" % number, bytes(100))
                case _:
                    store.execute("INSERT OR REPLACE INTO t VALUES (?, 'x')", (number,))
            store.start_commit(SHARD, Checkpoint(), ()).result()
        if kind == "rocksdb" and owner:  # It has made a table of what the first owner's WAL had.
            assert [*scratch.path.rglob("*.sst")]
        store.start_commit(SHARD, Checkpoint(), ()).result()
        assert exposed(scratch.path) == [], owner
        hints = [recorder.build_hints()]
        store.destroy()
        scratch.remove()
        assert not scratch.path.exists()
    standby = tmp_path / "standby"
    make_private(standby)
    replayer = Replayer(standby / "files")
    replayer.advance(bytes(log.data), log.end)
    view = view_of(kind, standby / "view")
    reader = replayer.view(view.refresh)
    assert exposed(standby) == []
    view.release(reader)
    view.close()
    replayer.abandon()
    make_private(tmp_path / "past")
    with open_at(MemoryLogs(log), hints, tmp_path / "past" / "state") as state:
        assert state.checkpoint == Checkpoint()
        # RocksDB begins a log of messages when it opens a database to read.
        found = [one for one in exposed(tmp_path / "past") if not one.endswith("/LOG 666")]
        assert found == []


def test_preparing_keeps_a_directory_and_its_mode(tmp_path: Path) -> None:
    """It was made again by the umask, and its lock with it."""
    directory = tmp_path / "files"
    directory.mkdir(0o700)
    inode = directory.stat().st_ino
    (directory / "deep" / "deeper").mkdir(parents=True)
    (directory / "deep" / "file").write_bytes(b"x")
    (directory / "link").symlink_to(tmp_path)
    (tmp_path / "kept").write_bytes(b"not ours to remove")
    files = StagedFiles(directory)
    files.prepare()
    assert directory.stat().st_ino == inode
    assert [path.name for path in directory.iterdir()] == [STAGING]
    assert (tmp_path / "kept").exists()
    assert exposed(directory) == []
    directory.chmod(0o777)
    files.prepare()
    assert exposed(directory) == []
    files.abandon()


def test_directories_of_others_are_refused(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with raises(Invalid, "directory"):
            empty_private(tmp_path / name)
    if os.geteuid():
        pytest.skip("only root can give directories to others")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "precious").touch()
    os.chown(foreign, OTHER_USER, OTHER_USER)
    for directory in (foreign, foreign / "new", foreign / "new" / "newer"):
        with raises(Invalid, "directory", owner=OTHER_USER):
            StagedFiles(directory).prepare()
    assert (foreign / "precious").exists()


def test_what_a_killed_process_leaves_is_swept(tmp_path: Path) -> None:
    """And nothing of a process that lives, nothing of another user, and nothing that is called alike."""
    killed = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert killed.stdout is not None
    path = Path(killed.stdout.readline().strip())
    assert path.name.startswith("gazette-shard-a_shard-")
    far = path.stat().st_mtime + 1000
    try:
        assert sweep(tmp_path, far, (SHARDS,)) == []
        assert path.exists()
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.wait(30)
        killed.stdout.close()
    mine = Scratch(shard_prefix("another"), tmp_path)
    alike = tmp_path / "gazette-shard-notes"
    alike.mkdir()
    (tmp_path / "gazette-shard-link-abcdefgh").symlink_to(alike)
    foreign = tmp_path / "gazette-shard-foreign-abcdefgh"
    foreign.mkdir()
    if not os.geteuid():
        os.chown(foreign, OTHER_USER, OTHER_USER)
    found = sweep(tmp_path, far, (SHARDS,))
    expected = {path} if not os.geteuid() else {path, foreign}
    assert {one.path for one in found} == expected
    assert max(one.size for one in found) == 1000
    assert not path.exists()
    assert mine.path.exists()
    assert alike.exists()
    assert list(abandoned(tmp_path, far, (SHARDS,))) == []
    mine.remove()
    mine.remove()
    assert not mine.path.exists()


def test_ids_of_shards_as_names(tmp_path: Path) -> None:
    left = left_scratch(tmp_path, "a", "a/b/c", "x" * 300, "..", "a b")
    assert [path.parent for path in left] == [tmp_path] * 5
    assert len(sweep(tmp_path, 2e12, (SHARDS,))) == 5
    with raises(Invalid, "directory", path="--scratch-dir"):
        Scratch(SHARDS, tmp_path / "missing")
