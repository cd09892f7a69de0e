"""Settings of a program, from flags, the environment, a file and defaults. The first that is given counts.

A group is a frozen dataclass whose fields are made by ``setting`` or ``duration``:

    @dataclass(frozen=True, slots=True)
    class EtcdFlags:
        address: str = setting("http://localhost:2379", "etcd service address")
        lease: float = duration("20s", "time to live of the lease", env="ETCD_LEASE_TTL")

    schema = Schema("gazette serve", {"etcd": EtcdFlags}, file_stem="gazette")
    etcd = schema.load(argv, os.environ).group(EtcdFlags)

Its flags are ``--etcd.address`` and ``--etcd.lease``. Its environment names are ``ETCD_ADDRESS``
and ``ETCD_LEASE_TTL``. A file says ``[Etcd] Address = …`` (INI) or ``etcd: {address: …}`` (YAML).
For an unknown name, an error suggests the nearest name. In an INI file, an unknown name is only a warning,
because programs of the original share these files and skip unknown keys.

A setting may have a one-letter ``short`` flag. It may be ``flag_only``: the environment does not set it.
A program with several commands has a schema for each command, and one file for all commands.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from gazette.config.ini_file import ini_entries, ini_value
from gazette.config.option import (
    FALSE_WORDS,
    TRUE_WORDS,
    Option,
    duration,
    expanded,
    options_of,
    setting,
)
from gazette.errors import Bug, Invalid
from gazette.runtime.near_names import near_name
from gazette.runtime.redaction import is_plain

log = logging.getLogger(__name__)

T = TypeVar("T")

_SECTIONS: Final = {"": "options", "log": "Logging"}
"""Sections of INI files, by their group, if they do not have the group's name."""
_ALIASES: Final = {"options": "", "logging": "log"}

_PLACES: Final = frozenset(
    {
        *("address", "trusted_ca_file", "cert_file", "cert_key_file"),
        *("peer_ca_file", "peer_cert_file", "peer_cert_key_file"),
        *("oidc_issuer", "oidc_audience", "oidc_claim", "oidc_roles", "oidc_jwks_url"),
    }
)
"""Fields that decide which servers are called, and which certificates both sides trust."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The configuration of a program, and the source of each value."""

    groups: Mapping[str, Any]
    sources: Mapping[str, str]
    """Option key → "flag", "env NAME", "file PATH" or "default"."""
    file: Path | None
    arguments: tuple[str, ...] = ()
    """Words that are not flags. Empty if the schema has no ``arguments`` text."""
    warnings: tuple[str, ...] = ()
    """A sentence for each key of the file that no program knows."""
    argv: tuple[str, ...] = ()

    def group(self, cls: type[T]) -> T:
        """Return the settings of a group, by its class."""
        for value in self.groups.values():
            if isinstance(value, cls):
                return value
        raise Bug("not a group of this schema", group=cls.__name__)


class _Parser(argparse.ArgumentParser):
    """An argparse parser that raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise Invalid(message, path=self.prog, hint=f"See `{self.prog} --help`.")


class _Help(argparse.RawDescriptionHelpFormatter):
    """Shows an option as ``-s, --selector STR``, and a switch without its optional value."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = ", ".join(action.option_strings)
        if action.nargs in (0, "?") or not action.metavar:
            return names
        return f"{names} {action.metavar}"


