"""The protocol versions spoken, and the channel settings that both ends share."""

from __future__ import annotations

from typing import Final

from kvplane.errors import InvalidRequestError, ProtocolMismatchError
from kvplane.wire.v1 import types_pb2 as pb

OLDEST: Final = 2
NEWEST: Final = 2

# The version of plans, grants and receipts.
PAYLOAD_VERSION: Final = 1

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024

# The least interval of a peer's pings; one that sends them more often is disconnected.
MIN_PING_INTERVAL_MS: Final = 500

# Pings find a dead peer within a minute; a server must be told to allow them, or it closes the
# connection. Reconnecting soon matters more than sparing a peer that restarts. gRPC does not retry:
# the client knows which calls may be repeated.
CHANNEL_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)

# For servers that take over from each other: one that hangs is left within 3 s, while its lease
# still runs.
FOLLOWER_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),  # gRPC ignores keepalive's, and takes a minute
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
)


def supported() -> pb.ProtocolRange:
    """Return the versions that this release speaks."""
    return pb.ProtocolRange(oldest=OLDEST, newest=NEWEST)


def negotiate(peer: pb.ProtocolRange, *, field: str = "protocol") -> int:
    """Return the newest version that both speak.

    Raises InvalidRequestError when ``peer`` is not a range, ProtocolMismatchError when there is no
    such version.
    """
    if not 1 <= peer.oldest <= peer.newest:
        raise InvalidRequestError("must be a range of versions from 1 on", field=field)
    version = min(NEWEST, peer.newest)
    if version < max(OLDEST, peer.oldest):
        raise ProtocolMismatchError(
            f"the peer speaks {peer.oldest} to {peer.newest}, this side {OLDEST} to {NEWEST}",
            field=field,
        )
    return version


def check_chosen(version: int) -> int:
    """Return a server's chosen version. Raises ProtocolMismatchError if this release lacks it."""
    if not OLDEST <= version <= NEWEST:
        raise ProtocolMismatchError(
            f"the server chose {version}, this side speaks {OLDEST} to {NEWEST}",
            field="protocol_version",
        )
    return version
