"""The JSON store: its file's form, old files, and states that are not what their type says."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import GenericAlias
from typing import Any, cast

import msgspec
import pytest

from gazette.errors import Corrupt, Invalid
from gazette.protocol.checkpoint import Checkpoint, SourceCheckpoint
from gazette.stores.json_file import JSONFileStore
from gazette.testing.recovery import MemoryLog, replay, take_over
from tests.facts import raises

SHARD: Any = None


class State(msgspec.Struct):
    words: dict[str, int] = {}
    total: float = 0.0


def opened(
    tmp_path: Path, content: bytes | None = None, log: MemoryLog | None = None
) -> JSONFileStore[State]:
    recorder = take_over(log or MemoryLog(), tmp_path / "shard", random.Random(1))
    if content is not None:
        (tmp_path / "shard" / "state.json").write_bytes(content)
    return JSONFileStore(recorder, State)


def test_the_files_form(tmp_path: Path) -> None:
    """Three documents, each a line: offsets, state, checkpoint. What was left over is replaced."""
    log = MemoryLog()
    store = opened(tmp_path, log=log)
    (tmp_path / "shard" / "next.json").write_bytes(b"left over")
    store.state.words["a\nb"] = 2
    checkpoint = Checkpoint(sources={"a/source": SourceCheckpoint(123)})
    store.start_commit(SHARD, checkpoint, ()).result()
    replay(bytes(log.data), tmp_path / "played")
    assert [path.name for path in (tmp_path / "played").iterdir()] == ["state.json"]
    data = (tmp_path / "played" / "state.json").read_bytes()
    assert data == (tmp_path / "shard" / "state.json").read_bytes()
    offsets, state, written = data.splitlines()
    assert offsets == b'{"a/source":123}'
    assert state == b'{"words":{"a\\nb":2},"total":0.0}'
    assert Checkpoint.from_json(written) == checkpoint


def test_an_old_file_has_no_checkpoint(tmp_path: Path) -> None:
    """Its offsets are all there is; with a checkpoint they are what counts."""
    store = opened(tmp_path, b'{"a/source":7}\n{"words":{"x":1}}\n')
    assert store.state.words == {"x": 1}
    assert store.restore_checkpoint(SHARD) == Checkpoint({"a/source": SourceCheckpoint(7)})

    document = Checkpoint({"a/source": SourceCheckpoint(5)}).to_json()
    store = opened(tmp_path, b'{"a/source":7}\n{}\n' + document + b"\n")
    assert store.restore_checkpoint(SHARD).sources["a/source"].read_through == 7


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}\n",
        b"{}\n{}",
        b'{}\n{"words":[]}\n',
        b'{"a":"x"}\n{}\n',
        b"{}\nnot json\n",
        b'{}\n{"words":{"x":1',
    ],
)
def test_a_file_that_is_something_else(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(Corrupt, match=r"state\.json"):
        opened(tmp_path, content)


def elsewhere(call: Callable[[], State]) -> State:
    """Call on another thread, which sees what is committed."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


@pytest.mark.parametrize("value", [object(), {1: object()}, {"x": "no number"}, float("nan")])
def test_a_state_that_could_not_be_read_again_is_not_committed(
    tmp_path: Path, value: object
) -> None:
    """The next owner would fail on it, for ever. Nothing was written: the last commit stands."""
    store = opened(tmp_path)
    store.state.words["x"] = 1
    store.start_commit(SHARD, Checkpoint(), ()).result()
    before = (tmp_path / "shard" / "state.json").read_bytes()
    if isinstance(value, float):
        store.state.total = value
    else:
        store.state.words = value  # type: ignore[assignment]
    with pytest.raises(Invalid, match="state"):
        store.start_commit(SHARD, Checkpoint(), ())
    assert (tmp_path / "shard" / "state.json").read_bytes() == before
    assert elsewhere(store.read) == State({"x": 1})
    with pytest.raises(Invalid, match="state"):
        store.read()


def test_types_that_are_no_json(tmp_path: Path) -> None:
    recorder = take_over(MemoryLog(), tmp_path / "shard", random.Random(1))
    with raises(Invalid, path="state_type"):
        JSONFileStore(recorder, cast("type[dict[str, Any]]", GenericAlias(dict, (str, object()))))
    with raises(Invalid, path="state"):
        JSONFileStore(recorder, State, object)  # type: ignore[arg-type]


def test_readers_get_copies_of_what_was_committed(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.state.words["x"] = 1
    assert elsewhere(store.read) == State()
    store.start_commit(SHARD, Checkpoint(), ()).result()
    copy = store.read()
    copy.words["x"] = 2
    assert store.read() == State({"x": 1})
    assert store.state.words == {"x": 1}


def sold(tmp_path: Path, run: int, state_type: Any) -> Any:
    """Open the store, as after a restart, and add two sales of customer 7."""
    recorder = take_over(MemoryLog(), tmp_path / f"shard{run}", random.Random(run))
    former = tmp_path / f"shard{run - 1}" / "state.json"
    if former.exists():
        (tmp_path / f"shard{run}" / "state.json").write_bytes(former.read_bytes())
    store: JSONFileStore[Any] = JSONFileStore(recorder, state_type, lambda: {"sales": {}})
    for _ in range(2):
        sales = store.state["sales"]
        sales[7] = sales.get(7, 0) + 1
    store.start_commit(SHARD, Checkpoint(), ()).result()
    return store


def test_a_key_that_json_does_not_have_is_refused_at_the_first_commit(tmp_path: Path) -> None:
    """It would come back as a text, and from then on both keys would count."""
    with raises(Invalid, path='state["sales"][7]', advises="dict[int, int]"):
        sold(tmp_path, 1, dict)
    assert not (tmp_path / "shard1" / "state.json").exists()


def test_a_declared_key_counts_on_after_each_restart(tmp_path: Path) -> None:
    for run in range(3):
        store = sold(tmp_path, run, dict[str, dict[int, int]])
    found: Any = elsewhere(store.read)
    assert found == {"sales": {7: 6}}
