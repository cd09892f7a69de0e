"""Doors of a cluster: see `tests.meaning.places`.

Lines go through `gazctl produce`, through HTTP, and into rows of Spark, and `gazctl read` prints them.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec

from gazette import Source
from gazette.cluster.etcd.client import Etcd, EtcdSettings
from gazette.labels import CONTENT_JSON_LINES, CONTENT_TYPE, MESSAGE_TYPE
from gazette.protocol.label_set import LabelSet
from gazette.runtime.clock import SystemClock
from gazette.testing.broker import BrokerFixture, journal_spec
from gazette.testing.etcd import etcd_for_tests
from tests.gazctl.runner import Result, Runner
from tests.meaning.values import LEAVES, NUMBERS, Case, json_value

PLAIN: Final = "lines/of/json"
KEYED: Final = "keyed"
COUNT: Final = 3
KEY_TYPES: Final = (int, float, str, bool)
LITERALS: Final = (
    *NUMBERS,
    *("1e400", "1e-400", "-0.0", "0.1", "0.10000000000000001", "5e-324", "3e-324", "1E2", "1.0"),
    *("1e-99999999999999999999", "1e99999999999999999999"),
    *("18446744073709551616", "-9223372036854775809", "9007199254740993", "9007199254740993.0"),
    *("0.1000000000000000055511151231257827", "123456789012345678901234567890.12"),
    *("NaN", "Infinity", "01", "+1", "1.", ".5", "0x10", "true", "null", '"\\ud800"', '"\\u00e9"'),
    *('"\\ud83d\\ude42"', '"\\u0000"', "'a'", "[1,]", '{"a":1}', '{"a":[{"b":0.30000000000000004}]}'),
)  # fmt: skip
"""Texts of values, as other programs write them. Some are no JSON."""

Body = Callable[[Sequence[Case], BrokerFixture, Runner], Awaitable[int]]


def _in_a_cluster(body: Body, cases: Sequence[Case], directory: Path, *specs: Any) -> int:
    """Run a check with a broker of its own."""

    async def run(endpoint: str) -> int:
        settings = EtcdSettings(endpoints=(endpoint,))
        async with (
            await Etcd.connect(settings, SystemClock()) as etcd,
            await BrokerFixture.start(etcd, directory, lease_ttl_s=60.0) as broker,
        ):
            await broker.create(*specs)
            environ = {"BROKER_ADDRESS": broker.endpoint, "HOME": str(directory)}
            gazctl = Runner({**environ, "BROKER_FILE_ROOT": str(broker.file_root)})
            return await body(cases, broker, gazctl)

    with etcd_for_tests(directory / "etcd") as server:
        return asyncio.run(run(server.endpoint))


def _line_of(case: Case) -> bytes:
    """Return a line of JSON, or of what a program takes for it."""
    rng = random.Random(case.seed)
    if rng.randrange(2):
        value = json_value(rng)
        return json.dumps({"value": value}, ensure_ascii=bool(rng.randrange(2))).encode()
    return f'{{"n": {rng.choice(LITERALS)}, "more": [{rng.choice(LITERALS)}]}}'.encode()


def _exactly(text: str | bytes) -> Any:
    """Return the JSON of a line with each digit of its numbers. Raise ``ValueError`` for other texts."""
    return json.loads(text, parse_float=_number_of, parse_constant=_no_constant)


def _number_of(text: str) -> Any:
    try:
        return Decimal(text)
    except ArithmeticError:  # Its exponent has too many digits.
        return text


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _same_json(one: Any, other: Any) -> bool:
    """Return True if two documents of `_exactly` are equal. 17 digits are as good as their float."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same_json(one[k], other[k]) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same_json, one, other))
    if isinstance(one, Decimal) and isinstance(other, Decimal | int):
        few = len(one.as_tuple().digits) <= 17 and math.isfinite(float(one)) and float(one) != 0
        return one == other or (few and float(one) == float(other))
    return type(one) is type(other) and bool(one == other)


def _require_refused(case: Case, line: bytes, result: Result) -> None:
    assert "line 1" in result.err, (
        f"{case.seed}: {line!r} is refused without its line: {result.err}"
    )
    assert "Traceback" not in result.err, f"{case.seed}: {line!r}: {result.err}"


async def _read(gazctl: Runner, *argv: str) -> list[Any]:
    """Return the documents that `gazctl read` prints, without UUIDs."""
    found = [_exactly(line) for line in (await gazctl.ok("read", *argv)).out.split("\n")[:-1]]
    for document in found:
        document.pop("uuid", None)
    return found


def _compare(cases: Sequence[Case], lines: Sequence[bytes], found: Sequence[Any]) -> None:
    """Compare lines that were taken with the documents that were read."""
    for case, line, document in zip(cases, lines, found, strict=True):
        assert _same_json(_exactly(line), document), f"{case.seed}: {line!r} is {document!r:.300}"


# -- gazctl produce and read


