"""Limits that follow from the number of files that this process may open. Sockets count as files."""

from __future__ import annotations

import logging
import resource
from dataclasses import dataclass
from typing import Final

log = logging.getLogger(__name__)

_RAISED_TO_MAX: Final = 1 << 20
"""Greatest soft limit to set. Some systems have no hard limit, and kernel tables grow with the soft one."""
_FILES_PER_ITEM: Final = 4
"""Files of one journal at a broker: its spool, a closed fragment to upload, and the files of two readers."""
_GRPC_MAX: Final = 16_384
_HTTP_MAX: Final = 8_192
_DEBUG_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Connections that each port accepts at one time. Unless the process may open very few files, more than
    half of the files are left for etcd, peers, spools and stores."""

    grpc: int
    http: int
    debug: int

    @classmethod
    def of_files(cls, files: int) -> ConnectionLimits:
        """Return the limits of a process that may open ``files`` files."""
        return cls(
            grpc=max(16, min(files // 4, _GRPC_MAX)),
            http=max(16, min(files // 8, _HTTP_MAX)),
            debug=max(4, min(files // 16, _DEBUG_MAX)),
        )

    @classmethod
    def of_process(cls) -> ConnectionLimits:
        """Return the limits of this process, for its present soft limit of files."""
        return cls.of_files(file_limit())


def file_limit() -> int:
    """Return the number of files that this process may open: its soft ``RLIMIT_NOFILE``."""
    return _number(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one, but not above ``_RAISED_TO_MAX``.

    Log a warning if the system refuses. Return the limit that holds now.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _number(hard)
    if _number(soft) < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:
            log.warning(
                "the limit of open files stays at %(count)d: %(error)s",
                {"count": soft, "error": error},
            )
    return file_limit()


def warn_of_few_files(files: int, items: int, setting: str) -> None:
    """Log a warning if ``files`` are too few for the ``items`` that ``setting`` permits."""
    needed = _FILES_PER_ITEM * items
    if files < needed:
        log.warning(
            "this process may open %(count)d files, and %(setting)s %(items)d asks for %(needed)d: "
            "raise the hard limit (ulimit -Hn, LimitNOFILE= of systemd), or lower %(setting)s",
            {"count": files, "setting": setting, "items": items, "needed": needed},
        )


def _number(limit: int) -> int:
    return _RAISED_TO_MAX if limit == resource.RLIM_INFINITY else min(limit, _RAISED_TO_MAX)
