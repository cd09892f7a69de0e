"""Deliver each committed message once, in the order of its producer."""
