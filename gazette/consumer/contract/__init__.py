"""Rules for applications: kinds of callbacks, causes of errors, places of keys, poison messages."""
