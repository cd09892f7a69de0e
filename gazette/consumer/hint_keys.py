"""Where in etcd hints of shards may be: `HintKeys`. Pure.

The specification of a shard names the prefix of its hints, and a member writes them with its own rights. So
they are written only below prefixes that the operator has named: a token for a shard is none for other keys.
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

from gazette.errors import Invalid
from gazette.protocol.shard import ShardSpec

CONVENTIONAL: Final = "/gazette/hints"
"""What specifications of the original have, and all of our examples."""
_OWN: Final = "hints"
_FLAG: Final = "consumer.hint-prefix"


@dataclass(frozen=True, slots=True)
class HintKeys:
    """The prefixes of keys that hints may have, without a slash at their end."""

    prefixes: tuple[str, ...]

    @classmethod
    def of(cls, prefixes: Sequence[str], root: str) -> Self:
        """Return ``prefixes`` or, without any, the default ones beside the ``root`` of the members.

        Raises ``Invalid`` for a prefix that is not an absolute path, or holds keys of the members.
        """
        own = f"{root}/{_OWN}"
        for prefix in prefixes:
            # Of paths that begin with two slashes, normpath keeps both.
            clean = posixpath.normpath(prefix) == prefix and prefix[:2] != "//"
            if not (clean and prefix.startswith("/") and prefix != "/"):
                raise Invalid(f"not an absolute, clean, non-directory path ({prefix})", path=_FLAG)
            is_own = _is_below(prefix, own)
            if (_is_below(prefix, root) and not is_own) or _is_below(root, prefix):
                raise Invalid(
                    f"{prefix} holds keys of the members, which are at {root}",
                    path=_FLAG,
                    hint=f"Name another prefix, as {CONVENTIONAL} or {own}.",
                )
        return cls(tuple(prefixes) or (CONVENTIONAL, own))

    def allows(self, hint_prefix: str) -> bool:
        """Return True if hints of that prefix are written."""
        return any(_is_below(hint_prefix, prefix) for prefix in self.prefixes)

    def require(self, spec: ShardSpec) -> None:
        """Raise ``Invalid`` if the hints of a shard are not written where it wants them."""
        if spec.hint_prefix and not self.allows(spec.hint_prefix):
            raise Invalid(
                f"{spec.hint_prefix} is not below {' or '.join(self.prefixes)}"
                f" (--{_FLAG} of the members)",
                path="HintPrefix",
                hint=f"Change hint_prefix of the shard, or start the members with --{_FLAG}.",
            )


def _is_below(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}/")
