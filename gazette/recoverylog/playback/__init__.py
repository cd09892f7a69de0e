"""Files played back from a log."""
