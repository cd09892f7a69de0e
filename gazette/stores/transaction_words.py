"""Statements that end a transaction, found in the text of SQL. Pure.

The text is divided into statements as the database divides it: not at semicolons in strings, quoted names,
comments and bodies of functions. Only the first words of a statement matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

_TOKEN: Final = re.compile(
    r"""
      (?P<skip> \s+ | --[^\n]* )
    | (?P<comment> /\* )
    | (?P<dollar> \$(?:[^\W\d]\w*)?\$ )
    | (?P<escaped> \b[eE]'(?:[^'\\]|\\.|'')*' )
    | (?P<quoted> '(?:[^']|'')*' | "(?:[^"]|"")*" | `[^`]*` )
    | (?P<word> [^\W\d]\w* )
    | (?P<end> ; )
    | (?P<other> . )
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPED: Final = re.compile(r"""'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.|"")*\"""", re.DOTALL)
_COMMENT_EDGE: Final = re.compile(r"/\*|\*/")
_ENDS: Final = frozenset({"COMMIT", "END", "ROLLBACK", "ABORT", "BEGIN", "START"})
"""First words of statements that end a transaction, or begin another one."""
_SUSPECT: Final = re.compile(rf"\b({'|'.join(sorted(_ENDS))}|PREPARE)\b", re.IGNORECASE)
_BODIES: Final = frozenset({"FUNCTION", "PROCEDURE", "TRIGGER"})
_WORDS_KEPT: Final = 4
_NESTS_COMMENTS: Final = frozenset({"postgresql", "mssql"})
_ESCAPES: Final = frozenset({"mysql", "mariadb"})


def ending_words(sql: str, dialect: str) -> str | None:
    """Return the first two words of the first statement that ends the transaction, or begins another one.
    Return None if no statement does.

    ``dialect`` is SQLAlchemy's name. A rollback to a savepoint does not end the transaction.
    """
    if _SUSPECT.search(sql) is None:
        return None
    for words in _statements(sql, dialect):
        first_word, later_words = words[0], words[1:]
        if first_word == "ROLLBACK" and "TO" in later_words:
            continue
        if first_word in _ENDS or words[:2] == ["PREPARE", "TRANSACTION"]:
            return " ".join(words[:2])
    return None


def _statements(sql: str, dialect: str) -> Iterator[list[str]]:
    """Yield the first words of each statement, in capitals. A semicolon in the body of a function or trigger
    ends no statement: ``depth`` counts the open BEGIN and CASE there."""
    words: list[str] = []
    has_body, depth = False, 0
    for group, text in _tokens(sql, dialect):
        if group == "end" and depth == 0:
            if words:
                yield words
            words, has_body = [], False
            continue
        word = text.upper() if group == "word" else text
        if len(words) < _WORDS_KEPT:
            words.append(word)
        has_body = has_body or (words[0] == "CREATE" and word in _BODIES)
        if has_body:
            depth = max(0, depth + (word in ("BEGIN", "CASE")) - (word == "END"))
    if words:
        yield words


def _tokens(sql: str, dialect: str) -> Iterator[tuple[str, str]]:
    """Yield tokens, each with its group of `_TOKEN`. Leave out white space, comments and dollar quotes."""
    position = 0
    while (token := _TOKEN.match(sql, position)) is not None:
        group, position = str(token.lastgroup), token.end()
        if group == "escaped" and dialect != "postgresql":
            group, position = "word", token.start() + 1
        if group == "quoted" and dialect in _ESCAPES and token.group()[0] != "`":
            position = _end_of_escaped(sql, token.start())
        if group == "comment":
            position = _end_of_comment(sql, position, nests=dialect in _NESTS_COMMENTS)
        elif group == "dollar":
            closing = sql.find(token.group(), position)
            position = len(sql) if closing < 0 else closing + len(token.group())
        elif group != "skip":
            yield group, token.group()


def _end_of_escaped(sql: str, start: int) -> int:
    """Return the position after a string in which a backslash escapes."""
    end = _ESCAPED.match(sql, start)
    return len(sql) if end is None else end.end()


def _end_of_comment(sql: str, at: int, *, nests: bool) -> int:
    """Return the position after a comment, which may contain others if ``nests``."""
    if not nests:
        end = sql.find("*/", at)
        return len(sql) if end < 0 else end + 2
    depth = 1
    while depth:
        edge = _COMMENT_EDGE.search(sql, at)
        if edge is None:
            return len(sql)
        depth += 1 if edge.group() == "/*" else -1
        at = edge.end()
    return at
