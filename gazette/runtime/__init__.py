"""Parts that all processes use: tasks, clocks, logs, metrics, traces."""
