"""Stage 10 of the byte path: the file bytes of a stored fragment become its journal bytes.

A stored file is not trusted. Its name gives the number of its decoded bytes, and their SHA-1. Decoding stops
at the first additional byte. A file that ends early is an error. If the fragment was read from start to end,
a wrong digest is an error, too, unless the caller checks the digest.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
from typing import Any, BinaryIO, Final, Self

from gazette.errors import Corrupt, Invalid, Unavailable
from gazette.protocol.codecs.codec import new_decompressor
from gazette.protocol.fragment import Codec, Fragment
from gazette.protocol.ids import Offset
from gazette.runtime.store_calls import on_store
from gazette.runtime.tasks import Pool

_READ_BYTES: Final = 1 << 18
_SUM_BYTES: Final = 1 << 20
"""Bytes that another thread hashes at a time. To hand over fewer bytes costs more than it saves."""
_TRAILER_BYTES_MAX: Final = 1 << 20
"""Upper bound of the bytes of a file after the last byte of content: checksums, empty members."""


class FragmentDecoder:
    """Decodes one fragment: bytes in, bytes out. For one thread at a time.

    Decoding starts with the file's first byte. Only with codec NONE may decoding start elsewhere: at the byte
    of offset ``start``; then the digest is not checked. Raises ``Invalid`` for another ``start``. Pass
    ``verify`` False if the caller checks the digest.

    The pool ``sums``, if given, computes the digest while decoding goes on. Decode in a thread of another
    pool: a thread of the same pool would wait for itself.
    """

    def __init__(
        self,
        fragment: Fragment,
        *,
        start: Offset | None = None,
        transport_decoded: bool = False,
        verify: bool = True,
        sums: Pool | None = None,
    ) -> None:
        self.fragment = fragment
        self.offset = fragment.begin if start is None else start
        """Journal offset of the next byte."""
        if self.offset != fragment.begin:
            if fragment.codec is not Codec.NONE:
                raise Invalid(f"a {fragment.codec.name} file is decoded from its start")
            if not fragment.begin <= self.offset <= fragment.end:
                raise Invalid(f"offset is not of the fragment ({self.offset})")
            verify = False
        self._decompressor = new_decompressor(fragment.codec, transport_decoded=transport_decoded)
        self._sum = hashlib.sha1(usedforsecurity=False) if verify else None
        self._sums = sums
        self._unsummed: list[bytes] = []
        """Content that was not handed over for hashing yet: ``_unsummed_bytes`` bytes."""
        self._unsummed_bytes = 0
        self._summing: list[bytes] = []
        """Content that the pool hashes, until ``_summed`` is done."""
        self._summed: concurrent.futures.Future[None] | None = None

    @property
    def needs_input(self) -> bool:
        """True if ``decode`` can return no more without more bytes of the file."""
        return self._decompressor.needs_input

    @property
    def remaining(self) -> int:
        """Bytes of the fragment that are still to come."""
        return self.fragment.end - self.offset

    def decode(self, data: bytes, max_length: int) -> bytes:
        """Take bytes of the file (or ``b""`` to go on). Return at most ``max_length`` bytes of the journal.

        Pass more only when ``needs_input``. Raise ``Corrupt`` if the file is damaged
        or holds more than the fragment.
        """
        remaining = self.remaining
        # Ask for one byte more than is left, to notice an additional byte.
        length_max = min(max_length, remaining + 1) if max_length else 0
        try:
            content = self._decompressor.decompress(data, length_max)
        except Corrupt as error:
            raise self._located(error) from error
        self._take(content, remaining)
        return content

    def finish(self) -> bytes:
        """Take the end of the file. Return the last bytes, at most two. Raise ``Corrupt`` if content is
        missing or was not read, or if the digest differs."""
        try:
            content = self._decompressor.finish()
        except Corrupt as error:
            raise self._located(error) from error
        self._take(content, self.remaining)
        if self.remaining:
            raise self._corrupt("file ends before its fragment does", missing=self.remaining)
        self._end_sum()
        if self._sum is not None and self._sum.digest() != self.fragment.sum:
            raise self._corrupt(
                "file does not have the SHA-1 of its name", found=self._sum.hexdigest()
            )
        return content

    def _take(self, content: bytes, remaining: int) -> None:
        """Count decoded content, and hash it: here, or in the pool in parts of `_SUM_BYTES`. Raise
        ``Corrupt`` for more than ``remaining`` bytes."""
        if len(content) > remaining:
            raise self._corrupt("file holds more than its fragment", end=self.fragment.end)
        self.offset += len(content)
        if self._sum is None:
            return
        if self._sums is None:
            self._sum.update(content)
            return
        self._unsummed.append(content)
        self._unsummed_bytes += len(content)
        if self._unsummed_bytes >= _SUM_BYTES:
            self._await_sum()
            pieces, self._unsummed, self._unsummed_bytes = self._unsummed, [], 0
            self._summing = pieces
            try:
                self._summed = self._sums.submit(_update, self._sum, pieces)
            except (RuntimeError, Unavailable):  # No thread will: hash the content here.
                self._await_sum()

    def _await_sum(self) -> None:
        """Wait until the pool has hashed its content. If the pool is closed, hash the content here."""
        pieces, self._summing = self._summing, []
        summed, self._summed = self._summed, None
        if summed is not None:
            try:
                summed.result()
            except concurrent.futures.CancelledError:
                pass  # The pool was closed before it began to hash.
            else:
                return
        if self._sum is not None:
            _update(self._sum, pieces)

    def _end_sum(self) -> None:
        """Hash all content that the digest does not have yet."""
        self._await_sum()
        if self._sum is not None:
            _update(self._sum, self._unsummed)
        self._unsummed, self._unsummed_bytes = [], 0

    def _located(self, error: Corrupt) -> Corrupt:
        return self._corrupt(error.message, **error.facts)

    def _corrupt(self, message: str, **facts: Any) -> Corrupt:
        fragment = self.fragment
        return Corrupt(
            message,
            journal=fragment.journal,
            offset=self.offset,
            file=f"{fragment.backing_store}{fragment.content_path()}",
            **facts,
        )


def _update(digest: Any, pieces: list[bytes]) -> None:
    for piece in pieces:
        digest.update(piece)


class DecodedFile:
    """Reads a stored fragment from an open file. Blocks: use it in a thread.

    The object owns ``source``: ``close`` and the end of ``with`` close the file.
    """

    def __init__(self, source: BinaryIO, decoder: FragmentDecoder) -> None:
        self._source = source
        self._decoder = decoder
        self._finished = False

    @property
    def offset(self) -> Offset:
        """Journal offset of the next byte."""
        return self._decoder.offset

    def read(self, max_length: int) -> bytes:
        """Return the next bytes, at most ``max_length`` (> 0); ``b""`` at the end of the fragment.

        Report the end only after a check that the file ends there, too. Otherwise raise ``Corrupt``.
        """
        trailer = 0
        while not self._finished:
            data = self._source.read(_READ_BYTES) if self._decoder.needs_input else b""
            on_store()
            if not data and self._decoder.needs_input:
                self._finished = True
                return self._decoder.finish()
            if content := self._decoder.decode(data, max_length):
                return content
            trailer += len(data)
            if not self._decoder.remaining and trailer > _TRAILER_BYTES_MAX:
                raise Corrupt(
                    "file goes on after the end of its fragment",
                    journal=self._decoder.fragment.journal,
                    offset=self.offset,
                )
        return b""

    def skip_to(self, offset: Offset) -> None:
        """Decode and drop all bytes before ``offset``. Raise ``Corrupt`` if the fragment ends before
        ``offset``."""
        while self.offset < offset:
            if not self.read(min(_READ_BYTES, offset - self.offset)):
                raise Corrupt(
                    "fragment ends before the offset",
                    journal=self._decoder.fragment.journal,
                    offset=offset,
                )

    def close(self) -> None:
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
