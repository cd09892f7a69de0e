"""JSON as Spark reads it. What Spark makes of each line is compared in `tests/spark`."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gazette.history import lenient_json
from tests.fuzzing import examples

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=12,
)
texts = values.flatmap(
    lambda value: st.booleans().map(
        lambda plain: json.dumps(value, ensure_ascii=plain).encode("utf-8", "replace")
    )
)


@settings(max_examples=examples(300), deadline=None)
@given(text=texts)
def test_json_is_read_as_json(text: bytes) -> None:
    """The slow way and the fast ones agree about what both read."""
    value = json.loads(text)
    if isinstance(value, dict):
        found = lenient_json.members(text + b" trailing")
        assert {name: json.loads(raw) for name, raw in found.items()} == value
    elif isinstance(value, list):
        assert [json.loads(raw) for raw in lenient_json.items(text)] == value
        assert lenient_json.is_array(text)
    elif isinstance(value, str):
        assert lenient_json.string(text) == value
    assert json.loads(lenient_json.strict(text + b" ")) == value


@settings(max_examples=examples(300), deadline=None)
@given(
    text=texts,
    edits=st.lists(
        st.tuples(
            st.integers(0, 60), st.sampled_from([b"", b"'", b'"', b"\\", b"{", b"]", b"NaN"])
        ),
        max_size=3,
    ),
)
def test_what_is_repaired_is_json(text: bytes, edits: list[tuple[int, bytes]]) -> None:
    """Damaged text is refused, or becomes JSON with the same values."""
    for at, new in edits:
        text = text[:at] + new + text[at + 1 :]
    try:
        repaired = lenient_json.strict(text)
    except ValueError:
        return
    json.loads(repaired)
    lenient_json.find_string(text, ["uuid"])


@pytest.mark.parametrize(
    ("line", "want"),
    [
        (b'{"uuid":"X"}', "X"),
        (b'{"a":tru,"uuid":"X"', "X"),
        (b'{"a":[1 2],"uuid" : \'X\'', "X"),
        (b'{"a":"it"s","uuid":"X"}', "X"),
        (b'{"a":it\'s,"uuid":"X"}', "X"),
        (b'{"m":{"uuid":"no"},"l":[{"uuid":"no"}],"uuid":"X"}', "X"),
        (b'{"uuid":"no","uuid":"X"}', "X"),
        (b'{"uuid":"X"} {"uuid":"no"}', "X"),
        (b'INFO: {"uuid":"X"', "X"),
        (b'{"a":"uuid","b":"X"}', None),
        (b'{"uuid":null,"a":}', None),
        (b'{"uuid":7,"a":"X"}', None),
        (b'{"uuid":"X', None),
        (b'{"l":["uuid","X"]}', None),
        (b'[{"uuid":"X"}]', None),
        (b'"uuid":"X"', None),
        (b"", None),
    ],
)
def test_a_uuid_is_found_as_far_as_a_line_can_be_read(line: bytes, want: str | None) -> None:
    assert lenient_json.find_string(line, ["uuid"]) == want


def test_a_nested_uuid_is_found() -> None:
    for line in (
        b'{"x":"uuid","_meta":{"a":tru,"uuid":"X"},"uuid":"no"',
        b'{"_meta" : {"m":{"uuid":"no"},"uuid" : "X"',
    ):
        assert lenient_json.find_string(line, ["_meta", "uuid"]) == "X"
    for line in (b'{"uuid":"no"}', b'{"_meta":"uuid","uuid":"no"}', b'{"_meta":[{"uuid":"no"}]}'):
        assert lenient_json.find_string(line, ["_meta", "uuid"]) is None


@pytest.mark.parametrize(
    "part", [b'"\\', b"'", b'{"a":', b"[", b" ", b"\\", b"a ", b'{"a":{},', b'"a":"b",']
)
def test_enemy_lines_take_no_longer_than_others(part: bytes) -> None:
    """The time grows with the length of a line, and not with its square."""
    line = b'{"a":' + part * 300_000 + b"x"
    began = time.process_time()
    lenient_json.find_string(line, ["uuid"])
    with pytest.raises(ValueError, match=r"JSON|nested|object"):
        lenient_json.members(line)
    assert time.process_time() - began < 5
