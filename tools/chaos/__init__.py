"""``gazette chaos``: breaks a cluster under load on purpose, and checks its bytes afterwards.

``run`` is the command. ``driver`` makes the faults of ``cluster`` and ``network``; ``workload`` appends and
reads. ``history`` has all events of a run; ``checker`` and ``registers`` judge it (pure).
"""
