"""Settings of a program, from flags, the environment, a file and defaults, in this order.

A group is a frozen dataclass whose fields are made by ``setting`` or ``duration``::

    @dataclass(frozen=True, slots=True)
    class EtcdFlags:
        address: str = setting("http://localhost:2379", "etcd service address")
        lease: float = duration("20s", "time to live of the lease", env="ETCD_LEASE_TTL")

    schema = Schema("gazette serve", {"etcd": EtcdFlags}, file_stem="gazette")
    etcd = schema.load(argv, os.environ).group(EtcdFlags)

Its flags are ``--etcd.address`` and ``--etcd.lease``, its environment names ``ETCD_ADDRESS`` and
``ETCD_LEASE_TTL``, and a file says ``[etcd] address = …`` (INI) or ``etcd: {address: …}`` (YAML).
Nothing that is given may be unknown: a typing error is an error, with the nearest name.

A setting may have a one-letter ``short`` flag, and may be ``flag_only``: neither the environment nor
a file says it. A program of several commands has a schema for each, and one file for all of them.
"""

from __future__ import annotations

import argparse
import configparser
import dataclasses
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar, get_type_hints

import yaml

from gazette.errors import Bug, Invalid
from gazette.protocol.duration import SECOND, format_go_duration, parse_go_duration

T = TypeVar("T")

_META: Final = "gazette.setting"
_TRUE: Final = frozenset({"1", "true", "t", "yes", "y", "on"})
_FALSE: Final = frozenset({"0", "false", "f", "no", "n", "off"})


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
) -> Any:
    """A field of a group: str, int, float, bool, ``bool | None``, ``Path | None`` or ``tuple[str, ...]``.

    ``name`` and ``env`` replace the names that follow from the field's name. A ``secret`` is never
    printed. ``short`` is a letter for ``-x``; ``flag_only`` keeps it out of environment and files.
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
    )
    return dataclasses.field(default=default, metadata={_META: meta})


def duration(
    default: str, help_text: str, *, name: str = "", env: str = "", flag_only: bool = False
) -> Any:
    """A field of a group that holds seconds and is written as ``20s``, ``1m30s`` or ``0``."""
    meta = _Meta(
        help_text, name, env, (), secret=False, is_duration=True, short="", flag_only=flag_only
    )
    return dataclasses.field(default=_parse_duration(default), metadata={_META: meta})


@dataclass(frozen=True, slots=True)
class Option:
    """One setting, by all its names."""

    group: str
    field: str
    name: str
    """Without its group: ``max-append-rate``."""
    env: str
    help: str
    default: Any
    kind: str
    choices: tuple[str, ...]
    secret: bool
    short: str = ""
    """A letter: the flag has a second form, ``-x``."""
    flag_only: bool = False

    @property
    def flag(self) -> str:
        return f"--{self.group}.{self.name}" if self.group else f"--{self.name}"

    @property
    def key(self) -> str:
        """How files and errors call it."""
        return f"{self.group}.{self.name}" if self.group else self.name

    def parse(self, text: str, source: str) -> Any:
        """The value of a text. Raises ``Invalid`` that names the source."""
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
        """The text whose ``parse`` is ``value``."""
        if value is None:
            return ""
        if self.kind == "duration":
            return format_go_duration(round(value * SECOND))
        if self.kind == "list":
            return ",".join(value)
        return str(value).lower() if self.kind == "bool" else str(value)


def _parse_duration(text: str) -> float:
    return parse_go_duration(text.strip()) / SECOND


def _parse_bool(text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise ValueError(text)


_PARSERS: Final[Mapping[str, Callable[[str], Any]]] = {
    "str": str,
    "int": lambda text: int(text.strip()),
    "float": lambda text: float(text.strip()),
    "bool": _parse_bool,
    "path": lambda text: Path(text).expanduser() if text.strip() else None,
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
    """The options of a group, in the order of its fields."""
    hints = get_type_hints(cls)
    for one in dataclasses.fields(cls):
        meta = one.metadata.get(_META)
        if meta is None:
            raise Bug("a field of a settings group was not made by setting()", field=one.name)
        name = meta.name or one.name.replace("_", "-")
        words = f"{group}.{name}" if group else name
        yield Option(
            group=group,
            field=one.name,
            name=name,
            env=meta.env or words.upper().replace(".", "_").replace("-", "_"),
            help=meta.help,
            default=one.default,
            kind="duration" if meta.is_duration else _KINDS[hints[one.name]],
            choices=meta.choices,
            secret=meta.secret,
            short=meta.short,
            flag_only=meta.flag_only,
        )


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a program was configured with, and from where."""

    groups: Mapping[str, Any]
    sources: Mapping[str, str]
    """Option key → "flag", "env NAME", "file PATH" or "default"."""
    file: Path | None
    arguments: tuple[str, ...] = ()
    """Words that are no flags, where the program takes such."""

    def group(self, cls: type[T]) -> T:
        for value in self.groups.values():
            if isinstance(value, cls):
                return value
        raise Bug("not a group of this schema", group=cls.__name__)


