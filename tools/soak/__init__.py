"""``gazette soak``: stream-sum on real processes, which are broken on purpose for as long as one likes.

``run`` is the command; ``driver`` breaks and repairs, ``cluster`` is what is broken, ``report`` what is said
in the end. What is right and wrong is the business of stream-sum's verifier.
"""
