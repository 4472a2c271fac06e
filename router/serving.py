"""A request from its message to its end, whatever brought it; gRPC (`service.py`) and HTTP (`openai/`) are the shells.

    generate ─► tenant ─► admission ─► validate ─► tokenise (off the loop) ─► RequestRun ─► Outbox ─► write

The caller's task only writes; the run goes on beside it, so a slow client never holds up a worker's stream. However
`generate` ends, the run has ended before it returns; to cancel it is to cancel the work.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

from opentelemetry import trace

from kvferry.config import Config
from kvferry.errors import Cancelled, DeadlineExceeded, Internal, KvferryError, RouterDraining, Unauthenticated
from kvferry.telemetry import Attributes, SpanNames, Telemetry, context_of
from proto.kvferry.v1 import inference_pb2 as pb
from router.admission import Admission
from router.auth import Authenticator, Metadata, Tenant
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
from router.resume import check_prompt, check_prompt_logprobs
from router.text.echo import EchoedPrompt
from router.text.tokenizer import TextTokenizer
from router.tracing import describe_outcome, describe_request
from router.validation import SEED_LIMIT, Limits, TextPrompt, fit, heartbeat_interval_s, is_request_id, validate

logger = logging.getLogger(__name__)

Write = Callable[[pb.GenerateResponse], Awaitable[None]]
"""Takes the messages of a response at the client's pace."""


@dataclass(frozen=True, slots=True)
class RouterParts:
    """What serving is made of."""

    config: Config
    membership: Membership
    models: Models
    metrics: RouterMetrics
    telemetry: Telemetry


