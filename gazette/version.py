"""The version of this package. The build reads this file."""

__version__ = "0.1.0"
