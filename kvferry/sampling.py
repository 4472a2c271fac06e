"""How one sequence is sampled and when it ends: values that travel unchanged from the router to both workers.

The router fills in every default, so a worker never guesses. Output relation, kept everywhere: the token that ended
a choice (end of sequence, stop id, the last token of a stop string) is among its token ids and is counted; its text is
not in the text.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

GREEDY_BELOW_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: dividing logits by them would overflow float32."""


@dataclass(frozen=True, slots=True)
class LogitRules:
    """What a request does to the logits before anything else; the defaults do nothing.

    Attributes:
        presence_penalty: taken from the logit of every token that the output has.
        frequency_penalty: taken from it once an occurrence.
        repetition_penalty: divides the logit of every token that prompt or output have, if above 0, else multiplies it.
        bias: what is added to the logits of some ids.
        allowed_token_ids: the only ids that may come; all where it is empty.
        bad_words: sequences of ids that the output may not have.
    """

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All ids that are named."""
        biased = (token_id for token_id, _ in self.bias)
        return (*biased, *self.allowed_token_ids, *(token_id for word in self.bad_words for token_id in word))


NO_RULES = LogitRules()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithm of a token's probability under the model, before rules, temperature and filters.

    Attributes:
        rank: tokens at least as likely, itself included; 0 where it was not counted.
        alternatives: the most likely tokens in order, or those that were asked for.
    """

    token_id: int
    logprob: float
    rank: int = 0
    alternatives: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Effective sampling parameters and token-level stop rules of one choice.

    Attributes:
        max_tokens: most output tokens, at least 1.
        temperature: 0.0 is greedy.
        top_k: keep the k most likely tokens; 0 switches it off.
        top_p: keep the smallest set of tokens whose probability reaches this; 1.0 switches it off.
        min_p: keep tokens at least this fraction of the most likely one; 0.0 switches it off.
        seed: 0 … 2**64 - 1; the noise of a token depends on (seed, choice, absolute position) and nothing else.
        min_tokens: end-of-sequence and stop ids cannot be sampled before this many output tokens.
        ignore_eos: end-of-sequence ids are ordinary tokens.
        eos_token_ids: the model's end-of-sequence ids.
        stop_token_ids: the caller's own stop ids.
        logprobs: report the log-probability of every sampled token.
        num_top_logprobs: with `logprobs`, report those of so many most likely tokens, too.
        logprob_token_ids: with `logprobs`, report those of these tokens, too, instead of the most likely ones'.
        rules: penalties, bias and bans.
        grammar: what the output has to match (`kvferry/grammar.py`); empty where it is free.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    eos_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: bool = False
    num_top_logprobs: int = 0
    logprob_token_ids: tuple[int, ...] = ()
    rules: LogitRules = NO_RULES
    grammar: str = ""

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW_TEMPERATURE

    @property
    def ending_token_ids(self) -> frozenset[int]:
        """Token ids whose sampling ends the choice."""
        eos = () if self.ignore_eos else self.eos_token_ids
        return frozenset(eos) | frozenset(self.stop_token_ids)

    def finish_after(self, token_id: int, num_output_tokens: int) -> Finish | None:
        """Whether `token_id`, as output token number `num_output_tokens` (counted from 1), ends the choice."""
        if token_id in self.stop_token_ids:
            return Finish(FinishKind.STOP_TOKEN, token_id=token_id)
        if not self.ignore_eos and token_id in self.eos_token_ids:
            return Finish(FinishKind.END_OF_SEQUENCE, token_id=token_id)
        if num_output_tokens >= self.max_tokens:
            return Finish(FinishKind.LENGTH)
        return None


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Beam search instead of sampling.

    Attributes:
        width: beams kept at every step, at least 1.
        length_penalty: exponent on the number of output tokens in a hypothesis' score.
        early_stopping: stop as soon as `width` hypotheses are complete.
        num_returned: hypotheses returned, at most `width`.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool = False
    num_returned: int = 1


class FinishKind(enum.Enum):
    """Why a choice ended."""

    END_OF_SEQUENCE = "end_of_sequence"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a choice; `token_id` or `stop_string` names what matched."""

    kind: FinishKind
    token_id: int | None = None
    stop_string: str | None = None