def check_produced_lines(cases: Sequence[Case], directory: Path) -> int:
    """Publish each line by `gazctl produce`, and read them by `gazctl read`."""
    spec = journal_spec(PLAIN, labels=LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES)))
    return _in_a_cluster(_produce, cases, directory, spec)


async def _produce(cases: Sequence[Case], broker: BrokerFixture, gazctl: Runner) -> int:
    taken: list[tuple[Case, bytes]] = []
    for case in cases:
        line = _line_of(case)
        result = await gazctl("produce", PLAIN, stdin=line)
        if result.code == 0:
            taken.append((case, line))
        else:
            _require_refused(case, line, result)
    found = await _read(gazctl, PLAIN)
    _compare([case for case, _ in taken], [line for _, line in taken], found)
    return len(taken)


# -- lines by HTTP


def check_appended_lines(cases: Sequence[Case], directory: Path) -> int:
    """Append each line by HTTP, get the same bytes, and let `gazctl read` print or skip each line."""
    spec = journal_spec(PLAIN, labels=LabelSet.of((CONTENT_TYPE, CONTENT_JSON_LINES)))
    return _in_a_cluster(_append, cases, directory, spec)


async def _append(cases: Sequence[Case], broker: BrokerFixture, gazctl: Runner) -> int:
    lines = [_line_of(case) + b"\n" for case in cases]
    async with httpx.AsyncClient(base_url=broker.http) as client:
        for line in lines:
            assert (await client.put(f"/{PLAIN}", content=line)).status_code == 204
        answer = await client.get(f"/{PLAIN}", params={"offset": 0})
    assert answer.content == b"".join(lines), f"seeds {cases[0].seed} to {cases[-1].seed}"
    result = await gazctl.ok("read", PLAIN, "--skip-malformed", "--meta")
    found = {}
    for text in result.out.split("\n")[:-1]:
        document = _exactly(text)
        found[document["offset"]] = document["message"]
    offset = 0
    for case, line in zip(cases, lines, strict=True):
        if offset in found:
            assert _same_json(_exactly(line), found[offset]), (
                f"{case.seed}: {line!r}: {found[offset]}"
            )
        else:
            assert f"begin={offset}," in result.err, f"{case.seed}: {line!r} is gone in silence"
        offset += len(line)
    return len(found)


# -- keys


def check_produced_keys(cases: Sequence[Case], directory: Path) -> int:
    """Publish messages with typed keys by `gazctl produce`: each finds the partition of its `Source`."""
    specs = [spec for kind in KEY_TYPES for spec in _keyed_specs(kind)]
    return _in_a_cluster(_produce_keys, cases, directory, *specs)


def _source_of(kind: Any) -> tuple[Any, Any]:
    message: Any = msgspec.defstruct("Keyed", [("id", kind), ("seed", int, 0), ("uuid", str, "")])
    return message, Source(f"{KEYED}/{kind.__name__}", message, partitions=COUNT, key="id")


def _keyed_specs(kind: Any) -> list[Any]:
    _, source = _source_of(kind)
    assert source.key_rule is not None
    labels = LabelSet.of(
        (CONTENT_TYPE, CONTENT_JSON_LINES), (MESSAGE_TYPE, "Keyed"), *source.key_rule.labels
    )
    return [journal_spec(name, labels=labels) for name in source.journals]


async def _produce_keys(cases: Sequence[Case], broker: BrokerFixture, gazctl: Runner) -> int:
    wanted: dict[str, list[int]] = {}
    others: set[int] = set()
    for case in cases:
        rng = random.Random(case.seed)
        kind = rng.choice(KEY_TYPES)
        line = f'{{"id": {_key_text(rng, kind)}, "seed": {case.seed}}}'.encode()
        message, source = _source_of(kind)
        argv = ["-l", f"name:prefix={source.name}/", *rng.choice(([], ["--key=id"]))]
        result = await gazctl("produce", *argv, stdin=line)
        if result.code:
            _require_refused(case, line, result)
            continue
        try:
            decoded = msgspec.json.decode(line, type=message)
        except msgspec.MsgspecError:
            others.add(case.seed)  # The command knows the type of the key only.
            continue
        wanted.setdefault(source.mapping()(decoded).journal, []).append(case.seed)
    for kind in KEY_TYPES:
        for journal in _source_of(kind)[1].journals:
            seeds = [one["seed"] for one in await _read(gazctl, journal)]
            found = [seed for seed in seeds if seed not in others]
            assert found == wanted.get(journal, []), f"partition {journal}: seeds {found}"
    return sum(map(len, wanted.values()))


def _key_text(rng: random.Random, kind: Any) -> str:
    """Return the text of a key, mostly of its type."""
    if not rng.randrange(4):
        return rng.choice(LITERALS)
    made: Any = next(one.make for one in LEAVES if one.type is kind)
    value = made(rng)
    if kind is float and value.is_integer() and rng.randrange(2):
        value = int(value)
    return json.dumps(value)


__all__: Final = ["check_appended_lines", "check_produced_keys", "check_produced_lines"]
