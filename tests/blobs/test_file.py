from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gazette.blobs.file import FileStore
from gazette.errors import Invalid, NotAllowed
from gazette.protocol.fragment import FragmentStoreUrl
from tests.facts import raises
from tests.support.blob_store_tests import BlobStoreTests, get, paths, put


def file_store(root: Path, url: str = "file:///") -> FileStore:
    return FileStore(root, FragmentStoreUrl.parse(url))


class TestFileStore(BlobStoreTests):
    @pytest.fixture
    def store(self, tmp_path: Path) -> FileStore:
        (tmp_path / "pre/fix").mkdir(parents=True)
        return file_store(tmp_path, "file:///pre/fix/")


class TestFileStoreBehindLinks(BlobStoreTests):
    """The root itself may be reached by links, and links below it may lead about inside."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> FileStore:
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to("real")
        return file_store(tmp_path / "link")


def test_paths_on_disk(tmp_path: Path) -> None:
    """Root, prefix and content path; the URL that readers get leaves the root out."""
    (tmp_path / "a dir").mkdir()
    store = file_store(tmp_path, "file:///a%20dir/")
    put(store, "my/journal/name.gz", b"content")
    assert (tmp_path / "a dir/my/journal/name.gz").read_bytes() == b"content"
    assert store.sign_get("my/journal/name.gz", 60.0) == "file:///a dir/my/journal/name.gz"


def test_paths_are_rewritten(tmp_path: Path) -> None:
    """`find` and `replace` of the URL move journals that were renamed, also when listing."""
    store = file_store(tmp_path, "file:///?find=new/&replace=old/deep/")
    put(store, "new/journal/new/name", b"content")
    assert (tmp_path / "old/deep/journal/new/name").read_bytes() == b"content"
    assert paths(store, "new/journal/") == ["new/name"]
    assert get(store, "new/journal/new/name") == b"content"
    assert store.sign_get("new/a", 1.0) == "file:///old/deep/a"
    with raises(Invalid, says="'colour'"):
        file_store(tmp_path, "file:///?colour=blue")
    with raises(Invalid, says="'FIND'"):
        file_store(tmp_path, "file:///?find=a&FIND=b")
    escaping = file_store(tmp_path, "file:///?find=new/&replace=../")
    with pytest.raises(Invalid):
        put(escaping, "new/name", b"content")


def test_links_cannot_lead_out(tmp_path: Path) -> None:
    """Neither a directory nor a file which is a link to somewhere else is followed."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    root = tmp_path / "root"
    root.mkdir()
    store = file_store(root)
    put(store, "journal/name", b"content")
    (root / "journal/away").symlink_to(outside)
    (root / "journal/file").symlink_to(outside / "secret")
    for path in ("journal/away/secret", "journal/file", "journal/away/new"):
        with raises(Invalid, path="path", says=path):
            store.open(path)
        with raises(Invalid, path="path", says=path):
            put(store, path, b"overwritten")
        with raises(Invalid, path="path", says=path):
            store.remove(path)
    assert "away/secret" not in paths(store, "journal/")
    assert (outside / "secret").read_bytes() == b"secret"
    assert not (outside / "new").exists()
    with raises(Invalid, path="url", says="/../outside/"):
        FileStore(root, FragmentStoreUrl("file", "", "/../outside/"))


def test_the_directory_must_exist(tmp_path: Path) -> None:
    """A volume that is not mounted must not pass for an empty store."""
    store = file_store(tmp_path, "file:///unmounted/")
    with raises(NotAllowed, says=str(tmp_path / "unmounted")):
        put(store, "a", b"")
    with raises(NotAllowed, says=str(tmp_path / "unmounted")):
        list(store.list("journal/"))
    assert not (tmp_path / "unmounted").exists()


def test_partial_files_are_not_listed(tmp_path: Path) -> None:
    """What a crash left behind is neither an object nor in the way."""
    store = file_store(tmp_path)
    put(store, "journal/name", b"content")
    (tmp_path / "journal/.partial-name12345").write_bytes(b"con")
    assert paths(store, "journal/") == ["name"]
    assert (tmp_path / "journal/name").stat().st_mode & 0o777 == 0o640


