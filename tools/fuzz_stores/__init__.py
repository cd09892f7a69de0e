"""Fuzzers of recording: random work on a store, cuts of its log, and a plain database beside it."""
