"""A plan as the value of an option: `Plan`, encoded as data and never as objects.

Every user with the right to query may set the option ``plan`` (``SELECT … OPTIONS (plan = …)``).
The process that plans a query reads it. So it is MessagePack of known types, its size is bounded,
and nothing in it names code. A plan with any unknown part is refused. A ``combine`` comes with the
class of the source (`with_combine`).
"""

from __future__ import annotations

import base64
import binascii
import re
import zlib
from dataclasses import dataclass
from typing import Final

import msgspec

from gazette.errors import Invalid
from gazette.history.merge import CommittedRun
from gazette.history.snapshot import Run
from gazette.protocol.fragment import Codec, Fragment
from gazette.spark.message_class import require_permitted

TEXT_BYTES_MAX: Final = 256 << 20
"""Largest encoded plan in bytes: a million fragments, each with its own path, take about 85 MB."""
DATA_BYTES_MAX: Final = 1 << 30
"""Largest decompressed plan in bytes: about 280 bytes for each fragment."""

_VERSION: Final = 3
_MARK: Final = "gazette-plan-"
_HEADER: Final = re.compile(rf"{_MARK}(\d{{1,9}}):")
_READ: Final = "Use gazette.spark.read(), which sets it."
_FEWER: Final = "Read fewer journals at once, or a shorter range of offsets."


@dataclass(frozen=True, slots=True)
class Plan:
    """The runs of a query, with what a first pass has found of them."""

    runs: tuple[CommittedRun, ...]


def encode_plan(plan: Plan) -> str:
    """Encode a plan as the value of an option. Raise `Invalid` if it is too large for one."""
    data = _data(plan)
    text = f"{_MARK}{_VERSION}:" + base64.b64encode(zlib.compress(data, 1)).decode()
    if len(text) > TEXT_BYTES_MAX or len(data) > DATA_BYTES_MAX:
        raise Invalid(
            f"the plan is too large for an option ({len(text)} bytes; at most {TEXT_BYTES_MAX})",
            path="option plan",
            hint=_FEWER,
        )
    return text


def decode_plan(text: str) -> Plan:
    """Undo `encode_plan`. Raise `Invalid` for any other text."""
    header = _HEADER.match(text)
    if header is None:
        raise _invalid("not a plan")
    if (version := int(header[1])) != _VERSION:
        raise _invalid(
            f"a plan of version {version}, and this version of gazette reads version {_VERSION}",
            "Have the same version on the driver and on the workers.",
        )
    data = _decompressed(text, header.end())
    try:
        plan = msgspec.msgpack.decode(data, type=Plan)
    except (msgspec.DecodeError, RecursionError, OverflowError) as error:
        raise _invalid(f"not a plan: {error}") from error
    _check(plan)
    if _data(plan) != data:
        # A field is unknown here, or is there twice.
        raise _invalid("not a plan: some of its fields are not understood")
    return plan


def _data(plan: Plan) -> bytes:
    return msgspec.msgpack.encode(plan)


def _decompressed(text: str, begin: int) -> bytes:
    if len(text) > TEXT_BYTES_MAX:
        raise _invalid(f"a plan of {len(text)} bytes; at most {TEXT_BYTES_MAX} are read", _FEWER)
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(base64.b64decode(text[begin:], validate=True), DATA_BYTES_MAX)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise _invalid(f"not a plan: {error}") from error
    if not stream.eof and len(data) >= DATA_BYTES_MAX:
        raise _invalid(f"a plan that decompresses to more than {DATA_BYTES_MAX} bytes", _FEWER)
    if not stream.eof or stream.unused_data:
        raise _invalid("not a plan: it is cut, or something follows it")
    return data


def _check(plan: Plan) -> None:
    numbers: set[int] = set()
    paths: set[tuple[str, str, Codec]] = set()
    for name in {committed.run.shape.message for committed in plan.runs} - {""}:
        try:
            require_permitted(name)  # Tasks import its module.
        except Invalid as error:
            raise error.within("option plan") from error
    for committed in plan.runs:
        run = committed.run
        if run.number in numbers:
            raise _invalid(f"not a plan: there are two runs {run.number}")
        numbers.add(run.number)
        _check_pieces(run, paths)


def _check_pieces(run: Run, paths: set[tuple[str, str, Codec]]) -> None:
    """Require pieces that can be read, in order. ``paths``: valid paths of fragments so far."""
    at = 0
    for piece in (*run.pieces, *run.beyond):
        fragment = piece.fragment
        whole = fragment is None or (
            fragment.journal == run.journal
            and fragment.begin <= piece.begin
            and piece.end <= fragment.end
            and len(fragment.sum) == 20
        )
        first = 0 if fragment is None else fragment.begin
        cut = piece.start is None or first <= piece.start < piece.begin
        if not (whole and cut and at <= piece.begin < piece.end):
            raise _invalid(
                f"not a plan: run {run.number} of {run.journal} has the piece"
                f" {piece.begin} to {piece.end} after {at}"
            )
        if fragment is not None:
            path = (fragment.journal, fragment.path_postfix, fragment.codec)
            if path not in paths:
                _check_path(fragment)
                paths.add(path)
        at = piece.end
    if not run.pieces:
        raise _invalid(f"not a plan: run {run.number} of {run.journal} is empty")


def _check_path(fragment: Fragment) -> None:
    try:
        fragment.validate()
        fragment.content_path()
    except Invalid as error:
        raise error.within("option plan") from error


def _invalid(problem: str, hint: str = _READ) -> Invalid:
    return Invalid(problem, path="option plan", hint=hint)
