"""Stage 8 of the byte path: fragments as objects of an S3 bucket, or of a store that speaks S3.

``s3://bucket/prefix/?Region=…``. The arguments are those of the protocol: ``find``, ``replace``, ``Profile``,
``Endpoint``, ``ACL``, ``StorageClass``, ``SSE``, ``SSEKMSKeyId`` and ``Region``.

The import of the SDK is slow, and a search for credentials may use the network. So the first operation does
both, in its thread, and raises their errors.
"""

from __future__ import annotations

import io
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from gazette.blobs import extras
from gazette.blobs.blob_store import (
    BlobInfo,
    parse_query,
    parse_rewrite,
    validate_path,
    validate_prefix,
)
from gazette.blobs.s3.access import S3Access, S3Settings
from gazette.errors import GazetteError, Invalid, NotFound, Unavailable
from gazette.protocol.fragment import FragmentStoreUrl
from gazette.runtime.numbers import is_digits

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

SIGNATURE_TTL_MAX_S: Final = 7 * 24 * 60 * 60
"""Longest lifetime of a signed URL, in seconds, that S3's signatures permit."""

RESUMES_MAX: Final = 3
"""Greatest number of broken connections that one read replaces until it has read ``_PROGRESS_BYTES`` more."""

_PROGRESS_BYTES: Final = 1 << 20
_READ_BYTES: Final = 1 << 18

_ARGUMENTS: Final = (
    "find",
    "replace",
    "profile",
    "endpoint",
    "acl",
    "storageclass",
    "sse",
    "ssekmskeyid",
    "region",
)
_PUT_ARGUMENTS: Final = {
    "acl": "ACL",
    "storageclass": "StorageClass",
    "sse": "ServerSideEncryption",
    "ssekmskeyid": "SSEKMSKeyId",
}


