"""The core's settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """``watermark``: share of device blocks that admissions leave free. ``max_operations``: items
    of one step, over all its operations. ``max_table_entries``: of all sequences of a session, a
    block of known tokens counting as one, beyond which it cannot fork.
    """

    lease_s: float = 30.0
    max_plans_in_flight: int = 4
    watermark: float = 0.01
    max_operations: int = 4096
    max_sequences: int = 65_536
    max_table_entries: int = 4_194_304
    max_sessions: int = 1024
