"""Verify tokens of a provider and tokens of shared keys: `OidcAuth`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from gazette.auth import LEEWAY_S, Claims, KeyedAuth
from gazette.client.oidc.documents import base64url, require_https, strict_object
from gazette.client.oidc.key_set import require_cryptography
from gazette.client.oidc.provider import OidcProvider
from gazette.client.oidc.roles import names_in, read_roles, rights_of
from gazette.errors import Invalid, NotAllowed

ALGORITHMS: Final = ("RS256", "ES256")
TOKEN_CHARS_MAX: Final = 1 << 14
_HEADER_CHARS_MAX: Final = 1 << 11
_KID_CHARS_MAX: Final = 256
_TYPES: Final = frozenset({"JWT", "AT+JWT", "APPLICATION/AT+JWT"})
"""Values of ``typ`` of access and ID tokens. Any other token, such as a logout token, gives no rights."""


@dataclass(frozen=True, slots=True)
class OidcSettings:
    """The provider of a server's callers, and what its tokens permit. See docs/security.md."""

    issuer: str
    audience: str
    claim: str = "groups"
    jwks_url: str = ""
    roles: Path | None = None


class OidcAuth:
    """Verifies tokens of shared keys and tokens of a provider. Signs with the shared keys.

    The algorithm in a token's header decides which keys verify it: the provider's for RS256 and ES256, the
    shared keys for all others. Shared keys accept neither RS256 nor ES256.
    """

    def __init__(self, keys: KeyedAuth, settings: OidcSettings) -> None:
        """Begin to fetch the provider's keys. Raise ``Invalid`` for settings that cannot be used."""
        if settings.roles is None or not settings.audience or not settings.claim:
            raise Invalid("it needs oidc-audience, oidc-claim and oidc-roles", path="oidc-issuer")
        require_https(settings.issuer, "oidc-issuer")
        if settings.jwks_url:
            require_https(settings.jwks_url, "oidc-jwks-url")
        require_cryptography()
        self._keys = keys
        self._settings = settings
        self._roles = read_roles(settings.roles)
        self._provider = OidcProvider(settings.issuer, settings.jwks_url, keys.clock)

    @property
    def keyless(self) -> bool:
        """True if callers without a token are admitted."""
        return self._keys.keyless

    def sign(self, claims: Claims, lifetime_s: float) -> str:
        return self._keys.sign(claims, lifetime_s)

    def verify(self, authorization: str | None, require: int) -> Claims:
        """Return the claims of the token in an ``Authorization`` header.

        Raise ``NotAllowed`` unless the token is genuine and current, and has every required capability.
        Raise ``Unavailable`` if the keys of the provider are not known now.
        """
        scheme, _, rest = (authorization or "").partition(" ")
        token = rest.strip()
        header = _header_of(token) if scheme.lower() == "bearer" else {}
        if header.get("alg") not in ALGORITHMS:
            return self._keys.verify(authorization, require)
        keys = self._provider.newest()
        claims = keys.verified(token, require)
        if claims is None:
            try:
                claims = self._check(token, header, require)
            except ValueError as error:
                raise NotAllowed(f"verifying Authorization: {error}") from error
            keys.remember(token, require, claims)
        assert claims.expires_at is not None
        if self._keys.clock.now() - LEEWAY_S >= claims.expires_at:
            raise NotAllowed("verifying Authorization: token is expired")
        return claims

    def _check(self, token: str, header: dict[str, Any], require: int) -> Claims:
        """Return the claims of a token of the provider.

        Raise ``ValueError`` for a token that is malformed, forged, or for another purpose. For missing keys
        and missing rights, raise the errors of ``verify``.
        """
        if len(token) > TOKEN_CHARS_MAX:
            raise ValueError(f"token is longer than {TOKEN_CHARS_MAX} characters")
        if "crit" in header:
            raise ValueError("header crit names what is not known here")
        if str(header.get("typ", "JWT")).upper() not in _TYPES:
            raise ValueError("header typ is not that of an access token or an ID token")
        kid = header.get("kid")
        if kid is not None and not (isinstance(kid, str) and len(kid) <= _KID_CHARS_MAX):
            raise ValueError("header kid is not the name of a key")
        signed, _, signature = token.rpartition(".")
        payload = strict_object(base64url(signed.partition(".")[2]))
        # Check the issuer before the key: a token of another issuer must not have keys fetched.
        if payload.get("iss") != self._settings.issuer:
            raise ValueError(f"token is of another issuer (expected {self._settings.issuer})")
        key = self._provider.key(header["alg"], kid, payload.get("iat"))
        if not key.verifies(base64url(signature), signed.encode()):
            raise ValueError("Signature verification failed")
        audience = payload.get("aud")
        if self._settings.audience not in (audience if isinstance(audience, list) else [audience]):
            raise ValueError(f"token is for another audience (expected {self._settings.audience})")
        times: dict[str, Any] = {
            name: payload[name] for name in ("exp", "iat", "nbf") if name in payload
        }
        expires_at = self._keys.claims_of(times).expires_at
        claim = self._settings.claim
        rights = rights_of(self._roles, names_in(payload, claim), claim, require)
        return replace(rights, expires_at=expires_at)


def _header_of(token: str) -> dict[str, Any]:
    """Return a token's header. If it cannot be read, return an empty one: the verifier of shared keys then
    refuses the token."""
    encoded = token.partition(".")[0]
    if len(encoded) > _HEADER_CHARS_MAX:
        return {}
    try:
        return strict_object(base64url(encoded))
    except ValueError:
        return {}
