"""Messages in bytes: JSON lines, fixed framing, CSV."""
