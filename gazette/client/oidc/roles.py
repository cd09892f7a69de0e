"""Roles: a file that says what each value of a provider's claim permits in this cluster.

    roles:
      - {role: gazette-operators, cap: [LIST, APPLY, READ, APPEND]}
      - {role: team-orders, cap: [LIST, READ], sel: "name:prefix=orders/"}

Rights of several roles add up. So all selectors of a file are about one label, and have no exclusions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from pathlib import Path
from typing import Any, Final

from gazette.auth import Capability, Claims
from gazette.errors import Invalid, NotAllowed
from gazette.protocol.label_set import EVERYTHING, LabelSelector, LabelSet

_NAMES: Final = ("LIST", "APPLY", "READ", "APPEND", "REPLICATE")
_SPACED: Final = frozenset({"scope", "scp"})
"""Claims whose text has several values, separated by spaces (RFC 8693). The text of any other claim is one
value: a user may have chosen a name with spaces."""


@dataclass(frozen=True, slots=True)
class Role:
    """A row of the file: holders of ``name`` have the capabilities for all that the selector matches."""

    name: str
    capability: int
    selector: LabelSelector


def read_roles(path: Path) -> tuple[Role, ...]:
    """Return the rows of a file. Raise ``Invalid`` for a file that cannot be read, or has no rows."""
    from gazette.protocol.text import strict_yaml

    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(f"the file cannot be read: {error}", path=str(path)) from error

    def row(node: Any) -> Role:
        fields = strict_yaml.Fields(node, ("role", "cap", "sel"))
        capabilities = fields.items("cap", lambda item: _capability(strict_yaml.text_of(item)))
        if not fields.text("role") or not capabilities:
            raise Invalid("a row needs role and cap")
        selector = LabelSelector.parse(fields.text("sel"))
        return Role(fields.text("role"), reduce(int.__or__, capabilities), selector)

    try:
        rows = strict_yaml.decode(
            text, lambda root: strict_yaml.Fields(root, ("roles",)).items("roles", row)
        )
        labels = {label.name for role in rows for label in role.selector.include.labels}
        if len(labels) > 1 or any(role.selector.exclude for role in rows):
            raise Invalid("selectors must be about one label, and exclude nothing: rights add up")
        if not rows:
            raise Invalid("no roles")
    except Invalid as error:
        raise error.within(str(path)) from error
    return rows


def _capability(name: str) -> int:
    """Return a capability by its name, or by its number if it is an application's. Else raise ``Invalid``."""
    if name in _NAMES:
        return Capability[name]
    if name.isascii() and name.isdigit() and len(name) < 11:
        value = int(name)
        if (
            Capability.APPLICATION <= value <= Capability.ALL
            and value % Capability.APPLICATION == 0
        ):
            return value
    raise Invalid(
        f"unknown capability {name[:100]}",
        hint=f"Give {', '.join(_NAMES)}, or a number of an application, from 65536.",
    )


def names_in(payload: Mapping[str, Any], claim: str) -> frozenset[str]:
    """Return the roles of a token. A dot in ``claim`` leads into an object, as in ``realm_access.roles``.

    Raise ``NotAllowed`` if the claim is neither a text nor a list of texts.
    """
    value: Any = payload.get(claim)
    if value is None:
        value = payload
        for part in claim.split("."):
            value = value.get(part) if isinstance(value, dict) else None
    if value is None:
        return frozenset()
    if isinstance(value, str):
        value = value.split() if claim in _SPACED else [value]
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise NotAllowed(f"verifying Authorization: claim {claim} is no list of texts")
    return frozenset(value)


def rights_of(roles: Sequence[Role], names: frozenset[str], claim: str, require: int) -> Claims:
    """Return the union of what the selectors match, of all roles that have every required capability.

    The capabilities returned are those that all these roles share. Raise ``NotAllowed`` if no role has every
    required capability.
    """
    able = [role for role in roles if role.name in names and not require & ~role.capability]
    if not able:
        wanted = ", ".join(name for name in _NAMES if Capability[name] & require)
        raise NotAllowed(
            f"authorization is missing required {wanted or require} capability: "
            f"no value of claim {claim} gives it"
        )
    capability = reduce(and_, (role.capability for role in able))
    if any(not role.selector.include for role in able):
        return Claims(capability, EVERYTHING)
    labels = {label for role in able for label in role.selector.include.labels}
    return Claims(capability, LabelSelector(LabelSet(tuple(sorted(labels)))))
