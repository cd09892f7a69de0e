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
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml

from gazette.config_file import ini_entries, yaml_entries
from gazette.errors import Bug, Invalid
from gazette.options import FALSE_WORDS, TRUE_WORDS, Option, duration, options_of, setting

T = TypeVar("T")


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
            if word in switches and (self.arguments or value not in TRUE_WORDS | FALSE_WORDS):
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
            entries = list(ini_entries(text) if path.suffix == ".ini" else yaml_entries(text))
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


def exit_with(error: Invalid, stderr: Any) -> int:
    """Say what is wrong with the configuration; the exit code is 2."""
    print(f"{error}", file=stderr)
    if error.hint and error.hint != Invalid.default_hint:
        print(error.hint, file=stderr)
    return 2


__all__ = ["Loaded", "Option", "Schema", "duration", "exit_with", "options_of", "setting"]
