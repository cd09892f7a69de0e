"""The surroundings of the user's code in a simulation: its time, its random numbers, and what it must not do.

Within a run, names of the system's clock in the user's modules mean the simulated clock. So a run is the same
in each process, and a fold at another time shows what depends on the time.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import random
import sys
import threading
import time
import traceback
import types
import typing
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final

from gazette.errors import Invalid, Unavailable
from gazette.message.publisher import Publisher
from gazette.message.values import ValueEncoding
from gazette.runtime.user_code import is_user_file, place_in
from gazette.stores.sqlite.store import SQLiteStore
from gazette.testing.simulation.shard_history import wrapped
from gazette.testing.simulation.storage import SIMULATED, TurnThread

_NETWORK: Final = frozenset(
    {"socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system"}
)
_is_user_file = cache(is_user_file)


class UserSurroundings:
    """The surroundings in this process, for one seed."""

    present: UserSurroundings | None = None
    """The surroundings that are attached now: a hook of the interpreter reads them, and stays installed."""
    _is_hooked = False

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(f"random numbers of the user {seed}")
        self._seed = seed
        self._now: Callable[[], float] = time.time
        self._pause: Callable[[float], object] = lambda seconds: None
        self._on_finding: Callable[[str, str, str], object] = lambda what, place, hint: None
        self.shift_s = 0.0
        """Seconds to add to the simulation's time: the user's code sees the sum."""
        self.fail_after = 0
        """Number of the call that fails, counted from now: 1 is the next call. With 0, no call fails."""
        self.on_failed_call: Callable[[], object] = lambda: None
        self.is_folding = False
        self.database: Any = None
        """The `SimDatabase` of stores in SQL; None: the run has no database."""
        self.refused: Invalid | None = None
        """Why the application cannot be simulated."""

    def bind(
        self,
        now: Callable[[], float],
        pause: Callable[[float], object],
        on_finding: Callable[[str, str, str], object],
    ) -> None:
        """Set the clock, the function that sleeps, and the function that notes forbidden acts."""
        self._now, self._pause, self._on_finding = now, pause, on_finding

    def now(self) -> float:
        return self._now() + self.shift_s

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Give the user's code these surroundings within the block."""
        before = UserSurroundings.present, random.getstate(), os.urandom
        UserSurroundings.present = self
        if not UserSurroundings._is_hooked:
            UserSurroundings._is_hooked = True
            sys.addaudithook(_on_audit)
        random.seed(self._rng.getrandbits(64))
        urandom: Any = self._rng.randbytes
        os.urandom = random._urandom = urandom  # type: ignore[attr-defined]
        with contextlib.ExitStack() as stack:
            for owner, name in _failing_calls():
                stack.enter_context(wrapped(owner, name, self._call))
            if (sql := sys.modules.get("gazette.stores.sql.store")) is not None:
                stack.enter_context(wrapped(sql.SQLStore, "__init__", self._open_database))
                stack.enter_context(wrapped(sql.SQLStore, "_await_commit", self._await_commit))
                if self.database is None:
                    engine = sys.modules["sqlalchemy"].Engine
                    stack.enter_context(wrapped(engine, "raw_connection", self._refuse_engine))
            stack.enter_context(wrapped(threading.Thread, "start", self._start_thread))
            stack.enter_context(wrapped(ValueEncoding, "__init__", _with_real_type))
            stack.enter_context(_replaced_names(_substitutes(self)))
            try:
                yield
            finally:
                UserSurroundings.present = before[0]
                random.setstate(before[1])
                os.urandom = random._urandom = before[2]  # type: ignore[attr-defined]

    def _call(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a store or publisher. Raise if a failure is due, and the user's code calls."""
        if self.fail_after and TurnThread.current() is not None:
            caller = sys._getframe(2).f_code.co_filename
            if _is_user_file(caller):
                self.fail_after -= 1
                if not self.fail_after:
                    self.on_failed_call()
                    raise Unavailable("the simulation lets this call fail")
        return call(*args, **kwargs)

    def _start_thread(self, start: Callable[..., None], thread: threading.Thread) -> None:
        """Refuse a thread that a callback starts. Threads with the name `SIMULATED` are the simulation's."""
        if thread.name != SIMULATED and (place := self._place_of_callback()):
            self._on_finding("a callback starts a thread", place, "thread")
            raise RuntimeError("a simulation has no threads of the application")
        start(thread)

    def _open_database(
        self, call: Callable[..., None], store: Any, *args: Any, **options: Any
    ) -> None:
        """Refuse a SQLStore if no database is given: it would change the user's own database."""
        if self.database is None:
            raise self._needs_database()
        call(store, *args, **options)
        try:
            self.database.adopt(store)
        except Invalid as error:
            self.refused = error
            raise

    def _refuse_engine(self, call: Callable[[Any], Any], engine: Any) -> Any:
        """Refuse a connection to a server, which may be in production."""
        if engine.dialect.name != "sqlite":
            raise self._needs_database()
        return call(engine)

    def _needs_database(self) -> Invalid:
        self.refused = Invalid(
            "an application with a SQLStore needs a database",
            path="new_store",
            hint="Give the URL of an empty one: --database postgresql+psycopg://user@host/name."
            " Each run has a copy of it.",
        )
        return self.refused

    def _await_commit(self, call: Callable[[Any], None], store: Any) -> None:
        """Wait for the previous commit in virtual time."""
        commit = store._commit
        if self.database is not None and commit is not None and not store._overlap:
            self.database.wait(commit.future)
        call(store)

    def refuse_network(self) -> None:
        """Refuse that a callback calls other systems."""
        if self.database is not None and self.database.is_connecting:
            return
        if place := self._place_of_callback():
            self._on_finding("a callback uses the network or another process", place, "network")
            raise ConnectionRefusedError("a simulation has no network")

    def _place_of_callback(self) -> str:
        """Return the user's line that runs now in a callback; empty outside of callbacks."""
        if not self.is_folding and TurnThread.current() is None:
            return ""
        return place_in(traceback.extract_stack())


def _on_audit(event: str, _args: Any) -> None:
    if event in _NETWORK and (present := UserSurroundings.present) is not None:
        present.refuse_network()


def _failing_calls() -> list[tuple[type, str]]:
    calls: list[tuple[type, str]] = [
        (Publisher, "publish_uncommitted"),
        (SQLiteStore, "execute"),
        (SQLiteStore, "executemany"),
        (SQLiteStore, "execute_tables"),
    ]
    rocksdb = sys.modules.get("gazette.stores.rocksdb.store")
    if rocksdb is not None:
        calls += [(rocksdb.RocksDBStore, "put"), (rocksdb.RocksDBStore, "get")]
    if (sql := sys.modules.get("gazette.stores.sql.store")) is not None:
        calls.append((sql.SQLStore, "execute"))
    return calls


def _substitutes(user: UserSurroundings) -> dict[int, Any]:
    """Return the substitutes of the system's clocks, by the identities of the originals."""
    real = datetime.datetime

    class SimulatedDatetime(datetime.datetime, metaclass=_RealInstances):
        real_class = real

        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return real.fromtimestamp(user.now(), tz)

        @classmethod
        def utcnow(cls) -> Any:
            return real.fromtimestamp(user.now(), datetime.UTC).replace(tzinfo=None)

        @classmethod
        def today(cls) -> Any:
            return real.fromtimestamp(user.now())

    class SimulatedDate(datetime.date, metaclass=_RealInstances):
        real_class = datetime.date

        @classmethod
        def today(cls) -> Any:
            return real.fromtimestamp(user.now()).date()

    functions: dict[str, Any] = {
        "time": user.now,
        "time_ns": lambda: int(user.now() * 1e9),
        "monotonic": user.now,
        "perf_counter": user.now,
        "sleep": lambda seconds: user._pause(seconds),
    }
    classes = {"datetime": SimulatedDatetime, "date": SimulatedDate}
    substitutes: dict[int, Any] = {
        id(time): _copy_of(time, functions),
        id(datetime): _copy_of(datetime, classes),
    }
    substitutes |= {id(getattr(time, name)): new for name, new in functions.items()}
    return substitutes | {id(getattr(datetime, name)): new for name, new in classes.items()}


class _RealInstances(type):
    """The metaclass of substitutes: they make real instances, and count these as theirs. Users may derive."""

    real_class: type

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "real_class" in vars(cls):
            return cls.real_class(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return cls.__subclasscheck__(type(instance))

    def __subclasscheck__(cls, subclass: type) -> bool:
        if "real_class" in vars(cls):
            return issubclass(subclass, cls.real_class)
        return super().__subclasscheck__(subclass)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is vars(cls).get("real_class")

    def __hash__(cls) -> int:
        return hash(vars(cls).get("real_class")) if "real_class" in vars(cls) else id(cls)


def _with_real_type(
    call: Callable[..., None], encoding: Any, declared: Any = Any, path: str = ""
) -> None:
    call(encoding, _real_type(declared), path)


def _real_type(declared: Any) -> Any:
    """Return a type with the real classes in place of simulated ones: msgspec knows no others."""
    if "real_class" in getattr(declared, "__dict__", {}):
        return declared.real_class
    parts, origin = typing.get_args(declared), typing.get_origin(declared)
    real = tuple(map(_real_type, parts))
    if all(part is each for part, each in zip(parts, real, strict=True)):
        return declared
    return typing.Union[real] if origin is types.UnionType else origin[real]  # noqa: UP007


def _resolve_annotations(module: types.ModuleType) -> None:
    """Replace annotations that are texts by types. Read later, an annotation would name simulated classes."""
    for cls in list(vars(module).values()):
        if isinstance(cls, type) and cls.__module__ == module.__name__:
            with contextlib.suppress(Exception):  # Some names are for type checkers only.
                own = cls.__annotations__ if "__annotations__" in vars(cls) else {}
                hints = typing.get_type_hints(cls, include_extras=True)
                own.update({name: hints[name] for name in own})


def _copy_of(module: types.ModuleType, changes: dict[str, Any]) -> types.ModuleType:
    copy = types.ModuleType(module.__name__)
    vars(copy).update(vars(module))
    vars(copy).update(changes)
    return copy


@contextlib.contextmanager
def _replaced_names(substitutes: dict[int, Any]) -> Iterator[None]:
    """Replace objects by their substitutes, under all names in the user's modules, within the block."""
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not _is_user_file(file):
            continue
        _resolve_annotations(module)
        names = vars(module)
        for name, value in list(names.items()):
            if id(value) in substitutes:
                replaced.append((names, name, value))
                names[name] = substitutes[id(value)]
    try:
        yield
    finally:
        for names, name, value in replaced:
            names[name] = value
