"""A running command: its settings, its streams, and its clients of servers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from gazette.client.flags import ClientFlags
from gazette.client.rpc.preflight import require_kind, require_reachable
from gazette.config.schema import Loaded
from gazette.errors import GazetteError, Invalid, NotAllowed, Unavailable
from gazette.gazctl.contexts import sign_in_path
from gazette.gazctl.flags import BrokerFlags, ConsumerFlags, SharedFlags
from gazette.gazctl.io.progress import ProgressLine
from gazette.gazctl.io.terminal import EXIT_OK, Terminal
from gazette.protocol.label_set import EVERYTHING, LabelSelector
from gazette.protocol.text.validation import within
from gazette.runtime.clock import Clock
from gazette.runtime.tasks import BlockingPool, TaskScope
from gazette.runtime.timeouts import timeout

if TYPE_CHECKING:
    from gazette.client.client import Client
    from gazette.client.shards import ShardClient

F = TypeVar("F", bound=SharedFlags)
C = TypeVar("C", bound=ClientFlags)
A = TypeVar("A")
R = TypeVar("R")

CALLS_MAX: Final = 32
"""Greatest number of calls in flight, of a command that makes a call for each journal or shard."""
_CONNECT_S: Final = 10.0
_PROGRESS_EVERY_S: Final = 0.2


class Context:
    """One run of one command. Loop-bound; close it."""

    def __init__(
        self,
        loaded: Loaded,
        environ: Mapping[str, str],
        terminal: Terminal,
        clock: Clock,
        rng: random.Random,
        in_use: str = "",
    ) -> None:
        """Make a context. ``in_use`` is the name of the addresses in use; empty if they have no name."""
        self.loaded = loaded
        self.environ = environ
        self.terminal = terminal
        self.clock = clock
        self.rng = rng
        self.in_use = in_use
        """Name of the context whose addresses are used; empty if no context gave the addresses."""
        self.on_signal: Callable[[], bool] = lambda: False
        """Function that is called for SIGINT and SIGTERM. If it returns False, the command is cancelled."""
        self.interrupted_code = EXIT_OK
        """Exit code of a command that the last signal has interrupted."""
        self._broker: Client | None = None
        self._consumer: ShardClient | None = None

    def flags(self, kind: type[F]) -> F:
        """Return the flags of the command."""
        return self.loaded.group(kind)

    @property
    def timeout_s(self) -> float:
        return self.loaded.group(SharedFlags).timeout

    async def broker(self, file_root: Path | None = None) -> Client:
        """Return a client of the brokers. ``file_root`` of the first call takes precedence over the settings.

        Raise ``Unavailable`` if no server answers at the address, ``Invalid`` if it is no broker or a setting
        is wrong, and the errors of `_signed_in`.
        """
        if self._broker is None:
            flags = self.loaded.group(BrokerFlags)
            if file_root is not None:
                flags = replace(flags, file_root=file_root)
            flags = await self._signed_in(flags, "broker")
            with within("--broker"):
                self._broker = flags.client(self._zone, self.clock)
            await self._reach(self._broker, "broker")
        return self._broker

    async def consumer(self) -> ShardClient:
        """Return a client of the consumers. The errors are as of `broker`."""
        if self._consumer is None:
            flags = await self._signed_in(self.loaded.group(ConsumerFlags), "consumer")
            with within("--consumer"):
                self._consumer = flags.client(self._zone, self.clock)
            await self._reach(self._consumer, "consumer")
        return self._consumer

    @property
    def _zone(self) -> str:
        return self.loaded.group(SharedFlags).zone

    async def _reach(self, client: Client | ShardClient, what: str) -> None:
        """Raise ``Unavailable`` soon if no server can be reached, and ``Invalid`` if it is no ``what``."""
        origin = self._origin(what)
        await require_reachable(
            client,
            what,
            connect_s=min(_CONNECT_S, self.timeout_s),
            hint=f"Check that it runs there, or give another address with --{what}.address.{origin}",
        )
        await require_kind(client, what, timeout_s=self.timeout_s, origin=origin)

    async def _signed_in(self, flags: C, what: str) -> C:
        """Return the flags with the token of `gazctl login`. Renew the token if it is due.

        A given token or keys take precedence. The sign-in's token is sent only to an address of the context,
        or to an address that is given beside --context: any other may be a stranger's. Raise the error of a
        renewal that fails, or ``NotAllowed`` if the token has ended.
        """
        path = sign_in_path(self.environ, self.in_use) if self.in_use else None
        is_by_hand = self.loaded.sources[f"{what}.address"] == "flag" and self.is_given("context")
        is_chosen = is_by_hand or bool(self._origin(what))
        is_given = flags.auth_token or flags.auth_token_file or flags.auth_keys
        if path is None or not is_chosen or is_given or not path.exists():
            return flags
        from gazette.client.oidc.token_file import renew

        pool = BlockingPool("sign-in", 1)
        try:
            sign_in = await pool.run(renew, path, self.clock)
        finally:
            pool.close()
        if self.clock.now() >= sign_in.expires_at:
            raise NotAllowed(
                f"the sign-in of context {self.in_use} has ended", hint="Run `gazctl login` again."
            )
        return replace(flags, auth_token_file=str(path))

    def is_given(self, key: str) -> bool:
        """Return True if a setting has another source than its default."""
        return self.loaded.sources[key] != "default"

    def _origin(self, what: str) -> str:
        """Return a text with the name of an address's context; empty if no context gave the address."""
        source = self.loaded.sources[f"{what}.address"]
        variable = source.removeprefix("env ")
        # A context gives its addresses as variables that the user's environment lacks.
        if not self.in_use or variable == source or self.environ.get(variable):
            return ""
        return f" This one is that of the context {self.in_use} (`gazctl context list`)."

    @asynccontextmanager
    async def answering(
        self,
        address: str,
        seconds: float | None = None,
        reason: Callable[[], Awaitable[str]] | None = None,
    ) -> AsyncIterator[None]:
        """Bound calls in the block by ``seconds``, or by ``--timeout``: unbounded calls may wait forever.
        Raise ``Unavailable`` with the address, and with the ``reason`` of the wait if known."""
        limit_s = self.timeout_s if seconds is None else seconds
        try:
            async with timeout(limit_s):
                yield
        except TimeoutError as error:
            reason_text = "" if reason is None else await reason()
            raise Unavailable(
                f"no answer from {address} within {limit_s:g} s"
                + (f": {reason_text}" if reason_text else ""),
                hint="Look at its log; --timeout sets how long to wait.",
            ) from error

    @asynccontextmanager
    async def reporting_progress(
        self, label: str | Callable[[], tuple[str, str]], amounts: Callable[[], tuple[int, int]]
    ) -> AsyncIterator[None]:
        """Show the progress of long work in the block: see `ProgressLine`.

        ``label`` is the name of the work, or a function that returns the name of the present work and its
        unit. ``amounts`` returns how much is done, and the total: in that unit, or else in bytes.
        """

        def labelled() -> tuple[str, str]:
            return (label, "bytes") if isinstance(label, str) else label()

        async def report(line: ProgressLine) -> None:
            while True:
                await self.clock.sleep(_PROGRESS_EVERY_S)
                line.label, line.unit = labelled()
                line.update(*amounts())

        with ProgressLine(self.terminal, self.clock, *labelled()) as line:
            async with TaskScope("progress") as scope:
                scope.daemon(report(line), name="progress")
                try:
                    yield
                finally:
                    scope.cancel()

    async def close(self) -> None:
        for client in (self._broker, self._consumer):
            if client is not None:
                await client.close()


def parse_selector(text: str, *, required: bool) -> LabelSelector:
    """Return the selector of ``--selector``. Raise ``Invalid`` for a malformed selector, or an empty one
    where one is required."""
    if not text.strip():
        if required:
            raise Invalid(
                "a selector is required",
                path="--selector",
                hint="Select one by its name: -l name=… for journals, -l id=… for shards.",
            )
        return EVERYTHING
    try:
        return LabelSelector.parse(text)
    except Invalid as error:
        raise error.within("--selector") from error


async def each(
    name: str, items: Iterable[A], work: Callable[[A], Awaitable[R]]
) -> list[R | GazetteError]:
    """Do the work for all items, at most `CALLS_MAX` at a time. Return results or errors, in order. Raise the
    first error that is no `GazetteError`, and cancel the rest. Cancellation cancels the work of all items."""
    gate = asyncio.Semaphore(CALLS_MAX)

    async def one(item: A) -> R | GazetteError:
        async with gate:
            try:
                return await work(item)
            except GazetteError as error:
                return error

    async with TaskScope(name) as scope:
        tasks = [scope.spawn(one(item), name=str(item)[:80]) for item in items]
    return [task.result() for task in tasks]
