"""``gazctl context``: named addresses of brokers and consumers, in the directory of configuration."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from gazette.errors import Invalid, NotFound
from gazette.gazctl.commands import Command
from gazette.gazctl.context import Context
from gazette.gazctl.io.output import NONE, Table
from gazette.runtime.numbers import is_digits

FILE: Final = "contexts.yaml"
_ADDRESSES: Final = {"broker": "BROKER_ADDRESS", "consumer": "CONSUMER_ADDRESS"}
"""Addresses of a context, with the variables whose place they take."""


@dataclass(slots=True)
class Contexts:
    """Named addresses, and the name of those in use."""

    path: Path | None
    current: str = ""
    named: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def load(cls, environ: Mapping[str, str]) -> Contexts:
        """Read the file. Without one there are no contexts. Raise ``Invalid`` if it cannot be read."""
        homes = [environ[name] for name in ("HOME", "UserProfile") if environ.get(name)]
        if not homes:
            return cls(None)
        path = Path(homes[0], ".config", "gazette", FILE)
        try:
            value = yaml.safe_load(path.read_text())
        except FileNotFoundError:
            return cls(path)
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise _unreadable(path, str(error)) from error
        return cls._parsed(path, value)

    @classmethod
    def _parsed(cls, path: Path, value: Any) -> Contexts:
        if not isinstance(value, dict) or not isinstance(value.get("contexts"), dict):
            raise _unreadable(path, "it has no contexts")
        for name, addresses in value["contexts"].items():
            if not isinstance(addresses, dict) or not all(
                kind in _ADDRESSES and isinstance(address, str)
                for kind, address in addresses.items()
            ):
                raise _unreadable(path, f"context {name} is not an address of broker or consumer")
        current = value.get("current") or ""
        if current and current not in value["contexts"]:
            raise _unreadable(path, f"there is no context {current}, which is the current one")
        return cls(path, current, value["contexts"])

    def save(self) -> None:
        """Replace the file. Raise ``Invalid`` without a home directory, ``OSError``."""
        if self.path is None:
            raise Invalid(
                "there is no place for contexts",
                path="HOME",
                hint="Set HOME to a directory that can be written.",
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump({"current": self.current, "contexts": self.named}, sort_keys=True)
        handle, partial = tempfile.mkstemp(dir=self.path.parent, prefix=f".{FILE}-")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
            os.replace(partial, self.path)
        except OSError:
            os.unlink(partial)
            raise

    def require(self, name: str, path: str) -> dict[str, str]:
        """Return the addresses of a context. Raise ``NotFound``."""
        if name not in self.named:
            raise NotFound(
                f"there is no context {name}",
                hint=f"There are: {', '.join(sorted(self.named)) or 'none'}. Create one by "
                f"`gazctl context set {name} --broker.address=…`.",
                path=path,
            )
        return self.named[name]

    def environ(self, name: str) -> dict[str, str]:
        """Return the addresses of a context as variables."""
        return {_ADDRESSES[kind]: address for kind, address in self.named[name].items()}


def use(context: Context, _command: Command) -> int:
    """Take a context for all commands that follow."""
    name = _name_of(context)
    contexts = Contexts.load(context.environ)
    contexts.require(name, "gazctl context use")
    contexts.current = name
    contexts.save()
    context.terminal.note(f"commands go to {_shown(contexts.named[name])} (context {name})")
    return 0


def set_addresses(context: Context, _command: Command) -> int:
    """Create a context, or change its addresses."""
    name = _name_of(context)
    given: dict[str, str] = {}
    for key, source in context.loaded.sources.items():
        group, _, field_name = key.partition(".")
        if source != "flag":
            continue
        if group not in _ADDRESSES or field_name != "address":
            raise Invalid(
                "a context has addresses only",
                path=f"--{key}",
                hint="Keep other settings in gazctl.ini or in the environment.",
            )
        given[group] = context.loaded.groups[group].address
    if not given:
        raise Invalid(
            "no address is given",
            path="gazctl context set",
            hint="Give --broker.address, --consumer.address, or both.",
        )
    contexts = Contexts.load(context.environ)
    contexts.named[name] = {**contexts.named.get(name, {}), **given}
    contexts.save()
    context.terminal.note(f"context {name}: {_shown(contexts.named[name])}")
    return 0


def delete(context: Context, _command: Command) -> int:
    """Forget a context."""
    name = _name_of(context)
    contexts = Contexts.load(context.environ)
    contexts.require(name, "gazctl context delete")
    del contexts.named[name]
    if contexts.current == name:
        contexts.current = ""
    contexts.save()
    return 0


def show(context: Context, _command: Command) -> int:
    """List all contexts, and mark the one in use."""
    contexts = Contexts.load(context.environ)
    table = Table(["Current", "Name", "Broker", "Consumer"])
    for name, addresses in sorted(contexts.named.items()):
        mark = "*" if name == contexts.current else ""
        table.add(mark, name, *(addresses.get(kind, NONE) for kind in _ADDRESSES))
    if not contexts.named:
        context.terminal.note("there are no contexts; `gazctl context set` creates one")
        return 0
    context.terminal.write(table.text(context.terminal))
    return 0


def _name_of(context: Context) -> str:
    arguments = context.loaded.arguments
    if len(arguments) != 1 or not arguments[0].strip() or is_digits(arguments[0]):
        raise Invalid("expected the name of one context", path="gazctl context")
    return arguments[0]


def _shown(addresses: Mapping[str, str]) -> str:
    return ", ".join(f"{kind} {address}" for kind, address in sorted(addresses.items()))


def _unreadable(path: Path, reason: str) -> Invalid:
    return Invalid(
        f"contexts cannot be read: {reason}",
        path=str(path),
        hint="Correct the file, or remove it and set the contexts again.",
    )
