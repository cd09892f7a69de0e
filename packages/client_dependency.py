"""Build hook: the wheel of `pygazette` depends on `pygazette-client` of its own version."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ClientDependency(BuildHookInterface[Any]):
    """Adds the dependency to each wheel. An editable installation has the client's files itself."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":
            build_data["dependencies"].append(f"pygazette-client=={self.metadata.version}")
