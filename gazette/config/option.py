"""One setting of a program: its names, its type, and reading it from a text.

Programs import these names from `gazette.config.schema`, which finds the value of each setting.
"""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_type_hints

from gazette.errors import Bug, Invalid
from gazette.protocol.text.duration import SECOND, format_go_duration, parse_go_duration
from gazette.runtime.numbers import parse_integer, parse_number

_META: Final = "gazette.setting"
TRUE_WORDS: Final = frozenset({"1", "true", "t", "yes", "y", "on"})
FALSE_WORDS: Final = frozenset({"0", "false", "f", "no", "n", "off"})


@dataclass(frozen=True, slots=True)
class _Meta:
    help: str
    name: str
    env: str
    choices: tuple[str, ...]
    secret: bool
    is_duration: bool
    short: str
    flag_only: bool
    ini: str


def setting(
    default: Any,
    help_text: str,
    *,
    name: str = "",
    env: str = "",
    choices: Sequence[str] = (),
    secret: bool = False,
    short: str = "",
    flag_only: bool = False,
    ini: str = "",
) -> Any:
    """Describe a field of a group.

    The field's type is str, int, float, bool, ``bool | None``, ``Path | None`` or ``tuple[str, ...]``.
    ``name``, ``env`` and ``ini`` replace the names that are derived from the field's name. A ``secret`` is
    never printed. ``short`` is a letter for ``-x``. With ``flag_only``, the environment does not set the
    field, and a file sets it only in the section of the field's command.
    """
    meta = _Meta(
        help_text,
        name,
        env,
        tuple(choices),
        secret,
        is_duration=False,
        short=short,
        flag_only=flag_only,
        ini=ini,
    )
    return dataclasses.field(default=default, metadata={_META: meta})


def duration(
    default: str,
    help_text: str,
    *,
    name: str = "",
    env: str = "",
    flag_only: bool = False,
    ini: str = "",
) -> Any:
    """Describe a field of a group that holds seconds, written as ``20s``, ``1m30s`` or ``0``."""
    meta = _Meta(
        help_text,
        name,
        env,
        (),
        secret=False,
        is_duration=True,
        short="",
        flag_only=flag_only,
        ini=ini,
    )
    return dataclasses.field(default=_parse_duration(default), metadata={_META: meta})


@dataclass(frozen=True, slots=True)
class Option:
    """One setting, with all its names."""

    group: str
    field: str
    name: str
    """Name without its group: ``max-append-rate``."""
    env: str
    """Name of the environment variable that sets the option; empty for no variable."""
    help: str
    default: Any
    kind: str
    """Key in ``_PARSERS`` of the function that reads a text of the option."""
    choices: tuple[str, ...]
    secret: bool
    short: str = ""
    """A letter for the short form of the flag, ``-x``."""
    flag_only: bool = False
    ini: str = ""
    """Key in an INI file, without the section: ``MaxAppendRate``."""

    @property
    def flag(self) -> str:
        return f"--{self.group}.{self.name}" if self.group else f"--{self.name}"

    @property
    def key(self) -> str:
        """Name of the setting in files and errors."""
        return f"{self.group}.{self.name}" if self.group else self.name

    def parse(self, text: str, source: str) -> Any:
        """Return the value of a text. Raise ``Invalid``, with the path ``source``, for any other text."""
        try:
            value = _PARSERS[self.kind](text)
        except (ValueError, Invalid) as error:
            reason = error.message if isinstance(error, Invalid) else f"expected {_NOUN[self.kind]}"
            hint = error.hint if isinstance(error, Invalid) else None
            raise Invalid(f'invalid value "{text}": {reason}', path=source, hint=hint) from error
        if self.choices and value not in self.choices:
            expected = ", ".join(self.choices)
            raise Invalid(f'invalid value "{text}": expected one of {expected}', path=source)
        return value

    def render(self, value: Any) -> str:
        """Return the text for which ``parse`` returns ``value``; empty for None."""
        if value is None:
            return ""
        if self.kind == "duration":
            return format_go_duration(round(value * SECOND))
        if self.kind == "list":
            return ",".join(value)
        return str(value).lower() if self.kind == "bool" else str(value)


def _parse_duration(text: str) -> float:
    return parse_go_duration(text.strip()) / SECOND


def expanded(text: str) -> Path:
    """Return a path with its ``~`` or ``~user`` expanded. Raise ``Invalid`` for an unknown directory."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise Invalid(
            "it begins with an unknown home directory", hint="Write the whole path."
        ) from error


def require_writable(path: Path, option: str) -> None:
    """Raise ``Invalid``, which names the option, unless a file could be made at ``path``. Do not make it."""
    import tempfile  # Commands without such an option do not need this module.

    with writing(path, option):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a directory")
        with tempfile.TemporaryFile(dir=path.parent):
            pass


@contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """Turn an ``OSError`` of the block, which writes to ``path``, into ``Invalid`` that names the option."""
    try:
        yield
    except OSError as error:
        raise Invalid(
            f"cannot write to {path}: {error.strerror}",
            path=option,
            hint="Give a file in a directory that exists.",
        ) from error


def _parse_bool(text: str) -> bool:
    word = text.strip().lower()
    if word in TRUE_WORDS or word in FALSE_WORDS:
        return word in TRUE_WORDS
    raise ValueError(text)


_PARSERS: Final[Mapping[str, Callable[[str], Any]]] = {
    "str": str,
    "int": lambda text: parse_integer(text.strip()),
    "float": lambda text: parse_number(text.strip()),
    "bool": _parse_bool,
    "path": lambda text: expanded(text) if text.strip() else None,
    "list": lambda text: tuple(word.strip() for word in text.split(",") if word.strip()),
    "duration": _parse_duration,
}
_NOUN: Final = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "duration": "a duration such as 20s or 1m30s",
}
_KINDS: Final[Mapping[Any, str]] = {
    str: "str",
    int: "int",
    float: "float",
    bool: "bool",
    bool | None: "bool",
    Path | None: "path",
    tuple[str, ...]: "list",
}


def options_of(group: str, cls: type) -> Iterator[Option]:
    """Yield the options of a group, in the order of its fields."""
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        meta = field.metadata.get(_META)
        if meta is None:
            raise Bug("a field of a settings group was not made by setting()", field=field.name)
        name = meta.name or field.name.replace("_", "-")
        # Without a group, derive no name: another program may use a short name such as PORT or ZONE.
        qualified = f"{group}.{name}" if group else ""
        yield Option(
            group=group,
            field=field.name,
            name=name,
            env=meta.env or qualified.upper().replace(".", "_").replace("-", "_"),
            help=meta.help,
            default=field.default,
            kind="duration" if meta.is_duration else _KINDS[hints[field.name]],
            choices=meta.choices,
            secret=meta.secret,
            short=meta.short,
            flag_only=meta.flag_only,
            ini=meta.ini or _camel(name),
        )


_UPPER_WORDS: Final = frozenset({"ca", "grpc", "http", "id", "rf", "ttl", "url"})


def _camel(name: str) -> str:
    """Return a name in the original's spelling for INI files: ``ServerCAFile`` for ``server-ca-file``."""
    words = name.replace(".", "-").split("-")
    return "".join(word.upper() if word in _UPPER_WORDS else word.capitalize() for word in words)
