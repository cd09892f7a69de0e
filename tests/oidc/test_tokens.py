"""Tokens of a provider: which are taken, what they permit, and what is wrong with all others."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import jwt
import pytest
from cryptography.hazmat.primitives import serialization

from gazette.auth import Capability, Claims
from gazette.client.oidc.roles import read_roles
from gazette.client.oidc.verifier import OidcAuth
from gazette.errors import Invalid, NotAllowed
from gazette.protocol.label_set import EVERYTHING, LabelSelector
from gazette.testing.clock import ManualClock
from tests.facts import raises
from tests.oidc.conftest import SECRET, auth_of
from tests.support.oidc_provider import JWKS, Provider, SigningKey, base64url

Forge = Callable[[Provider], str]


def verify(auth: OidcAuth, token: str, require: int = Capability.READ) -> Claims:
    return auth.verify(f"Bearer {token}", require)


def claims(**more: Any) -> Forge:
    """Return a maker of tokens that are signed as they should be."""
    return lambda provider: provider.token(**more)


def header(**more: Any) -> Forge:
    return lambda provider: provider.keys[0].token(provider.claims(), **more)


def payload(text: str) -> Forge:
    """Return a maker of tokens whose payload is this text; ISS and EXP are replaced by right values."""

    def make(provider: Provider) -> str:
        right = text.replace("ISS", f'"iss":"{provider.issuer}","aud":"gazette"')
        exp = int(provider.clock.now()) + 60
        return provider.keys[0].token(right.replace("EXP", str(exp)).encode())

    return make


def by_public_key(form: str) -> Forge:
    """Return a maker of tokens of HS256, whose secret is the provider's public key."""

    def make(provider: Provider) -> str:
        key = provider.keys[0]
        if form == "modulus":
            secret = key.jwk["n"].encode()
        else:
            formats = serialization.PublicFormat
            secret = key.private.public_key().public_bytes(
                getattr(serialization.Encoding, form),
                formats.PKCS1 if form == "DER" else formats.SubjectPublicKeyInfo,
            )
        head = base64url(json.dumps({"alg": "HS256", "kid": key.kid}).encode())
        rights = provider.claims(cap=int(Capability.ALL))
        signed = f"{head}.{base64url(json.dumps(rights).encode())}"
        digest = hmac.new(secret, signed.encode(), hashlib.sha256).digest()
        return f"{signed}.{base64url(digest)}"

    return make


def resigned(change: Callable[[str, str, str], tuple[str, str, str]]) -> Forge:
    return lambda provider: ".".join(change(*provider.token().split(".")))


def unsigned(algorithm: str) -> Forge:
    def make(provider: Provider) -> str:
        head = base64url(json.dumps({"alg": algorithm, "kid": "first"}).encode())
        return f"{head}.{base64url(json.dumps(provider.claims(cap=-1)).encode())}."

    return make


def of_another_key(provider: Provider) -> str:
    return SigningKey.rsa("first").token(provider.claims())


def with_its_own_key(provider: Provider) -> str:
    key = SigningKey.rsa("mine")
    return key.token(provider.claims(), jwk=key.jwk, kid="first")


def der_signature(provider: Provider) -> str:
    from cryptography.hazmat.primitives.asymmetric import ec, utils

    signed, _, signature = provider.keys[1].token(provider.claims()).rpartition(".")
    raw = jwt.utils.base64url_decode(signature)
    assert isinstance(provider.keys[1].private, ec.EllipticCurvePrivateKey)
    r, s = int.from_bytes(raw[:32]), int.from_bytes(raw[32:])
    return f"{signed}.{base64url(utils.encode_dss_signature(r, s))}"


def cross(algorithm: str, key: int, kid: str) -> Forge:
    return lambda provider: provider.keys[key].token(provider.claims(), alg=algorithm, kid=kid)


DEEP: Final = '{"a":' + "[" * 5_000 + "]" * 5_000 + "}"

