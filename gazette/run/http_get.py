"""One HTTP request to a process of this machine."""

from __future__ import annotations

import http.client
from typing import Final
from urllib.parse import urlsplit

_TIMEOUT_S: Final = 2.0


def get(url: str) -> bytes | None:
    """Return the body of an answer 200; None for any other outcome. Wait at most 2 s for each step."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", parts.path)
        answer = connection.getresponse()
        body = answer.read()
        return body if answer.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
