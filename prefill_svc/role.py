"""The prefill role of a worker process: engine, mailboxes, channels and servicer, wired together."""

from __future__ import annotations

import grpc.aio

from engine.block_feed import EngineBlockFeed
from engine.mailboxes import Mailboxes
from engine.memory_admin import EngineMemoryAdmin
from engine.opening import open_constraints, open_core, open_loop
from kvferry.block_changes import BlockFeed
from kvferry.spec import SequenceSpec
from kvferry.wire import load_to_pb
from kvferry.worker_process import WorkerContext, capabilities_of
from kvtransfer.faults import NO_FAULTS, Faults
from prefill_svc.opening import open_prefill_servicer
from proto.kvferry.v1 import types_pb2, worker_pb2, worker_pb2_grpc


class PrefillRole:
    """See `kvferry.worker_process.WorkerRole`; `faults` are committed beside the configured ones."""

    services = ("kvferry.v1.PrefillService",)

    def __init__(self, context: WorkerContext, faults: Faults = NO_FAULTS) -> None:
        self._context = context
        self._config = context.config
        self.core = open_core(context.config, digests=True)
        self.core.step_log = context.step_log
        self._constraints = open_constraints(context.config, self.core)
        mailboxes = Mailboxes()
        self.engine = open_loop(self.core, mailboxes.deliver, kill_at_step=context.config.faults.kill_prefill_at_step)
        self.memory = EngineMemoryAdmin(self.engine)
        self.blocks: BlockFeed = EngineBlockFeed(self.engine)
        self.servicer = open_prefill_servicer(
            context, self.engine, self._constraints, mailboxes, self._admit, self.is_alive, faults
        )

    def _admit(self, _: SequenceSpec) -> None:
        self._context.state.check_admits(self._context.identity)

    @property
    def capabilities(self) -> types_pb2.Capabilities:
        runner = self.core.runner
        return capabilities_of(
            self._config, layout=runner.layout, max_context=runner.max_context, vocab_size=runner.vocab_size
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_PrefillServiceServicer_to_server(self.servicer, server)

    def on_bound(self, address: str) -> None:
        """Nothing here depends on the address."""

    def load(self) -> worker_pb2.WorkerLoad:
        return load_to_pb(self.core.stats(), self.servicer.counters)

    def keep_moved(self) -> None:
        """Nothing: what a prefill worker computed is on its way to a decode worker, and found there."""

    def is_alive(self) -> bool:
        return not self.engine.is_stuck(self._config.engine.max_step_s)

    async def close(self) -> None:
        self.engine.stop()
        self._constraints.close()
        await self.servicer.close()
