"""The settings of a command, from its words, the environment, files and contexts."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from gazette.config.schema import Loaded, Schema, options_of
from gazette.errors import Invalid, NotFound
from gazette.gazctl import flags
from gazette.gazctl.command import Command
from gazette.gazctl.commands import COMMANDS, FAMILIES, HELP, VERSION, usage
from gazette.gazctl.contexts import ADDRESSES, Contexts, as_variables
from gazette.gazctl.flags import BrokerFlags, ConsumerFlags, LogFlags, SharedFlags
from gazette.gazctl.io.terminal import EXIT_FAILED, EXIT_OK, EXIT_SIGNAL, Terminal, report_error
from gazette.gazctl.run_contexts import addresses_of, the_run_context
from gazette.runtime.near_names import near_name
from gazette.version import __version__

GROUPS: Final = {"broker": BrokerFlags, "consumer": ConsumerFlags, "log": LogFlags}
"""Groups of settings that commands share, by their sections of the configuration file."""
FILE_STEM: Final = "gazctl"


def flags_of(command: Command) -> type[SharedFlags]:
    """Return the class of the command's own settings."""
    cls: type[SharedFlags] = getattr(flags, command.flags)
    return cls


def schema_of(command: Command) -> Schema:
    """Return the settings of a command."""
    return Schema(
        f"gazctl {command.name}",
        {"": flags_of(command), **{name: GROUPS[name] for name in command.groups}},
        file_stem=FILE_STEM,
        arguments=command.arguments,
        description=f"{command.summary}.\n\n{command.description}",
        examples=f"examples:\n{command.examples}" if command.examples else "",
        also_in_file=file_sections(),
        scopes=[".".join(command.words[:count]) for count in range(1, len(command.words) + 1)],
    )


def shared_schema(scope: str) -> Schema:
    """Return the settings that the commands of a group share, such as ``journals``."""
    return Schema(
        "gazctl print-config",
        {"": SharedFlags, **GROUPS},
        file_stem=FILE_STEM,
        also_in_file=file_sections(),
        scopes=[scope],
    )


def file_sections() -> dict[str, type]:
    """Return all sections of a configuration file, by name."""
    sections: dict[str, type] = {"": SharedFlags, **GROUPS}
    for family, groups in FAMILIES.items():
        sections |= {family: SharedFlags}
        sections |= {f"{family}.{name}": GROUPS[name] for name in groups}
    return sections | {".".join(command.words): flags_of(command) for command in COMMANDS}


def find_command(argv: Sequence[str]) -> tuple[Command | str, list[str]]:
    """Return the named command and the words after it; or a text to show, such as for ``--help``.

    If no command is named, return an empty text and the words so far. Shared flags may stand before the
    command or between its words. Raise ``Invalid`` for an unknown command.
    """
    args = list(argv)
    leading_flags: list[str] = []
    words: list[str] = []
    names = {command.words: command for command in COMMANDS}
    while tuple(words) not in names:
        leading_flags += _take_leading_flags(args)
        if not args:
            break
        word = args[0]
        if word in HELP and not words[1:]:
            args.pop(0)
            if word == "help" and args:
                return find_command([*args, "--help"])
            return usage(words[0] if words else ""), []
        if word.startswith("-"):
            break
        candidates = sorted(
            {command.words[len(words)] for command in COMMANDS if _begins(command.words, words)}
        )
        if word not in candidates:
            near = near_name(word, candidates)
            guess = f" (did you mean {near}?)" if near else ""
            path = " ".join(["gazctl", *words])
            raise Invalid(
                f"unknown command {word}{guess}",
                # Without a group, the path would only name the program, like the message.
                path=path if words else "",
                hint=f"See `{path} --help`.",
            )
        words.append(args.pop(0))
    command = names.get(tuple(words))
    if command is not None:
        return command, [*leading_flags, *args]
    if args:
        path = " ".join(["gazctl", *words])
        raise Invalid(f"expected a command, got {args[0]}", path=path, hint=f"See `{path} --help`.")
    return "", words


