"""``python -m stream_sum``: the application, and the load that verifies it."""

import sys

from gazette import runconsumer

if len(sys.argv) > 1 and sys.argv[1] == "chunk":
    from stream_sum.chunk import main

    sys.exit(main(sys.argv[2:]))

from stream_sum.app import Summer

runconsumer.main(Summer(), bind_host="127.0.0.1")
