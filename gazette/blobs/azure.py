"""Stage 8 of the byte path: fragments as block blobs of an Azure storage container, by adlfs.

A URL, and the environment variables with its credentials:

- ``azure://container/prefix/``: ``AZURE_ACCOUNT_NAME`` and ``AZURE_ACCOUNT_KEY``, or
  ``AZURE_STORAGE_CONNECTION_STRING``.
- ``azure-ad://tenant/account/container/prefix/``: ``AZURE_CLIENT_ID`` and ``AZURE_CLIENT_SECRET``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, BinaryIO, Final

from gazette.blobs import extras
from gazette.blobs import fsspec as fsspec_store
from gazette.blobs.blob_store import BlobInfo, validate_prefix
from gazette.blobs.fsspec import FsspecStore, mod_time_of, write_file
from gazette.errors import Invalid, NotAllowed
from gazette.protocol.fragment import FragmentStoreUrl
from gazette.runtime.clock import Clock, SystemClock

DELEGATION_KEY_S: Final = 2 * 60 * 60.0
"""Lifetime, in seconds, of a delegated key: ``azure-ad`` signs URLs with it."""
DELEGATION_KEY_RESERVE_S: Final = 60 * 60.0
"""Seconds. A delegated key with less remaining lifetime is replaced."""
SIGNATURE_TTL_MAX_S: Final = 7 * 24 * 60 * 60 - DELEGATION_KEY_RESERVE_S
"""Longest lifetime of a signed URL, in seconds. A delegated key is valid for seven days at most, and is
replaced before its last hour."""

_TIMEOUTS: Final = {"connection_timeout": 5, "read_timeout": 30}
_SKEW_S: Final = 300.0
"""Seconds by which our clock may be ahead of Azure's: a signed URL becomes valid so much earlier."""
_CALL_TIMEOUT_S: Final = 120.0


