"""Secrets that were planted in text of any form are not in what leaves the house."""

from __future__ import annotations

import base64
import json
import shlex
import string
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette.runtime.redaction import REDACTED, redact, redact_setting

BEFORE = "journal a/journal at http://broker:8080 offset=12\n"
AFTER = "\nlast line of the log, at http://[::1]:8081/debug offset=13\n"

NAMES = [
    "password", "PASSWORD", "PGPASSWORD", "db.password", "passwd", "passphrase", "pwd", "secret",
    "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "aws_access_key_id", "auth-keys", "auth_keys",
    "BROKER_AUTH_KEYS", "broker.auth-key", "consumer.auth-token", "AuthToken", "token", "apiKey",
    "api_key", "X-Api-Key", "AccountKey", "AZURE_STORAGE_ACCOUNT_KEY", "SharedAccessKey",
    "SharedAccessSignature", "private_key", "signing-keys", "encryption_key", "credentials",
    "client_secret", "sig", "X-Amz-Signature", "X-Amz-Credential", "X-Goog-Signature", "cookie",
    "Set-Cookie", "Authorization", "authorization", "proxy-authorization", "DB_PASS", "sas_token",
]  # fmt: skip

FIRST = string.ascii_letters + string.digits
LINE = FIRST + " +/=_-.:,;@!?#$%^&*()[]{}<>|~'\"\\`äß漢"


def of(alphabet: str) -> st.SearchStrategy[str]:
    body = st.text(alphabet, min_size=10, max_size=40)
    return st.builds(lambda a, text, z: f"{a}{text}{z}", word(), body, word())


def word(low: int = 6, high: int = 12) -> st.SearchStrategy[str]:
    """Draw a word too long for a part of it to be in the text by chance."""
    return st.text(FIRST, min_size=low, max_size=high)


KEYS = st.binary(min_size=12, max_size=48).map(lambda key: base64.b64encode(key).decode())
PHRASE = st.lists(word(), min_size=2, max_size=5).map(" ".join)
ANY = st.one_of(KEYS, PHRASE, of(LINE), of(FIRST))
URL_SAFE = of(FIRST + "-._~!$*+,;=:@/")


def pem(key: str) -> str:
    body = base64.b64encode(key.encode() * 8).decode()
    lines = "\n".join(body[at : at + 64] for at in range(0, len(body), 64))
    return f"-----BEGIN RSA PRIVATE KEY-----\n{lines}\n-----END RSA PRIVATE KEY-----\n"


def dsn_value(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


SHAPES: dict[str, Callable[[str, str], str]] = {
    "environment": lambda n, s: f"{n}={s}",
    "export": lambda n, s: f"export {n}={shlex.quote(s)}",
    "ini": lambda n, s: f"{n} = {s}",
    "header": lambda n, s: f"{n}: {s}",
    "header at a proxy": lambda n, s: f"> {n}: Bearer {s}",
    "yaml": lambda n, s: yaml.safe_dump({n: s}, width=1000, allow_unicode=True),
    "yaml within": lambda n, s: yaml.safe_dump({"a": [{n: s}]}, width=1000),
    "yaml block": lambda n, s: f"x:\n  {n}: |-\n    {s}\n    {s}\n  other: 1",
    "yaml of a pod": lambda n, s: yaml.safe_dump({"env": [{"name": n, "value": s}]}, width=1000),
    "json": lambda n, s: json.dumps({n: s, "other": 1}),
    "json, indented": lambda n, s: json.dumps({"a": {n: s}}, indent=2, ensure_ascii=False),
    "json in json": lambda n, s: json.dumps({"msg": json.dumps({n: s, "other": 1})}),
    "json in json in json": lambda n, s: json.dumps(json.dumps({"msg": json.dumps({n: s})})),
    "json of a pod": lambda n, s: json.dumps([{"name": n, "value": s}], indent=1),
    "repr": lambda n, s: repr({n: s, "other": 1}),
    "repr of bytes": lambda n, s: repr({n: s.encode(), "other": 1}),
    "repr of headers": lambda n, s: repr([(n, s), ("other", 1)]),
    "repr of an object": lambda n, s: f"Flags({n}={s!r}, other=1)",
    "log": lambda n, s: f"2026-11-22T10:00:00Z level=info {n}={json.dumps(s)} msg=x",
    "log in json": lambda n, s: json.dumps({"msg": f"begun with {n}={s}", "level": "info"}),
    "flag": lambda n, s: f"gazette serve --{n} {shlex.quote(s)} --broker.port 8080",
    "flag with =": lambda n, s: f"gazette serve --{n}={shlex.quote(s)} --broker.port 8080",
    "flag, joined": lambda n, s: f"gazette serve --{n} {s}",
    "arguments": lambda n, s: f"argv: {['serve', f'--{n}', s, '--broker.port', '1']!r}",
    "arguments with =": lambda n, s: f"argv: {['serve', f'--{n}={s}', '--broker.port', '1']!r}",
    "arguments in json": lambda n, s: json.dumps({"args": ["serve", f"--{n}", s, "--x"]}),
    "go map": lambda n, s: f"map[{n}:{s} other:1]",
    "go struct": lambda n, s: f"{{Address:http://x {n}:{s}}}",
    "dsn": lambda n, s: f"host=h dbname=x {n}={dsn_value(s)} user=u",
    "query": lambda n, s: f"GET https://h/p?a=1&{n}={quote(s, safe='')}&b=2 200",
    "query, plus": lambda n, s: f"'https://h/p?{n}={quote_plus(s)}' refused",
    "query in json": lambda n, s: json.dumps({"url": f"https://h/p?{n}={quote(s, safe='')}&b=2"}),
    "query in a query": lambda n, s: "https://h/?u=" + quote(f"https://i/?{n}={quote(s)}", safe=""),
    "xml": lambda n, s: f"<x><{n}>{s.replace('&', '&amp;').replace('<', '&lt;')}</{n}></x>",
}


def forms(secret: str) -> set[str]:
    """Return all forms that the secret may have in text, and long parts of them."""
    made = {
        secret, quote(secret, safe=""), quote(secret), quote_plus(secret), quote(quote(secret)),
        json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], repr(secret)[1:-1],
        json.dumps(json.dumps(secret)[1:-1])[1:-1], repr(secret.encode())[2:-1],
    }  # fmt: skip
    return made | {secret[:6], secret[-6:]} | {one for one in secret.split() if len(one) >= 6}


