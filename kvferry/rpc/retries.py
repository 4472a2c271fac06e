"""gRPC's own retries of plain calls that a server did not take, as a service config.

They are for a caller that knows one server only; where there are several, another one is asked, and both together would
multiply the load of servers that all refuse. What streams is never repeated here: who reads it knows what has come.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from google.protobuf.descriptor import ServiceDescriptor

MAX_ATTEMPTS = 3
"""Of one call, the first among them."""
RETRY_POLICY = {
    "maxAttempts": MAX_ATTEMPTS,
    "initialBackoff": "0.1s",
    "maxBackoff": "1s",
    "backoffMultiplier": 3,
    "retryableStatusCodes": ["UNAVAILABLE"],
}
RETRY_THROTTLING = {"maxTokens": 10, "tokenRatio": 0.1}
"""A failure takes a token, an answer gives a tenth: with less than half left nothing is retried, so a server that fails
for long gets a tenth more calls at most."""


def retrying(services: Iterable[ServiceDescriptor]) -> str:
    """The service config that retries every call of these services which has one answer; all may be repeated safely."""
    names = [
        {"service": service.full_name, "method": method.name}
        for service in services
        for method in service.methods
        if not (method.server_streaming or method.client_streaming)
    ]
    config = {"methodConfig": [{"name": names, "retryPolicy": RETRY_POLICY}], "retryThrottling": RETRY_THROTTLING}
    return json.dumps(config)
