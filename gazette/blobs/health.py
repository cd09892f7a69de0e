"""Probes of a blob store: they check that a broker can write, read, list, sign and remove there."""

from __future__ import annotations

import io
import random
import urllib.error
import urllib.request
from typing import Final

from gazette.blobs.blob_store import BlobStore
from gazette.errors import Broken, GazetteError, NotAllowed, Unavailable
from gazette.runtime.tls import tls_context

CHECK_PREFIX: Final = ".test/"
CHECK_PATH: Final = ".test/health-check"
_CHECK_CONTENT: Final = b"health-check\n"

DELETE_PROBE_NAME: Final = ".gazette-delete-probe"
_DELETE_PROBE_CONTENT: Final = b"gazette-delete-probe\n"

CHECK_TIMEOUT_S: Final = 60.0
_SIGNED_TTL_S: Final = 300.0
_FETCH_TIMEOUT_S: Final = 30.0

_HEALTHY_INTERVAL_S: Final = 1800.0
_FAILED_INTERVALS_S: Final = (0.0, 0.1, 1.0, 1.0, 10.0, 10.0, 100.0)
"""Seconds to the next check after the first failure in a row, the second, and so on. The last repeats."""


def check(store: BlobStore) -> None:
    """Write, read, list and sign a small object. If the signed URL is an HTTP URL, fetch it.

    Any number of brokers may check at the same time. Blocks. Raise the error of the store, with the name of
    the failed step before the message. Raise ``Broken`` if a step succeeds without the object's content.
    """
    with _NamedStep("PUT failed"):
        store.put(CHECK_PATH, io.BytesIO(_CHECK_CONTENT))
    with _NamedStep("GET failed"), store.open(CHECK_PATH) as source:
        content = source.read()
    if content != _CHECK_CONTENT:
        raise Broken(f"health check content mismatch: got {content[:64]!r}")
    with _NamedStep("LIST failed"):
        is_listed = any(
            f"{CHECK_PREFIX}{info.path}" == CHECK_PATH for info in store.list(CHECK_PREFIX)
        )
    if not is_listed:
        raise Broken("health check LIST did not find test file")
    with _NamedStep("SignGet failed"):
        url = store.sign_get(CHECK_PATH, _SIGNED_TTL_S)
    if url.startswith(("http://", "https://")):
        with _NamedStep("fetch failed"):
            content = _fetch(url)
        if content != _CHECK_CONTENT:
            raise Broken(f"health check fetch content mismatch: got {content[:64]!r}")


def probe_delete(store: BlobStore, prefix: str = "") -> None:
    """Write and remove an object below ``prefix`` (empty, or ending in ``/``). Call it in a thread.

    The periodic check does not remove: it needs no right to remove. Raise the error of the store.
    """
    path = f"{prefix}{DELETE_PROBE_NAME}"
    with _NamedStep("PUT failed", "delete-probe"):
        store.put(path, io.BytesIO(_DELETE_PROBE_CONTENT))
    with _NamedStep("DELETE failed", "delete-probe"):
        store.remove(path)


def next_check_s(failures: int, rng: random.Random) -> float:
    """Return the seconds until the next check, after ``failures`` in a row, varied at random by a fifth."""
    if failures == 0:
        interval = _HEALTHY_INTERVAL_S
    else:
        interval = _FAILED_INTERVALS_S[min(failures, len(_FAILED_INTERVALS_S)) - 1]
    return interval * (0.8 + 0.4 * rng.random())


def _fetch(url: str) -> bytes:
    try:
        with urllib.request.urlopen(  # noqa: S310
            url, timeout=_FETCH_TIMEOUT_S, context=tls_context()
        ) as response:
            return bytes(response.read(2 * len(_CHECK_CONTENT)))
    except urllib.error.HTTPError as error:
        error.close()
        # The URL holds the signature: keep it out of messages.
        raise NotAllowed(f"signed URL returned status {error.code}") from None
    except OSError as error:
        raise Unavailable(f"signed URL cannot be fetched: {error}") from error


class _NamedStep:
    """Puts the name of a step before the message of an error that its block raises."""

    def __init__(self, step: str, probe: str = "health check") -> None:
        self._text = f"{probe} {step}"

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, tb: object) -> None:
        if isinstance(error, GazetteError):
            error.message = f"{self._text}: {error.message}"