class AzureStore(FsspecStore):
    """Blobs of one container. The SDK repeats a failed request up to three times, with pauses."""

    writes_whole = True

    def __init__(
        self,
        url: FragmentStoreUrl,
        *,
        environ: Mapping[str, str] = os.environ,
        clock: Clock | None = None,
    ) -> None:
        """Parse the URL. Raise ``Invalid`` if adlfs is not installed or for unknown arguments, and
        ``NotAllowed`` if the environment has no credentials."""
        extras.require(url.scheme, "fsspec", "adlfs")
        self.scheme = url.scheme
        self._clock = clock if clock is not None else SystemClock()
        self._signing = threading.Lock()
        self._delegation: tuple[float, Any] | None = None
        """The last delegated key, after the Unix seconds at which it expires; None before the first."""
        self._with_key = url.scheme == "azure"
        """True if the account's key signs URLs; False if a delegated key does."""
        if self._with_key:
            self._container, path = url.host, url.path
            self._options = _key_options(environ)
        else:
            account, _, container_path = url.path.removeprefix("/").partition("/")
            self._container, _, path = container_path.partition("/")
            self._options = _client_options(url.host, account, environ)
        root = f"{self._container}/{path.removeprefix('/')}".rstrip("/")
        super().__init__(root, url.query)

    def make_files(self) -> Any:
        import fsspec

        options = dict(self._options)
        if not self._with_key:
            from azure.identity.aio import ClientSecretCredential

            # Do not look the authority up in Microsoft's list of clouds, which lacks private clouds.
            options["credential"] = ClientSecretCredential(
                options.pop("tenant_id"),
                options.pop("client_id"),
                options.pop("client_secret"),
                disable_instance_discovery=True,
            )
        return fsspec.filesystem(
            "abfs",
            # By default, adlfs first looks for the container, which needs another permission.
            assume_container_exists=True,
            **_TIMEOUTS,
            max_concurrency=1,
            use_listings_cache=False,
            skip_instance_cache=True,
            **options,
        )

    def read_range(self, files: Any, located: str, begin: int, end: int) -> bytes:
        """Read a range without decompression: the SDK would decompress each gzip range on its own."""
        from fsspec.asyn import sync

        async def read() -> bytes:
            async with self._blob_client(files, located) as blob:
                stream = await blob.download_blob(
                    offset=begin,
                    length=end - begin,
                    decompress=False,
                    max_concurrency=1,
                    **_TIMEOUTS,
                )
                content: bytes = await stream.readall()
                return content

        content: bytes = sync(files.loop, read, timeout=_CALL_TIMEOUT_S)
        return content

    def write(self, files: Any, located: str, source: BinaryIO, content_encoding: str) -> None:
        """Write a small blob in one request, and a larger one as blocks that are committed at the end.

        If two brokers upload blocks of one blob, the first commit drops the blocks of the other broker. The
        upload of the other broker fails, and its next attempt finds the blob.
        """
        from azure.storage.blob import ContentSettings

        settings = ContentSettings(
            content_type="application/octet-stream", content_encoding=content_encoding or None
        )
        head = _read_up_to(source, fsspec_store.BLOCK_BYTES)
        if len(head) < fsspec_store.BLOCK_BYTES:
            files.pipe_file(located, head, content_settings=settings)
        else:
            write_file(files, located, source, {"content_settings": settings}, head=head)

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        """List in pages of 5000 blobs. Leave out the directories of a hierarchical account."""
        from fsspec.asyn import sync

        validate_prefix(prefix)
        begin = self._begin(prefix)[len(self._container) + 1 :]
        token: str | None = None
        while True:
            with self._mapped(prefix, missing_is_refusal=True) as files:

                async def page(token: str | None = token, files: Any = files) -> tuple[Any, Any]:
                    async with files.service_client.get_container_client(
                        self._container
                    ) as container:
                        pages = container.list_blobs(
                            name_starts_with=begin or None, include=["metadata"]
                        ).by_page(continuation_token=token)
                        async for blobs in pages:
                            return [blob async for blob in blobs], pages.continuation_token
                        return [], None

                blobs, token = sync(files.loop, page, timeout=_CALL_TIMEOUT_S)
            for blob in blobs:
                is_directory = (blob.metadata or {}).get("hdi_isfolder") == "true"
                if not is_directory and not blob.name.endswith("/"):
                    modified = mod_time_of({"last_modified": blob.last_modified})
                    yield BlobInfo(blob.name[len(begin) :], modified, blob.size)
            if not token:
                return

    def sign_get(self, path: str, ttl_s: float) -> str:
        """Return a URL with a shared access signature, by the account's key or a delegated key.

        Return the location if the connection string has no key. Raise ``Invalid`` beyond
        ``SIGNATURE_TTL_MAX_S``.
        """
        with self._mapped(path) as files:
            delegation = None
            if not self._with_key:
                with self._signing:
                    delegation = self._delegated(files, self._clock.now(), ttl_s)
            return self._signed(files, path, ttl_s, delegation)

    def sign_now(self, path: str, ttl_s: float) -> str | None:
        """Return the URL of ``sign_get``; None before the first operation, or while a delegated key must be
        replaced."""
        files, delegation = self._files, self._delegation
        if files is None:
            return None
        if self._with_key:
            key = None
        elif delegation is None or delegation[0] < self._needed_until(self._clock.now(), ttl_s):
            return None
        else:
            key = delegation[1]
        with self._mapping(path):
            return self._signed(files, path, ttl_s, key)

    def _signed(self, files: Any, path: str, ttl_s: float, delegation: Any) -> str:
        """Return a URL, signed by the delegated key ``delegation``; None: by the account's key.

        Without the account's key, return the location. Raise ``Invalid`` if ``ttl_s`` is too long.
        """
        from azure.storage.blob import BlobSasPermissions, generate_blob_sas

        located = self._locate(path)
        if ttl_s > SIGNATURE_TTL_MAX_S:
            raise Invalid(
                f"invalid signature TTL ({ttl_s:g} s; expected <= {SIGNATURE_TTL_MAX_S:g} s)",
                path="signature_ttl",
            )
        client = files.service_client
        now = self._clock.now()
        if delegation is not None:
            secret = {"user_delegation_key": delegation}
        elif key := getattr(client.credential, "account_key", None):
            secret = {"account_key": key}
        else:
            return self.location(located)  # A connection string without the account's key.
        signature = generate_blob_sas(
            account_name=client.account_name,
            container_name=self._container,
            blob_name=located[len(self._container) + 1 :],
            permission=BlobSasPermissions(read=True),
            start=_moment(now - _SKEW_S),
            expiry=_moment(now + max(1.0, ttl_s)),
            # An emulator has no TLS.
            protocol="https" if client.url.startswith("https") else None,
            **secret,
        )
        return f"{self._blob_client(files, located).url}?{signature}"

    def _needed_until(self, now: float, ttl_s: float) -> float:
        """Return the Unix seconds until which a delegated key must be valid to be used again."""
        return now + max(DELEGATION_KEY_RESERVE_S, ttl_s)

    def _blob_client(self, files: Any, located: str) -> Any:
        name = located[len(self._container) + 1 :]
        return files.service_client.get_blob_client(self._container, name)

    def _delegated(self, files: Any, now: float, ttl_s: float) -> Any:
        """Return a key for signatures that is valid for ``ttl_s`` at least. Use one key until the last hour
        of its lifetime, or until a URL must be valid for longer."""
        from fsspec.asyn import sync

        if self._delegation is None or self._delegation[0] < self._needed_until(now, ttl_s):
            expires = now + max(DELEGATION_KEY_S, ttl_s + DELEGATION_KEY_RESERVE_S)
            key = sync(
                files.loop,
                files.service_client.get_user_delegation_key,
                _moment(now - _SKEW_S),
                _moment(expires),
                timeout=_CALL_TIMEOUT_S,
            )
            self._delegation = (expires, key)
        return self._delegation[1]


def _key_options(environ: Mapping[str, str]) -> dict[str, Any]:
    name, key = environ.get("AZURE_ACCOUNT_NAME", ""), environ.get("AZURE_ACCOUNT_KEY", "")
    connection = environ.get("AZURE_STORAGE_CONNECTION_STRING", "")
    if name and key:
        return {"account_name": name, "account_key": key}
    if connection:
        return {"connection_string": connection}
    raise NotAllowed(
        "azure:// needs AZURE_ACCOUNT_NAME and AZURE_ACCOUNT_KEY in the environment",
        hint="Set both for the broker, or set AZURE_STORAGE_CONNECTION_STRING.",
    )


def _client_options(tenant: str, account: str, environ: Mapping[str, str]) -> dict[str, Any]:
    client, secret = environ.get("AZURE_CLIENT_ID", ""), environ.get("AZURE_CLIENT_SECRET", "")
    if not client or not secret:
        raise NotAllowed(
            "azure-ad:// needs AZURE_CLIENT_ID and AZURE_CLIENT_SECRET in the environment",
            hint="Set both to an application that may use the storage account.",
        )
    return {
        "account_name": account,
        "tenant_id": tenant,
        "client_id": client,
        "client_secret": secret,
    }


def _read_up_to(source: BinaryIO, length: int) -> bytes:
    content = source.read(length)
    while content and len(content) < length and (more := source.read(length - len(content))):
        content += more
    return content


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, tz=UTC)
