"""Access of a task to the bytes of a run: in blob stores, or through brokers.

`Access` is a value that is sent to the tasks of a cluster. Each task opens its copy. All calls but coroutines
block: call them from threads, never on an event loop.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from gazette.blobs.blob_store import BlobStore
from gazette.blobs.fsspec import check_protocols
from gazette.blobs.registry import BlobSettings, BlobStores, StoreConstructor
from gazette.client.client import Client
from gazette.client.flags import BrokerClientFlags
from gazette.client.read.reader import OffsetJump, ReadParams
from gazette.client.rpc.preflight import require_reachable
from gazette.errors import Corrupt, Invalid, NotFound, Unavailable
from gazette.history.snapshot import READ_AGAIN_HINT, Piece
from gazette.history.summary_store import SummaryStore
from gazette.protocol.codecs.decoder import DecodedFile, FragmentDecoder
from gazette.protocol.fragment import FragmentStoreUrl
from gazette.protocol.ids import JournalName, Offset
from gazette.runtime.clock import Clock, SystemClock
from gazette.runtime.tasks import LoopThread
from gazette.runtime.timeouts import timeout

T = TypeVar("T")

BLOCK_BYTES: Final = 1 << 20
"""Usual size of a chunk of `OpenAccess.chunks`, in bytes. Every chunk is shorter than twice that: so a
processor's cache of 2 MB holds it while it is decompressed, summed and scanned."""
NO_SUMMARIES: Final = "none"
_LISTING_THREADS: Final = 8
_CONNECT_S: Final = 10.0
_WAIT_S: Final = 10.0
"""Seconds to wait for a first answer. A broker restarts in less time, so tasks survive a restart."""


def store_url(text: str) -> str:
    """Return the URL of a store: ``file://`` for a path. Raise `Invalid` if the URL names no store."""
    url = text if text.endswith("/") or "?" in text else f"{text}/"
    if url.startswith("/"):
        url = f"file://{url}"
    FragmentStoreUrl.parse(url)
    return url


@dataclass(frozen=True, slots=True)
class Access:
    """The places from which journals are read.

    ``brokers`` holds the address and credentials of brokers, if there are any. With ``direct``,
    this process opens stored fragments in their blob store, with its own credentials and
    ``file_root``. Otherwise brokers sign URLs for fragments, or proxy them.
    """

    brokers: BrokerClientFlags | None = None
    file_root: Path | None = None
    """Root directory of ``file://`` stores."""
    direct: bool = False
    fsspec_protocols: frozenset[str] = frozenset()
    """Protocols that ``fsspec+NAME://`` stores may name."""
    summaries: str = NO_SUMMARIES
    """URL of the store of summaries. Empty: the store of the fragments, with ``direct``. `NO_SUMMARIES`:
    summaries are neither kept nor read."""
    answer_s: float | None = None
    """Seconds to wait for an answer of brokers. None: wait without a limit."""

    @classmethod
    def of(
        cls,
        broker: str = "",
        *,
        file_root: Path | str | None = None,
        auth_keys: str = "",
        auth_token: str = "",
        trusted_ca_file: str = "",
        cert_file: str = "",
        cert_key_file: str = "",
        direct: bool = False,
        fsspec_protocols: Iterable[str] = (),
        summaries: str = NO_SUMMARIES,
    ) -> Self:
        """Return an access from its parts. Raise `Invalid` without a broker and without ``direct``."""
        root = None if file_root is None else Path(file_root)
        if not broker and not direct:
            raise Invalid(
                "there is no source to read from: neither a broker's address nor direct access to stores",
                path="broker",
            )
        brokers = None
        if broker:
            brokers = replace(
                BrokerClientFlags(),
                address=broker,
                auth_keys=auth_keys,
                auth_token=auth_token,
                trusted_ca_file=trusted_ca_file,
                cert_file=cert_file,
                cert_key_file=cert_key_file,
                file_root=root,
            )
        protocols = check_protocols(fsspec_protocols, "fsspec_protocols")
        return cls(brokers, root, direct, protocols, summaries)

    def open(self, clock: Clock | None = None) -> OpenAccess:
        """Open the access for this process. Close the result, or use it in a ``with`` block."""
        return OpenAccess(self, clock)


