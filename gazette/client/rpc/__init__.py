"""Make calls: channels, routes, credentials, errors."""
