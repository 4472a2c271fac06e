"""Output tokens of all choices of a request → its response.

Choices are streamed side by side as they come. Where the best of more candidates are wanted, all of them are held until
the last has ended (`max_tokens` × best_of ids at most); then the best are sent, best first, numbered from 0 anew.
"""

from __future__ import annotations

from collections.abc import Callable

from kvferry.sampling import Finish, SamplingParams
from proto.kvferry.v1 import inference_pb2 as pb
from router.ledger import RequestLedger
from router.outbox import Outbox
from router.output import ChoiceOutput
from router.text.stop_strings import StopStrings
from router.text.token_bytes import TokenBytes
from router.validation import Request


class RequestOutput:
    """One `ChoiceOutput` a choice, or candidate.

    Args:
        outbox: what the client gets.
        ledger: told when tokens are sent, and of overshoot.
    """

    def __init__(
        self,
        request: Request,
        sampling: SamplingParams,
        *,
        num_prompt_tokens: int,
        token_bytes: TokenBytes,
        outbox: Outbox,
        ledger: RequestLedger,
    ) -> None:
        self._num_returned = request.n
        self._tells_logprob = request.ranks_candidates or request.beam is not None
        self._outbox = outbox
        self._ledger = ledger
        self._held = [Outbox() for _ in range(request.best_of)] if request.ranks_candidates else []
        stops = StopStrings(request.stop) if request.stop else None
        self._choices = [
            ChoiceOutput(
                request,
                sampling,
                index=choice,
                num_prompt_tokens=num_prompt_tokens,
                token_bytes=token_bytes,
                stops=stops,
                put=self._put_of(choice),
            )
            for choice in range(request.best_of)
        ]
        self._sent: list[ChoiceOutput] = [] if self._held else self._choices  # in the order of the response

    def _put_of(self, choice: int) -> Callable[[pb.GenerateResponse], None]:
        return self._held[choice].put if self._held else self._outbox.put

    def push(self, choice: int, token_ids: tuple[int, ...], logprobs: tuple[float, ...] = ()) -> None:
        """The choice's next tokens, in order."""
        output = self._choices[choice]
        num_overshoot_tokens = output.num_overshoot_tokens
        output.push(token_ids, logprobs)
        self._ledger.num_overshoot_tokens += output.num_overshoot_tokens - num_overshoot_tokens
        if not self._held:
            self._ledger.tokens_sent()

    def finish(self, choice: int, finish: Finish, cumulative_logprob: float | None = None) -> None:
        """Ends the choice; `cumulative_logprob` where no log-probabilities came with its tokens."""
        output = self._choices[choice]
        logprob = output.cumulative_logprob if cumulative_logprob is None else cumulative_logprob
        output.finish(finish, cumulative_logprob=logprob if self._tells_logprob else None)
        if self._held and all(known.told is not None for known in self._choices):
            self._send_best()

    def stop_of(self, choice: int) -> Finish | None:
        """The finish of the choice's stop string once one was found."""
        return self._choices[choice].stop

    def num_tokens_of(self, choice: int) -> int:
        """Output tokens that belong to the choice so far."""
        return self._choices[choice].num_tokens

    @property
    def num_tokens(self) -> int:
        """Output tokens of all choices so far, those of candidates included that are not sent."""
        return sum(output.num_tokens for output in self._choices)

    @property
    def is_streamed(self) -> bool:
        """Whether tokens are sent as they come; else all of them at the end."""
        return not self._tells_logprob

    @property
    def num_longest_choice_tokens(self) -> int:
        """Output tokens of the longest choice so far."""
        return max(output.num_tokens for output in self._choices)

    @property
    def finishes(self) -> tuple[Finish, ...]:
        """How the choices ended of which the client was told."""
        return tuple(output.told for output in self._sent if output.told is not None)

    def _send_best(self) -> None:
        ranked = sorted(range(len(self._choices)), key=lambda choice: (-self._choices[choice].mean_logprob, choice))
        best = ranked[: self._num_returned]
        if any(self._choices[choice].num_tokens for choice in best):
            self._ledger.tokens_sent()
        for index, choice in enumerate(best):
            for message in self._held[choice].take_all():
                if message.HasField("delta"):
                    message.delta.index = index
                else:
                    message.finish.index = index
                self._outbox.put(message)
            self._sent.append(self._choices[choice])
