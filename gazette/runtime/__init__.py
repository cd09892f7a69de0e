"""What every process needs: tasks, clocks, logs, metrics, traces."""
