"""``python -m bike_share``: the application, and its data: ``generate`` and ``publish``."""

import sys

from gazette import runconsumer

if len(sys.argv) > 1 and sys.argv[1] in ("generate", "publish"):
    from bike_share.data import main

    sys.exit(main(sys.argv[1], sys.argv[2:]))

from bike_share.app import BikeShare

runconsumer.main(BikeShare(), bind_host="127.0.0.1")
