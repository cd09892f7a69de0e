"""Sign calls with the token of a file, which `gazctl login` or another program keeps current.

The file of another program has only a token, such as the file that Kubernetes writes into a pod. The file of
`gazctl login` is JSON. It also has the refresh token, for which the provider gives the next token.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Self

from gazette.auth import Claims, Renewing
from gazette.client.oidc.documents import (
    answer_of,
    base64url,
    discover,
    endpoint_of,
    fetch,
    require_https,
    strict_object,
)
from gazette.errors import GazetteError, Invalid, NotAllowed, Unavailable
from gazette.runtime.clock import Clock
from gazette.runtime.private_paths import locked_file, make_private_directory

log = logging.getLogger(__name__)

AHEAD_S: Final = 60.0
"""Seconds before the end of a token at which it is renewed, if it lives long enough."""
LOOK_S: Final = 5.0
"""Least seconds between two reads of the file."""
LOCK_S: Final = 30.0
"""Seconds to wait for another process that changes the same file."""
_LOCK_POLL_S: Final = 0.1
_RETRY_S: Final = 5.0
_PATIENCE_S: Final = 120.0
"""Seconds after which another renewal may begin, even if the last has not ended. A renewal that the parent
of a forked child began never ends in the child."""
_SECONDS_MAX: Final = 1e9
_FILE_BYTES_MAX: Final = 1 << 18
_UNKNOWN_LIFETIME_S: Final = 300.0
_NEVER: Final = float(1 << 53)
_TOKEN: Final = re.compile(r"[!-~]+")


@dataclass(frozen=True, slots=True)
class SignIn:
    """A token, and the values that renew it. A token without ``refresh_token`` is never renewed here."""

    token: str = field(repr=False)
    expires_at: float = _NEVER
    """Unix time at which the token ends, in seconds."""
    renew_at: float = _NEVER
    """Unix time from which the token is renewed, in seconds."""
    refresh_token: str = field(default="", repr=False)
    issuer: str = ""
    client_id: str = ""
    scope: str = ""
    audience: str = ""
    id_token: bool = False
    """True if ``token`` is the provider's ID token, False if it is the access token."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the sign-in of a file. Raise ``Invalid`` for a file that cannot be read, or has no token."""
        try:
            with path.open("rb") as file:
                return cls._parsed(file.read(_FILE_BYTES_MAX).strip())
        except (OSError, ValueError, TypeError, Invalid) as error:
            raise Invalid(f"the file of a token cannot be used: {error}", path=str(path)) from error

    @classmethod
    def _parsed(cls, data: bytes) -> Self:
        """Return the sign-in in ``data``: a JSON object, or the token itself. Raise ``ValueError``,
        ``TypeError`` or ``Invalid`` for other bytes."""
        values = strict_object(data) if data.startswith(b"{") else {"token": data.decode("ascii")}
        texts = ("token", "refresh_token", "issuer", "client_id", "scope", "audience")
        times = ("expires_at", "renew_at")
        if (
            not all(isinstance(values.get(name, ""), str) for name in texts)
            or not all(math.isfinite(_number(values.get(name, 0.0))) for name in times)
            or not isinstance(values.get("id_token", False), bool)
        ):
            raise ValueError("a field has another type")
        sign_in = cls(**values)
        if not _TOKEN.fullmatch(sign_in.token):
            raise ValueError("it has no token")
        if sign_in.refresh_token:
            require_https(sign_in.issuer, "issuer")
        return sign_in

    def save(self, path: Path) -> None:
        """Replace the file by a new file that only its owner can read.

        Raise ``OSError`` if that fails, and ``Invalid`` for a sign-in that `read` would refuse.
        """
        make_private_directory(path.parent)
        with _reserved(path) as save:
            save(self)

    def encoded(self) -> bytes:
        """Return the bytes of the file. Raise ``Invalid`` if `read` would refuse them."""
        data = json.dumps(asdict(self)).encode()
        try:
            if len(data) > _FILE_BYTES_MAX:
                raise ValueError(f"it has more than {_FILE_BYTES_MAX} bytes")
            self._parsed(data)
        except (ValueError, TypeError, Invalid) as error:
            raise Invalid(f"the sign-in cannot be kept: {error}", path="token") from error
        return data

    def is_due(self, now: float) -> bool:
        """Return True if the token can be renewed, and it is time to do so."""
        return bool(self.refresh_token) and now >= min(self.renew_at, self.expires_at)

    def with_answer(self, answer: Mapping[str, Any], now: float) -> Self:
        """Return the sign-in with the tokens of ``answer``. Raise ``Unavailable`` if that has no token."""
        name = "id_token" if self.id_token else "access_token"
        token: Any = answer.get(name)
        refresh_token = answer.get("refresh_token", self.refresh_token)
        is_text = isinstance(token, str) and isinstance(refresh_token, str)
        if not is_text or not _TOKEN.fullmatch(token):
            raise Unavailable(f"the provider's answer has no {name}")
        lifetime_s = _lifetime_of(token, self.id_token, answer, now)
        return replace(
            self,
            token=token,
            refresh_token=refresh_token,
            expires_at=now + lifetime_s,
            renew_at=now + max(lifetime_s - AHEAD_S, lifetime_s / 2),
        )


