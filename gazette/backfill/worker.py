"""The process of one task of a `gazette.backfill.local.LocalRunner`."""

from __future__ import annotations

import os
import sys

from gazette.backfill.local import work


def main() -> int:
    # Output of the application must not mix with what the driver reads.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return work(sys.stdin.buffer, answers)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # A thread waits for a message of the driver, which never comes.
