"""Metrics of the acting allocator (constant on other members), and of a member that drains."""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Gauge, Histogram

ADDED: Final = Counter("gazette_allocator_assignment_added_total", "Assignments added.")
REMOVED: Final = Counter("gazette_allocator_assignment_removed_total", "Assignments removed.")
PACKED: Final = Counter(
    "gazette_allocator_assignment_packed_total", "Assignments moved to a lower slot."
)
CONVERGE: Final = Counter("gazette_allocator_converge_total", "Rounds of convergence.")
MAX_FLOW_SECONDS: Final = Histogram(
    "gazette_allocator_max_flow_runtime_seconds", "Time to solve for desired assignments."
)
DESIRED_REPLICATION_SLOTS: Final = Gauge(
    "gazette_allocator_desired_replication_slots", "Sum of the desired replication of all items."
)
ITEMS: Final = Gauge("gazette_allocator_items", "Items as of the last solution.")
MEMBERS: Final = Gauge(
    "gazette_allocator_members", "Members with capacity as of the last solution."
)

DRAINING_ITEMS: Final = Gauge(
    "gazette_draining_items",
    "Journals or shards that this member still has to hand over, by what they wait for: other members "
    "to join, room on those that are there, or the hand-over that is under way.",
    ["waits_for"],
)
