"""``python -m tools.meaning_plants [NAME …]``: exit code 0 if the checks find each mistake."""

from __future__ import annotations

import sys

from tools.meaning_plants.plants import PLANTS
from tools.timer_plants.run import find_each

if __name__ == "__main__":
    sys.exit(find_each(PLANTS, "python -m tools.meaning_plants", __doc__))
