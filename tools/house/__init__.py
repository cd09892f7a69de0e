"""Counts the house: its size by room, what is over the limits, and how far one append or transaction runs."""
