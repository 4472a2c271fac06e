"""The decode role of a worker process: engine, admission, mailboxes and servicers, wired together.

What it let go of when it drained it ships itself, by the prefill worker's servicer over its own engine.
"""

from __future__ import annotations

import grpc.aio

from decode_svc.admission import DecodeAdmission
from decode_svc.attempt import DecodeAttempt
from decode_svc.service import DecodeServicer
from engine.block_feed import EngineBlockFeed
from engine.mailboxes import Mailboxes
from engine.memory_admin import EngineMemoryAdmin
from engine.opening import open_constraints, open_core, open_loop
from kvferry.block_changes import BlockFeed
from kvferry.spec import SequenceSpec
from kvferry.wire import load_to_pb
from kvferry.worker_process import WorkerContext, capabilities_of
from kvtransfer.grpc_transport import ShipServicer, add_ship_service
from kvtransfer.handshake import terms_of
from kvtransfer.messages import Offer
from kvtransfer.transport import ReceiveOptions
from prefill_svc.opening import open_prefill_servicer
from proto.kvferry.v1 import types_pb2, worker_pb2, worker_pb2_grpc


class DecodeRole:
    """See `kvferry.worker_process.WorkerRole`."""

    services = ("kvferry.v1.DecodeService", "kvferry.v1.ShipService", "kvferry.v1.PrefillService")

    def __init__(self, context: WorkerContext) -> None:
        self._config = context.config
        self.core = open_core(context.config, digests=True)
        self.core.step_log = context.step_log
        self.admission = DecodeAdmission(self.core)
        self._constraints = open_constraints(context.config, self.core)
        mailboxes = Mailboxes()
        self.engine = open_loop(
            self.core,
            mailboxes.deliver,
            before_step=self.admission.poll,
            kill_at_step=context.config.faults.kill_decode_at_step,
        )
        self.memory = EngineMemoryAdmin(self.engine)
        self.blocks: BlockFeed = EngineBlockFeed(self.engine)
        self.servicer = DecodeServicer(
            self.engine,
            self._constraints,
            self.admission,
            mailboxes,
            context.identity,
            context.state,
            context.moves,
            context.telemetry,
            self.is_alive,
        )
        self.move_servicer = open_prefill_servicer(
            context, self.engine, self._constraints, mailboxes, self._admit_move, self.is_alive
        )
        self._moves = context.moves
        transfer = context.config.transfer
        self.ship_servicer = ShipServicer(
            terms=terms_of(transfer, self.core.layout),
            epoch=context.identity.epoch,
            open_host=self._open_host,
            options=ReceiveOptions(
                max_frame_bytes=transfer.max_frame_bytes,
                is_alive=self.is_alive,
            ),
        )

    def _admit_move(self, spec: SequenceSpec) -> None:
        self._moves.claim(spec.id.request_id, spec.choice)

    def _open_host(self, offer: Offer) -> DecodeAttempt:
        return self.servicer.attempt(offer.id).open_shipment(offer)

    @property
    def capabilities(self) -> types_pb2.Capabilities:
        runner = self.core.runner
        return capabilities_of(
            self._config, layout=runner.layout, max_context=runner.max_context, vocab_size=runner.vocab_size
        )

    def add_to(self, server: grpc.aio.Server) -> None:
        worker_pb2_grpc.add_DecodeServiceServicer_to_server(self.servicer, server)
        worker_pb2_grpc.add_PrefillServiceServicer_to_server(self.move_servicer, server)
        add_ship_service(self.ship_servicer, server)

    def on_bound(self, address: str) -> None:
        """Registered attempts are told to be shipped to here."""
        self.servicer.ship_address = address

    def load(self) -> worker_pb2.WorkerLoad:
        stats, counters, moved = self.core.stats(), self.servicer.counters, self.move_servicer.counters
        return load_to_pb(stats, counters, num_waiting_grants=self.admission.num_waiting, moved=moved)

    def keep_moved(self) -> None:
        self.servicer.keep_moved()

    def is_alive(self) -> bool:
        return not self.engine.is_stuck(self._config.engine.max_step_s)

    async def close(self) -> None:
        self.engine.stop()
        self._constraints.close()
        await self.move_servicer.close()
