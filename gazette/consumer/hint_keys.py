"""Keys in etcd at which hints of shards may be written: `HintKeys`. Pure.

The specification of a shard names the prefix of its hints. A member writes the hints with its own rights in
etcd. So it writes only below prefixes that the operator has named. Otherwise a caller with the right to apply
shards could write to other keys.
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from gazette.errors import Invalid
from gazette.protocol.shard import ShardSpec

CONVENTIONAL: Final = "/gazette/hints"
"""Prefix of hints in specifications of the original, and in all our examples."""
_OWN: Final = "hints"
_FLAG: Final = "consumer.hint-prefix"


@dataclass(frozen=True, slots=True)
class HintKeys:
    """Prefixes at which hints may be written, without a slash at their end."""

    prefixes: tuple[str, ...]

    @classmethod
    def of(cls, prefixes: Sequence[str], root: str) -> Self:
        """Allow ``prefixes``. If empty, allow `CONVENTIONAL`, and ``hints`` below the members' ``root``.

        Raise ``Invalid`` for a prefix that is not an absolute path, or that holds keys of the members.
        """
        own_prefix = f"{root}/{_OWN}"
        for prefix in prefixes:
            # normpath keeps two slashes at the beginning of a path.
            is_clean = posixpath.normpath(prefix) == prefix and prefix[:2] != "//"
            if not (is_clean and prefix.startswith("/") and prefix != "/"):
                raise Invalid(f"not an absolute, clean, non-directory path ({prefix})", path=_FLAG)
            is_own = _is_below(prefix, own_prefix)
            if (_is_below(prefix, root) and not is_own) or _is_below(root, prefix):
                raise Invalid(
                    f"{prefix} holds keys of the members, which are at {root}",
                    path=_FLAG,
                    hint=f"Name another prefix, as {CONVENTIONAL} or {own_prefix}.",
                )
        return cls(tuple(prefixes) or (CONVENTIONAL, own_prefix))

    def allows(self, hint_prefix: str) -> bool:
        """Return True if hints may be written at ``hint_prefix``."""
        return any(_is_below(hint_prefix, prefix) for prefix in self.prefixes)

    def require(self, spec: ShardSpec) -> None:
        """Raise ``Invalid`` if the hints of a shard may not be written at their prefix."""
        if spec.hint_prefix and not self.allows(spec.hint_prefix):
            raise Invalid(
                f"{spec.hint_prefix} is not below {' or '.join(self.prefixes)}"
                f" (--{_FLAG} of the members)",
                path="HintPrefix",
                hint=f"Change hint_prefix of the shard, or start the members with --{_FLAG}.",
            )


def _is_below(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}/")
