"""Names, labels, numbers, times and YAML of strangers: read, or refused by one kind of error, in time."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from unicodedata import category

import pytest

from gazette.auth import Claims, KeyedAuth
from gazette.broker.http.ranges import Unsatisfiable, parse_range, parse_tags
from gazette.client.oidc.verifier import OidcAuth, OidcSettings
from gazette.config.ini_file import ini_entries
from gazette.config.yaml_file import yaml_entries
from gazette.errors import GazetteError, NotAllowed, Unavailable, printable
from gazette.net.http_guard import is_loopback
from gazette.protocol.fragment import Fragment, FragmentStoreUrl
from gazette.protocol.ids import validate_journal_name, validate_shard_id
from gazette.protocol.journal_tree import JournalNode
from gazette.protocol.label_set import LabelSelector
from gazette.protocol.shard_list import ShardList
from gazette.protocol.text.duration import parse_go_duration
from gazette.runtime.clock import SystemClock
from tests.hostile.conftest import Matrix, mutated
from tests.support.oidc_provider import Provider, SigningKey, fetched
from tests.test_authorization import AUTH, KEY

NAMES: Final = (
    "",
    ".",
    "..",
    "a/..",
    "../../etc/passwd",
    "/etc/passwd",
    "a//b",
    "a/./b",
    "a/b/",
    "a\\b",
    "a b/c",
    "a\nb/c",
    "a\r\nX: y",
    "a\x00b/c",
    "a\u202eb/c",
    "a\ud800b/c",
    "a;b/c",
    "a?b/c",
    "a#b/c",
    "a" * 513,
    "a/" * 10_000,
    "${jndi:ldap://x}",
    "<script>alert(1)</script>",
)

JOURNALS_YAML: Final = """name: a/
replication: 3
fragment: {length: 1024, compression_codec: GZIP, stores: [s3://bucket/], refresh_interval: 5m}
children:
  - &one {name: a/b, labels: [{name: x, value: "1"}], flags: O_RDWR}
  - {<<: *one, name: a/c, revision: -1}
"""
SHARDS_YAML: Final = """common: {recovery_log_prefix: logs, hint_prefix: /hints, hint_backups: 2}
shards:
  - {id: shard-one, sources: [{journal: a/b, min_offset: 1}], labels: [{name: x, value: y}]}
"""
PARSERS: Final[dict[str, tuple[Callable[[str], Any], str]]] = {
    "journal specs": (JournalNode.parse, JOURNALS_YAML),
    "shard specs": (ShardList.parse, SHARDS_YAML),
    "settings in YAML": (
        lambda text: list(yaml_entries(text)),
        "a: {b: 1, c: [x, y], d: &e {f: g}}\nh: *e",
    ),
    "settings in INI": (lambda text: list(ini_entries(text)), '[a]\nb = 1\nc = "x\\ty"\n; d\n'),
    "selectors": (
        LabelSelector.parse,
        "env in (prod, qa), tier not in (web), !test, name:prefix=logs/",
    ),
    "durations": (parse_go_duration, "1h2m3.5s"),
    "store URLs": (FragmentStoreUrl.parse, "s3://bucket/path/?endpoint=http://x&find=a&replace=b"),
    "fragment names": (
        lambda text: Fragment.parse("a/journal", text),
        "00000000000003e8-00000000000007d0-" + "a1" * 20 + ".gz",
    ),
    "ranges": (parse_range, "bytes=100-200"),
    "tags": (parse_tags, 'W/"1f-2a", "3-4"'),
    "hosts": (is_loopback, "[::ffff:127.0.0.1]"),
}


def test_names(matrix: Callable[[str], Matrix]) -> None:
    results = matrix("names of journals and shards")
    for name in NAMES:
        with pytest.raises(GazetteError):
            validate_journal_name(name)
        results.count("refused")
        # Slashes and dots of a shard's id are part of no path; its recovery log's name is checked.
        if not set(name) <= set("./aetcpasswdb"):
            with pytest.raises(GazetteError):
                validate_shard_id(name)
            results.count("refused")


@pytest.mark.parametrize("parser", PARSERS)
def test_parsers(
    parser: str, dice: random.Random, scale: int, matrix: Callable[[str], Matrix]
) -> None:
    """A mutated text is read, or refused by an error of ours."""
    results = matrix(f"texts x {parser}")
    parse, valid = PARSERS[parser]
    parse(valid)
    for _ in range(150 * scale):
        text = mutated(dice, valid.encode()).decode(dice.choice(("latin-1", "utf-8")), "replace")
        try:
            parse(text)
        except (GazetteError, Unsatisfiable):
            results.count("refused")
        else:
            results.count("read")


def test_tokens(dice: random.Random, scale: int, matrix: Callable[[str], Matrix]) -> None:
    """A token that was changed anywhere is refused."""
    results = matrix("tokens, mutated")
    auth = KeyedAuth(SystemClock(), (KEY,))
    good = f"Bearer {AUTH.sign(Claims(8), 600)}"
    auth.verify(good, 8)
    for _ in range(500 * scale):
        text = mutated(dice, good.encode()).decode("latin-1")
        if text.strip() == good or text.split() == good.split():
            continue
        try:
            auth.verify(text, 8)
        except NotAllowed:
            results.count("refused")
        else:
            # Base64 has bits that mean nothing, and white space around a token is left out.
            assert _same(text, good), text
            results.count("the same token")


@pytest.fixture
def provider() -> Iterator[Provider]:
    keys = [SigningKey.rsa("first"), SigningKey.ec("second")]
    with Provider(SystemClock(), keys).serving() as provider:
        yield provider


@pytest.mark.parametrize("key", [0, 1], ids=["RS256", "ES256"])
def test_tokens_of_a_provider(
    key: int,
    provider: Provider,
    tmp_path: Path,
    dice: random.Random,
    scale: int,
    matrix: Callable[[str], Matrix],
) -> None:
    """A token that was changed anywhere is refused, also a header or payload of JSON in another form."""
    results = matrix(f"tokens of a provider x {provider.keys[key].algorithm}")
    roles = tmp_path / "roles.yaml"
    roles.write_text("roles: [{role: operators, cap: [READ]}]")
    auth = OidcAuth(AUTH, OidcSettings(provider.issuer, "gazette", roles=roles))
    fetched()
    signer = provider.keys[key]
    good = signer.token(provider.claims())
    auth.verify(f"Bearer {good}", 8)

    def is_refused(token: str) -> bool:
        try:
            auth.verify(f"Bearer {token}", 8)
        except (
            NotAllowed,
            Unavailable,
        ):  # The latter, while keys are fetched for another name of a key.
            results.count("refused")
            return True
        return False

    for _ in range(300 * scale):
        text = mutated(dice, good.encode()).decode("latin-1")
        assert text.strip() == good or is_refused(text), text
    for _ in range(100 * scale):  # These are signed: each part of the JSON is read.
        body = mutated(dice, json.dumps(provider.claims()).encode())
        if not is_refused(signer.token(body)):
            payload = json.loads(body)
            assert (payload["iss"], "operators" in payload["groups"]) == (provider.issuer, True)
            results.count("the same rights")
    fetched()


def _same(text: str, good: str) -> bool:
    scheme, _, token = text.partition(" ")
    if scheme.lower() != "bearer":
        return False
    head, payload, signature = token.strip().split(".")
    known = good.partition(" ")[2].split(".")
    return [head, payload] == known[:2] and signature[:-1] == known[2][:-1]


@pytest.mark.parametrize(
    "number", [0x00, 0x1B, 0x9B, 0x202E, 0xD800, 0xE000, 0xF8FF, 0xF0000, 0x10FFFD]
)
def test_what_cannot_be_seen_is_escaped(number: int) -> None:
    shown = printable(f"a {chr(number)} b", one_line=True)
    assert shown.isprintable()
    assert f"{number:x}" in shown


def test_every_text_can_be_printed(dice: random.Random) -> None:
    """Also what is random, whatever its characters are for. Spaces and marks within words stay."""
    for _ in range(2_000):
        text = "".join(chr(dice.randrange(0x110000)) for _ in range(dice.randrange(12)))
        shown = printable(text, one_line=True)
        assert all(
            one.isprintable() or one == "\t" or category(one) in ("Cf", "Zs") for one in shown
        )
        if text.isprintable():
            assert shown == text
