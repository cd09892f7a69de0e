"""``gazette chaos``: a cluster under load is broken on purpose, and what came of it is checked.

``run`` is the command; ``driver`` breaks, ``workload`` appends and reads, ``cluster`` and ``network`` are
what is broken; ``history`` is what is written down, and ``checker`` and ``registers`` judge it (pure).
"""
