"""gRPC bootstrap of every process: servers, channels, liveness, and errors as statuses and back.

A server: `RpcServer(...)`, add servicers to its `.grpc`, `await start(listen, names)`, at the end `await drain(...)`.
A caller: `RpcChannel(target, ...)` and its `unary`, `stream`, `duplex`, each in an `async with`.
Above keepalive, which C-core answers even while the peer's Python hangs, internal streams have a progress deadline:
`HeartbeatWriter` at one end, `read_with_progress_deadline` at the other.
"""

from kvferry.rpc.channel import RpcChannel
from kvferry.rpc.health import Liveness, ask_liveness
from kvferry.rpc.listen import check_can_listen
from kvferry.rpc.liveness import HeartbeatWriter, read_with_progress_deadline
from kvferry.rpc.loop import new_event_loop, run
from kvferry.rpc.retries import retrying
from kvferry.rpc.server import RpcServer
from kvferry.rpc.status import error_from_rpc

__all__ = [
    "HeartbeatWriter",
    "Liveness",
    "RpcChannel",
    "RpcServer",
    "ask_liveness",
    "check_can_listen",
    "error_from_rpc",
    "new_event_loop",
    "read_with_progress_deadline",
    "retrying",
    "run",
]
