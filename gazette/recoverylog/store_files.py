"""Files of each kind of store: `form_of` and `require_form`. Pure.

A store that finds none of its files begins with an empty state. That would be wrong beside files of another
store, or beside some of its own files. So the store must know every file of a log.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from gazette.errors import Invalid

PRIMARY_DATABASE: Final = "primary.db"
STATE_FILE: Final = "state.json"
PAGE_DB: Final = "pageDB"
"""Directory of a RocksDB in which the Go original keeps the pages of SQLite databases."""

_ROCKSDB_BEFORE: Final = (
    r"(IDENTITY|LOCK|LOG(\.old\.\d+)?|MANIFEST-\d+|OPTIONS-\d+|rocksdict-config\.json"
    r"|\d+)(\.dbtmp|\.rebase|\.trash)?"
)
_ROCKSDB: Final = rf"{_ROCKSDB_BEFORE}|CURRENT|(archive/)?\d+\.(sst|blob|log)(\.rebase|\.trash)?"
_JOURNAL: Final = r"-(wal|journal|mj[0-9A-F]+)"
_IMAGES: Final = r"\.(redo-\d{8,}|image-\d{6,}-\d{8,})"
_OF_DATABASE: Final = re.compile(rf"(.+\.db)(?:{_JOURNAL}|{_IMAGES})")
_SHOWN: Final = 5


class StateForm(enum.Enum):
    """Form of a shard's state. The value describes it."""

    PAGES = "a SQLite database of the Go original, as pages in a RocksDB"
    REDO = "a SQLite database that the mode 'redo' recorded"
    PLAIN = "a SQLite database that the mode 'vfs' recorded"
    ROCKSDB = "a RocksDB database"
    JSON = "a JSON document"
    NOTHING = "no state"
    UNKNOWN = "files that belong to no state of a store of Gazette"


@dataclass(frozen=True, slots=True)
class _Files:
    """Patterns of a form's paths: of the file that each commit leaves, of all files, and of the files that
    may exist before the first commit."""

    committed: re.Pattern[str]
    all: re.Pattern[str]
    before: re.Pattern[str]


def _files(committed: str, others: str, before: str) -> _Files:
    return _Files(*map(re.compile, (committed, f"{committed}|{others}", before)))


_UNFINISHED_PAGES: Final = rf"{PAGE_DB}|{PAGE_DB}/({_ROCKSDB_BEFORE})"
_FORMS: Final[Mapping[StateForm, _Files]] = {
    StateForm.PAGES: _files(
        rf"{PAGE_DB}/CURRENT",
        # An interrupted hand-over leaves files of the other forms: they belong to this form, too.
        rf"{PAGE_DB}/({_ROCKSDB})|[^/]+{_JOURNAL}|[^/]+{_IMAGES}|[^/]+\.db",
        _UNFINISHED_PAGES,
    ),
    StateForm.REDO: _files(
        r"primary\.db\.redo-\d{8,}", rf"\w+\.db{_IMAGES}|{_UNFINISHED_PAGES}", _UNFINISHED_PAGES
    ),
    StateForm.PLAIN: _files(
        r"primary\.db", rf"\w+\.db({_JOURNAL}|\.rebase)?|{_UNFINISHED_PAGES}", _UNFINISHED_PAGES
    ),
    StateForm.ROCKSDB: _files(r"CURRENT", _ROCKSDB, _ROCKSDB_BEFORE),
    StateForm.JSON: _files(r"state\.json", r"next\.json", r"next\.json"),
}
_OPEN_WITH: Final = {
    StateForm.PAGES: "Open it with SQLiteStore, which takes it over.",
    StateForm.REDO: "Open it with SQLiteStore in its mode 'redo'.",
    StateForm.PLAIN: "Open it with SQLiteStore in its mode 'vfs'.",
    StateForm.ROCKSDB: "Open it with RocksDBStore.",
    StateForm.JSON: "Open it with JSONFileStore.",
}
_NEW_LOG: Final = "To begin without its state, give the shard another log."


def form_of(paths: Iterable[str], accepted: Collection[StateForm] = ()) -> StateForm:
    """Return the form of these files, by the files that each commit leaves. Prefer an accepted form.

    Return UNKNOWN if no form has committed, and NOTHING without files.
    """
    names = _file_names(paths)
    forms = [
        form
        for form, files in _FORMS.items()
        if any(files.committed.fullmatch(name) for name in names)
    ]
    preferred = [form for form in forms if form in accepted] or forms
    if preferred:
        return preferred[0]
    return StateForm.UNKNOWN if names else StateForm.NOTHING


def require_form(paths: Iterable[str], store: str, *accepted: StateForm) -> StateForm:
    """Return the form of a log's files, or NOTHING for a new state.

    Raise ``Invalid`` for a form that ``store`` cannot open, and for a file that it does not know.
    """
    names = _file_names(paths)
    form = form_of(names, accepted)
    # A store that has not committed yet leaves files, but no state.
    if form is StateForm.UNKNOWN and any(_is_before_commit(names, option) for option in accepted):
        return StateForm.NOTHING
    if form is StateForm.NOTHING:
        return form
    require_whole(names)
    if form not in accepted:
        hint = f"{_OPEN_WITH.get(form, _OTHER_CLASS_HINT)} {_NEW_LOG}"
        raise _refused(f"{form.value}, and no state of {store}", names, hint)
    unknown = {name for name in names if not _FORMS[form].all.fullmatch(name)}
    if unknown:
        description = f"{form.value}, and files that do not belong to it"
        raise _refused(description, unknown, f"{_OTHER_CLASS_HINT} {_NEW_LOG}")
    return form


_OTHER_CLASS_HINT: Final = "Open it with the class that recorded it."
_LOST_FILES_HINT: Final = (
    "The log lost files, or another program recorded it. Recover the shard from a backup of its hints"
    f" (gazctl shards recover --backup). {_NEW_LOG}"
)


def _file_names(paths: Iterable[str]) -> set[str]:
    return {path.lstrip("/") for path in paths}


def _is_before_commit(names: Collection[str], form: StateForm) -> bool:
    return all(_FORMS[form].before.fullmatch(name) for name in names)


def require_whole(paths: Iterable[str]) -> None:
    """Raise ``Invalid`` for WALs, journals and images without their SQLite database."""
    names = _file_names(paths)
    if form_of(names) is StateForm.PAGES:
        return  # The RocksDB has the pages of the databases.
    dbs = names | {match[1] for name in names if (match := _REDO.fullmatch(name))}
    orphans = {
        name for name in names if (match := _OF_DATABASE.fullmatch(name)) and match[1] not in dbs
    }
    if orphans:
        raise _refused(
            "a part of a SQLite database, and not the rest of it", orphans, _LOST_FILES_HINT
        )


_REDO: Final = re.compile(r"(.+)\.redo-\d{8,}")


def _refused(what: str, names: Collection[str], hint: str) -> Invalid:
    omitted = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return Invalid(
        f"the recovery log holds {what}",
        files=", ".join(f"/{name}" for name in sorted(names)[:_SHOWN]) + omitted,
        hint=hint,
    )
