"""Settings from flags, the environment and files."""

from __future__ import annotations

from gazette.config.schema import Loaded as Loaded
from gazette.config.schema import Option as Option
from gazette.config.schema import Schema as Schema
from gazette.config.schema import duration as duration
from gazette.config.schema import exit_with as exit_with
from gazette.config.schema import log_warnings as log_warnings
from gazette.config.schema import options_of as options_of
from gazette.config.schema import setting as setting

__all__ = [
    "Loaded",
    "Option",
    "Schema",
    "duration",
    "exit_with",
    "log_warnings",
    "options_of",
    "setting",
]