FORGED: Final[dict[str, tuple[Forge, str]]] = {
    "HS256 by the public key, PEM": (by_public_key("PEM"), "Signature"),
    "HS256 by the public key, DER": (by_public_key("DER"), "Signature"),
    "HS256 by the modulus": (by_public_key("modulus"), "Signature"),
    "none": (unsigned("none"), "alg"),
    "none as RS256": (unsigned("RS256"), "Signature"),
    "RS512": (unsigned("RS512"), "alg"),
    "rs256": (unsigned("rs256"), "alg"),
    "RS256 that names the key of ES256": (cross("RS256", 0, "second"), "no key second"),
    "ES256 that names the key of RS256": (cross("ES256", 1, "first"), "no key first"),
    "RS256 by the key of ES256": (cross("RS256", 1, "first"), "Signature"),
    "ES256 by the key of RS256": (cross("ES256", 0, "second"), "Signature"),
    "another key of that name": (of_another_key, "Signature"),
    "a key in the header": (with_its_own_key, "Signature"),
    "ES256 in DER": (der_signature, "Signature"),
    "no signature": (resigned(lambda a, b, c: (a, b, "")), "Signature"),
    "cut signature": (resigned(lambda a, b, c: (a, b, c[:-4])), ""),
    "padding": (resigned(lambda a, b, c: (a, b, c + "==")), "base64url"),
    "another alphabet": (resigned(lambda a, b, c: (a, b, "+" + c[1:])), "base64url"),
    "bits that mean nothing": (
        resigned(lambda a, b, c: (a, b, c[:-1] + chr(ord(c[-1]) + 1))),
        "base64",
    ),
    "four parts": (resigned(lambda a, b, c: (a, b + "." + b, c)), "base64url"),
    "unknown crit": (header(crit=["b64"], b64=False), "crit"),
    "empty crit": (header(crit=[]), "crit"),
    "a logout token": (header(typ="logout+jwt"), "typ"),
    "kid that is a number": (header(kid=1), "kid"),
    "kid that is long": (header(kid="k" * 300), "kid"),
    "oversized": (claims(filler="x" * 20_000), "longer"),
    "another issuer": (claims(iss="https://other.example"), "issuer"),
    "issuer with a slash": (lambda p: p.token(iss=p.issuer + "/"), "issuer"),
    "no issuer": (claims(iss=None), "issuer"),
    "issuers": (lambda p: p.token(iss=[p.issuer]), "issuer"),
    "another audience": (claims(aud="other"), "audience"),
    "no audience": (claims(aud=None), "audience"),
    "audience that holds ours": (claims(aud="gazette2"), "audience"),
    "audience of another type": (claims(aud={"gazette": 1}), "audience"),
    "expired": (lambda p: p.token(exp=p.clock.now() - 6), "expired"),
    "without an end": (claims(exp=None), "exp"),
    "end that is text": (claims(exp="9999999999"), "exp"),
    "end that is true": (claims(exp=True), "exp"),
    "end beyond floats": (claims(exp=10**400), "exp"),
    "end of too many digits": (payload('{ISS,"exp":' + "9" * 5_000 + "}"), "digits"),
    "end that is NaN": (payload('{ISS,"exp":NaN}'), "NaN"),
    "end that is infinite": (payload('{ISS,"exp":1e999}'), "exp"),
    "not valid yet": (lambda p: p.token(nbf=p.clock.now() + 6), "not valid yet"),
    "of the future": (lambda p: p.token(iat=p.clock.now() + 6), "before issued"),
    "two issuers": (payload('{ISS,"exp":EXP,"iss":"https://other.example"}'), "repeated"),
    "two ends": (payload('{ISS,"exp":1,"exp":EXP}'), "repeated"),
    "a list": (payload("[1]"), "object"),
    "no JSON": (payload("{"), "Expecting"),
    "no UTF-8": (lambda p: p.keys[0].token(b"\xff{}"), "utf-8"),
    "deep": (payload(DEEP), ""),
    "no role": (claims(groups=None), "READ"),
    "unknown role": (claims(groups=["operator", "Operators", "operators "]), "READ"),
    "roles of another type": (claims(groups={"operators": True}), "groups"),
    "roles that are numbers": (claims(groups=["operators", 1]), "groups"),
    "role without the capability": (claims(groups=["brokers"]), "READ"),
    "rights of its own": (claims(groups=[], cap=int(Capability.ALL)), "READ"),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_token_that_is_not_right_is_refused(
    auth: OidcAuth, provider: Provider, what: str
) -> None:
    forge, says = FORGED[what]
    with raises(NotAllowed, says=says):
        verify(auth, forge(provider))
    assert provider.asked(JWKS) <= 2


@pytest.mark.parametrize("key", [0, 1])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"typ": None},
        {"typ": "at+jwt"},
        {"kid": None},
    ],
)
def test_a_right_token_is_taken(
    auth: OidcAuth, provider: Provider, key: int, more: dict[str, Any]
) -> None:
    token = provider.keys[key].token(provider.claims(), **more)
    verified = verify(auth, token)
    assert verified.selector == EVERYTHING
    assert verified.capability == sum(
        Capability[name] for name in ("LIST", "APPLY", "READ", "APPEND")
    )
    assert verified.expires_at == int(provider.clock.now()) + 600
    assert verify(auth, token) == verified
    assert provider.asked(JWKS) == 1


def test_one_of_several_audiences_suffices(auth: OidcAuth, provider: Provider) -> None:
    verify(auth, provider.token(aud=["other", "gazette"]))


