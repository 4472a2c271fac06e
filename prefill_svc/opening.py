"""From a worker's context and its engine to a servicer that computes and ships: for prefill workers, and for decode
workers that ship what they let go of."""

from __future__ import annotations

from collections.abc import Callable

from engine.constraint import Constraints
from engine.loop import EngineLoop
from engine.mailboxes import Mailboxes
from kvferry.spec import SequenceSpec
from kvferry.worker_process import WorkerContext
from kvtransfer.budget import ByteBudget
from kvtransfer.faults import NO_FAULTS, Faults, faults_of
from kvtransfer.handshake import terms_of
from kvtransfer.transport import SendOptions
from prefill_svc.peers import DecodePeers
from prefill_svc.service import PrefillServicer


def open_prefill_servicer(
    context: WorkerContext,
    engine: EngineLoop,
    constraints: Constraints,
    mailboxes: Mailboxes,
    admit: Callable[[SequenceSpec], None],
    is_alive: Callable[[], bool],
    faults: Faults = NO_FAULTS,
) -> PrefillServicer:
    """A servicer over an engine that makes digests; `close` ends its channels.

    Args:
        admit: raises what keeps this worker from taking an attempt.
        is_alive: False while the step loop is stuck.
        faults: committed beside the configured ones.
    """
    transfer, identity = context.config.transfer, context.identity
    terms = terms_of(transfer, engine.core.layout)
    peers = DecodePeers(
        context.telemetry,
        terms.hello(identity.worker_id, identity.epoch, transfer.progress_timeout_s),
        ByteBudget(transfer.max_inflight_bytes),
        transfer.max_inflight_bytes_per_peer,
    )
    options = SendOptions(
        max_frame_bytes=transfer.max_frame_bytes,
        is_alive=is_alive,
        faults=Faults((*faults_of(context.config.faults).faults, *faults.faults)),
    )
    return PrefillServicer(engine, constraints, mailboxes, peers, admit, context.telemetry, options, is_alive)
