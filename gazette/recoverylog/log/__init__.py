"""The log: its operations, its state machine, its recorder and its sources."""