@pytest.mark.parametrize("require", [Capability.REPLICATE, Capability.APPLICATION, Capability.ALL])
def test_only_what_is_mapped_is_permitted(
    auth: OidcAuth, provider: Provider, require: Capability
) -> None:
    with raises(NotAllowed, says="groups"):
        verify(auth, provider.token(), require)
    if require == Capability.REPLICATE:
        assert verify(auth, provider.token(groups=["brokers"]), require).capability == require


def test_rights_of_roles_add_up_and_no_more(auth: OidcAuth, provider: Provider) -> None:
    """A right is for the selectors of those roles that give it."""
    token = provider.token(groups=["sales", "orders"])
    both = LabelSelector.parse("name:prefix=orders/,name=sales/all")
    assert verify(auth, token, Capability.READ) == Claims(
        Capability.LIST | Capability.READ, both, provider.clock.now() + 600
    )
    appends = verify(auth, token, Capability.APPEND)
    assert appends.selector == LabelSelector.parse("name=sales/all")
    # Case: one of the roles is for everything.
    all_of = provider.token(groups=["orders", "operators"])
    assert verify(auth, all_of).selector == EVERYTHING


def test_a_token_that_was_verified_ends_in_time(
    auth: OidcAuth, provider: Provider, clock: ManualClock
) -> None:
    token = provider.token(exp=int(clock.now()) + 60)
    for _ in range(2):
        verify(auth, token)
    clock.jump(64)
    verify(auth, token)
    clock.jump(2)
    with raises(NotAllowed, says="expired"):
        verify(auth, token)


def test_tokens_of_shared_keys_stay(auth: OidcAuth, clock: ManualClock) -> None:
    token = auth.sign(Claims(Capability.REPLICATE), 60)
    assert jwt.decode(token, SECRET, algorithms=["HS256"], options={"verify_exp": False})
    assert verify(auth, token, Capability.REPLICATE).capability == Capability.REPLICATE
    for authorization in (None, "", "Basic x", "Bearer ", "Bearer nonsense", "Bearer a.b.c"):
        with raises(NotAllowed):
            auth.verify(authorization, Capability.READ)
    assert not auth.keyless


@pytest.mark.parametrize(
    ("claim", "value"),
    [
        ("realm_access.roles", {"realm_access": {"roles": ["operators"]}}),
        ("https://example.com/roles", {"https://example.com/roles": ["operators"]}),
        ("sub", {"sub": "operators"}),
        ("scope", {"scope": "openid operators"}),
    ],
)
def test_claims_of_roles(
    provider: Provider, roles: Path, clock: ManualClock, claim: str, value: dict[str, Any]
) -> None:
    auth = auth_of(provider, roles, clock, claim=claim)
    verify(auth, provider.token(groups=None, **value))
    with raises(NotAllowed, says=claim):
        verify(auth, provider.token())


def test_a_name_with_spaces_is_one_name(
    provider: Provider, roles: Path, clock: ManualClock
) -> None:
    auth = auth_of(provider, roles, clock, claim="name")
    with raises(NotAllowed, says="name"):
        verify(auth, provider.token(name="me operators"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no roles"),
        ("roles: []", "no roles"),
        ("roles: {a: b}", "list"),
        ("roles: [{role: a}]", "cap"),
        ("roles: [{cap: [READ]}]", "role"),
        ("roles: [{role: a, cap: []}]", "cap"),
        ("roles: [{role: a, cap: [ALL]}]", "ALL"),
        ("roles: [{role: a, cap: [read]}]", "read"),
        ("roles: [{role: a, cap: [-1]}]", "-1"),
        ("roles: [{role: a, cap: [2]}]", "2"),
        ("roles: [{role: a, cap: [65537]}]", "65537"),
        ("roles: [{role: a, cap: [READ], select: x}]", "select"),
        ("roles: [{role: a, cap: [READ], sel: '?'}]", "selector"),
        ("roles: [{role: a, cap: [READ], sel: '!env'}]", "exclude"),
        ("roles: [{role: a, cap: [READ], sel: 'env=x,name=y'}]", "one label"),
        (
            "roles: [{role: a, cap: [READ], sel: env=x}, {role: b, cap: [READ], sel: name=y}]",
            "one label",
        ),
        ("roles: [{role: a, cap: [READ], cap: [APPEND]}]", "more than once"),
        ("a: [", "YAML"),
    ],
)
def test_files_of_roles_that_cannot_be_used(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "roles.yaml"
    path.write_text(text)
    with raises(Invalid, says=says):
        read_roles(path)


def test_capabilities_of_applications(tmp_path: Path) -> None:
    path = tmp_path / "roles.yaml"
    path.write_text("roles: [{role: a, cap: [READ, 65536, 131072]}]")
    assert read_roles(path)[0].capability == Capability.READ | 3 << 16
    with raises(Invalid, says="absent"):
        read_roles(tmp_path / "absent")
