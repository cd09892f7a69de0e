"""Read from brokers and from stored fragments, across failures."""
