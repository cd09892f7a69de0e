"""One command of ``gazctl``: its words, its settings, and its function."""

from __future__ import annotations

from typing import Final, NamedTuple

BROKER: Final = ("broker", "log")
BOTH: Final = ("consumer", "broker", "log")
"""Groups of settings of commands that call brokers; `BOTH` is for commands that call consumers, too."""
SELECTORS: Final = """\
A selector is like "env in (prod, qa), tier != cache, !legacy". A journal is selected by its name with
"name=a/journal", journals below a path with "name:prefix=a/path/", a shard by its id with "id=…"."""


class Command(NamedTuple):
    """One command. ``target`` is ``module:function``, and ``flags`` the name of a class of `gazctl.flags`.

    Names are imported once the command runs: a list of commands needs none of their modules.

    The function is a coroutine function of a `Context`. An ``offline`` command calls no server: its function
    is a plain function of a `Context` and this command.
    """

    words: tuple[str, ...]
    summary: str
    flags: str
    target: str
    groups: tuple[str, ...]
    description: str
    examples: str = ""
    arguments: str = ""
    offline: bool = False

    @property
    def name(self) -> str:
        return " ".join(self.words)
