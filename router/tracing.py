"""The router's spans below the call's own: one an attempt, under which its worker calls hang, and the wait for workers.

Spans are started and ended by hand, on every path; nothing is attached to a task.
"""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, Tracer

from kvferry.errors import KvferryError
from kvferry.sampling import Finish
from kvferry.telemetry import Attributes, SpanNames, context_of, mark_error
from router.ledger import RequestLedger
from router.validation import Request

ATTEMPT_SPAN = "kvferry.attempt"
PROVIDER = "kvferry"


class AttemptSpans:
    """Spans of the attempts of one request, or of a choice that parted from it; later ones are linked to the first.

    Args:
        tracer: makes them.
        parent: context of the call's span.
        choice: the choice that the attempts serve; None where they serve all.
        first: the request's first attempt, where these are not its first ones.
    """

    def __init__(
        self, tracer: Tracer, parent: Context, *, choice: int | None = None, first: Span | None = None
    ) -> None:
        self._tracer = tracer
        self._parent = parent
        self._choice = choice
        self._first = first
        self._current: Span | None = None
        self._queue: Span | None = None

    def of_choice(self, choice: int) -> AttemptSpans:
        """Spans of a choice that goes on by itself."""
        return AttemptSpans(self._tracer, self._parent, choice=choice, first=self._first)

    @property
    def context(self) -> Context:
        """Parent of the calls of the current attempt."""
        assert self._current is not None
        return context_of(self._current)

    def begin(self, attempt: int, cause: KvferryError | None) -> None:
        """Ends the attempt before with `cause` and begins the next, which waits for workers."""
        self.end(cause)
        links = [Link(self._first.get_span_context())] if self._first is not None else []
        attributes = {Attributes.ATTEMPT: attempt}
        if self._choice is not None:
            attributes[Attributes.CHOICE] = self._choice
        span = self._tracer.start_span(ATTEMPT_SPAN, context=self._parent, links=links, attributes=attributes)
        self._first = self._first or span
        self._current = span
        self._queue = self._tracer.start_span(SpanNames.QUEUE, context=self.context)

    def chosen(self, moved_from: str | None = None) -> None:
        """Workers were chosen; `moved_from`: the draining decode worker that takes the place of prefill."""
        if self._current is not None and moved_from is not None:
            self._current.set_attribute(Attributes.MOVED_FROM, moved_from)
        if self._queue is not None:
            self._queue.end()
            self._queue = None

    def end(self, error: KvferryError | None) -> None:
        """Ends what is open; may be called again."""
        for span in (self._queue, self._current):
            if span is not None:
                if error is not None:
                    mark_error(span, error)
                span.end()
        self._queue = self._current = None


def describe_request(span: Span, request: Request, server_request_id: str) -> None:
    """Name and attributes of the call's span, once the request is understood."""
    span.update_name(f"{request.operation} {request.model}")
    span.set_attributes(
        {
            Attributes.OPERATION: request.operation,
            Attributes.PROVIDER: PROVIDER,
            Attributes.REQUEST_MODEL: request.model,
            Attributes.REQUEST_TEMPERATURE: request.temperature,
            Attributes.REQUEST_TOP_P: request.top_p,
            Attributes.REQUEST_TOP_K: request.top_k,
            Attributes.REQUEST_SEED: str(request.seed),  # attributes are signed 64-bit numbers, seeds are not
            Attributes.RESPONSE_ID: server_request_id,
            Attributes.REQUEST_ID: request.label,
            Attributes.TIER: request.tier,
        }
    )
    if request.n != 1:
        span.set_attribute(Attributes.REQUEST_CHOICE_COUNT, request.n)


def describe_outcome(
    span: Span, ledger: RequestLedger, *, num_prompt_tokens: int, num_output_tokens: int, finishes: Sequence[Finish]
) -> None:
    """Usage and finish reasons on the call's span, on every way a request may end."""
    span.set_attributes(
        {
            Attributes.INPUT_TOKENS: num_prompt_tokens,
            Attributes.OUTPUT_TOKENS: num_output_tokens,
            Attributes.CACHED_TOKENS: ledger.num_cached_tokens,
        }
    )
    if ledger.time_to_first_token_s is not None:
        span.set_attribute(Attributes.TIME_TO_FIRST_TOKEN_S, ledger.time_to_first_token_s)
    if finishes:
        span.set_attribute(Attributes.FINISH_REASONS, [finish.kind.value for finish in finishes])
