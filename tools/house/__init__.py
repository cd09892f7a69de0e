"""Counts the house: its size by room, excesses over limits, and the code behind one append or transaction."""
