"""How a task gets at the bytes of a run: from blob stores, or through brokers.

`Access` is a value, which goes to the tasks of a cluster; each opens it for itself. Everything here
blocks: it is for threads, and never for an event loop.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from gazette.blobs.blob_store import BlobStore
from gazette.blobs.blob_stores import BlobSettings, BlobStores
from gazette.blobs.fsspec_store import check_protocols
from gazette.client.client import Client
from gazette.client.flags import BrokerClientFlags
from gazette.client.reachable import require_reachable
from gazette.client.reader import OffsetJump, ReadParams
from gazette.clock import Clock, SystemClock
from gazette.errors import Corrupt, Invalid, NotFound, Unavailable
from gazette.fragment.decoder import DecodedFile, FragmentDecoder
from gazette.history.snapshot import Piece, Run
from gazette.protocol.ids import JournalName, Offset
from gazette.tasks import LoopThread

T = TypeVar("T")

BLOCK_BYTES: Final = 1 << 20
"""The most that one piece of `OpenAccess.chunks` has: what a cache of two megabytes holds while it is
decompressed, summed and scanned."""
_LISTING_THREADS: Final = 8
_CONNECT_S: Final = 10.0
_PATIENCE_S: Final = 10.0
"""Longer than a broker takes to be started again: tasks that begin meanwhile are not to fail."""


@dataclass(frozen=True, slots=True)
class Access:
    """Where journals are read.

    ``brokers`` says how to reach brokers, if there are any. With ``direct``, stored fragments are
    opened in their blob store by this process, with its own credentials and ``file_root``; without
    it, brokers say where they are, or hand them on.
    """

    brokers: BrokerClientFlags | None = None
    file_root: Path | None = None
    """The directory below which ``file://`` stores are."""
    direct: bool = False
    fsspec_protocols: frozenset[str] = frozenset()
    """Those that ``fsspec+NAME://`` stores may name."""

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
    ) -> Self:
        """An access by its parts. Raises `Invalid` if there is neither a broker nor direct access."""
        root = None if file_root is None else Path(file_root)
        if not broker and not direct:
            raise Invalid(
                "there is nothing to read from: neither a broker's address, nor stores to open",
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
        return cls(brokers, root, direct, protocols)

    def open(self, clock: Clock | None = None) -> OpenAccess:
        """Open it for this process. Close what is returned, or use it in a ``with``."""
        return OpenAccess(self, clock)


class OpenAccess:
    """An access in use. Thread-safe."""

    def __init__(self, settings: Access, clock: Clock | None = None) -> None:
        self.settings = settings
        self.clock: Clock = SystemClock() if clock is None else clock
        self._lock = threading.Lock()
        self._loop: LoopThread | None = None
        self._client: Client | None = None
        self.stores = BlobStores(
            BlobSettings(settings.file_root, fsspec_protocols=settings.fsspec_protocols),
            self.clock,
            threads=_LISTING_THREADS,
            rng=random.Random(),
        )
        """The stores, on the loop of `run`; `store` is for other threads."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close connections. May be repeated."""
        with self._lock:
            client, self._client = self._client, None
            loop, self._loop = self._loop, None
        if loop is not None:
            if client is not None:
                loop.run(client.close())
            loop.close()
        self.stores.close()

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run something on the loop that belongs to this."""
        with self._lock:
            if self._loop is None:
                self._loop = LoopThread("history")
            loop = self._loop
        return loop.run(coro)

    async def client(self) -> Client:
        """The client of the brokers. On the loop.

        Raises `Invalid` if there are none, and ``Unavailable`` if the first call finds none that answers:
        later ones wait for brokers that are away.
        """
        if self._client is None:
            brokers = self.settings.brokers
            if brokers is None:
                raise Invalid(
                    "this is only known to brokers, and none was given",
                    path="broker",
                    hint="Give the address of a broker.",
                )
            # One that is there is closed by `close`, also if this is cancelled.
            client = self._client = brokers.client("", self.clock)
            try:
                await require_reachable(
                    client,
                    "broker",
                    connect_s=_CONNECT_S,
                    patience_s=_PATIENCE_S,
                    hint="Check that it runs there and can be reached from here, or correct the address.",
                )
            except Unavailable:
                self._client = None
                await client.close()
                raise
        return self._client

    def store(self, url: str) -> BlobStore:
        """A blob store, by its URL. Raises `Invalid` and `NotAllowed` if it cannot be made."""
        with self._lock:
            return self.stores.get(url).store

    def chunks(self, run: Run) -> Iterator[tuple[Offset, bytes]]:
        """The bytes of a run's pieces with their offsets, in order.

        A fragment that is read to its end was compared with its SHA-1 before its last bytes are given;
        none is ever decoded beyond its length. Raises ``NotFound`` if a fragment is gone, ``Corrupt``
        if it is not what its name says or if the journal has lost bytes of the snapshot meanwhile,
        and ``NotAllowed``, ``Unavailable`` or ``Broken`` as stores and brokers do.
        """
        for piece in run.pieces:
            if piece.fragment is not None and self._is_direct(piece):
                yield from self._stored(piece)
            else:
                yield from self._through_brokers(run.journal, piece)

    def _is_direct(self, piece: Piece) -> bool:
        assert piece.fragment is not None
        return bool(self.settings.direct and piece.fragment.backing_store)

    def _stored(self, piece: Piece) -> Iterator[tuple[Offset, bytes]]:
        fragment = piece.fragment
        assert fragment is not None
        path = fragment.content_path()
        try:
            source = self.store(fragment.backing_store).open(path)
        except NotFound as error:
            raise NotFound(
                "a fragment of the snapshot is gone: it was pruned meanwhile",
                hint="Read again: a new snapshot leaves it out.",
                journal=fragment.journal,
                file=f"{fragment.backing_store}{path}",
            ) from error
        with DecodedFile(source, FragmentDecoder(fragment)) as file:
            file.skip_to(piece.begin)
            held: list[bytes] = []
            size, begin = 0, piece.begin
            while block := file.read(min(BLOCK_BYTES, piece.end - file.offset) or 1):
                held.append(block)
                size += len(block)
                if file.offset == piece.end and piece.end < fragment.end:
                    break
                if size >= BLOCK_BYTES // 2 and file.offset < piece.end:
                    yield begin, b"".join(held)
                    held, begin, size = [], file.offset, 0
            if held:
                yield begin, b"".join(held)

    def _through_brokers(
        self, journal: JournalName, piece: Piece
    ) -> Iterator[tuple[Offset, bytes]]:
        params = ReadParams(journal, piece.begin, block=True, end_offset=piece.end)

        async def opened() -> Any:
            return (await self.client()).retry_reader(params)

        reader = self.run(opened())

        async def closed() -> None:
            reader.close()

        async def gathered() -> bytes:
            held: list[bytes] = []
            size = 0
            while size < BLOCK_BYTES and (block := await reader.read(BLOCK_BYTES)):
                held.append(block)
                size += len(block)
            return b"".join(held)

        try:
            at = piece.begin
            while at < piece.end:
                data = self.run(gathered())
                yield at, data
                at += len(data)
        except OffsetJump as jump:
            raise Corrupt(
                "the journal has lost bytes of the snapshot since it was taken",
                hint="Read again: a new snapshot leaves them out.",
                journal=journal,
                begin=jump.expected,
                end=jump.offset,
            ) from jump
        finally:
            self.run(closed())