class Schema:
    """The groups of one program. ``file_stem`` names its configuration file; None for no file.

    ``arguments`` describes words without dashes, as in ``[FILE...]``; by default no such words are permitted.
    ``description`` and ``examples`` are for ``--help``. ``also_in_file`` are sections of the same file for
    other programs. ``defaults`` replaces the defaults of some option keys.

    ``scopes`` are sections of the file for this program, the most general first. Their keys and sub-sections
    (``[scope.Group]``) take precedence over sections for all programs. Only the last scope may set options
    that are ``flag_only``.
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
        scopes: Sequence[str] = (),
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.program = program
        self.groups = dict(groups)
        self.file_stem = file_stem
        self.arguments = arguments
        self.description = description
        self.examples = examples
        replaced = defaults or {}
        self.options = tuple(
            replace(option, default=replaced.get(option.key, option.default))
            for group, cls in self.groups.items()
            for option in options_of(group, cls)
        )
        self._others = dict(also_in_file or {})
        self.scopes = tuple(scopes)

    def load(
        self, argv: Sequence[str], environ: Mapping[str, str], *, directory: Path | None = None
    ) -> Loaded:
        """Find the value of every option. Raise ``SystemExit`` for ``--help``.

        Raise ``Invalid`` (exit code 2) for an unknown flag or key, for a wrong value, and for a file that is
        missing, malformed or not to be trusted. The file is first searched in ``directory``, by default the
        working directory.
        """
        flags, arguments = self._parse_flags(argv)
        named_file = flags.pop("config", None)
        path = self._find_file(named_file, environ, directory)
        from_file, warnings = self._read_file(path) if path is not None else ({}, ())
        values: dict[str, dict[str, Any]] = {group: {} for group in self.groups}
        sources: dict[str, str] = {}
        for option in self.options:
            sources[option.key], value = self._settle(option, flags, environ, from_file, path)
            values[option.group][option.field] = value
        if path is not None and not named_file and path.parent == (directory or Path()):
            self._check_trust(path, sources)
        built_groups = {group: cls(**values[group]) for group, cls in self.groups.items()}
        return Loaded(built_groups, sources, path, arguments, tuple(warnings), tuple(argv))

    def _settle(
        self,
        option: Option,
        given: Mapping[str, list[str]],
        environ: Mapping[str, str],
        from_file: Mapping[str, str],
        path: Path | None,
    ) -> tuple[str, Any]:
        """Return the source of an option's value, and the value. Raise ``Invalid`` for a wrong value."""
        if (texts := given.get(option.key)) is not None:
            text = ",".join(texts) if option.kind == "list" else texts[-1]
            return "flag", option.parse(text, option.flag)
        # An empty variable counts as unset.
        env = "" if option.flag_only else option.env
        if env and (text_or_none := environ.get(env)):
            return f"env {option.env}", option.parse(text_or_none, option.env)
        if (text_or_none := from_file.get(option.key)) is not None:
            return f"file {path}", option.parse(text_or_none, f"{path}: {option.key}")
        return "default", option.default

    def _check_trust(self, path: Path, sources: Mapping[str, str]) -> None:
        """Raise ``Invalid`` if a file that the user did not name decides to which server a secret is sent.

        Another user may own the working directory, and so the file.
        """
        file = f"file {path}"
        secrets = [
            opt for opt in self.options if opt.secret and sources[opt.key] not in (file, "default")
        ]
        places = [opt for opt in self.options if opt.field in _PLACES and sources[opt.key] == file]
        if secrets and places:
            raise Invalid(
                f"{places[0].key} of a file in the working directory would decide where {secrets[0].key}"
                f" is used, which comes from {sources[secrets[0].key].replace('env ', 'environment ')}",
                path=str(path),
                hint=f"If you trust the file, name it: --config={path}. Else give {places[0].flag}.",
            )

    def parser(self) -> argparse.ArgumentParser:
        """Return the parser of the flags, for ``--help`` and for generated reference pages."""
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
            files = f"./{self.file_stem}.ini or .yaml, then the same in ~/.config/gazette"
            parser.add_argument("--config", metavar="FILE", help=f"INI or YAML file [{files}]")
        sections: dict[str, Any] = {"": parser}
        # Put the flags of the command itself first, since users look for them.
        for option in sorted(self.options, key=lambda option: not option.flag_only):
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
        """Return the given texts of options, and the words that are not flags. Raise ``Invalid`` for an
        unknown flag, a flag without its value, and a superfluous argument."""
        words = self._spelled_out(argv)
        end = words.index("--") if "--" in words else len(words)
        namespace, unparsed = self.parser().parse_known_args(words[:end])
        flags = [word for word in unparsed if word.startswith("-") and word != "-"]
        if flags:
            flag = flags[0].partition("=")[0]
            names = [option.flag for option in self.options]
            raise self._unknown(f"unknown flag {flag}", self.program, flag, names)
        arguments = (*unparsed, *words[end + 1 :])
        if arguments and not self.arguments:
            raise Invalid(
                f'unexpected argument "{arguments[0]}"',
                path=self.program,
                hint="Flags start with --.",
            )
        return dict(vars(namespace)), arguments

    def _spelled_out(self, argv: Sequence[str]) -> list[str]:
        """Return the words with each switch written as ``--switch=true``, also each letter of ``-av``. Write
        ``-x=text`` as two words. Unless the program takes arguments, a boolean after a switch is its value,
        as in ``--switch false``. Do not change words from ``--`` on."""
        switches = {option.flag: option.flag for option in self.options if option.kind == "bool"}
        switches |= {
            f"-{opt.short}": opt.flag for opt in self.options if opt.kind == "bool" and opt.short
        }
        words: list[str] = []
        for index, word in enumerate(argv):
            if word == "--":
                words.extend(argv[index:])
                break
            value = argv[index + 1].lower() if index + 1 < len(argv) else ""
            if word in switches and (self.arguments or value not in TRUE_WORDS | FALSE_WORDS):
                words.append(f"{switches[word]}=true")
            elif re.match("-[A-Za-z]=", word):
                words.extend((word[:2], word[3:]))
            elif _is_group_of_letters(word) and all(
                f"-{letter}" in switches for letter in word[1:]
            ):
                words.extend(f"{switches[f'-{letter}']}=true" for letter in word[1:])
            else:
                words.append(word)
        return words

    def _unknown(self, message: str, path: str, word: str, names: Sequence[str]) -> Invalid:
        """Return the error for an unknown flag or key, which suggests the name nearest to ``word``."""
        folded = {_folded(name): name for name in names}
        near = near_name(_folded(word), folded)
        hint = f"See `{self.program} --help`."
        if near:
            name = folded[near]
            message, hint = f"{message} (did you mean {name}?)", f"Write {name}."
        return Invalid(message, path=path, hint=hint)

    def _find_file(
        self, given: str | None, environ: Mapping[str, str], directory: Path | None
    ) -> Path | None:
        """Return the ``given`` file, or else the first file in ``directory`` or the home directory, or else
        None. Raise ``Invalid`` if the given file does not exist."""
        if given is not None:
            try:
                path = expanded(given)
            except Invalid as error:
                raise error.within("--config") from error
            if not os.path.isfile(path):
                raise Invalid(
                    "configuration file does not exist, or this user may not see it",
                    path="--config",
                    file=str(path),
                )
            return path
        if self.file_stem is None:
            return None
        homes = [environ[name] for name in ("HOME", "UserProfile") if environ.get(name)]
        for parent in (directory or Path(), *(Path(home, ".config", "gazette") for home in homes)):
            for suffix in (".ini", ".yaml", ".yml"):
                # Unlike ``Path.is_file``, this is False in a directory that the user may not enter.
                if os.path.isfile(path := parent / f"{self.file_stem}{suffix}"):
                    return path
        return None

    def _read_file(self, path: Path) -> tuple[dict[str, str], list[str]]:
        """Return option key → text of all entries of a file, and a warning for each unknown key.

        Raise ``Invalid`` if the file cannot be read. Raise ``Invalid`` also for an unknown key in YAML: the
        original has no files in YAML, so no other program shares them.
        """
        is_ini = path.suffix == ".ini"
        try:
            text = path.read_text(encoding="utf-8-sig")  # Editors of Windows write a BOM.
            if is_ini:
                entries = list(ini_entries(text))
            else:
                from gazette.config.yaml_file import yaml_entries  # 4 % of a broker's start.

                entries = list(yaml_entries(text))
        except UnicodeDecodeError as error:
            raise Invalid(
                "the configuration file is not UTF-8", path=str(path), hint="Save it as UTF-8."
            ) from error
        except (OSError, Invalid) as error:
            raise Invalid(f"configuration file cannot be read: {error}", path=str(path)) from error
        file_keys = self._file_keys()
        texts: dict[str, tuple[int, str]] = {}  # Rank and text by option key.
        warnings: list[str] = []
        for key, value in entries:
            file_key = file_keys.get(_folded(key))
            if file_key is None:
                names = [name for _, _, name in file_keys.values()]
                unknown = self._unknown(f"unknown key {key}", str(path), key, names)
                if not is_ini:
                    raise unknown
                warnings.append(f"{unknown}; it is ignored")
            elif (option := file_key[1]) is not None:
                rank, earlier = texts.get(option.key, (-1, ""))
                if option.kind == "list" and rank == file_key[0]:  # Entries of a list add up.
                    value = f"{earlier},{value}"
                if rank <= file_key[0]:
                    texts[option.key] = file_key[0], value
        return {key: value for key, (_, value) in texts.items()}, warnings

    def _file_keys(self) -> dict[str, tuple[int, Option | None, str]]:
        """Return, by folded key, the rank, option and usual name of each key that a file may have.

        If several keys set an option, the key with the greatest rank counts. For a key of another program,
        the option is None."""
        file_keys: dict[str, tuple[int, Option | None, str]] = {}
        for section, cls in self._others.items():
            for option in options_of(section.rpartition(".")[2], cls):
                name = _joined(section, option.name)
                file_keys |= dict.fromkeys(_spellings(section, option), (0, None, name))
        for rank, scope in enumerate(("", *self.scopes)):
            for option in self.options:
                if not option.flag_only or (scope and rank == len(self.scopes)):
                    section = _joined(scope, option.group)
                    name = _joined(section, option.name)
                    file_keys |= dict.fromkeys(_spellings(section, option), (rank, option, name))
        return file_keys

    def render_ini(self, loaded: Loaded, groups: Sequence[str] | None = None) -> str:
        """Return the effective configuration as an INI file, without secrets.

        Sections and keys have the original's names. Defaults are comments, as in files of the original.
        ``groups`` are the groups to render; None means all groups.
        """
        lines: list[str] = []
        scope = self.scopes[0] if self.scopes else ""
        for group in self.groups if groups is None else groups:
            name = _SECTIONS.get(group, group[:1].upper() + group[1:])
            section = _joined(scope, name if group or not scope else "")
            lines.append(f"[{section}]")
            for option in self.options:
                if option.group != group or option.flag_only:
                    continue
                value = getattr(loaded.groups[group], option.field)
                facts = ", ".join(filter(None, (option.env, loaded.sources[option.key])))
                lines.append(f"; {option.help} [{facts}]")
                if not _may_be_shown(option, value):
                    # Do not cut only the secret out of the text: the rest would read back as another value.
                    lines.append(f"; {option.name} is {'set' if value else 'not set'}; not shown")
                else:
                    mark = "; " if loaded.sources[option.key] == "default" else ""
                    texts = value if option.kind == "list" and value else [option.render(value)]
                    lines += [f"{mark}{option.ini} = {ini_value(text)}" for text in texts]
                lines.append("")
        return "\n".join(lines)


