"""``python -m tools.chaos`` is ``gazette chaos``."""

import sys

from tools.chaos.run import run

sys.exit(run(sys.argv[1:]))
