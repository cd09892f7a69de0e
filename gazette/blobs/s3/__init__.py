"""Fragments in S3."""
