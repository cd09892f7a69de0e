"""All exceptions that Gazette raises on purpose. The type says what the caller should do next.

    GazetteError
    ├── Retryable          the same call may succeed later
    │   ├── Unavailable        a peer, etcd or a store cannot be reached now
    │   │   └── Aborted            a store rolled back this transaction for another: repeat it
    │   ├── Moved              another process serves the journal or shard now: resolve again
    │   └── NotYet             the offset, revision or replica does not exist yet
    ├── Fenced             a newer owner has taken over: stop, do not retry
    ├── Invalid            the call is wrong: fix it
    │   ├── TooLarge           a value of the call, or its result, exceeds a limit of size
    │   └── InvalidValue       a value of the application would not read back equal
    ├── NotAllowed         the call is right and refused (credentials, read-only, suspended)
    ├── NotFound           the journal, shard or fragment does not exist
    ├── Conflict           a compare-and-set lost: read again, decide again
    ├── Corrupt            data is not what it claims to be: do not continue
    ├── Closed             this process closed the object on purpose
    ├── Broken             the peer ended the call or broke the protocol; see ``__cause__``
    └── Bug                an invariant of Gazette does not hold: tasks that depend on it end

An error has a message that says what happened, facts as fields, and a ``hint`` that says what to do. Parts of
these texts may come from a server. So Gazette escapes control characters in them (`printable`).
"""

from __future__ import annotations

from typing import Any, ClassVar, Final, Self
from unicodedata import category

_HIDDEN: Final = frozenset({"Cc", "Cn", "Co", "Cs", "Zl", "Zp"})
"""Categories of Unicode to escape: control, unassigned, private, surrogate, line and paragraph separator."""
_TURNING: Final = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that change the direction of text."""


def printable(text: str, *, one_line: bool = False) -> str:
    """Return a text of another process in a form that is safe for a terminal and a log.

    Escape characters that move a cursor, change a terminal's state, or change the direction of text. Escape
    also characters for private use and unassigned characters. Keep tabs and ends of lines. With ``one_line``,
    escape ends of lines, too, so that the text cannot look like another line of a log.
    """
    if text.isprintable():
        return text
    if one_line:
        text = text.replace("\n", "\\n")
    return "".join(_escaped(ord(char)) if _is_hidden(char) else char for char in text)


def _is_hidden(char: str) -> bool:
    return char not in "\t\n" and (category(char) in _HIDDEN or char in _TURNING)


def _escaped(code: int) -> str:
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class GazetteError(Exception):
    """Base of all exceptions that Gazette raises on purpose.

    ``hint`` says what the reader of the message should do next. ``facts`` are fields that an operator needs
    (``journal``, ``offset``, ``revision`` …). They are printed after the message, in a stable order.
    """

    default_hint: ClassVar[str] = "See docs/operating.md."

    def __init__(self, message: str, *, hint: str | None = None, **facts: Any) -> None:
        message = printable(message)
        super().__init__(message)
        self.message = message
        self.hint = printable(hint) if hint is not None else self.default_hint
        self.facts = facts

    def __str__(self) -> str:
        if not self.facts:
            return self.message
        facts = ", ".join(f"{name}={value}" for name, value in self.facts.items())
        return f"{self.message} ({printable(facts)})"


class Retryable(GazetteError):
    """The call failed, and the same call may succeed later."""

    default_hint = "No action: the call is retried."


class Unavailable(Retryable):
    """A peer, etcd or a store cannot be reached now."""

    default_hint = "Check that the named process is running and reachable; the call is retried."


class Aborted(Unavailable):
    """A store has rolled this transaction back, in favour of another transaction. Repeat it."""

    default_hint = (
        "No action: the shard is restarted automatically. If this happens often, have transactions "
        "change rows in the same order."
    )


class Moved(Retryable):
    """Another process serves the journal or shard now. Resolve its route again."""

    default_hint = "No action: the route is resolved again."


class NotYet(Retryable):
    """The offset, revision or replica does not exist yet."""

    default_hint = "Wait, or read with blocking enabled."


class Fenced(GazetteError):
    """A newer owner has taken over. Stop, and do not retry."""

    default_hint = (
        "No action: a newer owner has taken over. A replaced owner stops. A shard that is "
        "still assigned here is restarted automatically."
    )


class Invalid(GazetteError):
    """A value or a call is wrong. ``path`` names the field, as in ``fragment.stores[1]``.

    The message has the protocol's form: ``Ctx1.Ctx2: text``.
    """

    default_hint = "Correct the named field and call again."

    def __init__(
        self, message: str, *, path: str = "", hint: str | None = None, **facts: Any
    ) -> None:
        super().__init__(message, hint=hint, **facts)
        self.path = path

    def __str__(self) -> str:
        text = super().__str__()
        return f"{printable(self.path)}: {text}" if self.path else text

    def within(self, context: str) -> Self:
        """Return a copy of this error, with ``context`` in front of its path."""
        # Do not call the constructor: that of a subclass may take other arguments.
        error = type(self).__new__(type(self), *self.args)
        error.__dict__.update(self.__dict__)
        error.path = f"{context}.{self.path}" if self.path else context
        return error


class TooLarge(Invalid):
    """A value of the call, or a value that the call would produce, exceeds a limit of size."""

    default_hint = "Make the named field smaller and call again."


class InvalidValue(Invalid):
    """A value of the application cannot be kept or published unchanged. ``path`` names the wrong part.

    In ``consume_message``, this is an error of the message: a `PoisonPolicy` may skip the message.
    """

    default_hint = "Correct the named part of the value, or the program that made it."


class NotAllowed(GazetteError):
    """A correct call is refused because of its token, a read-only flag, or a suspension."""

    default_hint = "Check the token's capabilities and selector, or the flags of the specification."


class NotFound(GazetteError):
    """The journal, shard or fragment does not exist."""

    default_hint = "Check the name, and that the token's selector covers it."


class Conflict(GazetteError):
    """A compare-and-set found another value. Read again, and decide again."""

    default_hint = "Read the current revision and apply again."


class Corrupt(GazetteError):
    """Data is not what it claims to be. Do not continue."""

    default_hint = (
        "Do not continue on this data: compare it with another replica or an older fragment."
    )


class Closed(GazetteError):
    """The object was closed by this process, on purpose."""

    default_hint = "No action: it was closed on purpose."


class Broken(GazetteError):
    """The peer ended the call or broke the protocol. ``__cause__`` has more."""

    default_hint = "See the cause; the operation may be started again."


class Bug(GazetteError):
    """An invariant of Gazette does not hold. The tasks that depend on it are ended."""

    default_hint = "This is a defect of Gazette: please report it with the log."


def not_installed(
    what: str,
    package: str,
    extra: str,
    *,
    distribution: str = "pygazette",
    path: str = "",
    hint: str = "",
) -> Invalid:
    """Return the error for a part (``what``) whose package is not installed. ``extra`` installs it."""
    return Invalid(
        f"{what} needs a package that is not installed ({package}): "
        f"run `pip install '{distribution}[{extra}]'`",
        path=path,
        hint=hint or "Install the extra for every process that needs it.",
    )
