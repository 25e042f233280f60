"""Settings of the control plane."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from control_plane.config import EVICTION_POLICIES, CoreConfig
from kvplane.errors import InvalidRequestError
from kvplane.serving.config import (
    ServingConfig,
    bind_setting,
    check_address,
    max_message_setting,
    metrics_port_setting,
)
from kvplane.serving.settings import setting

PROGRAM: Final = "control_plane"
_CORE = CoreConfig()


@dataclass(frozen=True, kw_only=True)
class ControlPlaneConfig(ServingConfig):
    """Serve the metadata of KV caches: block tables, reference counts, the prefix index."""

    bind: str = bind_setting("127.0.0.1:50051")
    metrics_port: int = metrics_port_setting(9101)
    max_message_bytes: int = max_message_setting(1 << 23)  # a prompt of two million tokens
    plane_bind: str = setting(
        "",
        help="Another address, host:port, whose connections are counted apart: if only data planes"
        " can reach it, other callers cannot crowd them out.",
    )
    page_port: int = setting(
        -1,
        help="Port of a page for browsers that shows what the pools hold, on the same host; 0 picks"
        " a free one, -1 is off.",
        minimum=-1,
        maximum=65_535,
    )
    lease_s: float = setting(
        _CORE.lease_s,
        help="How long a session stays open when no message renews it.",
        unit="s",
        minimum=0.1,
        maximum=86_400,
    )
    max_plans_in_flight: int = setting(
        _CORE.max_plans_in_flight,
        help="Plans of a session that may wait for their receipts at one time.",
        unit="plans",
        minimum=1,
        maximum=64,
    )
    watermark: float = setting(
        _CORE.watermark,
        help="Share of a pool's device blocks that admissions leave free.",
        unit="fraction",
        minimum=0.0,
        maximum=0.9,
    )
    max_sessions: int = setting(
        _CORE.max_sessions, help="Sessions open at one time.", unit="sessions", minimum=1
    )
    max_sequences: int = setting(
        _CORE.max_sequences, help="Live sequences of a session.", unit="sequences", minimum=1
    )
    max_table_entries: int = setting(
        _CORE.max_table_entries,
        help="Entries of the block tables of a session, shared ones counted in each table.",
        unit="entries",
        minimum=1,
    )
    max_operations: int = setting(
        _CORE.max_operations, help="Items of all operations of a step.", unit="items", minimum=1
    )
    eviction_policy: str = setting(
        _CORE.eviction_policy,
        help="Which cached blocks are evicted first.",
        choices=EVICTION_POLICIES,
    )
    max_tenant_sessions: int = setting(
        _CORE.max_tenant_sessions,
        help="Open sessions of a tenant; 0 means no quota.",
        unit="sessions",
        minimum=0,
    )
    max_tenant_blocks: int = setting(
        _CORE.max_tenant_blocks,
        help="Device blocks of a pool that tables of a tenant's sessions refer to, each counted "
        "once; 0 means no quota.",
        unit="blocks",
        minimum=0,
    )
    max_retained_share: float = setting(
        _CORE.max_retained_share,
        help="Share of a pool's device blocks that a tenant may retain.",
        unit="fraction",
        minimum=0.0,
        maximum=1.0,
    )
    max_pools: int = setting(
        _CORE.max_pools, help="Pools that data planes may register.", unit="pools", minimum=1
    )
    max_blocks: int = setting(
        _CORE.max_blocks,
        help="Blocks of all data planes, of both tiers; each takes some 125 bytes of memory.",
        unit="blocks",
        minimum=1,
    )
    pool_expiry_s: float = setting(
        _CORE.pool_expiry_s,
        help="How long a pool is known after its last data plane has gone.",
        unit="s",
        minimum=0.1,
        maximum=31_536_000,
    )
    receipt_timeout_s: float = setting(
        _CORE.receipt_timeout_s,
        help="How long some shards of a pool may take to receipt a plan that others have receipted,"
        " before its session ends; and then to stop that session, before all others end too.",
        unit="s",
        minimum=0.1,
        maximum=86_400,
    )
    max_tenant_namespaces: int = setting(
        _CORE.max_tenant_namespaces,
        help="Namespaces of a tenant in a pool in which something is cached or a session is open.",
        unit="namespaces",
        minimum=1,
    )
    max_unfenced_sessions: int = setting(
        _CORE.max_unfenced_sessions,
        help="Ended sessions that a data plane of a pool has not stopped; no more are opened then.",
        unit="sessions",
        minimum=1,
    )
    max_waiting_messages: int = setting(
        4096,
        help="Messages that may wait for a data plane beyond those that it resumes with; then its "
        "stream is cut.",
        unit="messages",
        minimum=1,
    )
    max_followers: int = setting(
        _CORE.max_followers,
        help="Streams that follow prefix indexes at one time.",
        unit="streams",
        minimum=0,
    )
    num_kept_changes: int = setting(
        _CORE.num_kept_changes,
        help="Changes kept of each prefix index; a follower further behind starts again.",
        unit="changes",
        minimum=1,
        maximum=2**24,
    )
    heartbeat_s: float = setting(
        5.0,
        help="Interval of a data plane's heartbeats; after three without one it counts as gone.",
        unit="s",
        minimum=0.05,
        maximum=3600,
    )
    election: str = setting(
        "",
        help="Where several control planes elect the one that serves: file:/PATH on one machine,"
        " kubernetes://NAMESPACE/NAME, or with kvplane[etcd] etcd://HOST:PORT,…/NAME. Empty:"
        " this one serves.",
    )
    election_ttl_s: int = setting(
        5,
        help="How long a leader that cannot be reached keeps leading.",
        unit="s",
        minimum=1,
        maximum=3600,
    )
    advertise: str = setting(
        "",
        help="Address of this process for standbys, host:port; empty means the one bound.",
    )
    incarnation: int = setting(
        0,
        help="Number of this run, above those of earlier runs; 0 takes the clock's nanoseconds.",
        minimum=0,
        maximum=2**63 - 1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.election and self.incarnation:
            raise InvalidRequestError("must be 0: the election gives it", field="incarnation")
        if self.advertise:
            check_address(self.advertise, "advertise")
        if self.plane_bind:
            check_address(self.plane_bind, "plane_bind")
            self.check_safe(self.plane_bind, "plane_bind")

    @property
    def core(self) -> CoreConfig:
        """The core's part of the settings."""
        return CoreConfig(
            lease_s=self.lease_s,
            max_plans_in_flight=self.max_plans_in_flight,
            watermark=self.watermark,
            max_operations=self.max_operations,
            max_sequences=self.max_sequences,
            max_table_entries=self.max_table_entries,
            max_sessions=self.max_sessions,
            eviction_policy=self.eviction_policy,
            max_tenant_sessions=self.max_tenant_sessions,
            max_tenant_blocks=self.max_tenant_blocks,
            max_retained_share=self.max_retained_share,
            max_pools=self.max_pools,
            max_blocks=self.max_blocks,
            pool_expiry_s=self.pool_expiry_s,
            receipt_timeout_s=self.receipt_timeout_s,
            max_tenant_namespaces=self.max_tenant_namespaces,
            max_unfenced_sessions=self.max_unfenced_sessions,
            max_followers=self.max_followers,
            num_kept_changes=self.num_kept_changes,
        )