class S3Store:
    """Objects ``prefix + path`` of one bucket. Any number of threads may use it."""

    def __init__(
        self,
        url: FragmentStoreUrl,
        settings: S3Settings | None = None,
        *,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """Parse the URL, without the network. Raise ``Invalid`` if the SDK is not installed, or for unknown
        arguments."""
        extras.require("s3", "boto3")
        arguments = parse_query(url.query, _ARGUMENTS)
        self.bucket = url.host
        self.prefix = url.path.removeprefix("/")
        """Prefix of all keys; ends in ``/`` unless empty."""
        self._settings = settings if settings is not None else S3Settings()
        self._access = S3Access.of(arguments, environ)
        self._rewrite = parse_rewrite(arguments)
        self._put_arguments = {
            name: arguments[argument]
            for argument, name in _PUT_ARGUMENTS.items()
            if arguments.get(argument)
        }
        self._connecting = threading.Lock()
        self._connected: tuple[Any, Any] | None = None
        """The SDK's client, and its credentials."""

    def exists(self, path: str) -> bool:
        """Return True if there is an object at ``path``.

        Without permission to list the bucket, S3 does not say that an object is absent: then raise
        ``NotAllowed``.
        """
        key = self._key(path)
        try:
            with self._client(path) as client:
                client.head_object(Bucket=self.bucket, Key=key)
        except NotFound:
            return False
        return True

    def open(self, path: str) -> BinaryIO:
        """Read an object. If a connection breaks, another connection reads the rest of the same object.

        The reader can seek: a seek costs a request, and skipped bytes are not transferred.
        """
        key = self._key(path)

        def get(begin: int, etag: str) -> dict[str, Any]:
            range_argument = {"Range": f"bytes={begin}-"} if begin else {}
            etag_argument = {"IfMatch": etag} if etag else {}
            with self._client(path) as client:
                response: dict[str, Any] = client.get_object(
                    Bucket=self.bucket, Key=key, **range_argument, **etag_argument
                )
                return response

        return io.BufferedReader(_ObjectReader(get, self._translated(path)), _READ_BYTES)

    def put(self, path: str, source: BinaryIO, *, content_encoding: str = "") -> None:
        """Store an object.

        After a failure, the uploaded parts of a large object are removed again, if S3 can still be reached.
        Give the bucket a rule that removes incomplete multipart uploads.
        """
        key = self._key(path)
        arguments = dict(self._put_arguments)
        if content_encoding:
            arguments["ContentEncoding"] = content_encoding
        guarded_source = _Source(source)
        try:
            with self._client(path) as client:
                from gazette.blobs.s3 import client as s3_client

                s3_client.upload(
                    client, guarded_source, self.bucket, key, arguments, self._settings
                )
        except GazetteError:
            # If the source raises an error, the SDK reports an error of the network.
            guarded_source.check()
            raise

    def create(self, path: str, content: bytes) -> bool:
        """Create the object if it is absent. Return True if this call created it.

        False may also mean that this call created it, and the answer was lost. Read the object to find out.
        """
        from gazette.blobs.s3 import client as s3_client

        key = self._key(path)
        with self._client(path) as client:
            try:
                client.put_object(
                    Bucket=self.bucket,
                    Key=key,
                    Body=content,
                    IfNoneMatch="*",
                    **self._put_arguments,
                )
            except Exception as error:
                if not s3_client.is_already_exists(error):
                    raise
                return False
        return True

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        """List page by page. Leave out keys that end in ``/``: consoles create them as directories."""
        return self.list_after(prefix, "")

    def list_after(self, prefix: str, after: str) -> Iterator[BlobInfo]:
        """List as in ``OrderedListing``: the service skips earlier objects."""
        validate_prefix(prefix)
        rewritten = self._rewrite.apply(prefix)
        if rewritten:  # ``replace`` may lead out of the store.
            validate_path(rewritten.removesuffix("/"))
        key_prefix = f"{self.prefix}{rewritten}"
        with self._client(prefix) as client:
            listing = client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket,
                Prefix=key_prefix,
                **({"StartAfter": f"{key_prefix}{after}"} if after else {}),
                PaginationConfig={"PageSize": self._settings.page_objects},
            )
            pages = iter(listing)
        while True:
            with self._client(prefix):
                page = next(pages, None)
            if page is None:
                return
            for entry in page.get("Contents", ()):
                if not entry["Key"].endswith("/"):
                    modified = int(entry["LastModified"].timestamp())
                    yield BlobInfo(entry["Key"][len(key_prefix) :], modified, entry["Size"])

    def remove(self, path: str) -> None:
        key = self._key(path)
        try:
            with self._client(path) as client:
                client.delete_object(Bucket=self.bucket, Key=key)
        except NotFound:
            return  # S3 itself reports success. Other stores may not.

    def sign_get(self, path: str, ttl_s: float) -> str:
        """Return a presigned URL. A URL that temporary credentials have signed expires with them.

        Raise ``Invalid`` beyond ``SIGNATURE_TTL_MAX_S``.
        """
        with self._client(path) as client:
            return self._signed(client, path, ttl_s)

    def sign_now(self, path: str, ttl_s: float) -> str | None:
        """Return the URL of ``sign_get``, and raise its errors. Return None before the first operation, and
        while temporary credentials must be renewed: then the SDK would ask for new ones, over the network."""
        connected = self._connected
        if connected is None:
            return None
        from gazette.blobs.s3 import client as s3_client

        client, credentials = connected
        if not s3_client.are_at_hand(credentials):
            return None
        try:
            return self._signed(client, path, ttl_s)
        except GazetteError:
            raise
        except Exception as error:
            raise s3_client.map_errors(error, bucket=self.bucket, file=path) from error

    def _signed(self, client: Any, path: str, ttl_s: float) -> str:
        key = self._key(path)
        if ttl_s > SIGNATURE_TTL_MAX_S:
            raise Invalid(
                f"invalid signature TTL ({ttl_s:g} s; expected <= {SIGNATURE_TTL_MAX_S} s)",
                path="signature_ttl",
            )
        url: str = client.generate_presigned_url(
            "get_object",
            Params={"Bucket": self.bucket, "Key": key},
            ExpiresIn=max(1, math.ceil(ttl_s)),
        )
        return url

    def _key(self, path: str) -> str:
        """Return the object's key. Raise ``Invalid`` if ``path`` is bad, or the rewrite makes it bad."""
        validate_path(path)
        path = self._rewrite.apply(path)
        validate_path(path)
        return f"{self.prefix}{path}"

    @contextmanager
    def _client(self, path: str) -> Iterator[Any]:
        """Yield the SDK's client, made by the first call. Turn errors in the body into ``GazetteError``."""
        from gazette.blobs.s3 import client as s3_client

        try:
            with self._connecting:
                if self._connected is None:
                    # Each call tries again after a failure: the credentials may be corrected meanwhile.
                    self._connected = s3_client.connect(self._access, self._settings)
                client, _ = self._connected
            yield client
        except GazetteError:
            raise
        except Exception as error:
            if s3_client.blames_credentials(error):
                self._connected = None  # Read the credentials again: their file may have changed.
            raise s3_client.map_errors(error, bucket=self.bucket, file=path) from error

    def _translated(self, path: str) -> Callable[[Exception], GazetteError]:
        """Return a function that turns an error of the SDK about ``path`` into a ``GazetteError``."""

        def map_errors(error: Exception) -> GazetteError:
            from gazette.blobs.s3 import client as s3_client

            return s3_client.map_errors(error, bucket=self.bucket, file=path)

        return map_errors


