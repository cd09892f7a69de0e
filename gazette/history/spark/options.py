"""The options of our data sources for Spark: texts by name, parsed and checked. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn, TypeVar, get_args

from gazette.errors import Invalid
from gazette.protocol.label_set import LabelSelector
from gazette.runtime.near_names import near_name
from gazette.runtime.numbers import parse_integer, parse_number

T = TypeVar("T")

_IGNORED: Final = frozenset({"path", "queryname"})
"""Names of options that Spark itself adds."""
_CREDENTIALS: Final[dict[str, tuple[str, str]]] = {
    "authKeys": ("auth_keys", "base64 keys to sign tokens with"),
    "authToken": ("auth_token", "token to present"),
    "trustedCaFile": ("trusted_ca_file", "certificates to verify servers with (PEM)"),
    "certFile": ("cert_file", "certificate to present to servers (PEM)"),
    "certKeyFile": ("cert_key_file", "key of that certificate (PEM)"),
}
"""By option: the client flag of the same meaning, and its description."""


def credential_options(group: str) -> dict[str, str]:
    """Return the credential options of a group, such as ``broker``, with their descriptions."""
    return {f"{group}.{name}": text for name, (_, text) in _CREDENTIALS.items()}


class Options:
    """Options by name, in upper or lower case. Errors name the option, its value, and what to do.

    ``known`` has the options with their descriptions. ``renamed`` has advice by the former name of an option.
    """

    def __init__(
        self,
        options: Mapping[str, str],
        known: Mapping[str, str],
        *,
        renamed: Mapping[str, str] = {},
    ) -> None:
        self._values = {name.lower(): value for name, value in options.items()}
        self._known = {name.lower(): (name, text) for name, text in known.items()}
        for name in self._values:
            if name in self._known or name in _IGNORED:
                continue
            near = near_name(name, self._known)
            hint = f"Known: {', '.join(known)}."
            if name in renamed:
                hint = renamed[name]
            elif (plain := name.replace("_", "")) in self._known:
                hint = f"It is now {self._known[plain][0]}."
            elif near:
                hint = f"Did you mean {self._known[near][0]}?"
            # The value may be a secret, whose name is misspelt: do not show it.
            raise Invalid("there is no such option", path=f"option {name}", hint=hint)

    def __contains__(self, name: str) -> bool:
        return name.lower() in self._values

    def knows(self, name: str) -> bool:
        """Return True if there is an option of this name, whether it is set or not."""
        return name.lower() in self._known

    def text(self, name: str, default: str = "") -> str:
        return self._values.get(name.lower(), default).strip()

    def fail(self, name: str, reason: str, hint: str = "") -> NoReturn:
        """Raise ``Invalid`` for an option. Without a ``hint``, give the description of the option."""
        value = self._values.get(name.lower())
        value_text = "is not given" if value is None else f"is {value!r}"
        if value is not None and name.rpartition(".")[2] in _CREDENTIALS:
            value_text = "is not shown"
        spelt, text = self._known.get(name.lower(), (name, "not known"))
        raise Invalid(
            f"{reason} (it {value_text})", path=f"option {spelt}", hint=hint or f"It is: {text}."
        )

    def flag(self, name: str, default: bool = False) -> bool:
        text = self.text(name).lower()
        if text not in ("", "true", "false"):
            self.fail(name, "must be true or false")
        return text == "true" if text else default

    def number(self, name: str, default: T, least: float = 0, kind: type = int) -> Any | T:
        """Return an integer, or with another ``kind`` any number, of at least ``least``."""
        text = self.text(name)
        if not text:
            return default
        try:
            value = parse_integer(text) if kind is int else parse_number(text)
        except ValueError:
            self.fail(name, "must be a number")
        if not value >= least:  # Also for NaN.
            self.fail(name, f"must be at least {least}")
        if value == math.inf:  # As for 1e999.
            self.fail(name, "is too large")
        return value

    def choice(self, name: str, kind: Any, default: str) -> Any:
        """Return one of the texts of ``kind``, a ``Literal``, in lower case."""
        text = self.text(name, default).lower()
        choices = [choice for choice in get_args(kind) if choice]
        if text not in choices and text != default:
            self.fail(name, f"must be one of {', '.join(choices)}")
        return text

    def names(self, name: str) -> tuple[str, ...]:
        return tuple(part for part in re.split(r"[,\s]+", self.text(name)) if part)

    def parsed(self, name: str, parse: Callable[[str], T]) -> T:
        try:
            return parse(self.text(name))
        except Invalid as error:
            self.fail(name, str(error))

    def credentials(self, group: str) -> dict[str, Any]:
        """Return the credentials of a group as arguments of client flags."""
        return {flag: self.text(f"{group}.{name}") for name, (flag, _) in _CREDENTIALS.items()}

    def selector(self) -> LabelSelector | None:
        if not self.text("selector"):
            return None
        return self.parsed("selector", LabelSelector.parse)
