"""``gazctl journals append``: append an input, whole or by records, to journals."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

from gazette.client.append.appender import AppendParams
from gazette.client.append.service import AppendService
from gazette.errors import Bug, GazetteError, Invalid, NotFound, Unavailable
from gazette.gazctl.context import Context, parse_selector
from gazette.gazctl.flags import AppendFlags
from gazette.gazctl.io.record_splitter import FixedSplitter, LineSplitter, Splitter
from gazette.gazctl.journals.append_status import report_stalls
from gazette.message.mapping import (
    PartitionsFunc,
    PartitionWatch,
    modulo_mapping,
    random_mapping,
    rendezvous_mapping,
)
from gazette.runtime.numbers import counted
from gazette.runtime.tasks import BlockingPool, TaskScope, first_failure

log = logging.getLogger(__name__)

READ_BYTES: Final = 1 << 17
KEYED_NOTE: Final = (
    "a key says which messages belong to this journal, and raw bytes are not checked: use `gazctl "
    "produce`, or --mapping modulo with keys"
)
"""Warning before bytes are appended to one partition of a keyed source."""
_NAMED_MAX: Final = 3
_ANSWER_S: Final = 5.0
"""Seconds for an answer, beyond the time for which a broker holds an append."""
_POLL_S: Final = 0.1

Choose = Callable[[bytes], str]
"""Function from a key to a journal. Raises ``NotFound`` if ``direct`` keys name no matching journal."""


class _Unreadable(GazetteError):
    """The input cannot be read further."""


async def run(context: Context) -> int:
    flags = context.flags(AppendFlags)
    selector = parse_selector(flags.selector, required=True)
    _check(flags)
    client = await context.broker()
    service = AppendService(client)
    pool = BlockingPool("input", 1)
    try:
        async with TaskScope("append") as scope:
            watch = PartitionWatch(client.watch_journals(selector))
            scope.daemon(watch.run(), name="partitions")
            scope.daemon(service.run(), name="appends")
            async with context.answering(client.address):
                await watch.ready()
            if not watch().all:
                raise NotFound("no journal matches", selector=selector)
            if flags.mapping == "random" and watch().is_keyed:
                context.terminal.note(KEYED_NOTE)
            appending = Appending(service, choose_by(flags.mapping, watch, context))
            size = _size_of(flags.input)
            reports = report_stalls(
                service, client, context.terminal, lambda: appending.bytes_appended
            )
            scope.daemon(reports, name="waits")
            async with _showing_progress(context, appending, size):
                try:
                    await pool.run(_append_input, appending, flags, context)
                except (Invalid, NotFound, _Unreadable) as error:
                    await _flush(context, service, client.address)
                    raise appending.stopped_by(error) from error
                await _flush(context, service, client.address)
            scope.cancel()
    finally:
        # Do not wait for the thread: it may wait for input that never comes, and ends with the process.
        pool.close()
        await service.close()
    context.terminal.note(appending.summary())
    return 0


def _check(flags: AppendFlags) -> None:
    if flags.framing == "none" and flags.mapping != "random":
        raise Invalid(
            "--framing none makes one append, to a journal chosen at random", path="--mapping"
        )
    if flags.base64 and (flags.framing != "lines" or flags.mapping == "random"):
        raise Invalid(
            "line keys need --framing lines and a --mapping by key",
            path="--base64",
        )


def _size_of(path: str) -> int:
    """Return the size of the input in bytes; zero for a pipe or an absent file."""
    try:
        return 0 if path == "-" else Path(path).stat().st_size
    except OSError:
        return 0


@asynccontextmanager
async def _showing_progress(
    context: Context, appending: Appending, size: int
) -> AsyncIterator[None]:
    """Show progress in the block, if the size of the input is known."""
    if not size:
        yield
        return
    async with context.reporting_progress("appended", lambda: (appending.bytes_appended, size)):
        yield


def _append_input(appending: Appending, flags: AppendFlags, context: Context) -> None:
    """Read the input, and append it. Blocks: the open of a named pipe waits until a process writes to it."""
    splitter = splitter_of(flags)
    with ExitStack() as stack:
        source = _open(flags.input, context, stack)
        if splitter is None:
            appending.append_whole(source)
        else:
            appending.append_records(source, splitter, keys=flags.mapping != "random")


def _open(path: str, context: Context, stack: ExitStack) -> BinaryIO:
    if path == "-":
        return context.terminal.stdin
    try:
        return stack.enter_context(Path(path).open("rb"))
    except OSError as error:
        raise Invalid(f"cannot read {path}: {error.strerror}", path="--input") from error


def splitter_of(flags: AppendFlags) -> Splitter | None:
    match flags.framing:
        case "lines":
            return LineSplitter(base64_keys=flags.base64)
        case "fixed":
            return FixedSplitter()
    return None


def choose_by(mapping: str, partitions: PartitionsFunc, context: Context) -> Choose:
    """Return the function from keys to journals of a ``--mapping``."""
    match mapping:
        case "random":
            choose = random_mapping(partitions, cast("Any", context.rng))
        case "modulo":
            choose = modulo_mapping(partitions, _itself)
        case "rendezvous":
            choose = rendezvous_mapping(partitions, _itself)
        case "direct":
            return partial(_direct, partitions)
        case _:
            raise Bug("not a mapping", mapping=mapping)
    return lambda key: choose(key).journal


def _itself(key: bytes) -> bytes:
    return key


def _direct(partitions: PartitionsFunc, key: bytes) -> str:
    name = key.decode("utf-8", "backslashreplace")
    if any(partition.journal == name for partition in partitions().all):
        return name
    raise NotFound("no journal of this name matches the selector", journal=name)


class Appending:
    """The thread that reads and appends the input, with its counts of bytes and records."""

    def __init__(self, service: AppendService, choose: Choose) -> None:
        self._service = service
        self._choose = choose
        self._params: dict[str, AppendParams] = {}
        self._records = 0
        self._bytes = 0

    @property
    def bytes_appended(self) -> int:
        """Bytes passed to the append service, without the bytes that wait in its queue."""
        return self._bytes - self._service.backlog_bytes

    def summary(self) -> str:
        if not self._bytes:
            return "the input was empty: nothing was appended"
        names = sorted(self._params)
        journals = ", ".join(names) if len(names) <= _NAMED_MAX else f"{len(names)} journals"
        size, records = counted(self._bytes, "byte"), counted(self._records, "record")
        return f"appended {size}, in {records}, to {journals}"

    def stopped_by(self, error: GazetteError) -> GazetteError:
        """Return the error of a wrong input, with a summary of the records that were appended before."""
        if not self._bytes:
            return error
        return GazetteError(
            f"{self.summary()}, and then the input failed: {error}",
            hint="Correct it, and give only the records after the appended records.",
        )

    def append_whole(self, source: BinaryIO) -> None:
        """Append the whole input as one append. An empty input appends nothing, nor does an input that cannot
        be read to its end."""
        data = _read(source)
        if not data:
            return
        self._records = 1
        try:
            with self._service.start_append(self._params_of(self._choose(b""))) as append:
                while data:
                    append.write(data)
                    self._bytes += len(data)
                    data = _read(source)
        except _Unreadable:
            self._bytes = 0
            raise

    def append_records(self, source: BinaryIO, splitter: Splitter, *, keys: bool) -> None:
        """Append each record in its own append. With ``keys``, each record follows a record with its key:
        raise ``Invalid`` if the last key has no record. Raise the error of an append that failed."""
        key: bytes | None = None if keys else b""
        ended = False
        while not ended:
            data = _read(source)
            ended = not data
            for record in splitter.finish() if ended else splitter.feed(data):
                if key is None:
                    key = splitter.key_of(record)
                    continue
                self._append(self._choose(key), record)
                key = None if keys else b""
            # Stop after a failed append: later records could not be appended either.
            failure = first_failure(self._service.pending_except(""))
            if failure is not None:
                raise failure
        if keys and key is not None:
            raise Invalid(
                f"the input ends with a key ({key[:64]!r}) but no record follows", path="--input"
            )

    def _append(self, journal: str, record: bytes) -> None:
        log.debug(
            "record %(record)d of %(bytes)d bytes goes to %(journal)s",
            {"record": self._records, "bytes": len(record), "journal": journal},
        )
        with self._service.start_append(self._params_of(journal)) as append:
            append.write(record)
        self._records += 1
        self._bytes += len(record)

    def _params_of(self, journal: str) -> AppendParams:
        params = self._params.get(journal)
        if params is None:
            params = self._params[journal] = AppendParams(journal)
        return params


def _read(source: BinaryIO) -> bytes:
    """Return the available bytes of the input, up to the size of a read; empty at its end. Raise
    `_Unreadable` if it cannot be read."""
    try:
        read1 = getattr(source, "read1", source.read)
        data: bytes = read1(READ_BYTES)
        return data
    except OSError as error:
        raise _Unreadable(f"cannot read the input: {error.strerror}") from error


async def _flush(context: Context, service: AppendService, address: str) -> None:
    """Wait for pending appends for as long as they progress.

    Raise ``Unavailable``, with the broker's reason, after --timeout without progress.
    """
    while True:
        backlog = service.backlog_bytes
        try:
            async with context.answering(address):
                await service.flush()
                return
        except Unavailable as error:
            reason = await _reason(context, service)
            if service.backlog_bytes < backlog:
                continue
            if not reason and service.waiting():
                raise
            if not reason:  # The appends have succeeded or failed meanwhile.
                try:
                    await service.flush()
                    return
                except Unavailable as flush_error:
                    reason = f"{flush_error.facts.get('journal', address)}: {flush_error}"
            raise Unavailable(
                f"not appended within {context.timeout_s:g} s: {reason}", hint=error.hint
            ) from error


async def _reason(context: Context, service: AppendService) -> str:
    """Return the last reason why an append waits; empty if none waits.

    A broker may hold an append for a minute before it gives a reason. The default of --timeout is as long. So
    wait some seconds more, after --timeout.
    """
    deadline = context.clock.monotonic() + _ANSWER_S
    while waiting := service.waiting():
        for journal, reason in sorted(waiting.items()):
            if reason:
                return f"{journal}: {reason}"
        if context.clock.monotonic() >= deadline:
            break
        await context.clock.sleep(_POLL_S)
    return ""
