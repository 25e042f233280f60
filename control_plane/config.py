"""The core's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

EVICTION_POLICIES: Final = ("lru", "reuse-rate")


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """``watermark``: share of device blocks that admissions leave free. ``max_operations``: items
    of one step, over all its operations. ``max_table_entries``: of all sequences of a session.
    ``eviction_policy``: names the order in which cached blocks are evicted.

    A tenant's quotas, over all its sessions; 0 means none: ``max_tenant_sessions``,
    ``max_tenant_blocks`` of a pool's device tier that its tables refer to, each counted once.
    ``max_retained_share``: share of a pool's device blocks that a tenant may retain.

    ``receipt_timeout_s``: how long some shards of a pool may lack the receipt of a plan that others
    have receipted, before its session ends.

    Other bounds: ``max_followers`` of prefix indexes, ``num_kept_changes`` of each index for them,
    ``max_pools``, of which one without data planes is forgotten after ``pool_expiry_s``,
    ``max_blocks`` of all data planes, of both tiers, ``max_tenant_namespaces`` in a pool,
    ``max_unfenced_sessions`` of a pool: ended ones that some data plane has not fenced.
    """

    lease_s: float = 30.0
    max_plans_in_flight: int = 4
    watermark: float = 0.01
    max_operations: int = 4096
    max_sequences: int = 65_536
    max_table_entries: int = 4_194_304
    max_sessions: int = 1024
    eviction_policy: str = "reuse-rate"
    max_tenant_sessions: int = 0
    max_tenant_blocks: int = 0
    max_retained_share: float = 0.25
    max_followers: int = 64
    num_kept_changes: int = 65_536
    max_pools: int = 64
    max_blocks: int = 2**23
    pool_expiry_s: float = 3600.0
    receipt_timeout_s: float = 30.0
    max_tenant_namespaces: int = 4096
    max_unfenced_sessions: int = 4096
