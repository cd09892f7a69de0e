"""One process of a cluster, from its settings to its exit code: a broker, or a member of an application."""
