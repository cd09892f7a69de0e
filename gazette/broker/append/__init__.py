"""The decisions of appends: a state machine and its parts. `broker/commit` performs them."""
