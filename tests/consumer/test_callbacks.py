"""Callbacks of the wrong kind: refused at start, by name, and never dropped in silence."""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from gazette import Application, Message, MessageProducer
from gazette.consumer.contract.callbacks import ApplicationFailed, require_callbacks, require_none
from gazette.errors import GazetteError, Invalid
from gazette.message.mapping import fixed_mapping
from gazette.protocol.label_set import LabelSet
from gazette.runconsumer import process
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.app_driver import AppDriver
from tests.consumer.apps import SOURCE, Counts, Echo, Start, Tally, Word, frame
from tests.facts import raises

CALLBACKS = [
    "message_type_of",
    "poison_policy",
    "new_store",
    "new_view",
    "consume_message",
    "consume_messages",
    "begin_transaction",
    "finalize_transaction",
    "finished_transaction",
]
OF_PRODUCERS = ["start_reading", "read_through"]


async def coroutine(*args: Any) -> None: ...


async def async_generator(*args: Any) -> Any:
    yield


def generator(*args: Any) -> Any:
    yield


@functools.wraps(coroutine)
def decorated(*args: Any) -> Any:
    return coroutine(*args)


class Callable_:
    async def __call__(self, *args: Any) -> None: ...


class Methods:
    async def method(self, *args: Any) -> None: ...


KINDS: dict[str, tuple[Any, str]] = {
    "async def": (coroutine, "coroutine"),
    "async generator": (async_generator, "asynchronous generator"),
    "generator": (generator, "generator"),
    "partial": (functools.partial(coroutine), "coroutine"),
    "partial of partial": (functools.partial(functools.partial(generator)), "generator"),
    "decorated": (decorated, "wrapper"),
    "partial of decorated": (functools.partial(decorated), "coroutine"),
    "callable": (Callable_(), "coroutine"),
    "bound": (Methods().method, "coroutine"),
    "static": (staticmethod(coroutine), "coroutine"),
    "partialmethod": (functools.partialmethod(coroutine), "coroutine"),
    "no callable": (7, "cannot be called"),
}


class Brings(Tally, MessageProducer):
    def start_reading(self, shard: Any, store: Any, checkpoint: Any, feed: Any) -> None: ...

    def replay(self, shard: Any, store: Any, journal: str, begin: int, end: int) -> Any:
        yield ()


def with_callback(name: str, callback: Any, base: type[Any] = Tally) -> Any:
    return type("Mine", (base,), {name: callback, "__module__": __name__})()


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_wrong_function_is_refused(kind: str) -> None:
    callback, text = KINDS[kind]
    with raises(Invalid, says="Mine.consume_message") as refused:
        require_callbacks(with_callback("consume_message", callback))
    assert text in str(refused.value)
    assert "def" in str(refused.value.hint) or "method" in str(refused.value.hint)


@pytest.mark.parametrize("name", CALLBACKS + OF_PRODUCERS)
@pytest.mark.parametrize("callback", [coroutine, async_generator, generator])
def test_each_callback_is_checked(name: str, callback: Any) -> None:
    base = Brings if name in OF_PRODUCERS else Tally
    with raises(Invalid, says=f"{__name__}.Mine.{name} "):
        require_callbacks(with_callback(name, callback, base))
    mine = base()
    setattr(mine, name, callback)  # On the object, which is what is called.
    with raises(Invalid, says=f".{name} "):
        require_callbacks(mine)


def test_a_replay_may_be_a_generator_and_nothing_that_is_awaited() -> None:
    require_callbacks(Brings())
    with raises(Invalid, says="Mine.replay"):
        require_callbacks(with_callback("replay", coroutine, Brings))
    with raises(Invalid, says="Mine.initialize"):
        require_callbacks(with_callback("initialize", generator))
    require_callbacks(with_callback("initialize", coroutine))


def test_plain_functions_of_every_kind_are_accepted() -> None:
    def plain(*args: Any) -> None: ...

    class Called:
        def __call__(self, *args: Any) -> None: ...

    for callback in (
        plain,
        functools.partial(plain),
        Called(),
        staticmethod(plain),
        lambda *a: None,
    ):
        require_callbacks(with_callback("consume_message", callback))


def test_a_driver_refuses_it_before_anything_runs(tmp_path: Path) -> None:
    with raises(Invalid, says="Mine.consume_message"):
        AppDriver(with_callback("consume_message", coroutine), tmp_path, [SOURCE])


async def test_a_member_refuses_it_before_it_is_one(start: Start) -> None:
    with raises(Invalid, says="Mine.consume_message"):
        await start(with_callback("consume_message", coroutine))


async def test_a_plain_initialize_is_an_error_by_name(start: Start) -> None:
    with raises(ApplicationFailed, says="initialize"):
        await start(with_callback("initialize", lambda self, service: None))


def test_a_process_says_so_and_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert process.run(with_callback("consume_message", coroutine), ["serve"], {}) == 2
    said = capsys.readouterr().err
    assert "Mine.consume_message is a coroutine function" in said
    assert "plain `def`" in said


# --- What a plain function returns


def lazily(*args: Any) -> Any:
    return coroutine()


def generates(*args: Any) -> Any:
    return (one for one in args)


def generates_later(*args: Any) -> Any:
    return async_generator()


