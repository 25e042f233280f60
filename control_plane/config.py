"""The core's settings, which are settings of the control plane's program too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from kvplane.serving.settings import setting

EVICTION_POLICIES: Final = ("lru", "reuse-rate")


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """The core's settings: leases, bounds of a session and a step, and a tenant's quotas."""

    HEADING: ClassVar[str] = "Sessions and quotas"

    lease_s: float = setting(
        30.0,
        help="How long a session stays open when no message renews it.",
        unit="s",
        minimum=0.1,
        maximum=86_400,
    )
    max_plans_in_flight: int = setting(
        4,
        help="Plans of a session that may wait for their receipts at one time.",
        unit="plans",
        minimum=1,
        maximum=64,
    )
    watermark: float = setting(
        0.01,
        help="Share of a pool's device blocks that admissions leave free.",
        unit="fraction",
        minimum=0.0,
        maximum=0.9,
    )
    max_operations: int = setting(
        4096, help="Items of all operations of a step.", unit="items", minimum=1
    )
    max_sequences: int = setting(
        65_536, help="Live sequences of a session.", unit="sequences", minimum=1
    )
    max_table_entries: int = setting(
        4_194_304,
        help="Entries of the block tables of a session, shared ones counted in each table.",
        unit="entries",
        minimum=1,
    )
    max_pinned_blocks: int = setting(
        4096, help="Cached blocks that a session may pin at one time.", unit="blocks", minimum=1
    )
    max_sessions: int = setting(1024, help="Sessions open at one time.", unit="sessions", minimum=1)
    max_blocks: int = setting(
        2**23,
        help="Blocks of all data planes, of both tiers; each takes some 125 bytes of memory.",
        unit="blocks",
        minimum=1,
    )
    eviction_policy: str = setting(
        "reuse-rate", help="Which cached blocks are evicted first.", choices=EVICTION_POLICIES
    )
    max_tenant_sessions: int = setting(
        0, help="Open sessions of a tenant; 0 means no quota.", unit="sessions", minimum=0
    )
    max_tenant_blocks: int = setting(
        0,
        help="Device blocks of a pool that tables and pins of a tenant's sessions refer to, each"
        " counted once; 0 means no quota.",
        unit="blocks",
        minimum=0,
    )
    max_retained_share: float = setting(
        0.25,
        help="Share of a pool's device blocks that a tenant may retain.",
        unit="fraction",
        minimum=0.0,
        maximum=1.0,
    )
