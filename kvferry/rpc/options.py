"""Channel arguments of all servers and channels: keepalive, message limits, ports, reconnecting."""

from __future__ import annotations

KEEPALIVE_TIME_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000
DEFAULT_MAX_MESSAGE_BYTES = 4 << 20

_KEEPALIVE = [
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # else one that measures bandwidth is waited for for 60 s
    ("grpc.http2.max_pings_without_data", 0),
]
"""One policy for both ends. A client that pings more often than its server allows is disconnected, so the server below
allows what any of our clients does, also during a long silent prefill."""


def server_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Channel arguments of every server of ours."""
    return [
        *_KEEPALIVE,
        ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_TIME_MS // 2),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),  # else a second server on the same port starts and takes half of the calls
    ]


def channel_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Channel arguments of every channel of ours; `max_message_bytes` bounds what it receives."""
    return [
        *_KEEPALIVE,
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 5_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.enable_http_proxy", 0),
    ]