def require_absent(secret: str, text: str, template: str = "") -> None:
    """Require that no form of the secret is in the text.

    ``template``: the text with another secret, which may have a part of this one by chance.
    """
    for form in forms(secret):
        assert form not in text or form in template, text


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=6, deadline=None)
@given(name=st.sampled_from(NAMES), secret=ANY)
def test_a_named_secret_is_taken_out(shape: str, name: str, secret: str) -> None:
    text = SHAPES[shape](name, secret)
    redacted = redact(BEFORE + text + AFTER)
    require_absent(secret, redacted, BEFORE + SHAPES[shape](name, "x") + AFTER)
    assert REDACTED in redacted
    assert redacted.startswith(BEFORE)
    if not set(secret) & set("'\"`[](){}<>|"):
        assert redacted.endswith(AFTER)


LISTS: dict[str, Callable[[str, list[str]], str]] = {
    "environment": lambda n, keys: f"{n}={','.join(keys)}",
    "ini": lambda n, keys: f"{n} = {', '.join(keys)}",
    "continued lines": lambda n, keys: f"{n} = " + ",\n    ".join(keys) + "\nx = 1",
    "continued lines of yaml": lambda n, keys: f"a:\n  {n}: " + ",\n    ".join(keys) + "\n  x: 1",
    "flag": lambda n, keys: f"serve --{n} {','.join(keys)} --x 1",
    "flag, with blanks": lambda n, keys: f"serve --{n} {', '.join(keys)} --x 1",
    "json": lambda n, keys: json.dumps({n: keys, "x": 1}),
    "json, indented": lambda n, keys: json.dumps({n: keys, "x": 1}, indent=2),
    "json in json": lambda n, keys: json.dumps(json.dumps({n: keys})),
    "yaml": lambda n, keys: yaml.safe_dump({n: keys, "x": 1}),
    "yaml within": lambda n, keys: yaml.safe_dump({"a": {n: keys, "x": 1}}, indent=4),
    "repr": lambda n, keys: repr({n: tuple(keys), "x": 1}),
    "repr of an object": lambda n, keys: f"Flags({n}={keys!r}, x=1)",
    "nested": lambda n, keys: json.dumps({n: [{"id": 1, "k": key} for key in keys]}, indent=1),
}


@pytest.mark.parametrize("shape", LISTS)
@settings(max_examples=6, deadline=None)
@given(name=st.sampled_from(NAMES), keys=st.lists(KEYS, min_size=2, max_size=4))
def test_every_key_of_a_list_is_taken_out(shape: str, name: str, keys: list[str]) -> None:
    redacted = redact(BEFORE + LISTS[shape](name, keys) + AFTER)
    for key in keys:
        require_absent(key, redacted, BEFORE + LISTS[shape](name, ["x"]) + AFTER)
    assert redacted.startswith(BEFORE)
    assert redacted.endswith(AFTER)


UNNAMED: dict[str, Callable[[str], str]] = {
    "user of a URL": lambda s: f"etcd at http://root:{quote(s, safe='')}@etcd:2379 is away",
    "user of a URL, as it is": lambda s: f"dial postgresql://u:{s}@host:5432/db?x=1 failed",
    "URL in json": lambda s: json.dumps({"url": f"s3://key:{s}@bucket/prefix/", "x": 1}),
    "URL in a URL": lambda s: "http://h/?u=" + quote(f"postgresql://u:{s}@h/db", safe=""),
    "several URLs": lambda s: f"--etcd.address http://u:{s}@a:1,http://u:{s}@b:2",
    "user without a password": lambda s: f"https://{quote(s, safe='')}@github.com/x",
    "DSN of Go": lambda s: f"connect root:{s}@tcp(127.0.0.1:3306)/db",
    "bearer": lambda s: f"sent Bearer {s.replace('/', '_')} to it",
    "basic": lambda s: f"curl -H 'Authorization: Basic {base64.b64encode(s.encode()).decode()}'",
    "PEM": pem,
    "PEM in json": lambda s: json.dumps({"file": pem(s), "x": 1}),
    "PEM, its end missing": lambda s: pem(s).rpartition("-----END")[0],
    "PEM, its begin missing": lambda s: pem(s).partition("\n")[2],
    "PEM in a log": lambda s: "".join(f"10:00 broker: {line}\n" for line in pem(s).splitlines()),
}


