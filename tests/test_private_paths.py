"""Directories and files of state: no other user may read them, even if the umask is 0."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gazette.client.oidc.token_file import SignIn, locked
from gazette.cluster.etcd.server import EtcdServer
from gazette.gazctl.contexts import Contexts
from gazette.gazctl.run_contexts import RunContext, published
from gazette.gazctl.shards.recover import sole_use
from gazette.message.publishing.commit_records import CommitRecords
from gazette.run.lock import RunLock
from gazette.runtime.private_paths import make_private_directory


@pytest.fixture
def open_umask() -> Iterator[None]:
    """Let new files be readable and writable by everybody unless their mode says otherwise."""
    former = os.umask(0)
    yield
    os.umask(former)


def modes(root: Path) -> dict[str, int]:
    """Return the mode of each path below a directory."""
    return {str(path.relative_to(root)): path.stat().st_mode & 0o777 for path in root.rglob("*")}


def a_context_of_the_user(root: Path) -> None:
    with Contexts.changing({"HOME": str(root)}):
        pass


def a_context_of_a_run(root: Path) -> None:
    run = RunContext("http://127.0.0.1:1", "", "app.py", "/here")
    with published({"HOME": str(root)}, run):
        pass


def a_token(root: Path) -> None:
    SignIn("token").save(root / "a" / "b" / "token")


def the_lock_of_a_token(root: Path) -> None:
    with locked(root / "a" / "b" / "token"):
        pass


def commits(root: Path) -> None:
    records = CommitRecords(root / "a" / "b")
    records.save({})
    records.close()


def a_recovery(root: Path) -> None:
    with sole_use(root / "a" / "b"):
        pass


def a_run(root: Path) -> None:
    with RunLock(root / "a" / "b", "app.py"):
        pass


def data_of_etcd(root: Path) -> None:
    server = EtcdServer(root / "a" / "b")
    server.start()
    server.stop()


@pytest.mark.usefixtures("open_umask")
@pytest.mark.parametrize(
    "make",
    [
        a_context_of_the_user,
        a_context_of_a_run,
        a_token,
        the_lock_of_a_token,
        commits,
        a_recovery,
        a_run,
        data_of_etcd,
    ],
)
def test_state_is_for_its_owner_only(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path)
    made_modes = modes(tmp_path)
    assert made_modes
    assert {name: mode for name, mode in made_modes.items() if mode & 0o077} == {}


@pytest.mark.usefixtures("open_umask")
def test_directories_that_exist_keep_their_modes(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(0o775)
    make_private_directory(shared)
    make_private_directory(shared / "a" / "b")
    assert modes(tmp_path) == {"shared": 0o775, "shared/a": 0o700, "shared/a/b": 0o700}


def test_a_file_in_place_of_a_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "a"):
        with pytest.raises(OSError, match="file"):
            make_private_directory(path)
