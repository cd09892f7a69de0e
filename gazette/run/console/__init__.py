"""The console: a process of its own that serves pages about a cluster. Only its command imports it."""
