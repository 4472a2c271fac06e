"""A response as its events make it: choices with their tokens and text, checked for gaps.

Events are those of `AsyncClient.generate`, in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.errors import DataLoss
from kvferry.sampling import Finish
from kvferry.wire import finish_from_pb
from proto.kvferry.v1 import inference_pb2, types_pb2


@dataclass(slots=True)
class Choice:
    """One output, complete once `finish` is set; `logprobs` has one entry a token where they were asked for."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[types_pb2.TokenLogprob] = field(default_factory=list)
    text: str = ""
    finish: Finish | None = None
    cumulative_logprob: float | None = None


@dataclass(slots=True)
class Completion:
    """A whole response, gathered from its events.

    Attributes:
        prompt_logprobs: of every token of the prompt but the first, where they were asked for.
    """

    started: inference_pb2.Started = field(default_factory=inference_pb2.Started)
    prompt_logprobs: list[types_pb2.TokenLogprob] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    usage: inference_pb2.Usage = field(default_factory=inference_pb2.Usage)
    timings: inference_pb2.Timings = field(default_factory=inference_pb2.Timings)
    is_complete: bool = False

    @property
    def text(self) -> str:
        """That of the first choice."""
        return self.choices[0].text if self.choices else ""

    def add(self, event: inference_pb2.GenerateResponse) -> None:
        """Takes the next event; raises DataLoss when tokens are missing, doubled or out of order."""
        match event.WhichOneof("event"):
            case "started":
                self.started = event.started
            case "prompt_logprobs":
                self._add_prompt_logprobs(event.prompt_logprobs)
            case "delta":
                self._add_delta(event.delta)
            case "finish":
                choice = self._choice(event.finish.index)
                choice.finish = finish_from_pb(event.finish.finish)
                if event.finish.HasField("cumulative_logprob"):
                    choice.cumulative_logprob = event.finish.cumulative_logprob
                self._check_count(choice, event.finish.num_output_tokens)
            case "completed":
                self.usage, self.timings = event.completed.usage, event.completed.timings
                self.is_complete = True

    def check_complete(self) -> None:
        """Raises DataLoss when the stream ended before its last event."""
        if not self.is_complete:
            raise DataLoss("the stream ended without its last message")

    def _add_prompt_logprobs(self, message: types_pb2.PromptLogprobs) -> None:
        if message.token_index != len(self.prompt_logprobs) + 1:
            raise DataLoss(
                f"the log-probability of prompt token {message.token_index} came after {len(self.prompt_logprobs)}"
            )
        self.prompt_logprobs.extend(message.logprobs)

    def _add_delta(self, delta: inference_pb2.ChoiceDelta) -> None:
        choice = self._choice(delta.index)
        if delta.token_ids and delta.token_index != len(choice.token_ids):
            raise DataLoss(f"choice {delta.index}: token {delta.token_index} came after {len(choice.token_ids)} tokens")
        choice.token_ids.extend(delta.token_ids)
        choice.logprobs.extend(delta.logprobs)
        choice.text += delta.text

    def _check_count(self, choice: Choice, num_output_tokens: int) -> None:
        if choice.token_ids and len(choice.token_ids) != num_output_tokens:
            raise DataLoss(f"choice {choice.index}: {len(choice.token_ids)} tokens came, {num_output_tokens} were made")

    def _choice(self, index: int) -> Choice:
        while len(self.choices) <= index:
            self.choices.append(Choice(len(self.choices)))
        return self.choices[index]
