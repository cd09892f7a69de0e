"""Tokens: what is signed is what is verified, by any of the keys, while it is current."""

from __future__ import annotations

import base64
import json
import math
from typing import Any

import jwt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gazette.auth import (
    Capability,
    Claims,
    KeyedAuth,
    NoAuth,
    StaticToken,
    authorization_of,
    bearer,
)
from gazette.errors import Invalid, NotAllowed
from gazette.protocol.label_set import EVERYTHING, LabelSelector
from gazette.testing.clock import ManualClock
from tests.facts import raises

OLD = base64.b64encode(b"old secret key of 32 bytes......").decode()
NEW = base64.b64encode(b"new secret key of 32 bytes......").decode()


@pytest.fixture
def auth(clock: ManualClock) -> KeyedAuth:
    return KeyedAuth.parse(clock, OLD)


def header(token: str) -> str:
    return f"Bearer {token}"


def test_claims_survive_signing_and_verifying(auth: KeyedAuth, clock: ManualClock) -> None:
    claims = Claims(
        Capability.READ | Capability.APPEND,
        LabelSelector.parse("name:prefix=a/b,env in (x,y),!zone"),
    )
    verified = auth.verify(header(auth.sign(claims, 60)), Capability.READ)
    assert verified.capability == Capability.READ | Capability.APPEND
    assert verified.selector == claims.selector
    assert verified.expires_at == int(clock.now()) + 60


def test_a_token_has_the_claims_which_other_implementations_read(auth: KeyedAuth) -> None:
    token = auth.sign(Claims.of_journal(Capability.READ, "a/journal"), 60)
    payload = json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))
    assert payload["cap"] == 8
    assert payload["sel"]["include"] == {"labels": [{"name": "name", "value": "a/journal"}]}
    assert payload["exp"] - payload["iat"] == 60
    assert jwt.get_unverified_header(token)["alg"] == "HS256"


def test_keys_rotate_without_interruption(clock: ManualClock) -> None:
    before = KeyedAuth.parse(clock, OLD)
    adding = KeyedAuth.parse(clock, f"{OLD}, {NEW}")
    switched = KeyedAuth.parse(clock, f"{NEW}\n{OLD}")
    after = KeyedAuth.parse(clock, NEW)
    claims = Claims(Capability.LIST)
    for signer, verifiers in (
        (before, (before, adding, switched)),
        (adding, (before, adding, switched)),
        (switched, (adding, switched, after)),
        (after, (adding, switched, after)),
    ):
        token = header(signer.sign(claims, 60))
        for verifier in verifiers:
            assert verifier.verify(token, Capability.LIST).capability == Capability.LIST
    # Case: a key that was removed is worth nothing.
    with pytest.raises(NotAllowed, match="verifying Authorization"):
        after.verify(header(before.sign(claims, 60)), Capability.LIST)


def test_hs384_is_verified_too_and_nothing_else_is(auth: KeyedAuth, clock: ManualClock) -> None:
    payload = {"cap": 2, "sel": {}, "exp": clock.now() + 60}
    key = auth.keys[0]
    token = jwt.encode(payload, key + b"longer, for HS384", algorithm="HS384")
    longer = KeyedAuth(clock, (key + b"longer, for HS384",))
    assert longer.verify(header(token), Capability.LIST).selector == EVERYTHING
    for algorithm in ("HS512", "none"):
        secret: Any = None if algorithm == "none" else key * 2
        forged = jwt.encode(payload, secret, algorithm=algorithm)
        with pytest.raises(NotAllowed, match="verifying Authorization"):
            KeyedAuth(clock, (key * 2,)).verify(header(forged), Capability.LIST)


