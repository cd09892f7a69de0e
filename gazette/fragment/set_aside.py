"""Stage 7 of the byte path: objects of bytes that `persister` could not confirm when its broker ended. Later
`replica` makes fragments of them.

A broker that cannot ask etcd does not know whether a later primary gave its offsets to other bytes. As a
fragment, the broker's bytes could hide acknowledged appends. So the broker stores them *aside* at its end,
under a name that no listing mistakes for a fragment. The name holds the life of the journal, and the tenure
of the primary to which the bytes belong. A replica whose listing finds such an object asks etcd. If the
offsets were not given out again, the replica makes a fragment of the object.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from gazette.blobs.blob_store import BlobStore
from gazette.errors import Invalid, NotFound
from gazette.protocol.fragment import Codec, Fragment
from gazette.protocol.ids import JournalName, Revision

_NAME: Final = re.compile(
    r"(?P<path>.+)\.unconfirmed-(?P<life>[0-9]{1,19})-(?P<tenure>[0-9]{1,19})"
)


@dataclass(frozen=True, slots=True)
class SetAside:
    """A fragment that is stored aside. ``life`` is the creation revision of its journal. ``tenure`` is the
    tenure of the primary that appended its bytes."""

    fragment: Fragment
    life: Revision
    tenure: Revision

    @property
    def path(self) -> str:
        """Path of the object."""
        return f"{self.fragment.content_path()}.unconfirmed-{self.life}-{self.tenure}"

    @classmethod
    def parse(cls, journal: JournalName, relative_path: str) -> SetAside | None:
        """Read a path below a journal's directory. Return None for the path of another object."""
        match = _NAME.fullmatch(relative_path)
        if match is None:
            return None
        try:
            fragment = Fragment.parse(journal, match["path"])
        except Invalid:
            return None
        return cls(fragment, int(match["life"]), int(match["tenure"]))

    def place(self, store: BlobStore) -> bool:
        """Copy the object to the place of its fragment. Return True if this call stored the fragment.

        Call it in a thread. The object aside stays. Raise the store's ``Unavailable`` or ``NotAllowed``.
        """
        path = self.fragment.content_path()
        if store.exists(path):
            return False
        try:
            with store.open(self.path) as source:
                store.put(path, source, content_encoding=content_encoding(self.fragment))
        except NotFound:
            return False  # Another replica was faster, or an operator has removed the object.
        return True


def content_encoding(fragment: Fragment) -> str:
    """Return the content encoding to store with an object: a store can then undo the compression itself."""
    return "gzip" if fragment.codec is Codec.GZIP_OFFLOAD_DECOMPRESSION else ""