class _ObjectReader(io.RawIOBase):
    """The bytes of one object. ``get(begin, etag)`` requests the bytes from ``begin`` on."""

    def __init__(
        self,
        get: Callable[[int, str], dict[str, Any]],
        map_errors: Callable[[Exception], GazetteError],
    ) -> None:
        super().__init__()
        self._get = get
        self._translated = map_errors
        self._position = 0
        self._breaks = 0  # Broken connections without progress.
        self._last_break = 0  # Position at the last break.
        self._body: Any = None
        response = get(0, "")
        self._body = response["Body"]
        self._etag: str = response.get("ETag", "")
        self._length: int | None = response.get("ContentLength")
        """None if the server sends chunks: the last chunk is then the end of the object."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._length is not None

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if self._length is None:
            raise io.UnsupportedOperation("the length of the object is not known")
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        position = max(base + offset, 0)
        if position != self._position:
            self._drop()
            self._position = self._last_break = position
        return position

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        view = memoryview(buffer).cast("B")
        if self._length is not None:
            view = view[: max(0, self._length - self._position)]
        if not view:
            self._drop()
            return 0
        while True:
            try:
                content = self._read(len(view))
            except GazetteError as error:
                self._drop()
                if not isinstance(error, Unavailable) or not self._may_resume():
                    raise
                continue
            view[: len(content)] = content
            self._position += len(content)
            return len(content)

    def close(self) -> None:
        self._drop()
        super().close()

    def _read(self, length: int) -> bytes:
        if self._body is None:
            self._body = self._resumed()
        try:
            content: bytes = self._body.read(length)
        except Exception as error:
            raise self._translated(error) from error
        if content or self._length is None:
            return content
        raise Unavailable("the object ended early", missing=self._length - self._position)

    def _resumed(self) -> Any:
        """Return a new response body that begins at the present position of the same object.

        Raise ``Unavailable`` if the object was removed or replaced, or if the store fails.
        """
        try:
            response = self._get(self._position, self._etag)
        except NotFound as error:
            raise Unavailable("the object was removed while it was read", **error.facts) from error
        body, position = response["Body"], 0
        if self._position:
            position = _range_begin(response.get("ContentRange", ""))
        try:
            while position < self._position:  # The server does not support ranges.
                skipped = body.read(min(_READ_BYTES, self._position - position))
                if not skipped:
                    raise Unavailable("the object is shorter than it was", at=position)
                position += len(skipped)
        except GazetteError:
            body.close()
            raise
        except Exception as error:
            body.close()
            raise self._translated(error) from error
        return body

    def _may_resume(self) -> bool:
        """Count a broken connection. Return False if there were too many without progress."""
        if self._position - self._last_break >= _PROGRESS_BYTES:
            self._breaks = 0
        self._last_break = self._position
        self._breaks += 1
        return self._breaks <= RESUMES_MAX

    def _drop(self) -> None:
        body, self._body = self._body, None
        if body is not None:
            body.close()


class _Source:
    """Wraps the source of an upload, so that the SDK neither closes it nor hides its errors."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self._error: Exception | None = None

    def read(self, amount: int | None = -1) -> bytes:
        """Return as many bytes as requested: after fewer, the SDK would assume the end of the source."""
        self.check()
        try:
            if amount is None or amount < 0:
                return self._source.read()
            content = self._source.read(amount)
            while content and len(content) < amount:
                more = self._source.read(amount - len(content))
                if not more:
                    break
                content += more
            return content
        except Exception as error:
            self._error = error
            raise

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._source.seek(offset, whence)

    def tell(self) -> int:
        return self._source.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._source.seekable()

    def close(self) -> None:
        """Do nothing: the opener of the source closes it."""

    def check(self) -> None:
        """Raise the error of an earlier read, if there was one: as it is, or as ``Unavailable``."""
        if isinstance(self._error, GazetteError):
            raise self._error
        if self._error is not None:
            raise Unavailable(
                f"cannot read the source of the upload: {self._error}"
            ) from self._error


def _range_begin(content_range: str) -> int:
    """Return the begin of a range (5 of ``bytes 5-9/10``); 0 for a response without a range."""
    begin = content_range.removeprefix("bytes ").partition("-")[0]
    return int(begin) if is_digits(begin) else 0
