"""Hand-over of SQLite databases between this store and the store of the Go original: `Former`, `record_note`.

The original's store cannot read our records. It would find no directory ``/pageDB/`` in our log, and begin
without a state. So each of our logs has a file with the name of this directory. The original fails at this
file, with its name in the error, and the text of the file says why.

At promotion, our store takes over the original's databases. It records them whole, and unlinks the original's
files in one append, the last one. Until that append, the original's files are the state for every owner.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Self

from gazette.errors import Invalid
from gazette.recoverylog.disk_errors import check_lengths
from gazette.recoverylog.log.recorder import Group, Recorder
from gazette.recoverylog.sqlite.page_db import take_out
from gazette.recoverylog.store_files import PAGE_DB, StateForm, require_form

NOTE_PATH: Final = f"/{PAGE_DB}"
NOTE: Final = (
    b"The SQLite database of this shard is in the form of Gazette in Python, which the Go original does"
    b" not read. See docs/migrating.md.\n"
)
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\.db")


@dataclass(frozen=True, slots=True)
class Former:
    """Files of the original in the log, which the hand-over unlinks, and the databases made from them."""

    databases: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()

    @property
    def links(self) -> list[str]:
        """Paths of the databases in our logs."""
        return [f"/{name}" for name in self.databases]

    @classmethod
    def take(cls, recorder: Recorder, form: StateForm) -> Self:
        """Turn the original's files into databases in the directory. Leave files of ``form`` alone. Blocks.

        Raise ``Invalid`` for the log of another store or mode, and for a database with a name that SQL cannot
        attach. For other errors see `check_lengths` and `take_out`.
        """
        links = recorder.fsm.links
        present_form = require_form(links, "SQLiteStore", form, StateForm.PAGES)
        check_lengths(recorder)
        former = {path for path in links if path.startswith(f"{NOTE_PATH}/")}
        if present_form is not StateForm.PAGES:
            return cls(paths=tuple(sorted(former)))
        databases = take_out(recorder.directory)
        for name in databases:
            if not _NAME.fullmatch(name):
                raise Invalid(
                    f"the database {name!r} of the original cannot be attached under its name",
                    hint="Names here are letters, digits and underscores before .db. Let the original's"
                    " application move its tables to a database with such a name.",
                )
        # Unlink the original's journals and WALs together with its databases.
        former |= {path for path in links if path.endswith(("-wal", "-journal")) or "-mj" in path}
        with recorder.group() as group:
            for path in set(links) - former:
                group.unlink(path)  # An interrupted hand-over has left this file.
        return cls(databases, tuple(sorted(former)))

    def leave(self, recorder: Recorder) -> None:
        """Call `end` in an append of its own, if there are files to unlink, or no note yet."""
        if not self.paths and NOTE_PATH in recorder.fsm.links:
            return
        with recorder.group() as group:
            self.end(group)

    def end(self, group: Group) -> None:
        """Unlink the files, and record the note. From this append on, our databases are the state."""
        for path in self.paths:
            group.unlink(path)
        record_note(group)


NO_FORMER: Final = Former()


def record_note(group: Group) -> None:
    """Record the note file, or record it again at the end of the log."""
    group.write(group.create(NOTE_PATH), 0, NOTE)
