"""How far the log-probabilities of a request's prompt are: which ones the client has, over all attempts and routers.

They come from the worker that computes the prompt, in order and before its first token. An attempt that is repeated
asks for the missing ones only; what comes twice is dropped.
"""

from __future__ import annotations

from kvferry.sampling import TokenLogprob
from kvferry.spec import PromptScoring
from router.events import EmitPromptLogprobs


class PromptLogprobProgress:
    """Order of one prompt's log-probabilities.

    Args:
        num_prompt_tokens: of which all have one but the first.
        num_top_logprobs: most likely tokens told of beside each.
        num_received: those that the client had before this router began.
    """

    def __init__(self, num_prompt_tokens: int, num_top_logprobs: int, num_received: int = 0) -> None:
        self._num_prompt_tokens = num_prompt_tokens
        self._num_top_logprobs = num_top_logprobs
        self.next_index = 1 + num_received

    @property
    def missing(self) -> PromptScoring | None:
        """What is still to be computed; None once the client has all."""
        if self.next_index >= self._num_prompt_tokens:
            return None
        return PromptScoring(self.next_index, self._num_top_logprobs)

    def accept(self, token_index: int, logprobs: tuple[TokenLogprob, ...]) -> EmitPromptLogprobs | None:
        """What of these is new; None where nothing is, or those before them are missing."""
        if token_index > self.next_index:
            return None
        new = logprobs[self.next_index - token_index :][: self._num_prompt_tokens - self.next_index]
        if not new:
            return None
        emitted = EmitPromptLogprobs(self.next_index, new)
        self.next_index += len(new)
        return emitted
