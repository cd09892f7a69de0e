"""The settings of requests to an S3 bucket, and the access that a store's URL names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from gazette.errors import Invalid


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Bounds of one request.

    The SDK tries a request up to ``attempts`` times. So only one part of an upload, or one page of a listing,
    is repeated: retries of the whole call would begin at the first part or page. An object of ``part_bytes``
    or more is uploaded in such parts, one at a time. So a ``put`` holds at most two parts in memory.
    """

    connect_timeout_s: float = 5.0
    read_timeout_s: float = 30.0
    attempts: int = 2
    connections: int = 64
    part_bytes: int = 16 << 20
    page_objects: int = 1000


@dataclass(frozen=True, slots=True)
class S3Access:
    """The bucket's place and the caller's identity, from the URL. The SDK finds values for empty fields."""

    profile: str = ""
    endpoint: str = ""
    region: str = ""

    @classmethod
    def of(cls, arguments: Mapping[str, str], environ: Mapping[str, str]) -> S3Access:
        """Return the access that the arguments name. Raise ``Invalid`` for an endpoint that is no URL."""
        endpoint = arguments.get("endpoint", "")
        if endpoint:
            endpoint = endpoint if "://" in endpoint else f"https://{endpoint}"
            url_parts = urlsplit(endpoint)
            if url_parts.scheme not in ("http", "https") or not url_parts.netloc:
                raise Invalid(f"Endpoint must be a URL of http or https ({endpoint})", path="url")
        # SDKs of other languages read AWS_REGION; Python's reads AWS_DEFAULT_REGION only.
        region = arguments.get("region") or environ.get("AWS_REGION", "")
        return cls(arguments.get("profile", ""), endpoint, region)
