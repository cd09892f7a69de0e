"""Calls: channels, routes, credentials, errors."""