def test_a_listing_removes_old_partial_files(tmp_path: Path) -> None:
    """A killed writer leaves one. A file that a writer still writes stays."""
    store = file_store(tmp_path)
    put(store, "journal/name", b"content")
    old, new = tmp_path / "journal/.partial-old", tmp_path / "journal/.partial-new"
    for file in (old, new):
        file.touch()
    os.utime(old, (new.stat().st_mtime - 3700,) * 2)
    assert paths(store, "journal/") == ["name"]
    assert (old.exists(), new.exists()) == (False, True)


def test_directories_go_away_while_listing(tmp_path: Path) -> None:
    """Files and directories that are removed meanwhile are left out."""
    store = file_store(tmp_path)
    for number in range(5):
        put(store, f"journal/{number}/name", b"content")
    listing = store.list("journal/")
    first = next(listing).path.split("/")[0]
    for number in range(5):
        if str(number) != first:
            (tmp_path / f"journal/{number}/name").unlink()
            (tmp_path / f"journal/{number}").rmdir()
    assert list(listing) == []


def test_a_full_disk_is_unavailable(tmp_path: Path) -> None:
    """A write that fails leaves no object and no partial file."""
    code = """
import io, resource, sys
from pathlib import Path
from gazette.blobs.file import FileStore
from gazette.errors import Unavailable
from gazette.protocol.fragment import FragmentStoreUrl

resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
store = FileStore(Path(sys.argv[1]), FragmentStoreUrl.parse("file:///"))
store.put("small", io.BytesIO(bytes(1 << 20)))
try:
    store.put("large", io.BytesIO(bytes(3 << 20)))
except Unavailable as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "File too large" in done.stdout
    assert os.listdir(tmp_path) == ["small"]


def test_files_are_synced_before_they_are_named(tmp_path: Path) -> None:
    """The spool is dropped after `put`: file first, then its name, then the directories."""
    code = """
import io, os, stat, sys
from pathlib import Path
from gazette.blobs.file import FileStore
from gazette.protocol.fragment import FragmentStoreUrl

real_fsync, real_rename = os.fsync, os.rename
def fsync(fd):
    print("fsync", "dir" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
    real_fsync(fd)
def rename(a, b):
    print("rename")
    real_rename(a, b)
os.fsync, os.rename = fsync, rename
FileStore(Path(sys.argv[1]), FragmentStoreUrl.parse("file:///")).put("a/b/c", io.BytesIO(b"x"))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "fsync dir",
        "fsync dir",
        "fsync file",
        "rename",
        "fsync dir",
    ]


def test_unwritable_directories_are_not_allowed() -> None:
    """Permissions are a matter of credentials, not of trying again."""
    code = """
import io, os, tempfile
from pathlib import Path
from gazette.blobs.file import FileStore
from gazette.errors import NotAllowed
from gazette.protocol.fragment import FragmentStoreUrl

with tempfile.TemporaryDirectory() as root:
    os.chmod(root, 0o500)
    if os.geteuid() == 0:
        os.chmod(root, 0o555)
        os.seteuid(65534)
    store = FileStore(Path(root), FragmentStoreUrl.parse("file:///"))
    try:
        store.put("name", io.BytesIO(b"content"))
    except NotAllowed as error:
        print(error)
    if os.getuid() == 0:
        os.seteuid(0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Permission denied" in done.stdout


def test_errors_that_waiting_does_not_cure_are_invalid(tmp_path: Path) -> None:
    """A name that the file system cannot hold, and a file or a directory in the way."""
    store = file_store(tmp_path)
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "directory").mkdir()
    for path in ("x" * 300, "file/object", "directory"):
        with pytest.raises(Invalid):
            put(store, path, b"content")
    assert sorted(os.listdir(tmp_path)) == ["directory", "file"]
    store.put("empty", io.BytesIO())
    assert get(store, "empty") == b""


def test_a_prefix_that_is_all_of_find_is_listed_where_its_objects_are(tmp_path: Path) -> None:
    """Else the journal looks empty, and its offsets would be given out again."""
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "object").write_bytes(b"content")
    store = FileStore(tmp_path, FragmentStoreUrl.parse("file:///?find=new/&replace=old/"))
    assert [info.path for info in store.list("new/")] == ["object"]
    straddling = FileStore(tmp_path, FragmentStoreUrl.parse("file:///?find=w/&replace=x-"))
    with raises(Invalid, path="find", says="new/"):
        list(straddling.list("new/"))
