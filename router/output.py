"""Output tokens of one choice → the messages its client asked for."""

from __future__ import annotations

from kvferry.sampling import Finish, SamplingParams
from kvferry.wire import finish_to_pb
from proto.kvferry.v1 import inference_pb2 as pb
from router.outbox import Outbox
from router.text.output_text import ChoiceText
from router.text.stop_strings import StopStrings
from router.text.token_bytes import TokenBytes
from router.validation import Request, TextPrompt


class ChoiceOutput:
    """Detokenises, looks for stop strings, and puts deltas into the outbox.

    Attributes:
        stop: the stop string's finish once one was found; it wins over a worker's finish for the same or a later token.
    """

    def __init__(
        self,
        request: Request,
        sampling: SamplingParams,
        *,
        num_prompt_tokens: int,
        token_bytes: TokenBytes,
        outbox: Outbox,
    ) -> None:
        self._request = request
        self._num_prompt_tokens = num_prompt_tokens
        self._outbox = outbox
        self._text = ChoiceText(
            token_bytes,
            stops=StopStrings(request.stop) if request.stop else None,
            include_stop=request.include_stop_str_in_output,
            skip_special_tokens=request.skip_special_tokens,
            min_tokens=request.min_tokens,
            ending_token_ids=sampling.ending_token_ids,
            continues_text=isinstance(request.prompt, TextPrompt),
        )
        self.stop: Finish | None = None

    @property
    def num_tokens(self) -> int:
        """Output tokens that belong to the choice so far."""
        return self._text.num_output_tokens

    @property
    def num_overshoot_tokens(self) -> int:
        """Output tokens that came after its end."""
        return self._text.num_overshoot

    def push(self, token_ids: tuple[int, ...]) -> None:
        """The next tokens, in order."""
        token_index = self.num_tokens
        delta = self._text.push(token_ids)
        self.stop = self.stop or delta.stop
        self._put(token_index, delta.token_ids, delta.text)

    def finish(self, finish: Finish) -> Finish:
        """Ends the choice: held text goes out, then its finish. Returns the finish told."""
        delta = self._text.finish()
        self.stop = self.stop or delta.stop
        self._put(self.num_tokens, (), delta.text)
        told = self.stop or finish
        message = pb.ChoiceFinish(index=0, finish=finish_to_pb(told), num_output_tokens=self.num_tokens)
        self._outbox.put(pb.GenerateResponse(finish=message))
        return told

    def _put(self, token_index: int, token_ids: tuple[int, ...], text: str) -> None:
        ids = token_ids if self._request.token_ids else ()
        shown = text if self._request.text else ""
        if ids or shown:
            delta = pb.ChoiceDelta(
                index=0,
                token_index=token_index,
                position=self._num_prompt_tokens + token_index,
                token_ids=ids,
                text=shown,
            )
            self._outbox.put(pb.GenerateResponse(delta=delta))
