"""Output tokens of one choice → the messages its client asked for."""

from __future__ import annotations

from collections.abc import Callable

from kvferry.errors import InvalidArgument
from kvferry.sampling import Finish, SamplingParams, TokenLogprob
from kvferry.wire import finish_to_pb, logprob_to_pb
from proto.kvferry.v1 import inference_pb2 as pb
from router.resume import ReceivedChoice
from router.text.echo import EchoedPrompt
from router.text.output_text import ChoiceText
from router.text.stop_strings import StopStrings
from router.text.token_bytes import TokenBytes
from router.validation import Request, TextPrompt


class ChoiceOutput:
    """Detokenises, looks for stop strings, and gives deltas and the finish to `put`.

    Args:
        index: of the choice in the response.
        stops: the request's stop strings, compiled once for all its choices.
        echo: the prompt's text, where it stands before the output.
        put: takes the messages.

    Attributes:
        stop: the stop string's finish once one was found; it wins over a worker's finish for the same or a later token.
        told: the finish once it was told.
        cumulative_logprob: sum over its tokens, of those that came with a log-probability.
    """

    def __init__(
        self,
        request: Request,
        sampling: SamplingParams,
        *,
        index: int,
        num_prompt_tokens: int,
        token_bytes: TokenBytes,
        stops: StopStrings | None,
        echo: EchoedPrompt | None = None,
        put: Callable[[pb.GenerateResponse], None],
    ) -> None:
        self._request = request
        self._index = index
        self._num_prompt_tokens = num_prompt_tokens
        self._put = put
        self._ending = sampling
        self._echo = echo
        self._text = ChoiceText(
            token_bytes,
            stops=stops,
            include_stop=request.include_stop_str_in_output,
            skip_special_tokens=request.carries.skip_special_tokens,
            kept_special_ids=request.carries.kept_special_token_ids,
            min_tokens=request.min_tokens,
            ending_token_ids=sampling.ending_token_ids,
            continues_text=isinstance(request.prompt, TextPrompt),
            goes_on_from=None if echo is None else echo.detokenizer,
        )
        self.stop: Finish | None = None
        self.told: Finish | None = None
        self.cumulative_logprob = 0.0

    @property
    def num_tokens(self) -> int:
        """Output tokens that belong to the choice so far."""
        return self._text.num_output_tokens

    @property
    def num_overshoot_tokens(self) -> int:
        """Output tokens that came after its end."""
        return self._text.num_overshoot

    @property
    def mean_logprob(self) -> float:
        """Log-probability a token; that of no tokens is the lowest."""
        return self.cumulative_logprob / self.num_tokens if self.num_tokens else float("-inf")

    def echo_prompt(self) -> None:
        """The prompt's text, if asked for; before anything else."""
        for piece in self._echo.pieces if self._echo is not None else ():
            self._put_delta(0, (), piece)

    def restore(self, received: ReceivedChoice) -> None:
        """Takes the tokens that the client has, from the first on; `put` leaves out what it has of their messages.

        A choice that these tokens end is finished. Raises InvalidArgument for text or tokens beyond what there can be.
        """
        path, num_ids = f"resume.choices[{self._index}]", len(received.token_ids)
        delta = self._text.push(received.token_ids)
        self.stop = delta.stop
        if self.num_tokens < num_ids:
            raise InvalidArgument(
                f"{path}.token_ids", f"has {num_ids} ids; a stop string ended the choice with number {self.num_tokens}"
            )
        num_echoed = 0 if self._echo is None else len(self._echo.text)
        most = num_echoed + len(delta.text) + self._most_held_chars
        if self._request.carries.text and received.num_text_chars > most:
            raise InvalidArgument(
                f"{path}.num_text_chars",
                f"{received.num_text_chars} is above {most}, which its tokens can have at most",
            )
        self._put_delta(0, delta.token_ids, delta.text)
        if received.finish is not None:
            self.told = received.finish
        elif (finish := self._finish_of(received.token_ids)) is not None:
            self.finish(finish)

    @property
    def _most_held_chars(self) -> int:
        """Text that an end may have added: what was held back for a stop string, and a mark for half a character."""
        return max(map(len, self._request.stop), default=0) + 1

    def _finish_of(self, token_ids: tuple[int, ...]) -> Finish | None:
        """How these tokens end the choice, if they do."""
        if self.stop is not None or not token_ids:
            return self.stop
        return self._ending.finish_after(token_ids[-1], len(token_ids))

    def push(self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...] = ()) -> None:
        """The next tokens, in order."""
        token_index = self.num_tokens
        delta = self._text.push(token_ids)
        self.stop = self.stop or delta.stop
        logprobs = logprobs[: len(delta.token_ids)]
        self.cumulative_logprob += sum(one.logprob for one in logprobs)
        self._put_delta(token_index, delta.token_ids, delta.text, logprobs)

    def finish(self, finish: Finish, *, cumulative_logprob: float | None = None) -> None:
        """Ends the choice: held text goes out, then its finish, with the log-probability if that is to be told."""
        delta = self._text.finish()
        self.stop = self.stop or delta.stop
        self._put_delta(self.num_tokens, (), delta.text)
        self.told = self.stop or finish
        message = pb.ChoiceFinish(
            index=self._index,
            finish=finish_to_pb(self.told),
            num_output_tokens=self.num_tokens,
            cumulative_logprob=cumulative_logprob,
        )
        self._put(pb.GenerateResponse(finish=message))

    def _put_delta(
        self, token_index: int, token_ids: tuple[int, ...], text: str, logprobs: tuple[TokenLogprob, ...] = ()
    ) -> None:
        ids = token_ids if self._request.carries.token_ids else ()
        shown = text if self._request.carries.text else ""
        told = logprobs if self._request.carries.logprobs else ()
        if ids or shown or told:
            delta = pb.ChoiceDelta(
                index=self._index,
                token_index=token_index,
                position=self._num_prompt_tokens + token_index,
                token_ids=ids,
                text=shown,
                logprobs=map(logprob_to_pb, told),
            )
            self._put(pb.GenerateResponse(delta=delta))