def _lifetime_of(token: str, is_id_token: bool, answer: Mapping[str, Any], now: float) -> float:
    """Return the seconds for which a token lives: as the provider's answer says, or else as the token says.

    The provider's clock may differ from ours. So subtract from the end of the token its own begin, if it has
    one, and only otherwise our time.
    """
    times: dict[str, Any] = {}
    with suppress(ValueError, LookupError):
        times = strict_object(base64url(token.split(".")[1]))
    ends_at, said_s = _number(times.get("exp")), _number(answer.get("expires_in"))
    lifetimes = [said_s, ends_at - _number(times.get("iat")), ends_at - now]
    if is_id_token:  # The provider's answer is about the access token: use that answer last.
        lifetimes = [*lifetimes[1:], said_s]
    usable = (max(1.0, seconds) for seconds in lifetimes if 0 < seconds < _SECONDS_MAX)
    return next(usable, _UNKNOWN_LIFETIME_S)


def _number(value: Any) -> float:
    """Return a number of JSON; NaN for any other value, and for a number too large to be a time."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= _NEVER else math.nan


def renew(
    path: Path,
    clock: Clock,
    unsaved: dict[SignIn, SignIn] | None = None,
    wait_s: float = LOCK_S,
) -> SignIn:
    """Return the sign-in of a file. If it is due, renew it first. Blocking; one process renews at a time.

    ``unsaved`` maps the file's sign-in to a renewed sign-in that could not be saved; a later call saves it.
    Raise ``NotAllowed`` if the provider refuses, and ``Invalid`` for a file that cannot be used. Raise
    ``Unavailable`` if the provider does not answer, or if the file cannot be changed.
    """
    unsaved = {} if unsaved is None else unsaved
    sign_in = SignIn.read(path)
    if not unsaved and not sign_in.is_due(clock.now()):
        return sign_in
    with locked(path, wait_s):
        # Another process may have renewed the sign-in. Many providers accept a refresh token only once.
        before = SignIn.read(path)
        sign_in = unsaved.get(before, before)
        is_due = sign_in.is_due(clock.now())
        if is_due or before in unsaved:
            with _reserved(path) as save:
                if is_due:
                    unsaved[before] = sign_in = _renewed(sign_in, clock)
                save(sign_in)
        unsaved.clear()
    return sign_in


def _renewed(sign_in: SignIn, clock: Clock) -> SignIn:
    """Ask the provider for the next token. Raise ``NotAllowed`` if refused, ``Unavailable`` if that fails."""
    form = {"grant_type": "refresh_token", "refresh_token": sign_in.refresh_token}
    form |= {"client_id": sign_in.client_id}
    status, answer = fetch(endpoint_of(discover(sign_in.issuer), "token_endpoint"), form)
    if status != 200:
        raise refused(status, answer)
    return sign_in.with_answer(answer, clock.now())


def forget(path: Path) -> str:
    """Have the refresh token of a file revoked (RFC 7009), and remove the file. Blocking.

    Return why the provider has not revoked the refresh token. Return an empty text after success, and for a
    file without a refresh token. Raise ``Unavailable`` if the file cannot be changed.
    """
    reason = ""
    with locked(path):
        try:
            sign_in = SignIn.read(path)
            if sign_in.refresh_token:
                reason = _revoked(sign_in)
            else:
                reason = f"there is no refresh token. {_validity(sign_in)}"
        except GazetteError as error:
            reason = str(error)
        path.unlink(missing_ok=True)
    return reason


def _revoked(sign_in: SignIn) -> str:
    """Have the refresh token revoked. Return why the provider refuses; an empty text after success."""
    document = discover(sign_in.issuer)
    if "revocation_endpoint" not in document:
        return f"it revokes no tokens. {_validity(sign_in)}, and the refresh token until the provider ends it"
    form = {"token": sign_in.refresh_token, "client_id": sign_in.client_id}
    status, reason, data = answer_of(endpoint_of(document, "revocation_endpoint"), form)
    if status == 200:  # The body of this answer means nothing.
        return ""
    answer: dict[str, Any] = {}
    with suppress(ValueError):
        answer = strict_object(data)
    return f"it answers {status} {reason} {_said(answer)}".rstrip()


def _validity(sign_in: SignIn) -> str:
    """Return the begin of a sentence that says how long the token of a sign-in stays valid."""
    if sign_in.expires_at >= _NEVER:
        return "The token stays valid without an end"
    end = datetime.fromtimestamp(sign_in.expires_at, UTC)
    return f"The token stays valid until {end:%Y-%m-%dT%H:%M:%SZ}"


def refused(status: int, answer: Mapping[str, Any]) -> NotAllowed:
    """Return the error for a provider that refuses to give a token (RFC 6749, section 5.2)."""
    return NotAllowed(
        f"the provider refuses to give a token: {_said(answer) or status}",
        hint="Sign in again: `gazctl login`.",
    )


def _said(answer: Mapping[str, Any]) -> str:
    """Return the error in a provider's answer, and its description, or an empty text."""
    names = ("error", "error_description")
    return " ".join(str(answer[name])[:300] for name in names if name in answer)


