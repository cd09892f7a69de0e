"""Public keys of a provider, from its JSON Web Key Set (RFC 7517), and how they verify signatures.

Only keys for RS256 and ES256 are used. No key of a set ever serves as the secret of HS256: with a public key
as the secret, every caller could sign.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple, Protocol

from gazette.auth import Claims
from gazette.client.oidc.documents import base64url
from gazette.errors import Unavailable, not_installed

RSA_BITS: Final = (2048, 8192)
"""Least and greatest length of an RSA key, in bits. Longer keys take milliseconds for each signature."""
_KEYS_MAX: Final = 100
_TOKENS_MAX: Final = 1024
_ALGORITHMS: Final = {"RSA": "RS256", "EC": "ES256"}
_COORDINATE_BYTES: Final = 32


class PublicKey(Protocol):
    def verifies(self, signature: bytes, message: bytes) -> bool:
        """Return True if ``signature`` was made for ``message`` with this key."""
        ...


class _NamedKey(NamedTuple):
    kid: str | None
    algorithm: str
    public: PublicKey


class KeySet:
    """The keys of a provider, and the tokens that they have verified. A new set verifies tokens again."""

    def __init__(self, document: Mapping[str, Any], fetched_at: float) -> None:
        """Take the usable keys of a set. Raise ``Unavailable`` if it has no usable key."""
        self.fetched_at: Final = fetched_at
        entries = document.get("keys")
        entries = entries[:_KEYS_MAX] if isinstance(entries, list) else []
        self._keys = [key for entry in entries if (key := _key_of(entry)) is not None]
        if not self._keys:
            raise Unavailable(
                "the provider's set of keys has none for RS256 or ES256 that can be used"
            )
        self._verified: OrderedDict[tuple[str, int], Claims] = OrderedDict()

    def find(self, algorithm: str, kid: str | None) -> PublicKey | None:
        """Return the key that a token's header names; None if no key fits, or several fit.

        A token without ``kid`` fits each key for its algorithm.
        """
        keys = [
            key.public
            for key in self._keys
            if key.algorithm == algorithm and (kid is None or key.kid == kid)
        ]
        return keys[0] if len(keys) == 1 else None

    def verified(self, token: str, require: int) -> Claims | None:
        """Return the claims of a token that `remember` has kept; None for any other token."""
        return self._verified.get((token, require))

    def remember(self, token: str, require: int, claims: Claims) -> None:
        """Keep the claims of a verified token. Beyond `_TOKENS_MAX` tokens, forget the oldest."""
        self._verified[token, require] = claims
        while len(self._verified) > _TOKENS_MAX:
            self._verified.popitem(last=False)


def require_cryptography() -> None:
    """Raise ``Invalid`` if the package that verifies signatures is not installed."""
    try:
        import cryptography.hazmat.primitives.asymmetric  # noqa: F401
    except ImportError as error:
        raise not_installed("sign-in by OpenID Connect", "cryptography", "oidc") from error


def _key_of(entry: Any) -> _NamedKey | None:
    """Return a key of the set; None for a key of another type or use, and for an unsafe key."""
    if not isinstance(entry, dict):
        return None
    kid, operations = entry.get("kid"), entry.get("key_ops", ["verify"])
    algorithm = _ALGORITHMS.get(str(entry.get("kty")), "")
    if (
        not algorithm
        or entry.get("alg", algorithm) != algorithm
        or entry.get("use", "sig") != "sig"
    ):
        return None
    if not isinstance(operations, list) or "verify" not in operations:
        return None
    if kid is not None and not isinstance(kid, str):
        return None
    with suppress(ValueError):  # Raised for numbers that are malformed or not safe.
        public: PublicKey = _RsaKey(entry) if algorithm == "RS256" else _EcKey(entry)
        return _NamedKey(kid, algorithm, public)
    return None


class _RsaKey:
    def __init__(self, entry: Mapping[str, Any]) -> None:
        """Read modulus and exponent. Raise ``ValueError`` unless both are odd and within bounds."""
        from cryptography.hazmat.primitives.asymmetric import rsa

        modulus, exponent = (int.from_bytes(base64url(entry.get(name))) for name in ("n", "e"))
        least, greatest = RSA_BITS
        is_bounded = least <= modulus.bit_length() <= greatest and 3 <= exponent < 1 << 32
        if not is_bounded or not modulus & exponent & 1:
            raise ValueError("not a safe RSA key")
        self._key = rsa.RSAPublicNumbers(exponent, modulus).public_key()

    def verifies(self, signature: bytes, message: bytes) -> bool:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import padding

        try:
            self._key.verify(signature, message, padding.PKCS1v15(), hashes.SHA256())
        except InvalidSignature:
            return False
        return True


class _EcKey:
    def __init__(self, entry: Mapping[str, Any]) -> None:
        from cryptography.hazmat.primitives.asymmetric import ec

        x, y = (base64url(entry.get(name)) for name in ("x", "y"))
        if entry.get("crv") != "P-256" or len(x) != _COORDINATE_BYTES or len(y) != len(x):
            raise ValueError("not a key of P-256")
        numbers = ec.EllipticCurvePublicNumbers(
            int.from_bytes(x), int.from_bytes(y), ec.SECP256R1()
        )
        self._key = numbers.public_key()

    def verifies(self, signature: bytes, message: bytes) -> bool:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec, utils

        if len(signature) != 2 * _COORDINATE_BYTES:
            return False
        r, s = (int.from_bytes(half) for half in (signature[:32], signature[32:]))
        encoded = utils.encode_dss_signature(r, s)
        try:
            self._key.verify(encoded, message, ec.ECDSA(hashes.SHA256()))
        except InvalidSignature:
            return False
        return True
