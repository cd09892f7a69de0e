"""Compression of fragments."""
