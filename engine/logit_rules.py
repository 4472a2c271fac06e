"""Penalties, bias and bans: what a request does to its row of logits before anything is sampled from it.

The grammar comes first, so that all else sees only what it allows. Then the order is vLLM's: allowed ids, bad words,
min_tokens, bias, then the repetition, frequency and presence penalties. All that
they count is the sequence's own tokens, so a resume or a hand-off changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.constraint import Constraint
from engine.forward_batch import SampleRequest
from kvferry.sampling import NO_RULES, LogitRules

Floats = npt.NDArray[np.float64]
BANNED = -np.inf


def changes_logits(request: SampleRequest) -> bool:
    """Whether `apply_rules` would do anything."""
    sampling = request.sampling
    has_grammar = request.constraint is not None
    return has_grammar or sampling.rules != NO_RULES or request.num_output_tokens < sampling.min_tokens


def apply_rules(row: Floats, request: SampleRequest) -> None:
    """Changes `row`, `[vocab_size]`, in place. A row may be left without any token.

    Raises OutputRefused where the grammar cannot be followed.
    """
    rules, sampling = request.sampling.rules, request.sampling
    num_prompt_tokens = request.position - request.num_output_tokens
    needs_output = rules != NO_RULES or request.constraint is not None
    output = request.token_ids[num_prompt_tokens:] if needs_output else ()
    ending = [token_id for token_id in sampling.ending_token_ids if 0 <= token_id < len(row)]
    if request.constraint is not None and not _follow(row, request.constraint, output, ending):
        return
    if rules.allowed_token_ids:
        _allow_only(row, rules.allowed_token_ids)
    for word in rules.bad_words:
        if _is_about_to_come(word, output) and word[-1] < len(row):
            row[word[-1]] = BANNED
    if request.num_output_tokens < sampling.min_tokens:
        row[ending] = BANNED
    for token_id, bias in rules.bias:
        row[token_id] += bias
    _penalise(row, rules, request.token_ids, output)


def _follow(row: Floats, constraint: Constraint, output: Sequence[int], ending: Sequence[int]) -> bool:
    """Leaves what the grammar allows; False where only the end is left, which no other rule puts off then."""
    allowed = constraint.allowed(output, len(row))
    allowed[ending] = False
    if constraint.is_complete:
        if not allowed.any():
            _allow_only(row, ending)
            return False
        allowed[ending] = True
    row[~allowed] = BANNED
    return True


def _allow_only(row: Floats, token_ids: Sequence[int]) -> None:
    allowed = np.array(token_ids)
    values = row[allowed]
    row[:] = BANNED
    row[allowed] = values


def _is_about_to_come(word: Sequence[int], output: Sequence[int]) -> bool:
    """Whether the output ends with all of the word but its last token."""
    num_before = len(word) - 1
    return num_before == 0 or tuple(output[-num_before:]) == tuple(word[:-1])


def _penalise(row: Floats, rules: LogitRules, token_ids: Sequence[int], output: Sequence[int]) -> None:
    if rules.repetition_penalty != 1.0 and len(token_ids):
        seen = np.unique(np.array(token_ids))
        values = row[seen]
        row[seen] = np.where(values > 0, values / rules.repetition_penalty, values * rules.repetition_penalty)
    if (rules.frequency_penalty or rules.presence_penalty) and len(output):
        seen, counts = np.unique(np.array(output), return_counts=True)
        row[seen] -= rules.frequency_penalty * counts + rules.presence_penalty
