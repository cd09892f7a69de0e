"""Stage 7 of the byte path: the object in which a primary that ends without etcd states where it ended.

A primary that leaves in good order closes the known head in etcd. If etcd does not answer, the primary puts a
*closing* into the journal's store, after all of its bytes. A closing says that the primary has acknowledged
nothing beyond ``end``, and gives the registers there. The next primary that finds the head open reads the
closing by its exact name. See ADR 33.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, Final

from gazette.blobs.blob_store import BlobStore
from gazette.errors import Corrupt
from gazette.protocol.ids import JournalName, Offset, Revision
from gazette.protocol.label_set import Label, LabelSet

_NAME: Final = re.compile(
    r"closed-(?P<life>[0-9]{1,19})-(?P<tenure>[0-9]{1,19})-(?P<lease>[0-9a-f]{16})"
)
_BYTES_MAX: Final = 64 << 20
"""Upper bound of a closing in bytes. Each closing is shorter: its registers fit into a message of brokers."""


@dataclass(frozen=True, slots=True)
class ClosingName:
    """The primary of a closing.

    ``life`` is the creation revision of its journal, ``tenure`` is the creation revision of its assignment.
    ``lease`` is the lease of its broker. If etcd was restored from a backup, or begun from nothing, revisions
    may repeat. Leases never repeat, so a name never stands for two primaries.
    """

    journal: JournalName
    life: Revision
    tenure: Revision
    lease: int

    @property
    def path(self) -> str:
        """Path of the object. No broker mistakes it for the path of a fragment."""
        return f"{self.journal}/closed-{self.life}-{self.tenure}-{self.lease:016x}"

    @classmethod
    def parse(cls, journal: JournalName, relative_path: str) -> ClosingName | None:
        """Read a path below a journal's directory. Return None for the path of another object."""
        match = _NAME.fullmatch(relative_path)
        if match is None:
            return None
        return cls(journal, int(match["life"]), int(match["tenure"]), int(match["lease"], 16))


@dataclass(frozen=True, slots=True)
class Closing:
    """The statement of a primary at its end: it has acknowledged nothing beyond ``end``, with ``registers``
    there.

    ``begin`` is the first offset that no store was known to have when the primary ended. The primary put the
    closing when stores had everything from ``begin`` to ``end``.
    """

    name: ClosingName
    end: Offset
    registers: LabelSet
    begin: Offset

    def encode(self) -> bytes:
        """Return the content of the object, with its digest."""
        body = {
            "journal": self.name.journal,
            "life": self.name.life,
            "tenure": self.name.tenure,
            "lease": self.name.lease,
            "begin": self.begin,
            "end": self.end,
            "registers": [(label.name, label.value) for label in self.registers.labels],
        }
        return json.dumps({"closing": body, "sha256": _digest(body)}).encode()

    @classmethod
    def decode(cls, name: ClosingName, content: bytes) -> Closing:
        """Return the closing that ``content`` holds. Raise ``Corrupt`` if it is damaged, or has another
        name."""
        try:
            fields = json.loads(content)
            body = fields["closing"]
            registers = tuple(Label(str(label), str(value)) for label, value in body["registers"])
            found_name = ClosingName(
                str(body["journal"]), int(body["life"]), int(body["tenure"]), int(body["lease"])
            )
            closing = cls(found_name, int(body["end"]), LabelSet(registers), int(body["begin"]))
            is_intact = fields["sha256"] == _digest(body)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise _damaged(name) from error
        if not is_intact or found_name != name or not 0 <= closing.begin <= closing.end:
            raise _damaged(name)
        return closing

    @classmethod
    def read(cls, name: ClosingName, store: BlobStore) -> Closing:
        """Read a closing; this call blocks. Raise ``NotFound`` if the closing is missing, ``Corrupt`` if it
        is damaged."""
        with store.open(name.path) as source:
            return cls.decode(name, source.read(_BYTES_MAX))


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _damaged(name: ClosingName) -> Corrupt:
    return Corrupt(
        "the closing of a journal is damaged, or is that of another primary",
        hint="It proves nothing: confirm the head by `gazctl journals reset-head`.",
        journal=name.journal,
        object=name.path,
    )
