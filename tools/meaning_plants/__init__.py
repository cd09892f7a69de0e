"""Mistakes that change a value in silence, for each place of `tests.meaning`: its check must find them.

``python -m tools.meaning_plants`` makes each mistake in a copy of the source, and runs the check of its
place.
"""