@pytest.mark.parametrize("shape", UNNAMED)
@settings(max_examples=6, deadline=None)
@given(secret=URL_SAFE)
def test_a_secret_that_has_no_name_is_taken_out(shape: str, secret: str) -> None:
    text = UNNAMED[shape](secret)
    redacted = redact(BEFORE + text + AFTER)
    require_absent(secret, redacted, BEFORE + UNNAMED[shape]("x") + AFTER)
    encoded = base64.b64encode(secret.encode()).decode()
    assert encoded not in redacted
    if "PEM" in shape:
        body = "".join(line for line in pem(secret).splitlines() if "-----" not in line)
        for at in range(0, len(body) - 16, 16):
            assert body[at : at + 16] not in redacted
    assert redacted.startswith(BEFORE)
    assert redacted.endswith(AFTER)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(["'", '"', "\\", "[", "]", "{", "}", ":", "=", "://", "@", "\n", " "]),
            st.sampled_from(
                ["password", "--token", "-----BEGIN X-----", "-----END X-----", "?sig="]
            ),
            st.text(max_size=3),
        ),
        max_size=30,
    ).map("".join)
)
def test_any_text_is_read(text: str) -> None:
    once = redact(text)
    assert redact(once).count("\n") <= text.count("\n")


@pytest.mark.parametrize(
    "unit",
    ["password=[", "token: '", "a", "eyJ", "-----BEGIN A-----", "u:p@", "://", '"', "-", "="],
)
def test_long_text_takes_time_in_proportion(unit: str) -> None:
    """A page of a member has up to 64 MiB. (The time limit of tests is what this would run into.)"""
    redact(unit * (200_000 // len(unit)))


@pytest.mark.parametrize(
    "text",
    [
        "journal a/journal at http://broker:8080 offset=12 tokens, keys and a bearer of news",
        "X-Amz-Date=1 s3://bucket/prefix/?profile=x&endpoint=http://h:1",
        "0000000000000000-00000000000000ff-0123456789abcdef0123456789abcdef01234567.zst",
        "key=/gazette/hints/shard-1.primary monkey: 3 sigma=1 passes: 4 design=x",
        '{"name": "a/journal", "labels": [{"name": "key", "value": "x"}], "etcd": "http://h:2379"}',
        "grpc_server_handled_total{grpc_code=\"Unauthenticated\"} 5",
        "a mail to someone@example.com at 10:30:05 about s3://bucket/a@b",
    ],
)  # fmt: skip
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("GET https://h/p?a=1&sig=abcdef&b=2 200", "GET https://h/p?a=1&sig=*&b=2 200"),
        ('{"token": "a\\"b", "n": 1, "keys": 2}', '{"token": "*", "n": 1, "keys": 2}'),
        ('{"auth_keys": ["a", "b"], "n": 1}', '{"auth_keys": "*", "n": 1}'),
        ('{"password": null, "secret": 7}', '{"password": null, "secret": "*"}'),
        ("serve --x.auth-keys a,b --broker.port 80", "serve --x.auth-keys * --broker.port 80"),
        ("argv ['--auth-token', 'a b', '--x']", "argv ['--auth-token', '*', '--x']"),
        ("http://u:p@a:1,http://u:p@b:2", "http://*@a:1,http://*@b:2"),
        (
            "see http://a:1/x and postgresql://u:p w@h/d",
            "see http://a:1/x and postgresql://*@h/d",
        ),
        ("key: |\n  x\npassword: |\n  a\n  b\nc: 1", "key: |\n  x\npassword: *\nc: 1"),
        ("auth-keys:\n- a\n- b\nc:\n- 1", "auth-keys:*\nc:\n- 1"),
        ("auth-keys: a,\n  b\nc: 1", "auth-keys: *\nc: 1"),
        ("password: a\n  at x", "password: *\n  at x"),
    ],
)
def test_no_more_is_taken_out_than_needed(text: str, left: str) -> None:
    assert redact(text) == left.replace("*", REDACTED)


def test_settings_are_redacted_whole_by_their_name() -> None:
    assert redact_setting("db-password", "any, thing\nof\n several lines") == REDACTED
    assert redact_setting("db-password", "") == ""
    assert redact_setting("dsn", "postgresql://u:p@h/db") == f"postgresql://{REDACTED}@h/db"
    assert redact_setting("address", "http://host:1") == "http://host:1"