def _begins(words: tuple[str, ...], begin: Sequence[str]) -> bool:
    return len(words) > len(begin) and list(words[: len(begin)]) == list(begin)


def _take_leading_flags(words: list[str]) -> list[str]:
    """Remove shared flags, with their values, from the begin of ``words``. Return flags and values."""
    shared = {
        option.flag: option
        for group, cls in {"": SharedFlags, **GROUPS}.items()
        for option in options_of(group, cls)
    }
    flags: list[str] = []
    while words and words[0].startswith("--"):
        flag, equals, _ = words[0].partition("=")
        if flag not in shared and flag != "--config":
            break
        flags.append(words.pop(0))
        if not equals and words:
            flags.append(words.pop(0))
    return flags


def prepare(
    argv: Sequence[str], environ: Mapping[str, str], terminal: Terminal
) -> tuple[Command, Loaded, str] | int:
    """Return the command, its settings and the context's name.

    If there is nothing to run, print help, the version or what is wrong, and return the exit code.
    """
    try:
        if argv and argv[0] in VERSION:
            terminal.write(f"{__version__}\n")
            return EXIT_OK
        command, words = find_command(argv)
        if isinstance(command, str):
            if not command:
                terminal.stderr.write(usage(words[0] if words else ""))
                return EXIT_FAILED
            terminal.write(command)
            return EXIT_OK
        schema = schema_of(command)
        flags = words[: words.index("--")] if "--" in words else words
        if "-h" in flags or "--help" in flags:
            terminal.write(schema.parser().format_help())
            return EXIT_OK
        loaded, in_use = _load(command, schema, words, environ)
        for warning in loaded.warnings:
            terminal.note(f"gazctl: warning: {warning}")
    except (Invalid, NotFound) as error:
        return report_error(error, terminal)
    except BrokenPipeError:
        return EXIT_SIGNAL + signal.SIGPIPE
    return command, loaded, in_use


def _load(
    command: Command, schema: Schema, argv: Sequence[str], environ: Mapping[str, str]
) -> tuple[Loaded, str]:
    """Return the settings, and the name of the context whose addresses are used.

    Addresses of a context replace variables that the environment lacks. Without any address, use the
    addresses of the only application that `gazette run` runs. Raise ``Invalid`` for a wrong setting, or for
    several such applications. Raise ``NotFound`` for an unknown context.
    """
    if not command.groups or command.words[0] == "context":
        return schema.load(argv, environ), ""
    return load_in_context(schema, argv, environ, command.groups)


def load_in_context(
    schema: Schema, argv: Sequence[str], environ: Mapping[str, str], groups: Collection[str]
) -> tuple[Loaded, str]:
    """Return the settings, and the name of the context that gave the addresses of ``groups``.

    Return an empty name if no context gave them. Raise ``NotFound`` for an unknown context, and ``Invalid``
    for a wrong setting, or if several runs could give the addresses.
    """
    loaded = schema.load(argv, environ)
    contexts = Contexts.load(environ)
    name = loaded.group(SharedFlags).context or contexts.current
    if name:
        addresses = addresses_of(environ, contexts, name)
    else:
        addressed = [group for group in ADDRESSES if group in groups]
        only_run = the_run_context(environ, addressed) if _has_no_address(loaded) else None
        if only_run is None:
            return loaded, ""
        name, addresses = only_run[0], only_run[1].addresses
    variables = {
        variable: address
        for variable, address in as_variables(addresses).items()
        if not environ.get(variable)
    }
    return schema.load(argv, {**environ, **variables}), name


def _has_no_address(loaded: Loaded) -> bool:
    sources = [loaded.sources.get(f"{group}.address", "default") for group in ADDRESSES]
    return all(source == "default" for source in sources)
