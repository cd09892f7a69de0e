"""Named addresses of brokers and consumers, in a user's configuration directory: `Contexts`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from gazette.errors import Invalid, NotFound, Unavailable
from gazette.runtime.private_paths import locked_file, make_private_directory

FILE: Final = "contexts.yaml"
_LOCK_S: Final = 10.0
SIGN_INS: Final = "sign-ins"
ADDRESSES: Final = {"broker": "BROKER_ADDRESS", "consumer": "CONSUMER_ADDRESS"}
"""Addresses of a context, with the environment variables that they replace."""


def contexts_directory(environ: Mapping[str, str]) -> Path | None:
    """Return this user's configuration directory; None without a home directory."""
    homes = [environ[name] for name in ("HOME", "UserProfile") if environ.get(name)]
    return Path(homes[0], ".config", "gazette") if homes else None


def sign_in_path(environ: Mapping[str, str], name: str) -> Path | None:
    """Return the file with the tokens of a context; None without a home directory."""
    directory = contexts_directory(environ)
    return None if directory is None else directory / SIGN_INS / f"{quote(name, safe='')}.json"


def as_variables(addresses: Mapping[str, str]) -> dict[str, str]:
    """Return the addresses of a context as environment variables."""
    return {ADDRESSES[group]: address for group, address in addresses.items()}


@dataclass(slots=True)
class Contexts:
    """Named addresses. ``current`` is the name of the addresses in use; empty if no name is in use."""

    current: str = ""
    named: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def load(cls, environ: Mapping[str, str]) -> Contexts:
        """Read the file; without a file there are no contexts. Raise ``Invalid`` if it cannot be read."""
        directory = contexts_directory(environ)
        if directory is None:
            return cls()
        path = directory / FILE
        if not os.path.exists(path):  # Most users have no contexts: spare them the import.
            return cls()
        import yaml

        try:
            value = yaml.safe_load(path.read_text())
        except FileNotFoundError:
            return cls()
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise _unreadable(path, str(error)) from error
        return cls._parsed(path, value)

    @classmethod
    def _parsed(cls, path: Path, value: Any) -> Contexts:
        if not isinstance(value, dict) or not isinstance(value.get("contexts"), dict):
            raise _unreadable(path, "it has no contexts")
        for name, addresses in value["contexts"].items():
            if not isinstance(addresses, dict) or not all(
                key in ADDRESSES and isinstance(address, str) for key, address in addresses.items()
            ):
                raise _unreadable(path, f"context {name} is not an address of broker or consumer")
        current = value.get("current") or ""
        if current and current not in value["contexts"]:
            raise _unreadable(path, f"there is no context {current}, which is the current one")
        return cls(current, value["contexts"])

    @classmethod
    @contextmanager
    def changing(cls, environ: Mapping[str, str], *, wait_s: float = _LOCK_S) -> Iterator[Contexts]:
        """Read the file, and replace it at the end of the block. Other processes wait until then.

        Raise ``Invalid`` without a home directory, ``OSError`` if the write fails, and the errors of `load`.
        Raise ``Unavailable`` if another process keeps the lock for ``wait_s`` seconds.
        """
        directory = contexts_directory(environ)
        if directory is None:
            raise Invalid(
                "there is no place for contexts",
                path="HOME",
                hint="Set HOME to a directory that can be written.",
            )
        make_private_directory(directory)
        lock_path = directory / f"{FILE}.lock"
        try:
            with locked_file(lock_path, wait_s):
                contexts = cls.load(environ)
                yield contexts
                contexts._save(directory / FILE)
        except BlockingIOError:
            raise Unavailable(
                "another process changes the contexts",
                hint=f"Wait for the other gazctl, or end it: it holds {lock_path}.",
            ) from None

    def _save(self, path: Path) -> None:
        import yaml

        text = yaml.safe_dump({"current": self.current, "contexts": self.named}, sort_keys=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{FILE}-")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(text)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise

    def require(self, name: str, path: str) -> dict[str, str]:
        """Return the addresses of a context. Raise ``NotFound`` for an unknown name."""
        if name not in self.named:
            raise not_found(name, self.named, path)
        return self.named[name]


def not_found(name: str, there: Iterable[str], path: str) -> NotFound:
    """Return the error for a context that does not exist. The error names the existing contexts."""
    return NotFound(
        f"there is no context {name}",
        hint=f"There are: {', '.join(sorted(there)) or 'none'}. Create one by "
        f"`gazctl context set {name} --broker.address=…`.",
        path=path,
    )


def _unreadable(path: Path, reason: str) -> Invalid:
    return Invalid(
        f"contexts cannot be read: {reason}",
        path=str(path),
        hint="Correct the file, or remove it and set the contexts again.",
    )
