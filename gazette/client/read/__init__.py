"""Reads: of brokers and of stored fragments, across failures."""
