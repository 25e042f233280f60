"""The payload versions, and the channel settings that both ends share."""

from __future__ import annotations

from typing import Final

# The payload versions that this release reads and writes. A version says which fields there are in
# plans, grants, receipts and the messages of registration streams. NEWEST rises with each field. A
# release still knows all versions of the release before it: OLDEST may rise in the next one.
OLDEST_PAYLOAD_VERSION: Final = 1
NEWEST_PAYLOAD_VERSION: Final = 2

# The tensors of one layer, or an opaque page, which travel in one message.
MAX_LAYER_BYTES: Final = 64 * 1024 * 1024
# Beside them there is room for a plan.
MAX_MESSAGE_BYTES: Final = MAX_LAYER_BYTES + 1024 * 1024

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
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),  # a name that moved, not after 30 s
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),  # a proxy for the web, which seldom knows a plane's address
)

# For servers that take over from each other: one that hangs is left within 3 s, while its lease
# still runs.
FOLLOWER_OPTIONS: Final[tuple[tuple[str, int], ...]] = (
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.keepalive_timeout_ms", 2_000),
    ("grpc.http2.ping_timeout_ms", 2_000),  # gRPC ignores keepalive's, and takes a minute
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
)
