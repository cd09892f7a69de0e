"""Stage 8 of the byte path: fragments as objects of Google Cloud Storage, by gcsfs.

``gs://bucket/prefix/?find=…&replace=…``. Credentials are the application's default. The key of a service
account can sign URLs. ``STORAGE_EMULATOR_HOST`` names an emulator, which is called without credentials.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, BinaryIO, Final

from gazette.blobs import extras
from gazette.blobs.blob_store import BlobInfo, validate_prefix
from gazette.blobs.fsspec import FsspecStore, mod_time_of, write_file
from gazette.errors import Invalid
from gazette.protocol.fragment import FragmentStoreUrl

log = logging.getLogger(__name__)

SIGNATURE_TTL_MAX_S: Final = 7 * 24 * 60 * 60

_REQUEST_TIMEOUT_S: Final = 120.0
_CONNECT_TIMEOUT_S: Final = 5.0
_SILENCE_TIMEOUT_S: Final = 30.0


class GsStore(FsspecStore):
    """Objects of one bucket. gcsfs repeats a failed request up to five times, with growing pauses."""

    scheme = "gs"
    writes_whole = True

    def __init__(self, url: FragmentStoreUrl, *, environ: Mapping[str, str] = os.environ) -> None:
        """Parse the URL. Raise ``Invalid`` if gcsfs is not installed, or for unknown arguments."""
        extras.require("gs", "fsspec", "gcsfs")
        self._bucket = url.host
        self._emulated = bool(environ.get("STORAGE_EMULATOR_HOST"))
        self._signer: Any = None
        """The bucket that makes signed URLs; False if the credentials cannot sign; None until looked up."""
        self._signs_alone = False
        """True if the signer has its own key, and needs no service."""
        super().__init__(f"{url.host}{url.path}".rstrip("/"), url.query)

    def make_files(self) -> Any:
        import aiohttp
        from gcsfs.core import GCSFileSystem

        timeout = aiohttp.ClientTimeout(
            total=_REQUEST_TIMEOUT_S,
            sock_connect=_CONNECT_TIMEOUT_S,
            sock_read=_SILENCE_TIMEOUT_S,
        )
        # Not the class that gcsfs registers: that class asks a second service about the kind of the bucket.
        return GCSFileSystem(
            # Name the method. Without it, gcsfs would continue as an anonymous user if credentials are
            # missing.
            token="anon" if self._emulated else "google_default",
            requests_timeout=timeout,
            # Return objects with a gzip encoding as they are stored.
            session_kwargs={"auto_decompress": False},
            use_listings_cache=False,
            skip_instance_cache=True,
        )

    def write(self, files: Any, located: str, source: BinaryIO, content_encoding: str) -> None:
        """Write by a resumable upload, whose object appears with its last request."""
        options: dict[str, Any] = {"content_type": "application/octet-stream"}
        if content_encoding:
            options["fixed_key_metadata"] = {"content_encoding": content_encoding}
        write_file(files, located, source, options)

    def stat(self, files: Any, located: str) -> Mapping[str, Any]:
        """Return the info of an object by one request. The file system's own method makes several requests,
        to look for a directory."""
        info: dict[str, Any] = files.call(
            "GET",
            "b/{}/o/{}",
            self._bucket,
            located[len(self._bucket) + 1 :],
            fields="size,generation",
            json_out=True,
        )
        return info | {"type": "file"}

    def list(self, prefix: str) -> Iterator[BlobInfo]:
        """List in pages of 1000 objects, with only the fields that are needed."""
        return self.list_after(prefix, "")

    def list_after(self, prefix: str, after: str) -> Iterator[BlobInfo]:
        """List as in ``OrderedListing``: the service skips earlier objects."""
        validate_prefix(prefix)
        begin = self._begin(prefix)[len(self._bucket) + 1 :]
        token: str | None = None
        while True:
            with self._mapped(prefix, missing_is_refusal=True) as files:
                page = files.call(
                    "GET",
                    "b/{}/o",
                    self._bucket,
                    prefix=begin or None,
                    startOffset=f"{begin}{after}" if after else None,
                    fields="items(name,size,updated),nextPageToken",
                    maxResults=1000,
                    pageToken=token,
                    json_out=True,
                )
            for item in page.get("items", ()):
                name = item["name"][len(begin) :]
                if name > after and not name.endswith("/"):
                    yield BlobInfo(name, mod_time_of(item), int(item.get("size", 0)))
            token = page.get("nextPageToken")
            if not token:
                return

    def sign_get(self, path: str, ttl_s: float) -> str:
        """Return a signed URL; the location if the credentials cannot sign, such as a host's credentials.

        Without signed URLs, clients read through brokers. Raise ``Invalid`` beyond ``SIGNATURE_TTL_MAX_S``.
        """
        with self._mapped(path) as files:
            return self._signed(self._signing_bucket(files), path, ttl_s)

    def sign_now(self, path: str, ttl_s: float) -> str | None:
        """Return the URL of ``sign_get``; None before the first signature, and if a service signs for the
        credentials."""
        signer = self._signer
        if signer is None or (signer and not self._signs_alone):
            return None
        with self._mapping(path):
            return self._signed(signer or None, path, ttl_s)

    def _signed(self, bucket: Any, path: str, ttl_s: float) -> str:
        """Return a signed URL by ``bucket``; the location if ``bucket`` is None. Raise ``Invalid`` if
        ``ttl_s`` is too long."""
        located = self._locate(path)
        if ttl_s > SIGNATURE_TTL_MAX_S:
            raise Invalid(
                f"invalid signature TTL ({ttl_s:g} s; expected <= {SIGNATURE_TTL_MAX_S} s)",
                path="signature_ttl",
            )
        if bucket is None:
            return self.location(located)
        blob = bucket.blob(located[len(self._bucket) + 1 :])
        return str(
            blob.generate_signed_url(
                version="v4", expiration=timedelta(seconds=max(1, round(ttl_s))), method="GET"
            )
        )

    def _signing_bucket(self, files: Any) -> Any:
        """Return the bucket that signs URLs, in any project; None if the credentials cannot sign."""
        if self._signer is None:
            import google.auth.credentials
            from google.cloud import storage
            from google.oauth2 import service_account  # type: ignore[import-untyped,unused-ignore]

            credentials = files.credentials.credentials
            if not isinstance(credentials, google.auth.credentials.Signing):
                self._signer = False
                log.warning(
                    "%(store)s: these credentials cannot sign URLs, so stored fragments are read through "
                    "brokers. Use the key of a service account.",
                    {"store": f"gs://{self._bucket}"},
                )
            else:
                project = files.project or getattr(credentials, "project_id", None) or "none"
                self._signs_alone = isinstance(credentials, service_account.Credentials)
                client = storage.Client(project=project, credentials=credentials)
                self._signer = client.bucket(self._bucket)
        return self._signer or None
