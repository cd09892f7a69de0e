"""Places where applications write values, by their public doors, in batches of cases.

Each function writes its cases and reads them back. It raises `AssertionError` that has the seed of a case
which is neither refused by name nor read back equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import make_dataclass
from datetime import timedelta
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, ClassVar, Final

import msgspec

from gazette import Application, EventTime
from gazette.consumer.contract.callbacks import ApplicationFailed
from gazette.errors import GazetteError, Invalid
from gazette.message.message import Message
from gazette.stores.json_file import JSONFileStore
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.app_driver import AppDriver
from gazette.windows import Aggregate, JoinKind, StreamJoin, TableJoin, Tumbling, Windows
from tests.facts import is_advised
from tests.meaning.values import Case, same

SOURCE: Final = "numbers"
HOUR: Final = timedelta(hours=1)


class Number(Message):
    """A message that says which case the application has to write: no JSON between."""

    index: int


class Writer(Application[Any]):
    """Writes values of cases, and notes which are refused."""

    message_type = Number

    def __init__(self, cases: Sequence[Case]) -> None:
        self.cases = cases
        self.refused: dict[int, Exception] = {}

    def write(self, index: int, body: Callable[[], object]) -> None:
        try:
            body()
        except Exception as error:  # noqa: BLE001 - any other error than ours is a finding.
            self.refused[index] = error


def require_named(case: Case, error: BaseException, *roots: str) -> None:
    """Require that an error is one of ours, has the path of a value, and a hint for it."""
    assert isinstance(error, Invalid), f"{case}: {type(error).__name__}: {error}"
    path = error.path or ""
    assert path.startswith(roots), f"{case}: path {path!r} of {error}"
    assert is_advised(error), f"{case}: no hint of {error}"
    assert not case.fits, f"{case}: fits its type, and is refused: {error}"


def feed(driver: AppDriver[Any], cases: Sequence[Case]) -> None:
    driver.publish(SOURCE, *[Number(index=n) for n in range(len(cases))])
    driver.run()


# -- messages


ValueOf = Callable[[Any], Any]
"""Function from a message to the value of its case."""


def message_of(case: Case) -> tuple[Any, ValueOf]:
    """Return a message with a field of the case."""
    match case.seed % 3:
        case 0:
            made: Any = msgspec.defstruct("Made", [("value", case.type), ("uuid", str, "")])
        case 1:
            made = make_dataclass("Made", [("value", case.type), ("uuid", str, "")])
        case _:
            return {"value": case.value}, itemgetter("value")
    return made(case.value), attrgetter("value")


def check_messages(cases: Sequence[Case], directory: Path) -> int:
    """Publish each value as a field, and read the journal. Return how many were accepted."""
    with AppDriver(StateWriter(cases), directory, [SOURCE]) as driver:
        return sum(publishes(case, driver, *message_of(case)) for case in cases)


def publishes(
    case: Case, driver: AppDriver[Any], message: Any, value_of: ValueOf, *before: Any
) -> bool:
    """Return False if a message is refused by its path. Check that its journal has it otherwise.

    Good messages ``before`` it are in the journal in either case.
    """
    journal = f"values/{case.seed}"
    case = case._replace(value=value_of(message))
    if type(message) is dict:
        case = case._replace(fits=False)  # A dict declares nothing.
    publish = driver.publish if case.seed % 2 else driver.publish_pending
    publish(journal, *before)
    kept = driver.journals.content(journal)
    try:
        publish(journal, message)
    except Exception as error:  # noqa: BLE001 - any other error than ours is a finding.
        require_named(case, error, "value", "message", "inner", "others")
        assert driver.journals.content(journal) == kept, f"{case}: refused, and written"
        return False
    driver.acknowledge()
    try:
        *_, found = driver.committed(journal, type(message))
    except (GazetteError, ValueError) as error:
        raise AssertionError(f"{case}: accepted, and cannot be read: {error}") from error
    back = value_of(found)
    # A field takes an int for a float, and a member of an enum for its value.
    is_equal = same(back, case.value) or (not case.fits and back == case.value)
    assert is_equal, f"{case}: reads back as {back!r:.300}"
    return True


# -- states


class StateWriter(Writer):
    """Keeps the value of one case in its state."""

    def new_store(self, shard: Any, recorder: Any) -> Any:
        declared = self.cases[0].type
        state_type: Any = dict[str, declared]  # type: ignore[valid-type]
        return JSONFileStore(recorder, state_type, dict)

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        store.state["kept"] = self.cases[0].value


def check_states(cases: Sequence[Case], directory: Path) -> int:
    """Commit each value in a state, crash, and recover it."""
    accepted = 0
    for number, case in enumerate(cases):
        with AppDriver(StateWriter([case]), directory / str(number), [SOURCE]) as driver:
            try:
                feed(driver, [case])
            except Exception as error:  # noqa: BLE001 - any other error than ours is a finding.
                require_named(case, cause_of(error), 'state["kept"]', "state")
                driver.crash()
                assert driver.store.state == {}, f"{case}: refused, and kept"
                continue
            driver.crash()
            back = driver.store.state["kept"]
            assert same(back, case.value), f"{case}: reads back as {back!r:.300}"
            accepted += 1
    return accepted


def cause_of(error: BaseException) -> BaseException:
    """Return the error of a value for which the code of an application failed."""
    while isinstance(error, ApplicationFailed) and error.__cause__ is not None:
        error = error.__cause__
    return error


# -- aggregates and rows


class PartWriter(Writer):
    """Adds each value to windows or a join of its own, and keeps what timers give."""

    event_time: ClassVar[EventTime | None] = EventTime()

    def __init__(self, cases: Sequence[Case], new_part: Callable[[str, Case], Any]) -> None:
        super().__init__(cases)
        self.parts = [new_part(f"part{n}", case) for n, case in enumerate(cases)]
        self.found: dict[int, Any] = {}

    def new_store(self, shard: Any, recorder: Any) -> Any:
        return SQLiteStore(recorder, "\n".join(part.schema for part in self.parts))

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        index = envelope.message.index
        if index < len(self.parts):
            self.write(index, lambda: self.add(shard, store, envelope.time, index))

    def add(self, shard: Any, store: Any, at: Any, index: int) -> None:
        part, value = self.parts[index], self.cases[index].value
        if isinstance(part, StreamJoin):
            add = part.add_left if _is_left(self.cases[index]) else part.add_right
        else:
            add = part.add
        add(shard, store, "a", at, value)

    def on_timer(self, shard: Any, store: Any, timer: Any, publisher: Any) -> None:
        for index, part in enumerate(self.parts):
            for result in part.on_timer(shard, store, timer):
                if isinstance(part, StreamJoin):
                    self.found[index] = result.left if _is_left(self.cases[index]) else result.right
                else:
                    self.found[index] = result.value


def _is_left(case: Case) -> bool:
    """Return the side of a case in a join of streams."""
    return bool(case.seed % 4 > 1)


class RowWriter(PartWriter):
    """Puts each value as a row of a table, which is read behind a crash."""

    def add(self, shard: Any, store: Any, at: Any, index: int) -> None:
        self.parts[index].put(shard, store, "a", at, self.cases[index].value)


def windows_of(name: str, case: Case) -> Any:
    """Return windows whose state is the latest value."""
    kept: Aggregate[Any, Any, Any] = Aggregate(
        zero=lambda: None,
        add=lambda _, value: value,
        result=lambda state: state,
        state_type=case.type,
    )
    return Windows(name, Tumbling(HOUR), kept)


def join_of(name: str, case: Case) -> Any:
    if case.seed % 2:
        return TableJoin(name, wait=HOUR, value_type=case.type)
    bounds: Any = {"before": HOUR, "after": HOUR}
    types: Any = {"left_type": case.type, "right_type": case.type}
    return StreamJoin(name, kind=JoinKind.OUTER, **types, **bounds)


def table_of(name: str, case: Case) -> Any:
    return TableJoin(name, row_type=case.type)


def check_aggregates(cases: Sequence[Case], directory: Path) -> int:
    """Add each value to windows, add it again behind a crash, and let the windows close."""
    return _check_parts(PartWriter(cases, windows_of), directory, "state")


def check_joins(cases: Sequence[Case], directory: Path) -> int:
    """Let each value wait in a join, crash, and let its time come."""
    return _check_parts(PartWriter(cases, join_of), directory, "value", "left", "right")


def _check_parts(application: PartWriter, directory: Path, *roots: str) -> int:
    cases = application.cases
    with AppDriver(application, directory, [SOURCE]) as driver:
        feed(driver, cases)
        driver.crash()
        refused = dict(application.refused)
        driver.run()
        if roots == ("state",):
            feed(driver, cases)
        assert application.refused.keys() == refused.keys(), "a second time has another answer"
        driver.advance(3 * 3600)
        driver.publish(SOURCE, Number(index=len(cases)))
        driver.run()
    return _compare(application, roots, lambda index: application.found[index])


def check_rows(cases: Sequence[Case], directory: Path) -> int:
    """Put each value as a row of a table, and read it behind a crash."""
    application = RowWriter(cases, table_of)
    for index, case in enumerate(cases):
        if case.value is None:  # It deletes the row.
            application.cases = [*application.cases]
            application.cases[index] = case._replace(type=int, value=1, fits=True)
            application.parts[index] = table_of(f"part{index}", application.cases[index])
    with AppDriver(application, directory, [SOURCE]) as driver:
        feed(driver, cases)
        driver.crash()
        store = driver.store
        return _compare(
            application, ("row",), lambda index: application.parts[index].latest(store, "a")
        )


def _compare(application: PartWriter, roots: tuple[str, ...], back_of: Callable[[int], Any]) -> int:
    for index, case in enumerate(application.cases):
        if (error := application.refused.get(index)) is not None:
            require_named(case, error, *roots)
            with suppress(KeyError):
                back = back_of(index)
                assert back is None, f"{case}: refused, and kept as {back!r:.300}"
            continue
        try:
            back = back_of(index)
        except KeyError:
            raise AssertionError(f"{case}: accepted, and never seen again") from None
        assert same(back, case.value), f"{case}: reads back as {back!r:.300}"
    return len(application.cases) - len(application.refused)
