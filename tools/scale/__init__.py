"""Large clusters on paper: only one member's mirror of etcd, its allocator and its lists are real."""
