"""Journals over HTTP."""
