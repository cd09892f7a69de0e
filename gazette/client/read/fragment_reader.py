"""Stage 10 of the byte path: takes stored fragments by URL from blob stores, gives bytes to
`client/read/reader`.

A reader far behind the head reads fragments from their store, and so gives brokers no load. Threads fetch and
decode the file, one run of `AHEAD_BYTES` ahead of the reader.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import http.client
import os
import posixpath
import urllib.error
import urllib.request
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar, cast
from urllib.parse import unquote, urlsplit

from gazette.errors import Broken, Closed, GazetteError, Invalid, NotAllowed, NotFound, Unavailable
from gazette.protocol.codecs.decoder import DecodedFile, FragmentDecoder
from gazette.protocol.fragment import Codec, Fragment
from gazette.runtime.metrics import (
    DISCARD_FRAGMENT_BYTES,
    FRAGMENT_OPEN,
    FRAGMENT_OPEN_BYTES,
    FRAGMENT_OPEN_CONTENT_LENGTH,
    READ_FRAGMENT_BYTES,
)
from gazette.runtime.tasks import BlockingPool, await_future, submitted
from gazette.runtime.tls import tls_context

T = TypeVar("T")

_CANNOT_READ: Final = "cannot read fragments: the client was closed"

BLOCK_BYTES: Final = 1 << 18
"""Largest number of bytes that one read returns."""
AHEAD_BYTES: Final = 1 << 20
"""Bytes that a thread decodes at once. One stream needs about twice this memory, or four times while another
thread computes the digest."""


class FragmentAccess:
    """The fragment URLs that this process can open, and how.

    ``file_root`` is the directory at which ``file://`` stores are mounted: their URLs are relative to it.
    Without ``file_root``, fragments of these stores are read through brokers. With ``http=False``, fragments
    with signed ``http(s)`` URLs are read through brokers, too. ``timeout_s`` bounds each wait for an HTTP
    store, in seconds. Loop-bound.
    """

    def __init__(
        self,
        *,
        file_root: Path | None = None,
        http: bool = True,
        timeout_s: float = 30.0,
        threads: int = 4,
    ) -> None:
        self._file_root = file_root
        self._http = http
        self._timeout_s = timeout_s
        self._pool = BlockingPool("fragments", threads)
        self._sums = BlockingPool("fragment-sums", threads)

    def can_open(self, url: str) -> bool:
        match urlsplit(url).scheme:
            case "file":
                return self._file_root is not None
            case "http" | "https":
                return self._http
        return False

    async def open(self, fragment: Fragment, url: str, offset: int) -> FragmentStream:
        """Open a fragment for reading from a journal offset within it.

        Raise ``NotFound``, ``NotAllowed`` (also for an expired URL), ``Unavailable``, ``Broken``,
        ``Closed``, or ``Corrupt`` if the file ends before the offset. After a cancellation the
        thread opens the file and closes it again.
        """
        opening = submitted(self._pool, _CANNOT_READ, self._open, fragment, url, offset)
        try:
            file = await _ended(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_opened)
            raise
        try:
            return FragmentStream(file, fragment, self._pool)
        except Closed:
            file.close()
            raise

    def close(self) -> None:
        """Refuse new work. Do not wait for threads that wait for a store: they end later."""
        self._pool.close()
        self._sums.close()

    def _open(self, fragment: Fragment, url: str, offset: int) -> DecodedFile:
        if not fragment.begin <= offset <= fragment.end:
            raise Invalid(f"offset is not of the fragment ({offset})")
        codec = fragment.codec.name
        FRAGMENT_OPEN.labels(fragment.journal, codec).inc()
        FRAGMENT_OPEN_BYTES.labels(fragment.journal, codec).inc(fragment.length)
        if urlsplit(url).scheme == "file":
            file = self._open_file(fragment, url, offset)
        else:
            file = _open_http(fragment, url, offset, self._timeout_s, self._sums)
        try:
            DISCARD_FRAGMENT_BYTES.labels(fragment.journal, codec).inc(offset - file.offset)
            file.skip_to(offset)
        except BaseException:
            file.close()
            raise
        return file

    def _open_file(self, fragment: Fragment, url: str, offset: int) -> DecodedFile:
        assert self._file_root is not None, "asked can_open() first"
        relative = posixpath.normpath(unquote(urlsplit(url).path)).lstrip("/")
        if relative == ".." or relative.startswith("../"):
            raise Invalid(f"cannot traverse outside the file root ({url})")
        path = self._file_root / relative
        try:
            source = path.open("rb")
        except FileNotFoundError as error:
            raise NotFound(
                "the fragment's file does not exist",
                file=path,
                hint="Check that the file root is where the brokers' store is mounted.",
            ) from error
        except OSError as error:
            raise Unavailable(f"cannot open a fragment: {error.strerror}", file=path) from error
        size = os.fstat(source.fileno()).st_size
        FRAGMENT_OPEN_CONTENT_LENGTH.labels(fragment.journal, fragment.codec.name).inc(size)
        start = None
        if fragment.codec is Codec.NONE and size == fragment.length:
            source.seek(offset - fragment.begin)
            start = offset
        return DecodedFile(source, FragmentDecoder(fragment, start=start, sums=self._sums))


class FragmentStream:
    """The content of one fragment from some offset to its end, as blocks of bytes.

    For a file decoded from its start, the SHA-1 is checked before the last block is returned.
    """

    def __init__(self, file: DecodedFile, fragment: Fragment, pool: BlockingPool) -> None:
        self.fragment = fragment
        self._file = file
        self._pool = pool
        self._blocks: deque[bytes] = deque()
        self._ended = False
        self._read = READ_FRAGMENT_BYTES.labels(fragment.journal, fragment.codec.name)
        self._ahead: concurrent.futures.Future[list[bytes]] | None = submitted(
            pool, _CANNOT_READ, self._decode
        )

    async def next(self) -> bytes:
        """Return the next block; empty at the end.

        Raise ``Corrupt`` if the file does not match its name. Raise ``Unavailable`` or ``Broken``
        if the store fails, or ``Closed`` if the access or this stream is closed meanwhile. A cancelled
        call loses nothing: the next call returns the block.
        """
        if not self._blocks and not self._ended:
            ahead = self._ahead
            assert ahead is not None, "a closed stream is not read"
            blocks = await _ended(ahead)
            if self._ahead is None:
                raise Closed("the fragment was closed", journal=self.fragment.journal)
            self._blocks.extend(blocks)
            self._ended = not blocks
            self._ahead = None
            if not self._ended:
                self._ahead = submitted(self._pool, _CANNOT_READ, self._decode)
        if not self._blocks:
            return b""
        block = self._blocks.popleft()
        self._read.inc(len(block))
        return block

    def close(self) -> None:
        """Close the file, as soon as no thread reads it. May be repeated."""
        if self._ahead is None:
            self._file.close()
        else:
            self._ahead.add_done_callback(lambda _: self._file.close())
            self._ahead.cancel()
        self._ahead = None
        self._ended = True
        self._blocks.clear()

    def _decode(self) -> list[bytes]:
        """Decode the next blocks, in a thread. Check the end of the file before returning the last block."""
        blocks: list[bytes] = []
        room = AHEAD_BYTES
        while room > 0:
            block = self._file.read(min(BLOCK_BYTES, room))
            if not block:
                return blocks
            blocks.append(block)
            room -= len(block)
        if self._file.offset == self.fragment.end:
            # All content is read. Read once more to find faults at the end, such as a wrong checksum.
            surplus = self._file.read(1)
            assert not surplus
        return blocks


class _HttpSource:
    """The body of a response, which must be complete."""

    def __init__(self, response: http.client.HTTPResponse, url: str) -> None:
        self._response = response
        self._host = urlsplit(url).netloc

    def read(self, length: int) -> bytes:
        try:
            data = self._response.read(length)
        except http.client.HTTPException as error:
            raise Broken(f"a fragment's transfer broke: {error!r}", host=self._host) from error
        except OSError as error:
            raise Unavailable(f"a fragment's transfer broke: {error}", host=self._host) from error
        if not data and self._response.length:
            raise Broken(
                "a fragment's transfer ended early", host=self._host, missing=self._response.length
            )
        return data

    def close(self) -> None:
        self._response.close()


def _open_http(
    fragment: Fragment, url: str, offset: int, timeout_s: float, sums: BlockingPool
) -> DecodedFile:
    # Ask for the stored form. A store decompresses an object with Content-Encoding gzip for clients
    # that do not accept gzip. Only GZIP_OFFLOAD_DECOMPRESSION needs decompression by the store.
    headers = {"Accept-Encoding": "gzip" if fragment.codec is Codec.GZIP else "identity"}
    seek = fragment.codec is Codec.NONE and offset > fragment.begin
    if seek:
        headers["Range"] = f"bytes={offset - fragment.begin}-"
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - can_open() saw the scheme
    host = urlsplit(url).netloc
    try:
        response = cast(
            "http.client.HTTPResponse",
            urllib.request.urlopen(  # noqa: S310
                request, timeout=timeout_s, context=tls_context()
            ),
        )
    except urllib.error.HTTPError as error:
        with error:
            raise _http_error(error.code, error.reason, host) from error
    except (http.client.HTTPException, OSError) as error:
        raise Unavailable(f"cannot open a fragment: {error}", host=host) from error
    FRAGMENT_OPEN_CONTENT_LENGTH.labels(fragment.journal, fragment.codec.name).inc(
        response.length or 0
    )
    decoder = FragmentDecoder(
        fragment,
        start=offset if seek and response.status == http.HTTPStatus.PARTIAL_CONTENT else None,
        transport_decoded=response.headers.get("Content-Encoding") != "gzip",
        sums=sums,
    )
    return DecodedFile(cast("BinaryIO", _HttpSource(response, url)), decoder)


def _http_error(code: int, reason: Any, host: str) -> GazetteError:
    message = f"cannot open a fragment: {code} {reason}"
    match code:
        case 404 | 410:
            return NotFound(message, host=host, hint="It was pruned meanwhile: read again.")
        case 401 | 403:
            return NotAllowed(
                message, host=host, hint="Its signed URL expired, or the brokers cannot sign."
            )
        case 408 | 429 | 500 | 502 | 503 | 504:
            return Unavailable(message, host=host)
    return Broken(message, host=host)


async def _ended(call: concurrent.futures.Future[T]) -> T:
    """Return the result of a thread's call. Raise ``Closed`` if `close` drops the call before its begin."""
    try:
        return await await_future(call)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if not call.cancelled() or (task is not None and task.cancelling()):
            raise
        raise Closed("cannot read a fragment: its reader or client was closed") from None


def _close_opened(opening: concurrent.futures.Future[DecodedFile]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
