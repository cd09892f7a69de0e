"""The token of a file, as a signer: that of `gazctl login`, or one that another program keeps current.

For example, Kubernetes writes its tokens into a file of a pod. Such a file has a token and no more. That of
`gazctl login` is JSON, with the refresh token by which the provider gives the next token.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Self

from gazette.auth import Claims, Renewing
from gazette.client.oidc.documents import (
    base64url,
    discover,
    endpoint_of,
    fetch,
    require_https,
    strict_object,
)
from gazette.errors import GazetteError, Invalid, NotAllowed, Unavailable
from gazette.runtime.clock import Clock

AHEAD_S: Final = 60.0
"""Seconds before its end at which a token is renewed, if it lives long enough."""
LOOK_S: Final = 5.0
"""Seconds for which a file is not looked at again."""
_RETRY_S: Final = 5.0
_FILE_BYTES_MAX: Final = 1 << 18
_UNKNOWN_LIFETIME_S: Final = 300.0
_NEVER: Final = float(1 << 53)
_TOKEN: Final = re.compile(r"[!-~]+")


@dataclass(frozen=True, slots=True)
class SignIn:
    """A token, and what renews it. Without ``refresh_token`` it is only read."""

    token: str = field(repr=False)
    expires_at: float = _NEVER
    """Unix time at which the token ends, in seconds."""
    renew_at: float = _NEVER
    refresh_token: str = field(default="", repr=False)
    issuer: str = ""
    client_id: str = ""
    scope: str = ""
    audience: str = ""
    id_token: bool = False
    """True if the provider's ID token is presented, and not its access token."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return what a file has. Raise ``Invalid`` for a file that cannot be read, or has no token."""
        try:
            with path.open("rb") as file:
                return cls._parsed(file.read(_FILE_BYTES_MAX).strip())
        except (OSError, ValueError, TypeError, Invalid) as error:
            raise Invalid(f"the file of a token cannot be used: {error}", path=str(path)) from error

    @classmethod
    def _parsed(cls, data: bytes) -> Self:
        values = strict_object(data) if data.startswith(b"{") else {"token": data.decode("ascii")}
        texts = ("token", "refresh_token", "issuer", "client_id", "scope", "audience")
        times = ("expires_at", "renew_at")
        if not all(isinstance(values.get(name, ""), str) for name in texts) or not all(
            isinstance(values.get(name, 0.0), int | float) for name in times
        ):
            raise ValueError("a field has another type")
        sign_in = cls(**values)
        if not _TOKEN.fullmatch(sign_in.token):
            raise ValueError("it has no token")
        if sign_in.refresh_token:
            require_https(sign_in.issuer, "issuer")
        return sign_in

    def save(self, path: Path) -> None:
        """Replace the file by one that only its owner can read. Raise ``OSError`` if that fails."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".sign-in-")  # Mode 0600.
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(asdict(self), file)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise

    def with_answer(self, answer: Mapping[str, Any], now: float) -> Self:
        """Return the sign-in with the tokens of a provider's answer. Raise ``Unavailable`` if it has none."""
        name = "id_token" if self.id_token else "access_token"
        token: Any = answer.get(name)
        refresh_token = answer.get("refresh_token", self.refresh_token)
        is_text = isinstance(token, str) and isinstance(refresh_token, str)
        if not is_text or not _TOKEN.fullmatch(token):
            raise Unavailable(f"the provider's answer has no {name}")
        lifetime_s = _lifetime_of(token, answer, now)
        return replace(
            self,
            token=token,
            refresh_token=refresh_token,
            expires_at=now + lifetime_s,
            renew_at=now + max(lifetime_s - AHEAD_S, lifetime_s / 2),
        )


def _lifetime_of(token: str, answer: Mapping[str, Any], now: float) -> float:
    """Return the seconds for which a token lives: as it says itself, or else as the provider says."""
    with suppress(ValueError, LookupError, TypeError, OverflowError):
        return max(1.0, float(strict_object(base64url(token.split(".")[1]))["exp"] - now))
    lifetime_s: Any = answer.get("expires_in")
    is_usable = isinstance(lifetime_s, int | float) and 0 < lifetime_s < 1e9
    return float(lifetime_s) if is_usable else _UNKNOWN_LIFETIME_S


def renew(path: Path, clock: Clock) -> SignIn:
    """Return the sign-in of a file, renewed if that is due. Blocking; one process renews at a time.

    Raise ``NotAllowed`` if the provider refuses, ``Unavailable`` if it does not answer, and ``Invalid`` for a
    file that cannot be used.
    """
    with _locked(path):
        # Another process may have renewed it meanwhile. Many providers take a refresh token once.
        sign_in = SignIn.read(path)
        if not sign_in.refresh_token or clock.now() < sign_in.renew_at:
            return sign_in
        form = {"grant_type": "refresh_token", "refresh_token": sign_in.refresh_token}
        form |= {"client_id": sign_in.client_id}
        status, answer = fetch(endpoint_of(discover(sign_in.issuer), "token_endpoint"), form)
        if status != 200:
            raise refused(status, answer)
        sign_in = sign_in.with_answer(answer, clock.now())
        sign_in.save(path)
    return sign_in


def refused(status: int, answer: Mapping[str, Any]) -> NotAllowed:
    """Return the error for a provider that refuses to give a token (RFC 6749, section 5.2)."""
    reason = " ".join(
        str(answer[name])[:300] for name in ("error", "error_description") if name in answer
    )
    return NotAllowed(
        f"the provider refuses to give a token: {reason or status}",
        hint="Sign in again: `gazctl login`.",
    )


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class TokenFile(Renewing):
    """The signer of a client that has the token of a file. A thread renews it before it ends."""

    def __init__(self, path: Path, clock: Clock) -> None:
        """Read the file. Raise ``Invalid`` if it cannot be read, or has no token."""
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._sign_in = SignIn.read(path)
        self._looked_at = clock.monotonic()
        self._renewed_at = float("-inf")
        self._failure: GazetteError | None = None

    def sign(self, claims: Claims, lifetime_s: float) -> str:
        """Return the token. The provider says what it permits, and when it ends.

        Raise ``NotAllowed`` for a token that has ended, and cannot be renewed. Raise ``Unavailable`` while
        that can still be tried.
        """
        now = self._clock.monotonic()
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            with suppress(Invalid):  # It is being replaced. The last token may do.
                self._sign_in = SignIn.read(self._path)
        sign_in, wall = self._sign_in, self._clock.now()
        if sign_in.refresh_token and wall >= sign_in.renew_at:
            self._begin_renewal(now)
            if wall >= sign_in.expires_at:
                failure = self._failure or Unavailable("the token has ended, and is being renewed")
                raise type(failure)(failure.message, hint=failure.hint)
        return sign_in.token

    def _begin_renewal(self, now: float) -> None:
        with self._lock:
            if now - self._renewed_at < _RETRY_S:
                return
            self._renewed_at = now
        threading.Thread(target=self._renew, name="token-renewal", daemon=True).start()

    def _renew(self) -> None:
        try:
            self._sign_in = renew(self._path, self._clock)
        except OSError as error:
            self._failure = Unavailable(f"the token cannot be kept: {error}")
        except GazetteError as error:
            self._failure = error
        else:
            self._failure = None
