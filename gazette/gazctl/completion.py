"""``gazctl completion``: scripts with which shells complete commands, flags and their values.

The scripts contain all words, so that a completion starts no process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gazette.config.schema import Option
from gazette.errors import Invalid
from gazette.gazctl.command import Command
from gazette.gazctl.commands import COMMANDS
from gazette.gazctl.context import Context
from gazette.gazctl.settings import schema_of


def run(context: Context, _command: Command) -> int:
    arguments = context.loaded.arguments
    if len(arguments) != 1 or arguments[0] not in SCRIPTS:
        raise Invalid(
            "expected the name of a shell",
            path="gazctl completion",
            hint=f"One of {', '.join(SCRIPTS)}.",
        )
    context.terminal.write(SCRIPTS[arguments[0]]())
    return 0


def _tree() -> dict[str, list[tuple[str, str]]]:
    """Return the words that may follow a path of words: "" → journals, shards …; "journals" → list …"""
    tree: dict[str, list[tuple[str, str]]] = {"": []}
    for command in COMMANDS:
        if len(command.words) == 1:
            tree[""].append((command.name, command.summary))
            continue
        group, name = command.words
        if group not in tree:
            tree[group] = []
            tree[""].append((group, f"Commands of {group}"))
        tree[group].append((name, command.summary))
    return tree


def _options(command: Command) -> tuple[Option, ...]:
    return schema_of(command).options


def _words(command: Command) -> list[str]:
    """Return the words that may stand in the place of a flag."""
    flags = ["--help", "--config"]
    for option in _options(command):
        flags += [f"-{option.short}", option.flag] if option.short else [option.flag]
    return [*flags, *_literal_arguments(command)]


def _literal_arguments(command: Command) -> list[str]:
    """Return the words of an argument such as ``bash|zsh|fish``; empty if a command takes other words."""
    words = command.arguments.split("|")
    return words if len(words) > 1 else []


def _flag_pattern(option: Option) -> str:
    return f"-{option.short}|{option.flag}" if option.short else option.flag


def bash() -> str:
    cases = [
        f'        "{path}") words="{" ".join(name for name, _ in entries)}" ;;'
        for path, entries in _tree().items()
    ]
    for command in COMMANDS:
        cases.append(f'        "{command.name}") words="{" ".join(_words(command))}" ;;')
    values: list[str] = []
    for command in COMMANDS:
        for option in _options(command):
            pattern = "|".join(
                f'"{command.name} {flag}"' for flag in _flag_pattern(option).split("|")
            )
            if option.choices:
                reply = f'COMPREPLY=($(compgen -W "{" ".join(option.choices)}" -- "$word"))'
            elif option.kind == "bool":
                continue
            else:
                # Then bash completes names of files: see `complete` below.
                reply = "COMPREPLY=()"
            values.append(f"        {pattern}) {reply}; return ;;")
    return _BASH.format(cases="\n".join(cases), values="\n".join(values))


_BASH: Final = """\
# bash completion for gazctl. Load it with: source <(gazctl completion bash)
_gazctl() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" path="" words="" previous="" at
    # Bash splits at "=": what is before it is the flag.
    local before=$((COMP_CWORD - 1))
    if [[ "$word" == "=" ]]; then word=""; fi
    if [[ "${{COMP_WORDS[before]}}" == "=" ]]; then before=$((before - 1)); fi
    previous="${{COMP_WORDS[before]}}"
    for ((at = 1; at < COMP_CWORD; at++)); do
        case "${{COMP_WORDS[at]}}" in
        -*) break ;;
        *) path="${{path:+$path }}${{COMP_WORDS[at]}}" ;;
        esac
    done
    case "$path $previous" in
{values}
    esac
    case "$path" in
{cases}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _gazctl gazctl
"""


def zsh() -> str:
    tree = _tree()
    cases: list[str] = []
    for path, entries in tree.items():
        described = " ".join(_zsh_quoted(f"{name}:{summary}") for name, summary in entries)
        cases.append(f"    '{path}') _values=({described}); _describe command _values; return ;;")
    for command in COMMANDS:
        specs = [_zsh_option(option) for option in _options(command)]
        specs += ["'(-h --help)'{-h,--help}'[show help]'", "'--config=[settings file]:file:_files'"]
        literals = _literal_arguments(command)
        specs.append(f"'*:argument:({' '.join(literals)})'" if literals else "'*:file:_files'")
        cases.append(f"    '{command.name}') _arguments {' '.join(specs)}; return ;;")
    return _ZSH.format(cases="\n".join(cases))


_ZSH: Final = """\
#compdef gazctl
# zsh completion for gazctl. Put it into a directory of $fpath, as _gazctl.
_gazctl() {{
    local _path='' _word _depth=0
    local -a _values
    for _word in "${{(@)words[2,CURRENT-1]}}"; do
        [[ "$_word" == -* ]] && break
        _path="${{_path:+$_path }}$_word"
        (( _depth++ ))
        case "$_path" in
        journals|shards) ;;
        *) break ;;
        esac
    done
    shift "$_depth" words
    (( CURRENT -= _depth ))
    case "$_path" in
{cases}
    esac
}}
_gazctl "$@"
"""


def _zsh_option(option: Option) -> str:
    # Brackets and colons have a meaning within a specification of zsh.
    help_text = option.help.replace("[", "(").replace("]", ")").replace(":", " -")
    if option.kind == "bool":
        value = ""
    elif option.choices:
        value = f":value:({' '.join(option.choices)})"
    elif option.kind == "path":
        value = ":file:_files"
    else:
        value = ":value:_files"
    equals = "=" if value else ""
    specs = [_zsh_quoted(f"*{option.flag}{equals}[{help_text}]{value}")]
    if option.short:
        specs.append(_zsh_quoted(f"*-{option.short}{'+' if value else ''}[{help_text}]{value}"))
    return " ".join(specs)


def _zsh_quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def fish() -> str:
    lines = ["# fish completion for gazctl. Put it into ~/.config/fish/completions/gazctl.fish"]
    tree = _tree()
    for path, entries in tree.items():
        condition = _fish_condition(path, [name for name, _ in entries])
        lines += [
            f"complete -c gazctl -f -n {condition} -a {name} -d {_fish_quoted(summary)}"
            for name, summary in entries
        ]
    for command in COMMANDS:
        condition = _fish_condition(command.name, [])
        for option in _options(command):
            words = [f"complete -c gazctl -n {condition} -l {option.flag[2:]}"]
            if option.short:
                words.append(f"-s {option.short}")
            if option.choices:
                words.append(f"-x -a {_fish_quoted(' '.join(option.choices))}")
            elif option.kind != "bool":
                words.append("-r")
            lines.append(f"{' '.join(words)} -d {_fish_quoted(option.help)}")
        if literals := _literal_arguments(command):
            lines.append(
                f"complete -c gazctl -f -n {condition} -a {_fish_quoted(' '.join(literals))}"
            )
    return "\n".join(lines) + "\n"


def _fish_condition(path: str, following: list[str]) -> str:
    """Return the condition that the line has the words of a path, and none of ``following``."""
    if not path:
        return "__fish_use_subcommand"
    conditions = [f"__fish_seen_subcommand_from {word}" for word in path.split()]
    if following:
        conditions.append(f"not __fish_seen_subcommand_from {' '.join(following)}")
    return _fish_quoted("; and ".join(conditions))


def _fish_quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


SCRIPTS: Final[dict[str, Callable[[], str]]] = {"bash": bash, "zsh": zsh, "fish": fish}