class Serving:
    """Everything that clients may ask for, without a transport."""

    def __init__(self, parts: RouterParts) -> None:
        self.parts = parts
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

    def tenant(self, metadata: Metadata | None) -> Tenant:
        """Whose call carries this metadata, or these headers; raises Unauthenticated."""
        return self._authenticator.tenant(metadata)

    def tenant_name(self, metadata: Metadata | None) -> str:
        """Whose call carries this metadata, for the log; empty where that is nobody."""
        try:
            return self.tenant(metadata).name
        except Unauthenticated:
            return ""

    def answering(self, metadata: Metadata | None) -> AbstractContextManager[None]:
        """Errors that leave the block say where workers run to administrators only."""
        return self._authenticator.answering(metadata)

    def check_open(self) -> None:
        """Raises RouterDraining once new requests are refused."""
        if self._is_draining:
            raise RouterDraining("the router is shutting down", retry_after_s=1.0)

    @contextmanager
    def admitted(self, metadata: Metadata | None) -> Iterator[None]:
        """Around a call that works with text alone: its caller is known, the router open, and the number bounded."""
        with self._authenticator.answering(metadata):
            self.tenant(metadata)
            self.check_open()
            with self._admission.admit():
                yield

    async def generate(
        self,
        message: pb.GenerateRequest,
        metadata: Metadata | None,
        write: Write,
        deadline_s: float | None = None,
        *,
        route: str,
    ) -> None:
        """Serves one request to its end. Raises the error that ended it.

        Args:
            deadline_s: on the monotonic clock; None for none.
            route: what was called, for the log.
        """
        with self._authenticator.answering(metadata), self.parts.metrics.request() as record, logged(record):
            record.route, record.request_id = route, uuid.uuid4().hex
            _name(message, record)
            tenant = self.tenant(metadata)
            record.tenant = tenant.name
            self.check_open()
            with self._admission.admit():
                model, interval_s = self.parts.models.find(message.model), heartbeat_interval_s(message)
                record.model = model.name
                preparing = self._prepare(message, model, tenant, deadline_s, record)
                prepared = await beating(preparing, write, interval_s)
                await self._serve(prepared, model, write, record)

    def abort(self, names: list[str], tenant: Tenant) -> list[str]:
        """Ends running requests of these ids and labels, as far as `tenant` may; returns the names that were found."""
        found: list[str] = []
        for name in dict.fromkeys(names):
            runs = [run for run in self._runs_of(tenant) if name and name in run.names]
            for run in runs:
                run.abort()
            if runs:
                found.append(name)
        return found

    def _runs_of(self, tenant: Tenant) -> list[RequestRun]:
        """Running requests that `tenant` may end."""
        return [run for run in self._running.values() if tenant.is_admin or run.prepared.request.tenant == tenant.name]

    def _limits_of(self, model: Model, tenant: Tenant) -> Limits:
        """The model's limits with the tenant's quotas."""
        limits = model.limits(self.parts.config)
        configured = next((one for one in self.parts.config.tenants if one.name == tenant.name), None)
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
        record.tier = request.tier
        span = trace.get_current_span()
        server_id = record.request_id
        describe_request(span, request, server_id)
        started_s = time.monotonic()
        with self.parts.telemetry.span(SpanNames.TOKENIZE):
            token_ids = await model.tokenize(request.prompt, limits, num_kept=request.truncate_prompt_tokens)
        record.ledger.tokenize_s = time.monotonic() - started_s
        record.num_prompt_tokens = len(token_ids)
        check_prompt(request.resume, token_ids)
        if request.carries.num_prompt_logprobs is not None:
            check_prompt_logprobs(request.resume, len(token_ids))
        max_tokens = fit(request, len(token_ids), limits)
        span.set_attribute(Attributes.REQUEST_MAX_TOKENS, max_tokens)
        bad_words = [ids for word in request.bad_words for ids in model.tokenizer.bad_word_token_ids(word)]
        tokenizer = model.tokenizer
        grammar = await tokenizer.grammars.checked(request.constraint)
        sampling = request.sampling_params(max_tokens, tokenizer.eos_token_ids, bad_words, grammar)
        return PreparedRequest(server_id, request, tuple(token_ids), sampling, deadline_s)

    async def _serve(
        self,
        prepared: PreparedRequest,
        model: Model,
        write: Write,
        record: RequestRecord,
    ) -> None:
        model.cluster.retries.add_request()
        outbox = Outbox(prepared.request.heartbeat_interval_s)
        output = RequestOutput(
            prepared.request,
            prepared.sampling,
            prompt_token_ids=prepared.prompt_token_ids,
            token_bytes=model.tokenizer.token_bytes,
            echo=_echo_of(prepared, model.tokenizer) if prepared.request.carries.echo else None,
            outbox=outbox,
            ledger=record.ledger,
        )
        span = trace.get_current_span()
        outbox.put(started(prepared))
        output.begin()
        run = RequestRun(prepared, model.cluster, output, record.ledger, context_of(span))
        self._running[prepared.id] = run
        task = asyncio.create_task(_run_into(run, output, outbox, record.ledger))
        task.add_done_callback(lambda _: self._running.pop(prepared.id, None))
        try:
            while (message := await outbox.take()) is not None:
                await write(message)
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


def _name(message: pb.GenerateRequest, record: RequestRecord) -> None:
    """Takes the caller's label to the log and the call's span before anything can be refused; not one that is none."""
    if is_request_id(message.request_id):
        record.label = message.request_id
        trace.get_current_span().set_attribute(Attributes.REQUEST_ID, record.label)


def _echo_of(prepared: PreparedRequest, tokenizer: TextTokenizer) -> EchoedPrompt:
    """The prompt's text: as it was given, unless only its end is used."""
    request = prepared.request
    if isinstance(request.prompt, TextPrompt) and request.truncate_prompt_tokens is None:
        return EchoedPrompt(request.prompt.text)
    return EchoedPrompt.of_tokens(
        prepared.prompt_token_ids,
        tokenizer.token_bytes,
        skip_special_tokens=request.carries.skip_special_tokens,
        kept_special_ids=request.carries.kept_special_token_ids,
    )


def _why_gone(error: BaseException, prepared: PreparedRequest) -> KvferryError:
    """Why the handler ended before the run."""
    if isinstance(error, KvferryError):
        return error
    if prepared.deadline_s is not None and time.monotonic() >= prepared.deadline_s:
        return DeadlineExceeded("the call's deadline passed before the request ended")
    return Cancelled("the client went away")
