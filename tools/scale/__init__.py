"""Clusters on paper that no machine of ours could run, with the true mirror, allocator and lists."""
