"""Methods of an application that answer queries, checked when they are decorated and called."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

from gazette.consumer.callbacks import application_failed, require_plain, require_result
from gazette.errors import GazetteError

log = logging.getLogger(__name__)
_HINT: Final = "Correct it, and restart the application. Its shard goes on."


def query_method(method: Callable[..., Any], parameters: Sequence[str]) -> Callable[..., Any]:
    """Return a method that answers queries, so that its errors name the line of the user's code.

    Raise ``Invalid`` if it is no plain function, or cannot be called with ``parameters``. The returned one
    logs what it raises, and raises ``ApplicationFailed``. Errors of our tree pass through.
    """
    require_plain(method, parameters)
    name = method.__qualname__

    @functools.wraps(method)
    def call(*arguments: Any) -> Any:
        try:
            return require_result(name, method(*arguments))
        except GazetteError:
            raise
        except Exception as error:
            failed = application_failed(name, error, hint=_HINT)
            log.exception("%(error)s", {"error": failed}, exc_info=error)
            raise failed from error

    return call
