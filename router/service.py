"""The public service: a call comes in, is checked, tokenised, run, and its messages written at the client's pace.

    Generate ─► admission ─► validate ─► tokenise (off the loop) ─► RequestRun ─► Outbox ─► client

The handler only writes; the run goes on beside it, so a slow client never holds up a worker's stream. However the
handler ends, the run has ended before it returns.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from opentelemetry import trace

from kvferry import __version__
from kvferry.config import Config
from kvferry.errors import Cancelled, DeadlineExceeded, Internal, KvferryError, RouterDraining
from kvferry.telemetry import Attributes, SpanNames, Telemetry, context_of
from kvferry.wire import layout_to_pb
from proto.kvferry.v1 import inference_pb2 as pb
from proto.kvferry.v1 import inference_pb2_grpc, types_pb2
from router.admission import Admission
from router.auth import Authenticator, Tenant
from router.constraint import checked_grammar
from router.ledger import RequestLedger
from router.membership import Membership
from router.messages import completed, started
from router.metrics import RequestRecord, RouterMetrics
from router.models import Model, Models
from router.outbox import Outbox, beating
from router.prepared_request import PreparedRequest
from router.request_log import logged
from router.request_output import RequestOutput
from router.request_run import RequestRun
from router.resume import check_prompt
from router.tracing import describe_outcome, describe_request
from router.validation import SEED_LIMIT, UNSUPPORTED_FIELDS, Limits, fit, heartbeat_interval_s, validate

if TYPE_CHECKING:  # subscripted at type-check time only; at run time the class is not generic
    from grpc.aio import ServicerContext

logger = logging.getLogger(__name__)

LONGEST_DEADLINE_S = 10 * 365 * 86400.0

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name


@dataclass(frozen=True, slots=True)
class RouterParts:
    """What the service is made of."""

    config: Config
    membership: Membership
    models: Models
    metrics: RouterMetrics
    telemetry: Telemetry


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """Serves clients."""

    def __init__(self, parts: RouterParts) -> None:
        self._parts = parts
        self._admission = Admission(parts.config.router.max_queue)
        self._authenticator = Authenticator(parts.config)
        self._running: dict[str, RequestRun] = {}
        self._is_draining = False

    def drain(self) -> None:
        """Refuses new requests from now on."""
        self._is_draining = True

    @property
    def num_running(self) -> int:
        """Requests that run."""
        return len(self._running)

    async def Generate(  # type: ignore[override]  # a coroutine that writes
        self, request: pb.GenerateRequest, context: ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
    ) -> None:
        deadline_s = _deadline_s(context.time_remaining())
        with self._parts.metrics.request() as record, logged(record):
            tenant = self._authenticator.tenant(context.invocation_metadata())
            if self._is_draining:
                raise RouterDraining("the router is shutting down", retry_after_s=1.0)
            with self._admission.admit():
                model, interval_s = self._parts.models.find(request.model), heartbeat_interval_s(request)
                preparing = self._prepare(request, model, tenant, deadline_s, record)
                prepared = await beating(preparing, context.write, interval_s)
                await self._serve(prepared, model, context, record)

    async def Abort(
        self, request: pb.AbortRequest, context: ServicerContext[pb.AbortRequest, pb.AbortResponse]
    ) -> pb.AbortResponse:
        tenant = self._authenticator.tenant(context.invocation_metadata())
        found: list[str] = []
        for name in dict.fromkeys(request.request_ids):
            runs = [run for run in self._runs_of(tenant) if name and name in run.names]
            for run in runs:
                run.abort()
            if runs:
                found.append(name)
        return pb.AbortResponse(aborted_request_ids=found)

    async def GetCapabilities(
        self,
        request: pb.GetCapabilitiesRequest,
        context: ServicerContext[pb.GetCapabilitiesRequest, pb.GetCapabilitiesResponse],
    ) -> pb.GetCapabilitiesResponse:
        self._authenticator.tenant(context.invocation_metadata())
        models, config = self._parts.models, self._parts.config
        model = models.find(request.model)
        limits = model.limits(config)
        paths = (worker.status.model_path for worker in model.workers.accepted if worker.status is not None)
        capabilities = types_pb2.Capabilities(
            model=limits.model,
            model_path=next(paths, ""),
            max_context=limits.max_context,
            vocab_size=limits.vocab_size,
            layout=layout_to_pb(limits.layout),
            version=__version__,
            tiers=sorted(limits.tiers, key=lambda name: limits.tiers[name]),
            default_tier=config.default_tier.name,
            max_request_bytes=limits.max_request_bytes,
            unsupported_fields=list(UNSUPPORTED_FIELDS),
        )
        listed = [
            pb.ServedModel(name=model.name, aliases=model.aliases, is_ready=not model.workers.missing)
            for model in models.all
        ]
        return pb.GetCapabilitiesResponse(capabilities=capabilities, models=listed)

    async def ListWorkers(
        self, request: pb.ListWorkersRequest, context: ServicerContext[pb.ListWorkersRequest, pb.ListWorkersResponse]
    ) -> pb.ListWorkersResponse:
        del request
        tenant = self._authenticator.tenant(context.invocation_metadata())
        workers = self._parts.membership.workers
        return pb.ListWorkersResponse(workers=[worker.to_pb(shows_place=tenant.is_admin) for worker in workers])

    def _runs_of(self, tenant: Tenant) -> list[RequestRun]:
        """Running requests that `tenant` may end."""
        return [run for run in self._running.values() if tenant.is_admin or run.prepared.request.tenant == tenant.name]

    def _limits_of(self, model: Model, tenant: Tenant) -> Limits:
        """The model's limits with the tenant's quotas."""
        limits = model.limits(self._parts.config)
        configured = next((one for one in self._parts.config.tenants if one.name == tenant.name), None)
        if configured is None:
            return limits
        return replace(
            limits,
            num_quota_prefill_blocks=configured.max_used_blocks(limits.num_prefill_blocks),
            num_quota_decode_blocks=configured.max_used_blocks(limits.num_decode_blocks),
        )

    # --- one request ---

    async def _prepare(
        self,
        message: pb.GenerateRequest,
        model: Model,
        tenant: Tenant,
        deadline_s: float | None,
        record: RequestRecord,
    ) -> PreparedRequest:
        limits = self._limits_of(model, tenant)
        request = validate(message, limits, lambda: secrets.randbelow(SEED_LIMIT), tenant=tenant.name)
        record.model, record.tier, record.label = request.model, request.tier, request.label
        span = trace.get_current_span()
        server_id = uuid.uuid4().hex
        record.request_id = server_id
        describe_request(span, request, server_id)
        started_s = time.monotonic()
        with self._parts.telemetry.span(SpanNames.TOKENIZE):
            token_ids = await model.tokenize(request.prompt, limits)
        record.ledger.tokenize_s = time.monotonic() - started_s
        record.num_prompt_tokens = len(token_ids)
        check_prompt(request.resume, token_ids)
        max_tokens = fit(request, len(token_ids), limits)
        span.set_attribute(Attributes.REQUEST_MAX_TOKENS, max_tokens)
        bad_words = [ids for word in request.bad_words for ids in model.tokenizer.bad_word_token_ids(word)]
        tokenizer = model.tokenizer
        grammar = await checked_grammar(request.constraint, tokenizer.grammars, tokenizer.eos_token_ids)
        sampling = request.sampling_params(max_tokens, tokenizer.eos_token_ids, bad_words, grammar)
        return PreparedRequest(server_id, request, tuple(token_ids), sampling, deadline_s)

    async def _serve(
        self,
        prepared: PreparedRequest,
        model: Model,
        context: ServicerContext[pb.GenerateRequest, pb.GenerateResponse],
        record: RequestRecord,
    ) -> None:
        model.cluster.retries.add_request()
        outbox = Outbox(prepared.request.heartbeat_interval_s)
        output = RequestOutput(
            prepared.request,
            prepared.sampling,
            num_prompt_tokens=len(prepared.prompt_token_ids),
            token_bytes=model.tokenizer.token_bytes,
            outbox=outbox,
            ledger=record.ledger,
        )
        span = trace.get_current_span()
        outbox.put(started(prepared))
        output.restore()
        run = RequestRun(prepared, model.cluster, output, record.ledger, context_of(span))
        self._running[prepared.id] = run
        task = asyncio.create_task(_run_into(run, output, outbox, record.ledger))
        task.add_done_callback(lambda _: self._running.pop(prepared.id, None))
        try:
            while (message := await outbox.take()) is not None:
                await context.write(message)
        except BaseException as error:
            run.client_gone(_why_gone(error, prepared))
            raise
        finally:
            await asyncio.wait([task])
            record.phase, record.finish = run.phase, run.finish
            record.num_output_tokens = output.num_tokens - output.num_received_tokens
            record.is_streamed, record.num_longest_choice_tokens = output.is_streamed, output.num_longest_choice_tokens
            describe_outcome(
                span,
                record.ledger,
                num_prompt_tokens=record.num_prompt_tokens,
                num_output_tokens=output.num_tokens,
                finishes=output.finishes,
            )


async def _run_into(run: RequestRun, output: RequestOutput, outbox: Outbox, ledger: RequestLedger) -> None:
    """Runs the request and closes its outbox, whatever happens."""
    try:
        await run.run()
        outbox.put(completed(run.prepared, output.num_tokens, ledger))
        outbox.close()
    except KvferryError as error:
        outbox.close(error)
    except Exception as error:
        logger.exception("request_failed", extra={"fields": {"request": run.prepared.id}})
        outbox.close(Internal(f"the router failed with {type(error).__name__}; its log has the details"))
    finally:
        outbox.close(Cancelled("the router ended the request"))  # of no effect once it is closed


def _deadline_s(remaining_s: float | None) -> float | None:
    """On the monotonic clock; the library says None or a very long time where the call has none."""
    if remaining_s is None or remaining_s > LONGEST_DEADLINE_S:
        return None
    return time.monotonic() + remaining_s


def _why_gone(error: BaseException, prepared: PreparedRequest) -> KvferryError:
    """Why the handler ended before the run."""
    if isinstance(error, KvferryError):
        return error
    if prepared.deadline_s is not None and time.monotonic() >= prepared.deadline_s:
        return DeadlineExceeded("the call's deadline passed before the request ended")
    return Cancelled("the client went away")