class OpenAccess:
    """An access in use. Thread-safe."""

    def __init__(
        self,
        settings: Access,
        clock: Clock | None = None,
        constructors: Mapping[str, StoreConstructor] | None = None,
    ) -> None:
        """Open ``settings``. The defaults are the system's clock and the constructors of all known stores."""
        self.settings = settings
        self._constructors = constructors
        self.clock: Clock = SystemClock() if clock is None else clock
        self._lock = threading.Lock()
        self._loop: LoopThread | None = None
        self._client: Client | None = None
        self.stores = self._blob_stores(settings.file_root)
        """The blob stores, only for the event loop of `run`. Other threads call `store`."""
        self._summary_stores = self._blob_stores(settings.file_root or Path("/"))
        """Stores for `settings.summaries`. Without a ``file_root``, any path is permitted."""
        self._summaries: dict[str, SummaryStore] = {}

    def _blob_stores(self, file_root: Path | None) -> BlobStores:
        return BlobStores(
            BlobSettings(file_root, fsspec_protocols=self.settings.fsspec_protocols),
            self.clock,
            threads=_LISTING_THREADS,
            rng=random.Random(),
            constructors=self._constructors,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close connections. A second call does nothing."""
        with self._lock:
            client, self._client = self._client, None
            loop, self._loop = self._loop, None
        if loop is not None:
            if client is not None:
                loop.run(client.close())
            loop.close()
        self.stores.close()
        self._summary_stores.close()

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the event loop that belongs to this access."""
        with self._lock:
            if self._loop is None:
                self._loop = LoopThread("history")
            loop = self._loop
        return loop.run(coro)

    async def client(self) -> Client:
        """Return the client of the brokers. Call this on the loop.

        Raise `Invalid` without brokers. Raise ``Unavailable`` if no broker answers in time: the next call
        tries again.
        """
        if self._client is None:
            brokers = self.settings.brokers
            if brokers is None:
                raise Invalid(
                    "reading these journals needs a broker, and no address of a broker was given",
                    path="broker",
                    hint="Give the address of a broker.",
                )
            # Store the client before the first call: so `close` closes it even if the call is cancelled.
            client = self._client = brokers.client("", self.clock)
            limit_s = math.inf if self.settings.answer_s is None else self.settings.answer_s
            try:
                await require_reachable(
                    client,
                    "broker",
                    connect_s=min(_CONNECT_S, limit_s),
                    wait_s=min(_WAIT_S, limit_s),
                    hint="Check that it runs there and can be reached from here, or correct the address.",
                )
            except Unavailable:
                self._client = None
                await client.close()
                raise
        return self._client

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        """Bound the time of one call to brokers. Raise ``Unavailable`` if no broker answers in time."""
        try:
            async with timeout(self.settings.answer_s):
                yield
        except TimeoutError as error:
            brokers = self.settings.brokers
            raise Unavailable(
                f"no answer from the broker within {self.settings.answer_s:g} s",
                hint="Look at the brokers' logs, and at `gazctl journals list`. A journal may have no "
                "primary.",
                address="" if brokers is None else brokers.address,
            ) from error

    def store(self, url: str) -> BlobStore:
        """Return the blob store of a URL. Raise `Invalid` or `NotAllowed` if it cannot be made."""
        with self._lock:
            return self.stores.get(url).store

    def summaries(self, pieces: Sequence[Piece]) -> SummaryStore | None:
        """Return the store of summaries for some pieces; None if summaries are not kept.

        Raise `Invalid` or `NotAllowed` if the store cannot be made.
        """
        url = self.settings.summaries
        if not url and self.is_direct(pieces[0]):
            fragment = pieces[0].fragment
            assert fragment is not None
            url = fragment.backing_store
        if not url or url == NO_SUMMARIES:
            return None
        with self._lock:
            store = self._summaries.get(url)
            if store is None:
                stores = self._summary_stores if self.settings.summaries else self.stores
                store = self._summaries[url] = SummaryStore(stores.get(url).store, url)
        return store

    def chunks(
        self, journal: JournalName, pieces: Iterable[Piece]
    ) -> Iterator[tuple[Offset, bytes]]:
        """Yield the bytes of pieces of a journal with their offsets, in order.

        If this process opens a fragment in its store, and reads it to its end, check the SHA-1 before the
        last yield. Never decode a fragment beyond its length. Raise ``NotFound`` if such a fragment was
        pruned. Raise ``Corrupt`` if a fragment does not match its name, or if brokers do not have bytes of
        the snapshot any more. Raise ``NotAllowed`` if credentials do not permit reading, ``Unavailable`` if
        stores or brokers do not answer, and ``Broken`` if an answer ends early or is wrong.
        """
        for piece in pieces:
            if self.is_direct(piece):
                yield from self._stored(piece)
            else:
                yield from self._through_brokers(journal, piece)

    def is_direct(self, piece: Piece) -> bool:
        """Return True if this process opens the piece in its store, and checks its SHA-1."""
        fragment = piece.fragment
        return bool(self.settings.direct and fragment is not None and fragment.backing_store)

    def _stored(self, piece: Piece) -> Iterator[tuple[Offset, bytes]]:
        """Yield the bytes of a piece from its fragment in the blob store. Errors: see `chunks`."""
        fragment = piece.fragment
        assert fragment is not None
        path = fragment.content_path()
        try:
            source = self.store(fragment.backing_store).open(path)
        except NotFound as error:
            raise NotFound(
                "a fragment of the snapshot was pruned after the snapshot was taken",
                hint=READ_AGAIN_HINT,
                journal=fragment.journal,
                file=f"{fragment.backing_store}{path}",
            ) from error
        with DecodedFile(source, FragmentDecoder(fragment)) as file:
            file.skip_to(piece.begin)
            blocks: list[bytes] = []
            size, begin = 0, piece.begin
            # At the end of the fragment, read on: only this checks the SHA-1, before the last yield.
            while block := file.read(min(BLOCK_BYTES, piece.end - file.offset) or 1):
                blocks.append(block)
                size += len(block)
                if file.offset == piece.end and piece.end < fragment.end:
                    break
                if size >= BLOCK_BYTES // 2 and file.offset < piece.end:
                    yield begin, b"".join(blocks)
                    blocks, begin, size = [], file.offset, 0
            if blocks:
                yield begin, b"".join(blocks)

    def _through_brokers(
        self, journal: JournalName, piece: Piece
    ) -> Iterator[tuple[Offset, bytes]]:
        """Yield the bytes of a piece as brokers serve them. The reader is loop-bound: use it by `run`."""
        params = ReadParams(journal, piece.begin, block=True, end_offset=piece.end)

        async def opened() -> Any:
            return (await self.client()).retry_reader(params)

        reader = self.run(opened())

        async def closed() -> None:
            reader.close()

        async def gathered() -> bytes:
            blocks: list[bytes] = []
            size = 0
            async with self.answering():
                while size < BLOCK_BYTES and (block := await reader.read(BLOCK_BYTES)):
                    blocks.append(block)
                    size += len(block)
            return b"".join(blocks)

        try:
            offset = piece.begin
            while offset < piece.end:
                data = self.run(gathered())
                yield offset, data
                offset += len(data)
        except OffsetJump as jump:
            raise Corrupt(
                "the journal has lost bytes of the snapshot since it was taken",
                hint=READ_AGAIN_HINT,
                journal=journal,
                begin=jump.expected,
                end=jump.offset,
            ) from jump
        finally:
            self.run(closed())
