"""Fuzzers of recorded stores: random work, cuts of the log, and a plain database to compare with."""