@pytest.mark.parametrize(
    ("claims", "text"),
    [
        ({"cap": 2}, "missing required claim: exp"),
        ({"cap": 2, "exp": -6}, "token is expired"),
        ({"cap": 2, "exp": 60, "iat": 6}, "token used before issued"),
        ({"cap": 2, "exp": 60, "nbf": 6}, "token is not valid yet"),
        ({"cap": "2", "exp": 60}, "claim cap is not an integer"),
        ({"cap": 2, "exp": 60, "sel": "everything"}, "claim sel is not an object"),
        ({"cap": 2, "exp": 60, "sel": {"include": {"labels": [{"name": 1}]}}}, "claim sel"),
        ({"cap": 2, "exp": 60, "sel": {"include": {"labels": [{"name": "?"}]}}}, "claim sel"),
        ({"cap": 2, "exp": 60, "Sel": {"include": {"labels": []}}}, "claim Sel is written sel"),
        ({"CAP": 2, "exp": 60}, "claim CAP is written cap"),
        ({"cap": 2, "exp": 60, "NBF": 5}, "claim NBF is written nbf"),
        ({"cap": 2, "exp": 60, "sel": []}, "claim sel is not an object"),
        ({"cap": 2, "exp": 60, "sel": ""}, "claim sel is not an object"),
        ({"cap": 2, "exp": 60, "sel": 0}, "claim sel is not an object"),
        ({"cap": 2, "exp": 60, "sel": False}, "claim sel is not an object"),
        ({"cap": 2, "exp": 60, "sel": {"includes": {}}}, 'unknown field "includes"'),
        ({"cap": 2, "exp": 60, "sel": {"Include": {"labels": []}}}, 'unknown field "Include"'),
        ({"cap": 2, "exp": 60, "sel": {"include": {"label": []}}}, 'unknown field "label"'),
        ({"cap": 2, "exp": 60, "sel": {"include": []}}, "claim sel"),
        ({"cap": 2, "exp": 60, "sel": {"include": {"labels": ""}}}, "claim sel"),
        (
            {"cap": 2, "exp": 60, "sel": {"exclude": {"labels": [{"name": "nn", "values": "x"}]}}},
            'unknown field "values"',
        ),
        ({"cap": -1, "exp": 60}, "claim cap is not an integer of 32 bits"),
        ({"cap": 1 << 32, "exp": 60}, "claim cap is not an integer of 32 bits"),
        ({"cap": 2.0, "exp": 60}, "claim cap is not an integer of 32 bits"),
        ({"cap": 2, "exp": math.nan}, "claim exp is not a number"),
        ({"cap": 2, "exp": math.inf}, "claim exp is not a number"),
        ({"cap": 2, "exp": 60, "nbf": math.nan}, "claim nbf is not a number"),
    ],
)
def test_what_is_wrong_with_a_token_is_said(
    auth: KeyedAuth, clock: ManualClock, claims: dict[str, Any], text: str
) -> None:
    now = clock.now()
    times: dict[str, Any] = {
        key: now + claims[key] for key in ("exp", "iat", "nbf") if key in claims
    }
    token = jwt.encode({**claims, **times}, auth.keys[0], algorithm="HS256")
    with pytest.raises(NotAllowed, match=text):
        auth.verify(header(token), Capability.LIST)


def test_a_time_too_large_for_any_clock_is_refused(auth: KeyedAuth) -> None:
    token = jwt.encode({"cap": 2, "exp": 10**400}, auth.keys[0], algorithm="HS256")
    with raises(NotAllowed, says="exp"):
        auth.verify(header(token), Capability.LIST)


@pytest.mark.parametrize("sel", [None, {}, {"include": None}, {"include": {"labels": None}}])
def test_a_token_without_a_selector_covers_everything(
    auth: KeyedAuth, clock: ManualClock, sel: object
) -> None:
    payload = {"cap": 2, "exp": clock.now() + 60, "sel": sel}
    token = jwt.encode(payload, auth.keys[0], algorithm="HS256")
    assert auth.verify(header(token), Capability.LIST).selector == EVERYTHING


def test_clocks_may_differ_by_the_leeway(auth: KeyedAuth, clock: ManualClock) -> None:
    token = header(auth.sign(Claims(Capability.LIST), 10))
    clock.jump(-4)
    auth.verify(token, Capability.LIST)
    clock.jump(4 + 10 + 4)
    auth.verify(token, Capability.LIST)
    clock.jump(2)
    with pytest.raises(NotAllowed, match="expired"):
        auth.verify(token, Capability.LIST)


