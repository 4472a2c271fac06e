"""Asking a process whether it makes progress, by its gRPC health service."""

from __future__ import annotations

import enum

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry.rpc.channel import RpcChannel
from kvferry.rpc.server import LIVENESS_SERVICE


class Liveness(enum.Enum):
    """What a process answered."""

    ALIVE = "alive"
    STUCK = "stuck"
    SILENT = "silent"


async def ask_liveness(channel: RpcChannel, timeout_s: float) -> Liveness:
    """Asks once; SILENT for whatever keeps an answer from coming within `timeout_s`."""
    stub = health_pb2_grpc.HealthStub(channel.grpc)
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=LIVENESS_SERVICE), timeout=timeout_s)
    except grpc.aio.AioRpcError:
        return Liveness.SILENT
    return Liveness.ALIVE if answer.status == health_pb2.HealthCheckResponse.SERVING else Liveness.STUCK
