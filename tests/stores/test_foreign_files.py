"""No store begins without a state beside files that it does not explain: stores x sets of files."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from gazette.errors import GazetteError, Invalid
from gazette.protocol.checkpoint import Checkpoint, SourceCheckpoint
from gazette.protocol.hints import FSMHints
from gazette.recoverylog.log.fsm import RecoveryFSM
from gazette.recoverylog.log.recorder import Recorder
from gazette.recoverylog.playback.staged_files import PlayedFiles
from gazette.recoverylog.shard_state import ShardState
from gazette.recoverylog.store_files import StateForm, form_of, require_form
from gazette.stores.json_file import JSONFileStore
from gazette.stores.rocksdb.store import RocksDBStore
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.recovery import LOG, MemoryLog, replay, take_over
from tests.facts import is_advised, raises
from tests.fuzzing import examples
from tests.recoverylog.original_logs import NAMES, original_log

pytest.importorskip("rocksdict")

SHARD: Any = None
SCHEMA = (
    "CREATE TABLE IF NOT EXISTS word (w TEXT PRIMARY KEY NOT NULL, n INTEGER NOT NULL, filler BLOB)"
)
CHECKPOINT = Checkpoint({"a/source": SourceCheckpoint(7)})
Files = Mapping[str, bytes]
_LAST: Final = re.compile(r"\.log$|-wal$|redo-0*2$")
"""Files with the last commits. Without them a log would be that of an earlier moment."""


def of_sqlite(store: SQLiteStore) -> Any:
    return dict(store.query("SELECT w, n FROM word"))


OPENERS: Final[dict[str, tuple[Callable[[Recorder], Any], Callable[[Any], Any]]]] = {
    "redo": (lambda recorder: SQLiteStore(recorder, SCHEMA), of_sqlite),
    "vfs": (lambda recorder: SQLiteStore(recorder, SCHEMA, mode="vfs"), of_sqlite),
    "rocksdb": (RocksDBStore, lambda store: {k.decode(): int(v) for k, v in store.iterate()}),
    "json": (
        lambda recorder: JSONFileStore(recorder, dict[str, int], dict),
        lambda store: dict(store.state),
    ),
}


def put(store: Any, word: str) -> None:
    if isinstance(store, SQLiteStore):
        store.execute("INSERT INTO word VALUES (?, 1, NULL)", (word,))
    elif isinstance(store, RocksDBStore):
        store.put(word.encode(), b"1")
    else:
        store.state[word] = 1
    store.start_commit(SHARD, CHECKPOINT, ()).result()


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Files, Any]]:
    """Return the files of each form of state, and what they hold."""
    rng, directory = random.Random(1), tmp_path_factory.mktemp("logs")
    found: dict[str, tuple[Files, Any]] = {}
    for kind, (opener, content) in OPENERS.items():
        log = MemoryLog()
        for owner in range(2):
            store = opener(take_over(log, directory / f"{kind}-{owner}", rng))
            put(store, f"by {kind} {owner}")
            expected = content(store)
            store.destroy()
        found[kind] = files_of(bytes(log.data), directory / kind), expected
    for name in NAMES:
        original = original_log(name)
        found[f"original {name}"] = (
            files_of(original.data, directory / name),
            dict(original.counts),
        )
    return found


def files_of(log: bytes, directory: Path) -> Files:
    fsm = replay(log, directory)
    return {path: (directory / path[1:]).read_bytes() for path in fsm.links}


def recorder_of(files: Files, directory: Path) -> tuple[Recorder, MemoryLog]:
    """Return the recorder of an owner that has played these files back."""
    log = MemoryLog()
    directory.mkdir()
    recorder = Recorder(RecoveryFSM(FSMHints(log=LOG)), 1234, directory, log, LOG, 0)
    for path, data in files.items():
        with recorder.group() as group:
            group.write(group.create(path), 0, data)
    return take_over(log, directory, random.Random(2)), log


def can_coexist(files: Files) -> bool:
    return not any(other.startswith(f"{path}/") for path in files for other in files)


def cases(logs: dict[str, tuple[Files, Any]]) -> Iterator[Files]:
    """Yield sets of files: those of one form, without some, with others of another, or unknown ones."""
    rng = random.Random(3)
    kinds = list(logs)
    for number in range(examples(60)):
        kind = rng.choice(kinds)
        files = dict(logs[kind][0])
        if number % 3 != 0:
            removable = sorted(path for path in files if not _LAST.search(path))
            for path in rng.sample(removable, rng.randint(min(1, len(removable)), len(removable))):
                del files[path]
        if number % 3 != 1:
            for path, data in rng.sample(sorted(logs[rng.choice(kinds)][0].items()), 1):
                files.setdefault(path, data)
        if rng.random() < 0.2:
            files[rng.choice(("/notes.txt", "/primary.db-wal2", "/other/CURRENT", "/x.sst"))] = b"x"
        # A part of another state may be an earlier moment of it, which is no mistake.
        is_other = form_of(files) not in (form_of(logs[kind][0]), StateForm.UNKNOWN)
        if can_coexist(files) and not is_other:
            yield files


def test_an_owner_has_the_state_or_an_error(
    logs: dict[str, tuple[Files, Any]], tmp_path: Path
) -> None:
    """Files that are missing, foreign or unknown never become a state without what was committed."""
    known = [dict(content) for _, content in logs.values()]
    opened, errors = 0, list[tuple[GazetteError, int]]()
    for number, files in enumerate(cases(logs)):
        for by, (opener, content) in OPENERS.items():
            recorder, log = recorder_of(files, tmp_path / f"{number}-{by}")
            end = log.end
            try:
                store = opener(recorder)
            except GazetteError as error:
                errors.append((error, log.end - end))
                continue
            found = content(store)
            store.destroy()
            opened += 1
            if form_of(files) is StateForm.UNKNOWN:
                # What a first owner leaves that dies before its first commit. See `store_files`.
                assert not any(
                    path.endswith((".sst", ".log", "-wal", "state.json")) for path in files
                )
            elif files:
                assert found in known, (by, sorted(files))
    refused = [(error, recorded) for error, recorded in errors if isinstance(error, Invalid)]
    assert all(is_advised(error) and not recorded for error, recorded in refused)
    assert len(refused) > opened > 0


@pytest.mark.parametrize("by", OPENERS)
def test_a_state_of_another_form_is_refused_by_name(
    by: str, logs: dict[str, tuple[Files, Any]], tmp_path: Path
) -> None:
    """The error has the files, and says which class opens them."""
    for number, (kind, (files, expected)) in enumerate(logs.items()):
        recorder, log = recorder_of(files, tmp_path / str(number))
        opener, content = OPENERS[by]
        is_known = kind == by or (kind.startswith("original") and by in ("redo", "vfs"))
        if is_known:
            store = opener(recorder)
            assert content(store) == expected
            store.destroy()
            continue
        end = log.end
        with raises(Invalid, "files", advises="Store") as raised:
            opener(recorder)
        assert min(files) in str(raised.value.facts["files"])
        assert log.end == end


@pytest.mark.parametrize(
    "path", ["/primary.db-wal", "/primary.db-journal", "/primary.db.image-000000-00000001"]
)
def test_a_part_of_a_database_is_refused(path: str, tmp_path: Path) -> None:
    """By stores, hot standbys, and readers of a recovered directory."""
    for by, (opener, _) in OPENERS.items():
        recorder, _ = recorder_of({path: b"x" * 100}, tmp_path / by)
        with raises(Invalid, files=path):
            opener(recorder)
    recovered = tmp_path / "redo"
    with raises(Invalid, files=path):
        ShardState(recovered)
    played = PlayedFiles({path[1:]: recovered / path[1:]}, {})
    for view in (
        SQLiteStore.view(tmp_path / "view"),
        RocksDBStore.standby_view(tmp_path / "other"),
        JSONFileStore.view(dict),
    ):
        with raises(Invalid, files=path):
            view.refresh(played)
        view.close()


def test_a_hot_standby_reads_what_the_original_recorded(
    logs: dict[str, tuple[Files, Any]], tmp_path: Path
) -> None:
    for name in NAMES:
        original = original_log(name)
        directory = tmp_path / name
        fsm = replay(original.data, directory / "played")
        paths = {path[1:]: directory / "played" / path[1:] for path in fsm.links}
        view = SQLiteStore.view(directory / "view")
        reader = view.refresh(PlayedFiles(paths, {}))
        assert of_sqlite(reader) == original.counts
        view.release(reader)
        view.close()


def test_files_of_a_form() -> None:
    """Names as the original and we give them, and others that look alike."""
    rocksdb = ["/CURRENT", "/MANIFEST-000005", "/000012.sst", "/000013.log", "/000007.dbtmp"]
    assert require_form(rocksdb, "s", StateForm.ROCKSDB) is StateForm.ROCKSDB
    assert require_form(["/000001.dbtmp"], "s", StateForm.ROCKSDB) is StateForm.NOTHING
    assert require_form(["/next.json"], "s", StateForm.JSON) is StateForm.NOTHING
    assert require_form(["/pageDB"], "s", StateForm.REDO) is StateForm.NOTHING
    assert require_form([], "s", StateForm.REDO) is StateForm.NOTHING
    for other in ("/data.txt", "/12.sst.old", "/sub/000012.sst", "/state.json", "/primary.db"):
        with raises(Invalid, files=other):
            require_form([*rocksdb, other], "s", StateForm.ROCKSDB)
