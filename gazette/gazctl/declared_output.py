"""A `Source` or `Output` that a command names as ``module:Class.attribute``, and its messages as lines."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from gazette.errors import Invalid
from gazette.message.codec import json_codec
from gazette.message.publishing.outputs import DeclaredOutput


def load_declared(name: str) -> DeclaredOutput:
    """Import a source or an output. Raise ``Invalid`` if the import fails, or finds neither of the two."""
    module, colon, path = name.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        declared: Any = importlib.import_module(module)
        for part in path.split("."):
            declared = getattr(declared, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise Invalid(
            f"cannot import {name!r}: {error}",
            path="--declared",
            hint="Give module:Class.attribute, importable from here (PYTHONPATH)"
            + ("." if colon else "; the colon is missing."),
        ) from error
    if isinstance(declared, type) or not isinstance(declared, DeclaredOutput):
        raise Invalid(
            f"{name} is neither a Source nor an Output",
            path="--declared",
            hint="Name an attribute of the application's class, such as app:WordCount.words.",
        )
    return declared


def decoder_of(output: DeclaredOutput) -> Callable[[bytes], Any]:
    """Return the function from a line of JSON to a message of the declared type."""
    message_type = output.message_type
    if not hasattr(message_type, "DESCRIPTOR"):
        return json_codec(message_type).decode
    from google.protobuf.json_format import Parse, ParseError

    def decode(line: bytes) -> Any:
        try:
            return Parse(line, message_type())
        except ParseError as error:
            raise ValueError(str(error)) from error

    return decode
