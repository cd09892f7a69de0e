"""Look-ups of journals that may be so new that the broker does not know them yet."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, TypeVar

from gazette.client.waits import Grace, RepeatedCall
from gazette.errors import NotFound

if TYPE_CHECKING:
    from gazette.client.access import BrokerAccess

T = TypeVar("T")

_PAUSE_S: Final = 0.2
"""Seconds to wait after an answer without the journal."""


async def once_known(client: BrokerAccess, journal: str, look_up: Callable[[], Awaitable[T]]) -> T:
    """Return the result of a look-up of journals. If it raises ``NotFound``, repeat it for `LAG_S` seconds.

    Raise ``NotFound`` after that time. Other errors of ``look_up`` reach the caller at once.
    """
    grace, call = Grace(client.clock), RepeatedCall()
    try:
        while True:
            try:
                return await look_up()
            except NotFound as error:
                if not grace.covers(error):
                    raise
                client.waits.note(call, journal, error)
            await client.clock.sleep(_PAUSE_S)
    finally:
        client.waits.end(call)
