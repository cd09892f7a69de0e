"""Secrets that tests plant, the places that they are planted in, and the look for them."""

from __future__ import annotations

import base64
import json
import string
from collections.abc import Callable
from typing import Final
from urllib.parse import quote, quote_plus

from hypothesis import strategies as st

NAMES: Final = [
    "password", "PASSWORD", "PGPASSWORD", "db.password", "passwd", "passphrase", "pwd", "secret",
    "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "aws_access_key_id", "auth-keys", "auth_keys",
    "BROKER_AUTH_KEYS", "broker.auth-key", "consumer.auth-token", "AuthToken", "token", "apiKey",
    "api_key", "X-Api-Key", "AccountKey", "AZURE_STORAGE_ACCOUNT_KEY", "SharedAccessKey",
    "SharedAccessSignature", "private_key", "signing-keys", "encryption_key", "credentials",
    "client_secret", "sig", "X-Amz-Signature", "X-Amz-Credential", "X-Goog-Signature", "cookie",
    "Set-Cookie", "Authorization", "authorization", "proxy-authorization", "DB_PASS", "sas_token",
]  # fmt: skip
"""Names that mean a secret."""

_FIRST: Final = string.ascii_letters + string.digits
_LINE: Final = _FIRST + " +/=_-.:,;@!?#$%^&*()[]{}<>|~'\"\\`äß漢"


def word(low: int = 6, high: int = 12) -> st.SearchStrategy[str]:
    """Draw a word too long for a part of it to be in the text by chance."""
    return st.text(_FIRST, min_size=low, max_size=high)


def _of(alphabet: str) -> st.SearchStrategy[str]:
    body = st.text(alphabet, min_size=10, max_size=40)
    return st.builds(lambda a, text, z: f"{a}{text}{z}", word(), body, word())


KEYS: Final = st.binary(min_size=24, max_size=48).map(lambda key: base64.b64encode(key).decode())
PHRASES: Final = st.lists(word(), min_size=2, max_size=5).map(" ".join)
SECRETS: Final = st.one_of(KEYS, PHRASES, _of(_LINE), _of(_FIRST), _of(_FIRST + "-._~!$*+,;=:@/"))


def pem(secret: str) -> str:
    """Return a key in PEM."""
    body = base64.b64encode(secret.encode() * 8).decode()
    lines = "\n".join(body[at : at + 64] for at in range(0, len(body), 64))
    return f"-----BEGIN RSA PRIVATE KEY-----\n{lines}\n-----END RSA PRIVATE KEY-----\n"


FORMS: Final[dict[str, Callable[[str], str]]] = {
    "user of a URL": lambda s: f"http://root:{quote(s, safe='')}@etcd:2379",
    "user of a URL, as it is": lambda s: f"postgresql://u:{s}@host:5432/db?x=1",
    "user without a password": lambda s: f"https://{quote(s, safe='')}@github.com/x",
    "second of several URLs": lambda s: f"http://a:1,http://u:{quote(s, safe='')}@b:2",
    "query": lambda s: f"https://h/p?a=1&sig={quote(s, safe='')}&b=2",
    "query, plus": lambda s: f"s3://bucket/prefix/?key={quote_plus(s)}",
    "query in a query": lambda s: "https://h/?u=" + quote(f"https://i/?t={quote(s)}", safe=""),
    "DSN of Go": lambda s: f"root:{s}@tcp(127.0.0.1:3306)/db",
    "DSN": lambda s: f"host=h dbname=x password='{s}' user=u",
    "words": lambda s: f"the password is {s}",
    "header": lambda s: f"Authorization: {s}",
    "bearer": lambda s: f"Bearer {s}",
    "environment": lambda s: f"DB={s}",
    "JSON": lambda s: json.dumps({"key": s}),
    "JSON in JSON": lambda s: json.dumps({"msg": json.dumps({"a": s, "other": 1})}),
    "token": lambda s: f"eyJhbGciOiJIUzI1NiJ9.{base64.urlsafe_b64encode(s.encode()).decode()}.c2ln",
    "PEM": pem,
    "PEM without its begin": lambda s: pem(s).partition("\n")[2],
    "lines": lambda s: f"a\n{s}\nb",
}
"""Texts that have a secret, and show that they may."""


def written(secret: str) -> set[str]:
    """Return all forms that the secret may have in text, and long parts of them."""
    made = {
        secret, quote(secret, safe=""), quote(secret), quote_plus(secret), quote(quote(secret)),
        json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1], repr(secret)[1:-1],
        json.dumps(json.dumps(secret)[1:-1])[1:-1], repr(secret.encode())[2:-1],
        base64.b64encode(secret.encode()).decode().rstrip("=")[:-1],
    }  # fmt: skip
    parts = {secret[:6], secret[-6:]} | {one for one in secret.split() if len(one) >= 6}
    return made | parts


def require_absent(secret: str, text: str, template: str = "") -> None:
    """Require that no form of the secret is in the text.

    ``template``: the text with another secret, which may have a part of this one by chance.
    """
    for form in written(secret):
        assert form not in text or form in template, text
    for line in pem(secret).splitlines()[1:-1]:
        assert line[:16] not in text, text