@contextmanager
def locked(path: Path, wait_s: float = LOCK_S) -> Iterator[None]:
    """Let no other process change the file of a sign-in during the block. Blocking.

    Raise ``Unavailable`` if another process keeps the lock for ``wait_s`` seconds, and for an ``OSError``.
    """
    try:
        make_private_directory(path.parent)
        with locked_file(path.with_suffix(".lock"), wait_s):
            yield
    except BlockingIOError:
        raise Unavailable(f"another process renews or changes the sign-in of {path}") from None
    except OSError as error:
        raise Unavailable(f"the sign-in cannot be kept: {error}") from error


@contextmanager
def _reserved(path: Path) -> Iterator[Callable[[SignIn], None]]:
    """Reserve disk for a new file, and yield a function that replaces the old file by a sign-in.

    So a full disk raises ``OSError`` before anyone asks the provider for a token that could not be saved.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".sign-in-")  # Mode 0600.
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(bytes(_FILE_BYTES_MAX))
            file.flush()
            os.fsync(handle)

            def save(sign_in: SignIn) -> None:
                data = sign_in.encoded()
                file.seek(0)
                file.write(data)
                file.truncate()  # This flushes the file, too.
                os.fsync(handle)
                os.replace(temporary, path)

            yield save
    finally:
        Path(temporary).unlink(missing_ok=True)


class TokenFile(Renewing):
    """The signer of a client that has the token of a file. A thread renews the token before its end."""

    def __init__(self, path: Path, clock: Clock) -> None:
        """Read the file. Raise ``Invalid`` if it cannot be read, or has no token."""
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._sign_in = SignIn.read(path)
        self._unsaved: dict[SignIn, SignIn] = {}
        self._looked_at = clock.monotonic()
        self._renewed_at = float("-inf")
        self._is_renewing = False
        self._failure: GazetteError | None = None

    def sign(self, claims: Claims, lifetime_s: float) -> str:
        """Return the token, whose rights and end the provider has decided: the arguments have no effect.

        For a token that has ended, raise ``NotAllowed`` if it cannot be renewed, and ``Unavailable`` while it
        is being renewed. After a failed renewal, raise the renewal's error.
        """
        now, wall = self._clock.monotonic(), self._clock.now()
        with self._lock:
            if now - self._looked_at >= LOOK_S:
                self._looked_at = now
                self._look()
            sign_in = self._sign_in
        if self._unsaved or sign_in.is_due(wall):
            self._begin_renewal(now)
        if wall < sign_in.expires_at:
            return sign_in.token
        if not sign_in.refresh_token:
            raise NotAllowed("the token has ended", hint="Sign in again: `gazctl login`.")
        failure = self._failure or Unavailable("the token has ended, and is being renewed")
        raise type(failure)(failure.message, hint=failure.hint)

    def _look(self) -> None:
        """Read the file's sign-in. If a renewed sign-in could not be saved, take that one instead. If the
        sign-in is new, forget the last failure."""
        with suppress(Invalid):  # The file is being replaced. The last token may still be valid.
            sign_in = SignIn.read(self._path)
            sign_in = self._unsaved.get(sign_in, sign_in)
            if sign_in != self._sign_in:
                self._sign_in, self._failure = sign_in, None

    def _begin_renewal(self, now: float) -> None:
        with self._lock:
            if now - self._renewed_at < (_PATIENCE_S if self._is_renewing else _RETRY_S):
                return
            self._renewed_at, self._is_renewing = now, True
        try:
            threading.Thread(target=self._renew, name="token-renewal", daemon=True).start()
        except RuntimeError as error:
            self._end(self._sign_in, Unavailable(f"this process has no thread for it: {error}"))

    def _renew(self) -> None:
        before, failure = self._sign_in, None
        try:
            renew(self._path, self._clock, self._unsaved)
        except GazetteError as error:
            failure = error
        self._end(before, failure)

    def _end(self, before: SignIn, failure: GazetteError | None) -> None:
        last = self._failure
        if failure is not None and (last is None or failure.message != last.message):
            log.warning(
                "cannot renew or keep the token of %(path)s: %(reason)s",
                {"path": str(self._path), "reason": failure.message},
            )
        with self._lock:
            self._look()
            self._failure = failure if self._sign_in == before else None
            self._is_renewing = False
