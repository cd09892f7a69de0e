"""Brokers with a mistake in them, each of which `gazette chaos` must find.

``python -m tools.chaos_plants`` runs `gazette chaos` once for each mistake. Its brokers get the mistake as
they import a module (`hook`): shipped code knows nothing of it.
"""