@pytest.mark.parametrize("value", [None, ""])
def test_a_missing_token_is_refused_unless_the_marker_key_is_there(
    auth: KeyedAuth, clock: ManualClock, value: str | None
) -> None:
    with pytest.raises(NotAllowed, match="missing or empty Authorization token"):
        auth.verify(value, Capability.READ)
    lenient = KeyedAuth.parse(clock, f"AA==,{OLD}")
    granted = lenient.verify(value, Capability.READ)
    assert granted == Claims(Capability.READ, EVERYTHING, clock.now() + 3600)
    # Case: the marker is no key, and a wrong token is not a missing one.
    assert lenient.keys == (base64.b64decode(OLD),)
    with pytest.raises(NotAllowed, match="verifying Authorization"):
        lenient.verify(header("x.y.z"), Capability.READ)


@pytest.mark.parametrize("value", ["Basic abc", "Bearer", "Bearer  "])
def test_only_bearer_tokens_are_taken(auth: KeyedAuth, value: str) -> None:
    with pytest.raises(NotAllowed, match=r"expected 'Bearer'"):
        auth.verify(value, Capability.READ)


def test_every_required_capability_must_be_there(auth: KeyedAuth) -> None:
    token = header(auth.sign(Claims(Capability.LIST | Capability.READ), 60))
    auth.verify(token, Capability.LIST | Capability.READ)
    for name in ("APPLY", "APPEND", "REPLICATE"):
        with pytest.raises(NotAllowed, match=f"is missing required {name} capability"):
            auth.verify(token, Capability[name] | Capability.READ)
    with pytest.raises(NotAllowed, match="is missing required capability"):
        auth.verify(token, Capability.APPLICATION)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at least one key must be provided"),
        ("AA==", "at least one key must be provided"),
        (f"{OLD} not-base64!", "key at index 1 is not valid base64"),
        (f"{OLD} {base64.b64encode(bytes(31)).decode()}", "key at index 1 has 31 bytes"),
        ("AAA=", "key at index 0 has 2 bytes"),
    ],
)
def test_keys_that_cannot_be_used_are_refused(clock: ManualClock, text: str, message: str) -> None:
    with pytest.raises(Invalid, match=message):
        KeyedAuth.parse(clock, text)


def test_keys_do_not_show_in_a_log(auth: KeyedAuth) -> None:
    assert "secret" not in repr(auth)
    assert "abc" not in repr(StaticToken("abc"))


def test_without_keys_everything_is_allowed_and_nothing_is_sent() -> None:
    assert NoAuth().sign(Claims(Capability.ALL), 60) == ""
    assert NoAuth().verify(None, Capability.APPLY) == Claims(Capability.APPLY, EVERYTHING, None)
    assert bearer("") == ()
    assert StaticToken("t").sign(Claims(0), 1) == "t"


def test_only_the_first_authorization_value_counts() -> None:
    metadata = (("x", "y"), ("Authorization", "Bearer a"), ("authorization", "Bearer b"))
    assert authorization_of(metadata) == "Bearer a"
    assert authorization_of((("authorization", b"Bearer c"),)) == "Bearer c"
    assert authorization_of(None) is None


@given(st.binary(max_size=40), st.integers(0, 39))
def test_a_token_that_was_tampered_with_is_refused(noise: bytes, at: int) -> None:
    """No change of any character of a token's payload or signature goes unnoticed."""
    auth = KeyedAuth(ManualClock(), (b"k" * 32,))
    head, _, rest = auth.sign(Claims(Capability.READ), 60).partition(".")
    changed = rest[:at] + base64.urlsafe_b64encode(noise).decode() + rest[at + len(noise) :]
    if changed == rest:
        return
    with pytest.raises(NotAllowed):
        auth.verify(header(f"{head}.{changed}"), Capability.READ)
