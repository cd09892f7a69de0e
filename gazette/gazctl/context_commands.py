"""``gazctl context``: commands on named addresses."""

from __future__ import annotations

from collections.abc import Mapping

from gazette.errors import Invalid
from gazette.gazctl.command import Command
from gazette.gazctl.context import Context
from gazette.gazctl.contexts import ADDRESSES, Contexts, sign_in_path
from gazette.gazctl.io.output import NONE, Table
from gazette.gazctl.run_contexts import run_contexts
from gazette.runtime.numbers import is_digits


def use(context: Context, _command: Command) -> int:
    """Use a context for all later commands.

    Raise ``NotFound`` for an unknown context, and ``Invalid`` for the context of a run: it ends with the run.
    """
    name = _name_of(context)
    with Contexts.changing(context.environ) as contexts:
        if name not in contexts.named and name in run_contexts(context.environ):
            raise Invalid(
                f"context {name} is there only while its run is",
                path="gazctl context use",
                hint=f"Give --context={name}, or set GAZCTL_CONTEXT={name}.",
            )
        contexts.require(name, "gazctl context use")
        contexts.current = name
    context.terminal.note(f"commands go to {_shown(contexts.named[name])} (context {name})")
    return 0


def set_addresses(context: Context, _command: Command) -> int:
    """Create a context, or change its addresses. Raise ``Invalid`` without an address, or for other flags."""
    name = _name_of(context)
    addresses: dict[str, str] = {}
    for key, source in context.loaded.sources.items():
        group, _, field_name = key.partition(".")
        if source != "flag":
            continue
        if group not in ADDRESSES or field_name != "address":
            raise Invalid(
                "a context has addresses only",
                path=f"--{key}",
                hint="Keep other settings in gazctl.ini or in the environment.",
            )
        addresses[group] = context.loaded.groups[group].address
    if not addresses:
        raise Invalid(
            "no address is given",
            path="gazctl context set",
            hint="Give --broker.address, --consumer.address, or both.",
        )
    with Contexts.changing(context.environ) as contexts:
        contexts.named[name] = {**contexts.named.get(name, {}), **addresses}
    context.terminal.note(f"context {name}: {_shown(contexts.named[name])}")
    return 0


def delete(context: Context, _command: Command) -> int:
    """Forget a context and its sign-in. Raise ``NotFound`` for an unknown context."""
    name = _name_of(context)
    with Contexts.changing(context.environ) as contexts:
        contexts.require(name, "gazctl context delete")
        path = sign_in_path(context.environ, name)
        if path is not None and path.exists():
            from gazette.client.oidc.token_file import locked

            with locked(path):
                path.unlink(missing_ok=True)
        del contexts.named[name]
        if contexts.current == name:
            contexts.current = ""
    return 0


def show(context: Context, _command: Command) -> int:
    """List all contexts, and mark the context in use: of the only run if the user has not chosen."""
    contexts = Contexts.load(context.environ)
    runs = run_contexts(context.environ)
    current = contexts.current or (next(iter(runs)) if len(runs) == 1 else "")
    table = Table(["Current", "Name", "Broker", "Consumer"])
    named = {name: run.addresses for name, run in runs.items()} | contexts.named
    for name, addresses in sorted(named.items()):
        mark = "*" if name == current else ""
        table.add(mark, name, *(addresses.get(group, NONE) for group in ADDRESSES))
    if not named:
        context.terminal.note("there are no contexts; `gazctl context set` creates one")
        return 0
    context.terminal.write(table.text(context.terminal))
    for name, run in runs.items():
        context.terminal.note(f"{name} is there while {run.target} runs in {run.directory}")
    return 0


def _name_of(context: Context) -> str:
    arguments = context.loaded.arguments
    if len(arguments) != 1 or not arguments[0].strip() or is_digits(arguments[0]):
        raise Invalid("expected the name of one context", path="gazctl context")
    return arguments[0]


def _shown(addresses: Mapping[str, str]) -> str:
    return ", ".join(f"{group} {address}" for group, address in sorted(addresses.items()))
