"""Ship calls by hand."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

from kvferry.rpc import RpcChannel
from kvtransfer.grpc_transport import SHIP_METHOD
from proto.kvferry.v1 import ship_pb2


def ship_call(channel: RpcChannel) -> AbstractAsyncContextManager[Any]:
    """A Ship call that takes the bytes of requests."""
    method: Any = channel.grpc.stream_stream(SHIP_METHOD, None, ship_pb2.ShipResponse.FromString)
    return channel.duplex(method)