def _may_be_shown(option: Option, value: Any) -> bool:
    """Return True for a value that is known to hold no secret."""
    is_free = option.kind in ("str", "list") and value not in option.choices
    return not option.secret and (not is_free or is_plain(option.name, option.render(value)))


def _help_text(option: Option) -> str:
    default = option.render(option.default) if _may_be_shown(option, option.default) else ""
    facts = [] if option.flag_only or not option.env else [f"env {option.env}"]
    if default and not (option.flag_only and option.default is False):
        facts.append(f"default {default}")
    choices = f" One of {', '.join(option.choices)}." if option.choices else ""
    about = f" [{', '.join(facts)}]" if facts else ""
    return f"{option.help}.{choices}{about}".replace("%", "%%")


def _is_group_of_letters(word: str) -> bool:
    """Return True for several one-letter flags in one word, such as ``-av``."""
    return len(word) > 2 and word[0] == "-" and word[1:].isalpha()


def _spellings(section: str, option: Option) -> set[str]:
    """Return the folded keys of an option in a section: our names, and the original's names."""
    keys = (option.name, option.field, option.ini, option.flag[2:])
    return {_folded(_joined(section, key)) for key in keys}


def _joined(*parts: str) -> str:
    return ".".join(filter(None, parts))


def _folded(key: str) -> str:
    """Return a key in a form for comparisons: in lower case, without separators, with our names of groups."""
    *sections, name = (re.sub("[-_]", "", part) for part in key.lower().split("."))
    return _joined(*(_ALIASES.get(section, section) for section in sections), name)


def exit_with(error: Invalid, stderr: Any) -> int:
    """Print the error of the configuration, with its hint. Return exit code 2."""
    print(f"{error}", file=stderr)
    if error.hint and error.hint != Invalid.default_hint:
        print(error.hint, file=stderr)
    return 2


def log_warnings(loaded: Loaded) -> None:
    """Log the keys of the file that no program knows."""
    for warning in loaded.warnings:
        log.warning("%(warning)s", {"warning": warning})


__all__ = [
    "Loaded",
    "Option",
    "Schema",
    "duration",
    "exit_with",
    "log_warnings",
    "options_of",
    "setting",
]
