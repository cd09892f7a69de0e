"""``python -m tools.house``: print the counts of the house, or of the walk of one call.

::

    python -m tools.house [rooms]
    python -m tools.house append [--replication 3]
    python -m tools.house transaction
    python -m tools.house privates
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Final

from tools.house.counts import count
from tools.house.privates import count_uses
from tools.house.sources import sources
from tools.house.walk import walk_append, walk_transaction

_ROOT: Final = Path(__file__).parents[2]


def main() -> None:
    """Parse the command line, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what", nargs="?", default="rooms", choices=("rooms", "append", "transaction", "privates")
    )
    parser.add_argument("--replication", type=int, default=1, help="replicas of the journal")
    arguments = parser.parse_args()
    if arguments.what == "rooms":
        report = count(_ROOT).show()
    elif arguments.what == "privates":
        report = count_uses(sources(_ROOT, "tests")).show()
    elif arguments.what == "append":
        walk = asyncio.run(walk_append(arguments.replication))
        report = walk.show(f"small append, R={arguments.replication}")
    else:
        report = asyncio.run(walk_transaction()).show("publish and transaction, SQLite")
    sys.stdout.writelines(f"{line}\n" for line in report)


if __name__ == "__main__":
    main()
