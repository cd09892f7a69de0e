"""The calls of the Journal service."""
