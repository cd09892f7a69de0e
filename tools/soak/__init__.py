"""``gazette soak``: runs the example stream-sum on real processes, and breaks these on purpose.

``run`` is the command. ``driver`` makes the faults and repairs them, ``cluster`` has the processes, and
``report`` the results. The verifier of stream-sum judges what shards publish.
"""
