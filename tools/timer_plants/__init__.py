"""Timers, windows, joins and lists with a mistake in them, each of which a test must find.

``python -m tools.timer_plants`` makes each mistake in a copy of the source, and runs the tests that find it.
"""