class _Parser(argparse.ArgumentParser):
    """argparse that raises instead of leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise Invalid(message, path=self.prog, hint=f"See `{self.prog} --help`.")


class _Help(argparse.RawDescriptionHelpFormatter):
    """``-s, --selector STR``, and switches without the value that they may have."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = ", ".join(action.option_strings)
        if action.nargs in (0, "?") or not action.metavar:
            return names
        return f"{names} {action.metavar}"


class Schema:
    """The groups of one program. ``file_stem`` names its configuration file, None: it has none.

    ``arguments`` says what words without dashes are, as in ``[FILE...]``; by default there must be
    none. ``description`` and ``examples`` are for ``--help``. ``also_in_file`` are groups that other
    programs read from the same file.
    """

    def __init__(
        self,
        program: str,
        groups: Mapping[str, type],
        *,
        file_stem: str | None = None,
        arguments: str = "",
        description: str = "",
        examples: str = "",
        also_in_file: Mapping[str, type] | None = None,
    ) -> None:
        self.program = program
        self.groups = dict(groups)
        self.file_stem = file_stem
        self.arguments = arguments
        self.description = description
        self.examples = examples
        self.options = tuple(
            option for group, cls in self.groups.items() for option in options_of(group, cls)
        )
        self._others = tuple(
            option
            for group, cls in (also_in_file or {}).items()
            if group not in self.groups
            for option in options_of(group, cls)
        )

    def load(
        self, argv: Sequence[str], environ: Mapping[str, str], *, directory: Path | None = None
    ) -> Loaded:
        """Settle every option. Raises ``Invalid`` (exit code 2), or ``SystemExit`` for ``--help``.

        ``directory`` stands for the working directory, where a file is searched first.
        """
        given, arguments = self._parse_flags(argv)
        path = self._find_file(given.pop("config", None), environ, directory)
        from_file = self._read_file(path) if path is not None else {}
        values: dict[str, dict[str, Any]] = {group: {} for group in self.groups}
        sources: dict[str, str] = {}
        for option in self.options:
            sources[option.key], value = self._settle(option, given, environ, from_file, path)
            values[option.group][option.field] = value
        built = {group: cls(**values[group]) for group, cls in self.groups.items()}
        return Loaded(built, sources, path, arguments)

    def _settle(
        self,
        option: Option,
        given: Mapping[str, list[str]],
        environ: Mapping[str, str],
        from_file: Mapping[str, str],
        path: Path | None,
    ) -> tuple[str, Any]:
        if (texts := given.get(option.key)) is not None:
            text = ",".join(texts) if option.kind == "list" else texts[-1]
            return "flag", option.parse(text, option.flag)
        if option.flag_only:
            return "default", option.default
        if text_or_none := environ.get(option.env):  # set but empty is as good as not set
            return f"env {option.env}", option.parse(text_or_none, option.env)
        if (text_or_none := from_file.get(option.key)) is not None:
            return f"file {path}", option.parse(text_or_none, f"{path}: {option.key}")
        return "default", option.default

    def parser(self) -> argparse.ArgumentParser:
        """The flags, for ``--help`` and for generated reference pages."""
        usage = f"{self.program} [FLAGS] {self.arguments}".rstrip()
        parser = _Parser(
            prog=self.program,
            usage=usage,
            description=self.description or None,
            epilog=self.examples or None,
            formatter_class=_Help,
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )
        if self.file_stem is not None:
            where = f"./{self.file_stem}.ini or .yaml, then the same in ~/.config/gazette"
            parser.add_argument("--config", metavar="FILE", help=f"INI or YAML file [{where}]")
        sections: dict[str, Any] = {"": parser}
        # What a command has of its own is what people look for.
        for option in sorted(self.options, key=lambda one: not one.flag_only):
            section = sections.get(option.group)
            if section is None:
                section = sections[option.group] = parser.add_argument_group(option.group)
            kwargs: dict[str, Any] = (
                {"nargs": "?", "const": "true"} if option.kind == "bool" else {}
            )
            section.add_argument(
                *([f"-{option.short}"] if option.short else []),
                option.flag,
                dest=option.key,
                action="append",
                metavar=option.kind.upper(),
                help=_help_text(option),
                **kwargs,
            )
        return parser

    def _parse_flags(self, argv: Sequence[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """What was given for each option, and the words that are no flags."""
        words = self._spelled_out(argv)
        end = words.index("--") if "--" in words else len(words)
        namespace, rest = self.parser().parse_known_args(words[:end])
        flags = [word for word in rest if word.startswith("-") and word != "-"]
        if flags:
            flag = flags[0].partition("=")[0]
            names = [option.flag for option in self.options]
            raise self._unknown(f"unknown flag {flag}", self.program, flag, names)
        arguments = (*rest, *words[end + 1 :])
        if arguments and not self.arguments:
            raise Invalid(
                f'unexpected argument "{arguments[0]}"',
                path=self.program,
                hint="Flags start with --.",
            )
        return dict(vars(namespace)), arguments

    def _spelled_out(self, argv: Sequence[str]) -> list[str]:
        """The words with every switch as ``--switch=true``, so that it does not take what follows it
        for its value; unless that is one, as in ``--switch false``."""
        switches = {one.flag: one.flag for one in self.options if one.kind == "bool"}
        switches |= {
            f"-{one.short}": one.flag for one in self.options if one.kind == "bool" and one.short
        }
        words: list[str] = []
        for at, word in enumerate(argv):
            if word == "--":
                words.extend(argv[at:])
                break
            value = argv[at + 1].lower() if at + 1 < len(argv) else ""
            if word in switches and (self.arguments or value not in _TRUE | _FALSE):
                words.append(f"{switches[word]}=true")
            elif _is_cluster(word) and all(f"-{letter}" in switches for letter in word[1:]):
                words.extend(f"{switches[f'-{letter}']}=true" for letter in word[1:])
            else:
                words.append(word)
        return words

    def _unknown(self, message: str, path: str, word: str, names: Sequence[str]) -> Invalid:
        near = difflib.get_close_matches(word, names, n=1, cutoff=0.65)
        hint = f"See `{self.program} --help`."
        if near:
            message, hint = f"{message} (did you mean {near[0]}?)", f"Write {near[0]}."
        return Invalid(message, path=path, hint=hint)

    def _find_file(
        self, given: str | None, environ: Mapping[str, str], directory: Path | None
    ) -> Path | None:
        if given is not None:
            path = Path(given).expanduser()
            if not path.is_file():
                raise Invalid("configuration file does not exist", path="--config", file=str(path))
            return path
        if self.file_stem is None:
            return None
        homes = [environ[name] for name in ("HOME", "UserProfile") if environ.get(name)]
        for parent in (directory or Path(), *(Path(home, ".config", "gazette") for home in homes)):
            for suffix in (".ini", ".yaml", ".yml"):
                if (path := parent / f"{self.file_stem}{suffix}").is_file():
                    return path
        return None

    def _read_file(self, path: Path) -> dict[str, str]:
        """Option key → text of everything a file says. Raises ``Invalid`` for what is unknown."""
        try:
            text = path.read_text()
            entries = list(_ini_entries(text) if path.suffix == ".ini" else _yaml_entries(text))
        except (OSError, UnicodeDecodeError, configparser.Error, yaml.YAMLError) as error:
            raise Invalid(f"configuration file cannot be read: {error}", path=str(path)) from error
        options = [one for one in (*self.options, *self._others) if not one.flag_only]
        known = {_folded(option.key): option for option in options}
        known |= {_folded(f"{one.group}.{one.field}"): one for one in options}
        found: dict[str, str] = {}
        for key, value in entries:
            option = known.get(_folded(key))
            if option is None:
                names = [one.key for one in options]
                raise self._unknown(f"unknown key {key}", str(path), key.lower(), names)
            found[option.key] = value
        return found

    def render_ini(self, loaded: Loaded) -> str:
        """The effective configuration as an INI file, without secrets."""
        lines: list[str] = []
        for group in self.groups:
            lines.append(f"[{group or 'options'}]")
            for option in self.options:
                if option.group != group or option.flag_only:
                    continue
                value = getattr(loaded.groups[group], option.field)
                lines.append(f"; {option.help} [{option.env}, {loaded.sources[option.key]}]")
                if option.secret:
                    lines.append(f"; {option.name} is {'set' if value else 'not set'}; not shown")
                else:
                    lines.append(f"{option.name} = {option.render(value)}".rstrip())
                lines.append("")
        return "\n".join(lines)


def _help_text(option: Option) -> str:
    default = option.render(option.default)
    facts = [] if option.flag_only else [f"env {option.env}"]
    if default and not option.secret and not (option.flag_only and option.default is False):
        facts.append(f"default {default}")
    choices = f" One of {', '.join(option.choices)}." if option.choices else ""
    about = f" [{', '.join(facts)}]" if facts else ""
    return f"{option.help}.{choices}{about}".replace("%", "%%")


def _is_cluster(word: str) -> bool:
    return len(word) > 2 and word[0] == "-" and word[1:].isalpha()


def _folded(key: str) -> str:
    """Keys are compared without case and separators, so that ``MaxAppendRate`` is known too."""
    group, _, name = key.lower().partition(".")
    group, name = ("", group) if not name else (group, name)
    group = "" if group == "options" else group
    return f"{group}.{name.replace('-', '').replace('_', '').replace('.', '')}"


def _ini_entries(text: str) -> Iterator[tuple[str, str]]:
    parser = configparser.ConfigParser(interpolation=None, default_section="\0")
    parser.optionxform = lambda optionstr: optionstr  # type: ignore[method-assign]
    parser.read_string(text)
    for section in parser.sections():
        for key, value in parser.items(section):
            if value:
                quoted = len(value) >= 2 and value[0] == value[-1] == '"'
                yield f"{section}.{key}", value[1:-1] if quoted else value


def _yaml_entries(text: str) -> Iterator[tuple[str, str]]:
    document = yaml.safe_load(text)
    if document is None:
        return
    if not isinstance(document, dict):
        raise yaml.YAMLError("expected a mapping of groups")
    yield from _flattened("", document)


def _flattened(prefix: str, node: Mapping[Any, Any]) -> Iterator[tuple[str, str]]:
    for key, value in node.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict):
            yield from _flattened(path, value)
        elif isinstance(value, list):
            yield path, ",".join(str(one) for one in value)
        elif isinstance(value, bool):
            yield path, str(value).lower()
        elif value is not None:
            yield path, str(value)


def exit_with(error: Invalid, stderr: Any) -> int:
    """Say what is wrong with the configuration; the exit code is 2."""
    print(f"{error}", file=stderr)
    if error.hint and error.hint != Invalid.default_hint:
        print(error.hint, file=stderr)
    return 2
