"""The keys of a provider: fetched in a thread, kept, and fetched again when a token names another one."""

from __future__ import annotations

import logging
import threading
from typing import Final

from gazette.client.oidc.documents import discover, endpoint_of, fetch
from gazette.client.oidc.key_set import KeySet, PublicKey
from gazette.errors import GazetteError, NotAllowed, Unavailable
from gazette.runtime.clock import Clock

log = logging.getLogger(__name__)

REFRESH_S: Final = 300.0
"""Age of keys, in seconds, from which they are fetched again."""
RETRY_S: Final = 10.0
"""Least seconds from one fetch to the next, for whatever reason and however many callers."""
KEPT_S: Final = 86_400.0
"""Age to which keys are used while the provider is away, in seconds."""


class OidcProvider:
    """The newest keys of an issuer. No call waits for the provider: fetches are made by a thread."""

    def __init__(self, issuer: str, jwks_url: str, clock: Clock) -> None:
        """Begin to fetch. ``jwks_url`` is empty if the provider says where its keys are."""
        self.issuer: Final = issuer
        self._jwks_url = jwks_url
        self._clock = clock
        self._lock = threading.Lock()
        self._keys: KeySet | None = None
        self._failure = ""
        self._attempted_at = float("-inf")
        self._is_fetching = False
        self._refresh()

    def newest(self) -> KeySet:
        """Return the keys. Raise ``Unavailable`` if there are none, or only old ones.

        Old keys are used if the provider is away. Otherwise the fetch that has begun may show that the
        provider has withdrawn them.
        """
        keys = self._keys
        age_s = KEPT_S if keys is None else self._clock.monotonic() - keys.fetched_at
        if age_s >= REFRESH_S:
            self._refresh()
        is_unsure = age_s >= 2 * REFRESH_S and not self._failure
        if keys is None or age_s >= KEPT_S or is_unsure:
            raise Unavailable(
                f"the keys of {self.issuer} are not known"
                f" ({self._failure or 'they are being fetched'}): try again"
            )
        return keys

    def key(self, keys: KeySet, algorithm: str, kid: str | None) -> PublicKey:
        """Return the key of a token. Have the keys fetched again if it is not there.

        Raise ``Unavailable`` while that goes on or fails, and ``NotAllowed`` when it has brought no such key.
        """
        key = keys.find(algorithm, kid)
        if key is not None:
            return key
        name = "one key without a name" if kid is None else f"key {kid}"
        missing = f"{self.issuer} has no {name} for {algorithm}"
        if self._refresh() or self._is_fetching or self._failure:
            raise Unavailable(
                f"{missing} ({self._failure or 'its keys are fetched again'}): try again"
            )
        raise NotAllowed(f"verifying Authorization: {missing}")

    def _refresh(self) -> bool:
        """Begin to fetch, and return True. Return False if one goes on, or began less than `RETRY_S` ago."""
        with self._lock:
            now = self._clock.monotonic()
            if self._is_fetching or now - self._attempted_at < RETRY_S:
                return False
            self._attempted_at, self._is_fetching = now, True
        threading.Thread(target=self._fetch, name="oidc-keys", daemon=True).start()
        return True

    def _fetch(self) -> None:
        begun_at, failure = self._attempted_at, "the fetch broke"
        try:
            url = self._jwks_url or endpoint_of(discover(self.issuer), "jwks_uri")
            self._keys = KeySet(fetch(url)[1], begun_at)
            failure = ""
        except GazetteError as error:
            failure = error.message
            if failure != self._failure:
                log.warning(
                    "cannot fetch keys of tokens from %(address)s: %(reason)s; known keys are used for a day",
                    {"address": self.issuer, "reason": failure},
                )
        finally:
            self._failure, self._is_fetching = failure, False
