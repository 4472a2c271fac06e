"""Turns the engine's outputs of one sequence into messages for the router and into spans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self

from opentelemetry.trace import Span

from engine.outputs import (
    BeamsFinished,
    ChunkComputed,
    Output,
    PromptScored,
    SequenceCommitted,
    SequenceFailed,
    SequencePreempted,
    SequenceStarted,
    TokenSampled,
)
from kvferry.spec import AttemptId
from kvferry.telemetry import Attributes, SpanNames, Telemetry, mark_error
from kvferry.wire import finish_to_pb, logprob_to_pb, prompt_logprobs_to_pb
from proto.kvferry.v1 import worker_pb2


class DecodeReporter:
    """One attempt's messages; use it as a context manager, which ends the decode span.

    Tokens of several choices come mixed; each choice's own are in order, and the last finish of all ends the attempt.
    The span `kvferry.decode` runs from the sequence's entry into the batch to its end; recomputed or locally computed
    chunks are `kvferry.prefill.chunk` spans.
    """

    def __init__(
        self, telemetry: Telemetry, attempt_id: AttemptId, *, received_ns: int, choices: Iterable[int] = (0,)
    ) -> None:
        self._telemetry = telemetry
        self._attempt_id = attempt_id
        self._received_ns = received_ns
        self._choices = set(choices)  # that have not ended
        self._started_ns: int | None = None  # with local prefill: begin of the first chunk
        self._prefilled_ns = received_ns  # with local prefill: end of its last chunk
        self._num_cached_tokens = 0
        self._num_tokens = 0
        self._num_accepted_tokens = 0  # beside one a step and choice: of drafts
        self._num_told: dict[int, int] = {}  # output tokens of each choice, up to the last one told
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
        self._span.set_attribute(Attributes.NUM_ACCEPTED_TOKENS, self._num_accepted_tokens)
        if error is not None:
            mark_error(self._span, error)
        self._span.end()

    def responses(self, outputs: list[Output]) -> Iterator[worker_pb2.DecodeResponse]:
        """Messages for a batch of outputs; a choice's tokens share one. Raises the error of a failed sequence."""
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
                    self._prefilled_ns = output.end_ns
                    self._record_chunk(output)
                case PromptScored():
                    message = prompt_logprobs_to_pb(output.token_index, output.logprobs)
                    yield worker_pb2.DecodeResponse(prompt_logprobs=message)
                case SequencePreempted():
                    self._num_preemptions += 1
                case BeamsFinished():
                    yield self._beams(output)
                case SequenceFailed(error=error):
                    yield from self._token_messages(tokens)
                    raise error
        yield from self._token_messages(tokens)

    def _begin(self, at_ns: int | None = None) -> None:
        attributes = {Attributes.ATTEMPT: self._attempt_id.attempt}
        self._span = self._telemetry.tracer.start_span(SpanNames.DECODE, start_time=at_ns, attributes=attributes)

    def _committed(self, output: SequenceCommitted) -> worker_pb2.DecodeResponse:
        self._begin()
        self._choices &= set(output.choices)
        self.is_finished = not self._choices
        message = worker_pb2.Committed(attempt=self._attempt_id.attempt, num_cached_tokens=output.num_cached_tokens)
        return worker_pb2.DecodeResponse(committed=message)

    def _record_chunk(self, chunk: ChunkComputed) -> None:
        span = self._telemetry.tracer.start_span(
            SpanNames.PREFILL_CHUNK, start_time=chunk.start_ns, attributes={Attributes.NUM_TOKENS: chunk.num_tokens}
        )
        span.end(chunk.end_ns)

    def _token_messages(self, tokens: list[TokenSampled]) -> Iterator[worker_pb2.DecodeResponse]:
        by_choice: dict[int, list[TokenSampled]] = {}
        for token in tokens:
            by_choice.setdefault(token.choice, []).append(token)
        for own in by_choice.values():
            yield self._tokens(own)

    def _tokens(self, tokens: list[TokenSampled]) -> worker_pb2.DecodeResponse:
        """The message of one choice's tokens."""
        first, last = tokens[0], tokens[-1]
        message = worker_pb2.DecodeTokens(
            token_index=first.token_index, token_ids=[token.token_id for token in tokens], choice=first.choice
        )
        message.logprobs.extend(logprob_to_pb(token.logprob) for token in tokens if token.logprob is not None)
        if last.finish is not None:
            message.finish.CopyFrom(finish_to_pb(last.finish))
            self.end_choice(first.choice)
        if self._started_ns is not None and self._num_tokens == 0:
            message.num_cached_tokens = self._num_cached_tokens
            message.queue_s = (self._started_ns - self._received_ns) / 1e9
            message.prefill_s = (first.at_ns - self._started_ns) / 1e9
        self._num_tokens += len(tokens)
        self._num_accepted_tokens += len(tokens) - len({token.at_ns for token in tokens})
        self._num_told[first.choice] = last.token_index + 1
        return worker_pb2.DecodeResponse(tokens=message)

    def _beams(self, output: BeamsFinished) -> worker_pb2.DecodeResponse:
        message = worker_pb2.Beams(
            beams=[
                worker_pb2.Beam(
                    token_ids=beam.token_ids,
                    finish=finish_to_pb(beam.finish),
                    cumulative_logprob=beam.cumulative_logprob,
                    score=beam.score,
                )
                for beam in output.beams
            ]
        )
        if self._started_ns is not None:
            message.num_cached_tokens = self._num_cached_tokens
            message.queue_s = (self._started_ns - self._received_ns) / 1e9
            message.prefill_s = (self._prefilled_ns - self._started_ns) / 1e9
        self._num_tokens += sum(len(beam.token_ids) for beam in output.beams)
        self.is_finished = True
        return worker_pb2.DecodeResponse(beams=message)

    @property
    def num_told_tokens(self) -> dict[int, int]:
        """Output tokens, earlier attempts' included, that the router knows of each choice that goes on here."""
        return {choice: number for choice, number in self._num_told.items() if choice in self._choices}

    def end_choice(self, choice: int) -> None:
        """A choice is over, by itself or because no more of it is wanted; the attempt is with the last one."""
        self._choices.discard(choice)
        self.is_finished = not self._choices
