"""Programs for developers of this repository. Not part of the wheel."""
