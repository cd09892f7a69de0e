"""``python -m gazette.dev.chaos`` is ``gazette chaos``."""

import sys

from gazette.dev.chaos.run import run

sys.exit(run(sys.argv[1:]))
