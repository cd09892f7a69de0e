"""The process of one task of a `gazette.history.backfill.local.LocalRunner`."""

from __future__ import annotations

import os
import sys

from gazette.history.backfill.local import work


def main() -> int:
    # The pipe to the driver is our standard output: send the output of the application to standard error.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return work(sys.stdin.buffer, answers)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # Do not wait for the thread that waits for the driver's end.
