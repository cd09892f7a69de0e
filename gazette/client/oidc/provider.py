"""Keep the keys of a provider. A thread fetches them, again when a token names an unknown key."""

from __future__ import annotations

import logging
import threading
from typing import Any, Final

from gazette.auth import LEEWAY_S
from gazette.client.oidc.documents import discover, endpoint_of, fetch
from gazette.client.oidc.key_set import KeySet, PublicKey
from gazette.errors import GazetteError, NotAllowed, Unavailable
from gazette.runtime.clock import Clock

log = logging.getLogger(__name__)

REFRESH_S: Final = 300.0
"""Age in seconds at which keys are fetched again."""
RETRY_S: Final = 10.0
"""Least seconds from the begin of one fetch to the begin of the next."""
PATIENCE_S: Final = 60.0
"""Seconds after which a fetch that does not end counts as failed."""
KEPT_S: Final = 86_400.0
"""Greatest age, in seconds, of keys that are used while the provider does not answer."""


class OidcProvider:
    """The newest keys of an issuer. A thread fetches them, so no call waits for the provider."""

    def __init__(self, issuer: str, jwks_url: str, clock: Clock) -> None:
        """Begin to fetch. An empty ``jwks_url`` means: take the URL of the provider's discovery document."""
        self.issuer: Final = issuer
        self._jwks_url = jwks_url
        self._clock = clock
        self._lock = threading.Lock()
        self._keys: KeySet | None = None
        self._failure = ""
        self._attempted_at = self._attempted_wall = float("-inf")
        self._is_fetching = False
        self._patience_s = PATIENCE_S
        self._refresh()

    def newest(self) -> KeySet:
        """Return the keys. Raise ``Unavailable`` if no keys are known, or if they are too old.

        Keys are too old at the age of `KEPT_S`. If the last fetch has not failed, they are too old at twice
        `REFRESH_S`: the running fetch may show that the provider has withdrawn them.
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

    def key(self, algorithm: str, kid: str | None, issued_at: Any) -> PublicKey:
        """Return the key of a token. If the key is unknown, have all keys fetched again.

        For an unknown key, raise ``Unavailable`` while a fetch goes on, and if the last fetch failed. Raise
        it also for a token newer than the last fetch: its key may be newer, too. Otherwise raise
        ``NotAllowed``.
        """
        if (key := self._find(algorithm, kid)) is not None:
            return key
        is_awaited = self._refresh() or self._is_fetching
        if not is_awaited and (key := self._find(algorithm, kid)) is not None:
            return key  # A fetch has just brought the key.
        name = "one key without a name" if kid is None else f"key {kid}"
        missing = f"{self.issuer} has no {name} for {algorithm}"
        if is_awaited or self._failure or self._is_newer(issued_at):
            raise Unavailable(
                f"{missing} ({self._failure or 'its keys are fetched again'}): try again"
            )
        raise NotAllowed(f"verifying Authorization: {missing}")

    def _find(self, algorithm: str, kid: str | None) -> PublicKey | None:
        return None if self._keys is None else self._keys.find(algorithm, kid)

    def _is_newer(self, issued_at: Any) -> bool:
        """Return True if ``issued_at`` is after the last fetch and not in the future. It is not verified."""
        if not isinstance(issued_at, int | float):
            return False
        return self._attempted_wall - LEEWAY_S < issued_at <= self._clock.now() + LEEWAY_S

    def _refresh(self) -> bool:
        """Begin to fetch, and return True. Return False if a fetch goes on, or began less than `RETRY_S` ago.

        If a fetch does not end, begin another fetch after `PATIENCE_S`. Double this time after each fetch
        that does not end.
        """
        with self._lock:
            now = self._clock.monotonic()
            if now - self._attempted_at < (self._patience_s if self._is_fetching else RETRY_S):
                return False
            if is_stuck := self._is_fetching:
                self._failure = f"a fetch has not ended in {self._patience_s:.0f} s"
                self._patience_s *= 2
            else:
                self._patience_s = PATIENCE_S
            self._attempted_at, self._attempted_wall = now, self._clock.now()
            self._is_fetching = True
        if is_stuck:
            self._warn()
        try:
            threading.Thread(target=self._fetch, args=(now,), name="oidc-keys", daemon=True).start()
        except RuntimeError as error:
            self._end(now, None, f"this process has no thread for it: {error}")
        return True

    def _fetch(self, begun_at: float) -> None:
        keys, failure = None, "the fetch broke"  # This text stays only after an unexpected error.
        try:
            url = self._jwks_url or endpoint_of(discover(self.issuer), "jwks_uri")
            keys, failure = KeySet(fetch(url)[1], begun_at), ""
        except GazetteError as error:
            failure = error.message
        finally:
            self._end(begun_at, keys, failure)

    def _end(self, begun_at: float, keys: KeySet | None, failure: str) -> None:
        """Take the keys or the failure of a fetch, unless a later fetch has brought keys."""
        with self._lock:
            if keys is not None and (self._keys is None or begun_at > self._keys.fetched_at):
                self._keys = keys
            if begun_at != self._attempted_at:  # This fetch was stuck, and a later fetch has begun.
                return
            is_news = failure not in ("", self._failure)
            self._failure, self._is_fetching = failure, False
        if is_news:
            self._warn()

    def _warn(self) -> None:
        log.warning(
            "cannot fetch keys of tokens from %(address)s: %(reason)s; known keys are used for a day",
            {"address": self.issuer, "reason": self._failure},
        )
