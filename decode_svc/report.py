"""Turns the engine's outputs of one sequence into messages for the router and into spans."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Self

from opentelemetry.trace import Span

from engine.outputs import (
    ChunkComputed,
    Output,
    SequenceCommitted,
    SequenceFailed,
    SequencePreempted,
    SequenceStarted,
    TokenSampled,
)
from kvferry.spec import AttemptId
from kvferry.telemetry import Attributes, SpanNames, Telemetry, mark_error
from kvferry.wire import finish_to_pb
from proto.kvferry.v1 import worker_pb2


class DecodeReporter:
    """One attempt's messages; use it as a context manager, which ends the decode span.

    The span `kvferry.decode` runs from the sequence's entry into the batch to its end; recomputed or locally computed
    chunks are `kvferry.prefill.chunk` spans.
    """

    def __init__(self, telemetry: Telemetry, attempt_id: AttemptId, *, received_ns: int) -> None:
        self._telemetry = telemetry
        self._attempt_id = attempt_id
        self._received_ns = received_ns
        self._started_ns: int | None = None  # with local prefill: begin of the first chunk
        self._num_cached_tokens = 0
        self._num_tokens = 0
        self._num_preemptions = 0
        self._span: Span | None = None
        self.is_finished = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._span is None:
            return
        self._span.set_attribute(Attributes.NUM_TOKENS, self._num_tokens)
        self._span.set_attribute(Attributes.NUM_PREEMPTIONS, self._num_preemptions)
        if error is not None:
            mark_error(self._span, error)
        self._span.end()

    def responses(self, outputs: list[Output]) -> Iterator[worker_pb2.DecodeResponse]:
        """Messages for a batch of outputs; adjacent tokens share one. Raises the error of a failed sequence."""
        tokens: list[TokenSampled] = []
        for output in outputs:
            match output:
                case TokenSampled():
                    tokens.append(output)
                case SequenceCommitted():
                    yield self._committed(output)
                case SequenceStarted():
                    self._begin(output.at_ns)
                    self._started_ns, self._num_cached_tokens = output.at_ns, output.num_cached_tokens
                case ChunkComputed():
                    self._record_chunk(output)
                case SequencePreempted():
                    self._num_preemptions += 1
                case SequenceFailed(error=error):
                    if tokens:
                        yield self._tokens(tokens)
                    raise error
        if tokens:
            yield self._tokens(tokens)

    def _begin(self, at_ns: int | None = None) -> None:
        attributes = {Attributes.ATTEMPT: self._attempt_id.attempt}
        self._span = self._telemetry.tracer.start_span(SpanNames.DECODE, start_time=at_ns, attributes=attributes)

    def _committed(self, output: SequenceCommitted) -> worker_pb2.DecodeResponse:
        self._begin()
        message = worker_pb2.Committed(attempt=self._attempt_id.attempt, num_cached_tokens=output.num_cached_tokens)
        return worker_pb2.DecodeResponse(committed=message)

    def _record_chunk(self, chunk: ChunkComputed) -> None:
        span = self._telemetry.tracer.start_span(
            SpanNames.PREFILL_CHUNK, start_time=chunk.start_ns, attributes={Attributes.NUM_TOKENS: chunk.num_tokens}
        )
        span.end(chunk.end_ns)

    def _tokens(self, tokens: list[TokenSampled]) -> worker_pb2.DecodeResponse:
        message = worker_pb2.DecodeTokens(
            token_index=tokens[0].token_index, token_ids=[token.token_id for token in tokens]
        )
        finish = tokens[-1].finish
        if finish is not None:
            message.finish.CopyFrom(finish_to_pb(finish))
            self.is_finished = True
        if self._started_ns is not None and self._num_tokens == 0:
            message.num_cached_tokens = self._num_cached_tokens
            message.queue_s = (self._started_ns - self._received_ns) / 1e9
            message.prefill_s = (tokens[0].at_ns - self._started_ns) / 1e9
        self._num_tokens += len(tokens)
        return worker_pb2.DecodeResponse(tokens=message)
