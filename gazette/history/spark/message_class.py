"""Checks the class that the option ``message`` names.

Every user that may query can set the option, even in SQL. To import a module runs its code, and the code of
its packages. So the option may name only modules that protoc has generated, and modules that the environment
of the job lists.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import Any, Final

from google.protobuf.message import Message

from gazette.errors import Invalid
from gazette.history.columns import MessageFormat
from gazette.labels import CONTENT_PROTO_FIXED

MODULES_VARIABLE: Final = "GAZETTE_SPARK_MESSAGE_MODULES"
"""Environment variable with the names of further modules, separated by commas."""
_GENERATED: Final = "_pb2"
_NAME: Final = re.compile(
    r"([A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*):[A-Za-z_][A-Za-z0-9_.]*"
)


def message_class(name: str) -> type[Message]:
    """Import the class ``module:Class``. Raise `Invalid` for a module that is not permitted, and for anything
    but a class of protobuf messages."""
    require_permitted(name)
    class_: Any = MessageFormat(CONTENT_PROTO_FIXED, message=name).message_type()
    if not (isinstance(class_, type) and issubclass(class_, Message)):
        raise Invalid(
            f"{name!r} is not the class of a protobuf message",
            path="message",
            hint="Give module:Class of a class that protoc has generated.",
        )
    return class_


def require_permitted(name: str) -> None:
    """Raise `Invalid` unless the module of ``name`` is permitted. Import nothing."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise _cannot_import(name, "it is not module:Class")
    module = match[1]
    permitted_modules = os.environ.get(MODULES_VARIABLE, "").split(",")
    if module in (permitted.strip() for permitted in permitted_modules):
        return
    if not module.endswith(_GENERATED):
        raise Invalid(
            f"the module {module} may not be named here",
            path="message",
            hint=f"Name a module that protoc has generated (…{_GENERATED}). Or list this one in"
            f" {MODULES_VARIABLE}, in the environment of the driver, before the session starts.",
        )
    if not _is_present(module):
        raise _cannot_import(name, f"No module named {module!r}")


def _is_present(module: str) -> bool:
    """Return True if a module can be found. Import no package, as ``importlib.util.find_spec`` would."""
    name, path = "", None
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        spec = _find(name, path)
        if spec is None:
            return False
        path = spec.submodule_search_locations or ()
    return True


def _find(name: str, path: Sequence[str] | None) -> Any:
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path)
        if spec is not None:
            return spec
    return None


def _cannot_import(name: str, why: str) -> Invalid:
    return Invalid(
        f"cannot import the message class {name!r}: {why}",
        path="message",
        hint="Give module:Class of a generated protobuf class that every worker can import.",
    )
