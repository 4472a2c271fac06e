"""Output tokens of all choices of a request → its response.

Choices are streamed side by side as they come. Where the best of more candidates are wanted, all of them are held until
the last has ended (`max_tokens` × best_of ids at most); then the best are sent, best first, numbered from 0 anew.

A response begins with `begin`: the prompt's text where it is echoed, then, in a resumed one, streamed choices take the
tokens that the client has; others are made again as a whole. Either way nothing is sent that the client has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from kvferry.sampling import Finish, SamplingParams, TokenLogprob
from kvferry.wire import prompt_logprobs_to_pb
from proto.kvferry.v1 import inference_pb2 as pb
from router.ledger import RequestLedger
from router.outbox import Outbox
from router.output import ChoiceOutput
from router.resume import Received, ReceivedChoice
from router.text.detokenizer import Detokenizer
from router.text.echo import EchoedPrompt
from router.text.stop_strings import StopStrings
from router.text.token_bytes import TokenBytes
from router.validation import Request


class RequestOutput:
    """One `ChoiceOutput` a choice, or candidate.

    Args:
        echo: the prompt's text, where it stands before the output of each choice.
        outbox: what the client gets.
        ledger: told when tokens are sent, and of overshoot.
    """

    def __init__(
        self,
        request: Request,
        sampling: SamplingParams,
        *,
        prompt_token_ids: Sequence[int],
        token_bytes: TokenBytes,
        echo: EchoedPrompt | None = None,
        outbox: Outbox,
        ledger: RequestLedger,
    ) -> None:
        self._outbox = outbox
        self._num_returned = request.n
        self._tells_logprob = request.comes_at_end
        received = MappingProxyType[int, ReceivedChoice]({}) if request.resume is None else request.resume.choices
        self._received = received if self.is_streamed else {}
        self._is_gone_on_with = request.resume is not None and request.resume.is_begun and self.is_streamed
        self._puts = [  # to the client, by index in the response
            Received(received[index], outbox.put).put if index in received else outbox.put for index in range(request.n)
        ]
        self._ledger = ledger
        self._held = [Outbox() for _ in range(request.best_of)] if request.ranks_candidates else []
        prompt = Detokenizer.behind(
            token_bytes,
            prompt_token_ids,
            skip_special_tokens=request.carries.skip_special_tokens,
            kept_special_ids=request.carries.kept_special_token_ids,
            marks_half=echo is not None,
        )
        stops = StopStrings(request.stop) if request.stop else None
        self._choices = [
            ChoiceOutput(
                request,
                sampling,
                index=choice,
                num_prompt_tokens=len(prompt_token_ids),
                prompt=prompt,
                stops=stops,
                echo=echo,
                put=self._put_of(choice),
            )
            for choice in range(request.best_of)
        ]
        self._sent: list[ChoiceOutput] = [] if self._held else self._choices  # in the order of the response

    def _put_of(self, choice: int) -> Callable[[pb.GenerateResponse], None]:
        return self._held[choice].put if self._held else self._puts[choice]

    def begin(self) -> None:
        """Brings streamed choices to where the client has them. Raises InvalidArgument where that cannot be."""
        for output in self._choices:
            output.echo_prompt()
        for choice, received in self._received.items():
            self._choices[choice].restore(received)

    @property
    def resumed(self) -> Mapping[int, tuple[int, ...]] | None:
        """Tokens of the choices that are to be gone on with; None where all begin, together."""
        if not self._is_gone_on_with:
            return None
        return {
            choice: self._received_ids(choice) for choice, output in enumerate(self._choices) if output.told is None
        }

    def _received_ids(self, choice: int) -> tuple[int, ...]:
        return self._received[choice].token_ids if choice in self._received else ()

    def push_prompt_logprobs(self, token_index: int, logprobs: tuple[TokenLogprob, ...]) -> None:
        """The next ones of the prompt, in order; they are the request's, whatever becomes of its choices."""
        self._outbox.put(pb.GenerateResponse(prompt_logprobs=prompt_logprobs_to_pb(token_index, logprobs)))

    def push(self, choice: int, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...] = ()) -> None:
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
    def num_received_tokens(self) -> int:
        """Those of them that the client had before this router began."""
        return sum(len(received.token_ids) for received in self._received.values())

    @property
    def is_streamed(self) -> bool:
        """Whether tokens are sent as they come; else all of them at the end."""
        return not self._tells_logprob

    @property
    def num_longest_choice_tokens(self) -> int:
        """Output tokens of the longest choice so far, those apart that the client had before this router began."""
        return max(output.num_tokens - len(self._received_ids(choice)) for choice, output in enumerate(self._choices))

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
                self._puts[index](message)
            self._sent.append(self._choices[choice])
