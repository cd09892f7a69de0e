"""The mistakes, as small changes of the source: one at least for each place, by the name of its check."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tools.timer_plants.plants import Plant

_TEST: Final = "tests/meaning/test_meaning.py::test_values_read_back_equal_or_are_refused"
_MESSAGE: Final = "gazette/message/"
_WINDOWS: Final = "gazette/windows/"
_STORES: Final = "gazette/stores/"

Planted = Iterator[tuple[str, Plant]]


def _plant(check: str, path: str, right: str, wrong: str) -> Plant:
    return Plant(path, right, wrong, (f"{_TEST}[check_{check}]",))


def _messages() -> Planted:
    classes = _MESSAGE + "field_classes.py"
    yield (
        "NaN is written as null",
        _plant("messages", classes, '{value} - {value} == 0.0"', '{value} is not None"'),
    )
    yield (
        "keys of dicts become texts",
        _plant("messages", classes, "_TEXT.issuperset(map(type, value))", "True"),
    )
    yield (
        "only the first field is checked",
        _plant("fields", classes, "' and '.join(tests) or 'True'", "(tests or ['True'])[0]"),
    )
    yield (
        "later messages are not checked",
        _plant(
            "fields",
            classes,
            "    return check\n",
            "    seen = iter(range(100))\n    return lambda m: next(seen, None) is None or check(m)\n",
        ),
    )
    yield (
        "parts of other types are taken",
        _plant(
            "nested",
            _MESSAGE + "value_parts.py",
            "return None if not by_type and written == read_back else _type_misfit(written, read_back)",
            "return None if not by_type else _type_misfit(written, read_back)",
        ),
    )
    yield (
        "names that are not ASCII are unknown",
        _plant(
            "names",
            _MESSAGE + "value_types.py",
            "msgspec.json.encode([field.encode_name for field in fields])",
            "str([field.encode_name for field in fields])",
        ),
    )
    yield (
        "lists of models are not compared",
        _plant(
            "models",
            _MESSAGE + "readable_model.py",
            "if value == value_back and",
            "if isinstance(value_back, list) or value == value_back and",
        ),
    )
    yield (
        "protobuf loses zeros at its end",
        _plant(
            "protobuf",
            _MESSAGE + "codec.py",
            "return message.SerializeToString()",
            "return message.SerializeToString().rstrip(b'\\0')",
        ),
    )
    yield (
        "CSV loses the ends of lines in fields",
        _plant(
            "csv", _MESSAGE + "framing/csv.py", 'if "\\r\\n" in text:', 'if "\\r\\n\\r" in text:'
        ),
    )


def _parts_of_applications() -> Planted:
    yield (
        "states are plain JSON",
        _plant(
            "states",
            _STORES + "json_file.py",
            'return self._encoding.encode(self.state, "state")',
            "return msgspec.json.encode(self.state)",
        ),
    )
    yield (
        "aggregates are plain JSON",
        _plant(
            "aggregates",
            _WINDOWS + "windows.py",
            'self._states.encode(state, "state")',
            "__import__('msgspec').json.encode(state)",
        ),
    )
    yield (
        "sides of joins lose zeros",
        _plant(
            "joins",
            _WINDOWS + "stream_join.py",
            "self._sides[side].encode(value, _NAMES[side], join=self.name, key=key)",
            "self._sides[_LEFT].encode(value, _NAMES[side]).replace(b'.0', b'')",
        ),
    )
    yield (
        "rows are plain JSON",
        _plant(
            "rows",
            _WINDOWS + "table_join.py",
            'self._rows.encode(row, "row", join=self.name, key=key)',
            "__import__('msgspec').json.encode(row)",
        ),
    )
    yield (
        "outputs are not checked",
        _plant(
            "outputs",
            _MESSAGE + "framing/framing.py",
            "                if fits(message):\n",
            "                if fits:\n",
        ),
    )
    yield (
        "dead letters lose spaces",
        _plant(
            "dead_letters",
            "gazette/consumer/transaction/poison_handler.py",
            "letter.raw = raw[",
            "letter.raw = raw.strip()[",
        ),
    )
    yield (
        "answers are not compared",
        _plant(
            "answers",
            "gazette/consumer/query/answer_json.py",
            "if _decode(body) == value:",
            "if _decode(body) is not value:",
        ),
    )
    yield (
        "SQLite has null for empty values",
        _plant(
            "sqlite_values",
            _STORES + "sqlite/store.py",
            "connection.executemany(sql, checked_rows.bound)",
            "connection.executemany(sql, [[n or None for n in one] for one in checked_rows.bound])",
        ),
    )
    yield (
        "RocksDB has no empty values",
        _plant(
            "rocksdb_values",
            _STORES + "rocksdb/store.py",
            "self._pending_of(column_family).set(key, value)",
            "self._pending_of(column_family).set(key, value or None)",
        ),
    )


def _lines() -> Planted:
    yield (
        "gazctl produce reads numbers as floats",
        _plant(
            "produced_lines",
            "gazette/gazctl/messages.py",
            "dict[str, Any], float_hook=exact_float",
            "dict[str, Any]",
        ),
    )
    yield (
        "gazctl read prints numbers as floats",
        _plant(
            "appended_lines",
            _MESSAGE + "codec.py",
            "dict[str, Any], float_hook=hook",
            "dict[str, Any]",
        ),
    )
    yield (
        "gazctl produce does not know the type of keys",
        _plant(
            "produced_keys",
            _MESSAGE + "key_rule.py",
            "encoding_named(self.rule.key_type)",
            'encoding_named("text" if self.rule.key_type == "any" else "any")',
        ),
    )


def _keys() -> Planted:
    def plant(path: str, right: str, wrong: str) -> Plant:
        return _plant("keys", path, right, wrong)

    choices = _MESSAGE + "publishing/outputs.py"
    keys = _MESSAGE + "keys.py"
    yield (
        "booleans have the text of Python",
        plant(keys, 'return "true" if value else "false"', "return str(value)"),
    )
    yield (
        "times of two zones have two keys",
        plant(keys, 'utc.replace(tzinfo=None).isoformat() + "Z"', "value.isoformat()"),
    )
    yield (
        "texts in tuples have no quotes",
        plant(keys, "return msgspec.json.encode(json_text).decode()", "return str(json_text)"),
    )
    yield (
        "publishers by labels fold case",
        plant(
            choices,
            "return current.of_key(keys.key_of(message, key))",
            "return current.of_key(str(keys.key_of(message, key)).lower())",
        ),
    )
    yield (
        "publishers by a declaration hash the key that is said",
        plant(
            choices,
            "        return mapping(message)\n",
            "        return mapping(message) if key is None else current.of_key(str(key))\n",
        ),
    )
    yield (
        "publishers by name take each key",
        plant(
            choices,
            "if (key_number := rule.number_of(canonical)) != number:",
            "if (key_number := number) != number:",
        ),
    )
    yield (
        "shards hash the text of Python",
        plant(
            "gazette/consumer/contract/key_check.py",
            "return self.place.encoding.encode(value)",
            "return str(value)",
        ),
    )
    yield (
        "columns of Spark are keys by their text",
        plant(
            "gazette/history/spark/sink/publishing.py",
            "    return choose(message, key)\n",
            "    return choose(message, str(key))\n",
        ),
    )
    yield (
        "routes read + as a space",
        plant(
            "gazette/net/raw_path.py",
            'unquote(part, "utf-8", "surrogateescape")',
            'unquote(part.replace("+", " "), "utf-8", "surrogateescape")',
        ),
    )
    yield (
        "gazctl --key folds case",
        plant(
            "gazette/gazctl/messages.py",
            '            hint="Every message needs its key. Nested fields are joined by dots.",\n        )\n'
            "    return value\n",
            '            hint="Every message needs its key. Nested fields are joined by dots.",\n        )\n'
            "    return value.lower() if isinstance(value, str) else value\n",
        ),
    )
    yield (
        "windows and joins cut spaces off keys",
        plant(_WINDOWS + "tables.py", "plain_text(key)", "plain_text(key).strip()"),
    )


def _times() -> Planted:
    times = _MESSAGE + "message_time.py"
    yield (
        "timers count milliseconds",
        _plant(
            "timers",
            "gazette/consumer/timers/timer.py",
            "at_us = (at - _EPOCH) // _MICROSECOND\n",
            "at_us = (at - _EPOCH) // (1000 * _MICROSECOND) * 1000\n",
        ),
    )
    yield (
        "whole times pass through a float",
        _plant(
            "times",
            times,
            "return value * _UNIT_NS[self.unit] // 1000",
            "return int(value * (_UNIT_NS[self.unit] / 1000))",
        ),
    )
    yield (
        "times without a zone are taken for UTC",
        _plant(
            "times",
            times,
            'return f"has no zone ({value})"',
            "return (value.replace(tzinfo=UTC) - _EPOCH) // _MICROSECOND",
        ),
    )


def _columns() -> Planted:
    values = "gazette/history/json_values.py"
    yield (
        "decimals are rounded to 28 digits",
        _plant(
            "columns",
            values,
            "value = _DECIMALS.create_decimal(text)",
            "value = decimal.Decimal(text) + 0",
        ),
    )
    yield (
        "small integers wrap",
        _plant(
            "columns",
            "gazette/history/field_arrays.py",
            "            if unfit.any():\n",
            "            values = (values + limit) % (2 * limit) - limit\n            if limit < 1:\n",
        ),
    )
    yield (
        "bytes end at the first padding",
        _plant("columns", values, "_BASE64_GROUP.findall(text)", "_BASE64_GROUP.findall(text)[:1]"),
    )


PLANTS: Final = dict(
    (
        *_messages(),
        *_parts_of_applications(),
        *_lines(),
        *_keys(),
        *_times(),
        *_columns(),
    )
)
