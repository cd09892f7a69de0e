"""Authorization of calls: claims in a JWT, and the keys that sign and verify it.

A token is ``Authorization: Bearer <jwt>``, signed by HS256 with a shared key. Its claims are ``cap``, a bit
mask of capabilities, and ``sel``, a label selector of the journals or shards for which they hold.

Several keys may be configured: the first key signs, all keys verify. So keys rotate without an interruption:
first add the new key as the last key everywhere. Then move the new key to the front everywhere, and remove
the old key. The text ``AA==`` is no key: it admits callers without a token. Use ``AA==`` to switch
authentication on in a running cluster.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Any, Final, Protocol

from gazette.errors import Invalid, NotAllowed
from gazette.protocol.label_set import EVERYTHING, LabelSelector
from gazette.runtime.clock import Clock

ALGORITHMS: Final = ("HS256", "HS384")
LEEWAY_S: Final = 5.0
"""Seconds by which the clocks of signer and verifier may differ."""
MISSING_TOKEN_LIFETIME_S: Final = 3600.0
"""Seconds after which the claims of a caller without a token expire."""
KEY_BYTES_MIN: Final = 32
"""Least number of bytes of a key: the length of an HS256 digest (RFC 7518, section 3.2)."""
_MISSING_IS_OK: Final = b"\x00"


class Capability(IntFlag):
    """Rights that a token gives. Bits from ``APPLICATION`` upwards belong to applications."""

    LIST = 2
    APPLY = 4
    READ = 8
    APPEND = 16
    REPLICATE = 32
    APPLICATION = 1 << 16
    ALL = 0xFFFFFFFF


_CLAIMS: Final = frozenset({"cap", "exp", "iat", "nbf", "sel"})
_NAMED: Final = (
    Capability.LIST,
    Capability.APPLY,
    Capability.READ,
    Capability.APPEND,
    Capability.REPLICATE,
)


@dataclass(frozen=True, slots=True)
class Claims:
    """Rights of a caller, and the journals or shards for which they hold.

    ``expires_at`` is a Unix time, in seconds: a long call ends then. If None, the claims never expire.
    """

    capability: int
    selector: LabelSelector = EVERYTHING
    expires_at: float | None = None

    @staticmethod
    def of_journal(capability: int, journal: str) -> Claims:
        """Return claims to one journal. ``journal`` must not have a metadata segment."""
        return Claims(capability, LabelSelector.of(name=journal))


class Signer(Protocol):
    def sign(self, claims: Claims, lifetime_s: float) -> str:
        """Return a token for the claims, valid for ``lifetime_s`` seconds; empty if no token is needed."""
        ...


class Verifier(Protocol):
    def verify(self, authorization: str | None, require: int) -> Claims:
        """Return the claims of the token in an ``Authorization`` header.

        Raise ``NotAllowed`` unless the token is genuine and current, and has every required capability.
        Raise ``Unavailable`` if the keys that verify it are not known now.
        """
        ...


class MemberAuth(Signer, Verifier, Protocol):
    """Signs the calls of a member, and verifies the tokens of its callers."""

    @property
    def keyless(self) -> bool:
        """True if callers without a token are admitted."""
        ...


class Renewing:
    """Base of signers that decide when their tokens end. Ask such a signer for a token at each call."""

    __slots__ = ()


class NoAuth:
    """Signer and verifier of a cluster without keys: every caller may do everything."""

    __slots__ = ()
    keyless: Final = True

    def sign(self, claims: Claims, lifetime_s: float) -> str:
        return ""

    def verify(self, authorization: str | None, require: int) -> Claims:
        return Claims(require)


@dataclass(frozen=True, slots=True)
class StaticToken:
    """A signer that always returns the same token (``--broker.auth-token``)."""

    token: str = field(repr=False)

    def sign(self, claims: Claims, lifetime_s: float) -> str:
        return self.token


@dataclass(frozen=True, slots=True)
class KeyedAuth:
    """Signer and verifier with shared keys."""

    clock: Clock
    keys: tuple[bytes, ...] = field(repr=False)
    allow_missing: bool = False

    @property
    def keyless(self) -> bool:
        """True if callers without a token are admitted."""
        return self.allow_missing

    @staticmethod
    def parse(clock: Clock, text: str) -> KeyedAuth:
        """Read keys from base64 text, separated by white space or commas.

        Raise ``Invalid`` for text that is not base64, a key under ``KEY_BYTES_MIN``, or no key at all.
        """
        keys, allow_missing = [], False
        for index, word in enumerate(re.split(r"[\s,]+", text.strip(" \t\r\n,"))):
            try:
                key = base64.b64decode(word, validate=True)
            except (binascii.Error, ValueError) as error:
                raise Invalid(
                    f"key at index {index} is not valid base64: {error}",
                    path="auth-keys",
                    hint="Keys are standard base64, for example of `openssl rand -base64 32`.",
                ) from error
            if key == _MISSING_IS_OK:
                allow_missing = True
            elif 0 < len(key) < KEY_BYTES_MIN:
                raise Invalid(
                    f"key at index {index} has {len(key)} bytes (expected >= {KEY_BYTES_MIN})",
                    path="auth-keys",
                    hint="Make a key of full strength: `openssl rand -base64 32`.",
                )
            elif key:  # An empty text is no key.
                keys.append(key)
        if not keys:
            raise Invalid(
                "at least one key must be provided (AA== alone is not a key)", path="auth-keys"
            )
        return KeyedAuth(clock, tuple(keys), allow_missing)

    def sign(self, claims: Claims, lifetime_s: float) -> str:
        import jwt  # The import takes a tenth of a broker's start: brokers without keys skip it.

        now = self.clock.now()
        payload = {
            "cap": int(claims.capability),
            "sel": claims.selector.to_json(),
            "iat": int(now),
            "exp": int(now + lifetime_s),
        }
        return jwt.encode(payload, self.keys[0], algorithm="HS256")

    def verify(self, authorization: str | None, require: int) -> Claims:
        if not authorization:
            if self.allow_missing:
                return Claims(require, EVERYTHING, self.clock.now() + MISSING_TOKEN_LIFETIME_S)
            raise NotAllowed("missing or empty Authorization token")
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise NotAllowed("invalid or unsupported Authorization header (expected 'Bearer')")
        claims = self.claims_of(self._decode(token.strip()))
        missing = require & ~claims.capability
        if missing:
            # Name the first right that is missing. Rights of applications have no names.
            name = next((f"{right.name} " for right in _NAMED if right & missing), "")
            raise NotAllowed(f"authorization is missing required {name}capability")
        return claims

    def _decode(self, token: str) -> dict[str, Any]:
        """Return the payload of a token. Raise ``NotAllowed`` unless one of our keys has signed it."""
        import jwt

        failure: Exception | None = None
        for key in self.keys:
            try:
                # `claims_of` checks the times in the token, by our clock.
                return jwt.decode(token, key, algorithms=list(ALGORITHMS), options=_SIGNATURE_ONLY)
            except jwt.InvalidSignatureError as error:  # Try the next key.
                failure = error
            except jwt.PyJWTError as error:
                raise NotAllowed(f"verifying Authorization: {error}") from error
        raise NotAllowed(f"verifying Authorization: {failure}") from failure

    def claims_of(self, payload: Mapping[str, Any]) -> Claims:
        """Return the claims of a signed payload. Raise ``NotAllowed`` if it is malformed or not current."""
        for name in payload:
            # The original ignores case, so `Sel` restricts a token there. Refuse `Sel` here.
            if name not in _CLAIMS and name.lower() in _CLAIMS:
                raise NotAllowed(f"verifying Authorization: claim {name} is written {name.lower()}")
        now = self.clock.now()
        expires_at = _number(payload, "exp")
        if expires_at is None:
            raise NotAllowed("verifying Authorization: token is missing required claim: exp")
        if now - LEEWAY_S >= expires_at:
            raise NotAllowed("verifying Authorization: token is expired")
        if (issued_at := _number(payload, "iat")) is not None and issued_at > now + LEEWAY_S:
            raise NotAllowed(
                "verifying Authorization: token used before issued",
                hint="Compare the clocks of the caller and of this server.",
            )
        if (not_before := _number(payload, "nbf")) is not None and not_before > now + LEEWAY_S:
            raise NotAllowed("verifying Authorization: token is not valid yet")
        capability = payload.get("cap", 0)
        is_integer = isinstance(capability, int) and not isinstance(capability, bool)
        # A negative number has all high bits set: it would grant rights that the token does not name.
        if not is_integer or not 0 <= capability <= Capability.ALL:
            raise NotAllowed("verifying Authorization: claim cap is not an integer of 32 bits")
        return Claims(capability, _selector(payload.get("sel")), expires_at)


def _selector(value: Any) -> LabelSelector:
    """Return the selector in the claim ``sel``, or `EVERYTHING` if the claim is absent or null.

    Raise ``NotAllowed`` for an unknown field: without this check, a misspelled field would grant everything.
    """
    if value is None:
        return EVERYTHING
    if not isinstance(value, dict):
        raise NotAllowed("verifying Authorization: claim sel is not an object")
    try:
        selector = LabelSelector.from_json(value)
        selector.validate()
    except Invalid as error:
        raise NotAllowed(f"verifying Authorization: claim sel: {error}") from error
    return selector


_SIGNATURE_ONLY: Final[Any] = {
    "verify_exp": False,
    "verify_iat": False,
    "verify_nbf": False,
    "verify_aud": False,
    "verify_sub": False,
    "verify_jti": False,
}


def _number(payload: Mapping[str, Any], claim: str) -> float | None:
    """Return the number of a claim; None if it is absent or null. Raise ``NotAllowed`` for other values."""
    value = payload.get(claim)
    if value is None:
        return None
    if isinstance(value, int | float) and not isinstance(value, bool):
        # An integer of any length is valid JSON. Python also accepts NaN and Infinity.
        with suppress(OverflowError):
            if math.isfinite(seconds := float(value)):
                return seconds
    raise NotAllowed(f"verifying Authorization: claim {claim} is not a number")


AUTHORIZATION: Final = "authorization"
"""Metadata key of a call's token."""


def authorization_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    """Return the first value of ``authorization`` in a call's metadata. Later values do not count."""
    for name, value in metadata or ():
        if name.lower() == AUTHORIZATION:
            return value if isinstance(value, str) else value.decode("latin-1")
    return None


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """Return call metadata with ``token``; empty metadata for an empty token."""
    return ((AUTHORIZATION, f"Bearer {token}"),) if token else ()


def admission(
    verifier: Verifier, capabilities: Mapping[str, int]
) -> Callable[[str, Iterable[tuple[str, str | bytes]]], None]:
    """Return a function that checks a call by its path and metadata.

    The function raises ``NotAllowed`` as the call's handler would, but before the server stores any bytes of
    the call. ``capabilities`` has the required capability of each method, by its name.
    """

    def admit(path: str, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        verifier.verify(authorization_of(metadata), capabilities[path.rpartition("/")[2]])

    return admit
