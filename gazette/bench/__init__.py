"""Benchmarks: each figure beside one that was measured in the same run."""