@pytest.mark.parametrize(
    ("callback", "text"),
    [
        (lazily, "coroutine"),
        (generates, " generator"),
        (generates_later, "asynchronous generator"),
        (lambda *args: 7, "int"),
    ],
)
@pytest.mark.parametrize(
    "name",
    [
        "consume_message",
        "consume_messages",
        "begin_transaction",
        "finalize_transaction",
        "finished_transaction",
    ],
)
def test_a_result_that_would_be_dropped_fails_the_shard(
    tmp_path: Path, name: str, callback: Callable[..., Any], text: str
) -> None:
    application = with_callback(name, callback)
    with AppDriver(application, tmp_path, [SOURCE]) as driver, warnings.catch_warnings():
        warnings.simplefilter("error")
        driver.feed(SOURCE, frame("a"))
        with raises(ApplicationFailed, says=f"{name} returned") as failed:
            driver.run()
        assert text in failed.value.message
        gc.collect()
        if name.startswith("consume"):
            assert failed.value.facts == {"journal": SOURCE, "begin": 0, "end": len(frame("a"))}
        assert not driver.transactions


def test_a_result_under_a_poison_policy_is_no_poison(tmp_path: Path) -> None:
    class Mine(Echo):
        def new_store(self, shard: Any, recorder: Any) -> Any:
            return SQLiteStore(recorder, "CREATE TABLE IF NOT EXISTS counts (word)")

        def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> Any:
            return coroutine()

    labels = {"consumer.gazette.dev/poison": "skip", "consumer.gazette.dev/dead-letters": "dead"}
    with AppDriver(
        Mine("b/target"), tmp_path, [SOURCE], labels=LabelSet.of(*labels.items())
    ) as driver:
        driver.feed(SOURCE, frame("a"))
        with raises(ApplicationFailed, journal="a/source", begin=0, says="coroutine"):
            driver.run()
        assert not driver.skipped


def test_a_future_is_cancelled() -> None:
    future: Future[None] = Future()
    with raises(ApplicationFailed, says="Future"):
        require_none("consume_message", future)
    assert future.cancelled()


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (None, "None"),
        (7, "int"),
        (coroutine, "coroutine"),
    ],
)
def test_new_store_must_return_a_store(tmp_path: Path, result: Any, text: str) -> None:
    returned = result() if callable(result) else result
    application = with_callback("new_store", lambda self, shard, recorder: returned)
    with AppDriver(application, tmp_path, [SOURCE]) as driver:
        with raises(ApplicationFailed, says=text) as failed:
            driver.run()
        if result is None:
            assert "return statement" in str(failed.value.hint)


def test_a_store_whose_methods_are_coroutines_is_refused(tmp_path: Path) -> None:
    class Later(SQLiteStore):
        async def destroy(self) -> None: ...  # type: ignore[override]

    class Mine(Tally):
        def new_store(self, shard: Any, recorder: Any) -> Any:
            return Later(recorder, "CREATE TABLE IF NOT EXISTS counts (word)")

    with AppDriver(Mine(), tmp_path, [SOURCE]) as driver:
        with raises(Invalid, says="Later.destroy"):
            driver.run()


def test_a_validation_that_would_check_nothing_is_refused(tmp_path: Path) -> None:
    class Checked(Message):
        word: str = ""

        async def validate(self) -> None: ...

    class Mine(Tally):
        def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
            publisher.publish_uncommitted(
                fixed_mapping("b/target", "application/x-ndjson"), Checked()
            )

    with AppDriver(Mine(), tmp_path, [SOURCE]) as driver:
        driver.publish(SOURCE, Word(word="a"))
        with raises(GazetteError, says="Checked"):
            driver.run()


def test_a_callback_with_other_parameters_is_refused() -> None:
    """It would fail at the first message, and not when the application starts."""
    require_callbacks(Tally())

    class Fewer(Tally):
        consume_message = lambda self, store, envelope: None  # type: ignore[assignment]  # noqa: E731

    class Whatever(Tally):
        consume_message = lambda self, *arguments: None  # noqa: E731

    says = (
        "Fewer.consume_message takes (store, envelope), and is called with "
        "(shard, store, envelope, publisher)"
    )
    with raises(Invalid, says=says):
        require_callbacks(Fewer())
    require_callbacks(Whatever())


class Bare(Application[Any]):
    """Has the callbacks of `Application` itself."""

    message_type = Word

    def new_store(self, shard: Any, recorder: Any) -> Counts:
        return Counts(recorder)

    def consume_message(self, shard: Any, store: Any, envelope: Any, publisher: Any) -> None:
        store.state[envelope.message.word] = 1


OF_TRANSACTIONS = ("begin_transaction", "finalize_transaction", "finished_transaction")


def test_callbacks_that_a_program_puts_into_the_base_class_are_called(tmp_path: Path) -> None:
    """A library that traces calls does that."""
    seen: list[str] = []
    defaults = {name: vars(Application)[name] for name in OF_TRANSACTIONS}
    try:
        for name in OF_TRANSACTIONS:
            setattr(Application, name, lambda *_, name=name: seen.append(name))
        with AppDriver(Bare(), tmp_path, [SOURCE]) as driver:
            driver.feed(SOURCE, frame("a"))
            driver.run()
    finally:
        for name, default in defaults.items():
            setattr(Application, name, default)
    assert seen[: len(OF_TRANSACTIONS)] == list(OF_TRANSACTIONS)


@pytest.mark.parametrize("name", OF_TRANSACTIONS)
def test_a_callback_that_cannot_be_read_fails_by_name(tmp_path: Path, name: str) -> None:
    def unreadable(self: Any) -> Any:
        raise ValueError("not now")

    application = Bare()
    with AppDriver(application, tmp_path, [SOURCE]) as driver:
        driver.feed(SOURCE, frame("a"))
        application.__class__ = type("Mine", (Bare,), {name: property(unreadable)})
        with raises(ApplicationFailed, says=name):
            driver.run()
