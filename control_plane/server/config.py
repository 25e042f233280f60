"""Settings of the control plane."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Final

from control_plane.config import CoreConfig
from kvplane.errors import InvalidRequestError
from kvplane.serving.config import ServerSettings, check_address
from kvplane.serving.settings import setting

PROGRAM: Final = "control_plane"


@dataclass(frozen=True, kw_only=True)
class ControlPlaneSettings(ServerSettings):
    """Serve the metadata of KV caches: block tables, reference counts, the prefix index."""

    HEADING: ClassVar[str] = "The control plane"

    bind: str = "127.0.0.1:50051"
    metrics_port: int = 9101
    core: CoreConfig = field(default_factory=CoreConfig)
    max_message_bytes: int = setting(
        1 << 23,  # a prompt of two million tokens
        help="Largest message accepted.",
        unit="bytes",
        minimum=4096,
        maximum=2**31 - 1,
    )
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
    page_hosts: str = setting(
        "",
        help="Names, with commas, by which browsers may ask for the page. Without an access list"
        " names other than these and localhost are refused; addresses are not.",
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
        if self.plane_bind:
            check_address(self.plane_bind, "plane_bind")
            self.check_safe(self.plane_bind, "plane_bind")
