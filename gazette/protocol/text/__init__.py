"""Forms of text that the protocol takes from Go and YAML."""
