"""What sampling has to give, row by row and in plain Python: no tensors, no arrays, nothing of the engine's code.

Order, as in vLLM: allowed ids, bad words, min_tokens, bias, penalties, temperature, min_p, top_k, top_p, noise. The
noise is written down here once more from its definition, the generator (Philox 4×64 with 10 rounds) included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.forward_batch import Sampled, SampledToken, SampleRequest
from kvferry.sampling import TokenLogprob

BORDER = 1e-9
"""Where a filter's border or two sums are nearer than this, rounding decides: either answer is right."""
WORD = (1 << 64) - 1
FACTORS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
WEYL = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B


def ruled(row: Sequence[float], request: SampleRequest) -> list[float]:
    """The row after the request's rules, token by token as each is documented; minus infinity is banned."""
    sampling, rules = request.sampling, request.sampling.rules
    num_prompt = len(request.token_ids) - request.num_output_tokens
    output = list(request.token_ids[num_prompt:])
    seen, bias, allowed = set(request.token_ids), dict(rules.bias), set(rules.allowed_token_ids)
    result = []
    for token_id, logit in enumerate(row):
        is_banned = bool(allowed) and token_id not in allowed
        for word in rules.bad_words:
            is_banned = is_banned or [*output, token_id][-len(word) :] == list(word)
        is_banned = is_banned or (request.num_output_tokens < sampling.min_tokens and _ends(token_id, request))
        value = logit + bias.get(token_id, 0.0)
        if token_id in seen:
            value = value / rules.repetition_penalty if value > 0 else value * rules.repetition_penalty
        count = output.count(token_id)
        value -= rules.frequency_penalty * count + (rules.presence_penalty if count else 0.0)
        result.append(-math.inf if is_banned else value)
    return result


def _ends(token_id: int, request: SampleRequest) -> bool:
    sampling = request.sampling
    is_eos = token_id in sampling.eos_token_ids and not sampling.ignore_eos
    return is_eos or token_id in sampling.stop_token_ids


def right_tokens(row: Sequence[float], request: SampleRequest, choice: int) -> set[int]:
    """The token of one choice; several where rounding decides, none where all are banned. `row`: rules applied."""
    largest = max(row)
    if largest == -math.inf:
        return set()
    if request.sampling.temperature < 1e-5:
        return {row.index(largest)}
    noise = gumbel(request.sampling.seed, choice, request.position, len(row))
    scaled = [(value - largest) / request.sampling.temperature for value in row]
    right = set()
    for slack in (-BORDER, 0.0, BORDER):
        sums = {token_id: scaled[token_id] + noise[token_id] for token_id in _kept(scaled, request, slack)}
        largest_sum = max(sums.values())
        right |= {token_id for token_id, value in sums.items() if value >= largest_sum - BORDER}
    return right


def distribution(row: Sequence[float], request: SampleRequest) -> list[float]:
    """How likely each token is to be sampled. `row`: rules applied."""
    scaled = [(value - max(row)) / request.sampling.temperature for value in row]
    weights = {token_id: math.exp(scaled[token_id]) for token_id in _kept(scaled, request, 0.0)}
    total = math.fsum(weights.values())
    return [weights.get(token_id, 0.0) / total for token_id in range(len(row))]


def _kept(scaled: Sequence[float], request: SampleRequest, slack: float) -> list[int]:
    """Ids that min_p, top_k and top_p leave, the most likely first; with `slack` a few more or less at a border."""
    sampling = request.sampling
    order = sorted(range(len(scaled)), key=lambda token_id: (-scaled[token_id], token_id))
    least = sampling.min_p * (1 - slack)
    order = [one for one in order if scaled[one] > -math.inf and (scaled[one] == 0.0 or math.exp(scaled[one]) >= least)]
    order = order[: sampling.top_k or None]
    if sampling.top_p >= 1.0:
        return order
    total = math.fsum(math.exp(scaled[token_id]) for token_id in order)
    kept, before = order[:1], math.exp(scaled[order[0]]) / total
    for token_id in order[1:]:
        if before >= sampling.top_p + slack:
            break
        kept.append(token_id)
        before += math.exp(scaled[token_id]) / total
    return kept


def gumbel(seed: int, choice: int, position: int, vocab_size: int) -> list[float]:
    """Standard Gumbel values: word i of the generator, keyed by seed and choice, is token i's."""
    counters = range(1, 1 - (-vocab_size // 4))
    words = [word for counter in counters for word in _philox((counter, 0, position, 0), (seed, choice))]
    uniform = (min(((word >> 11) + 0.5) * 2.0**-53, 1.0 - 2.0**-53) for word in words[:vocab_size])
    return [-math.log(-math.log(one)) for one in uniform]


def _philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> Iterator[int]:
    first, second, third, fourth = counter
    for round_ in range(10):
        left, right = FACTORS[0] * first, FACTORS[1] * third
        keys = [(one + round_ * step) & WORD for one, step in zip(key, WEYL, strict=True)]
        first, second = (right >> 64) ^ second ^ keys[0], right & WORD
        third, fourth = (left >> 64) ^ fourth ^ keys[1], left & WORD
    yield from (first, second, third, fourth)


@dataclass(frozen=True)
class LogprobTruth:
    """Log-probabilities of one row of logits, and a check of what was told of them in float32."""

    row: Sequence[float]

    def check(self, one: TokenLogprob) -> None:
        """The value, and a rank that counts those at least as likely; the nearest ones may be on either side."""
        largest = max(self.row)
        total = largest + math.log(math.fsum(math.exp(logit - largest) for logit in self.row))
        logit = self.row[one.token_id]
        assert math.isfinite(one.logprob)
        assert math.isclose(one.logprob, logit - total, rel_tol=1e-6, abs_tol=2e-5), (one, logit - total)
        near = 2e-5 + 2e-6 * abs(logit - total)
        assert sum(other > logit + near for other in self.row) < one.rank
        assert one.rank <= sum(other >= logit - near for other in self.row)

    def check_all(self, one: TokenLogprob, request: SampleRequest) -> None:
        """The sampled token's and those of its alternatives."""
        sampling = request.sampling
        for each in (one, *one.alternatives):
            self.check(each)
        ids = [other.token_id for other in one.alternatives]
        if not sampling.num_top_logprobs:
            assert ids == list(sampling.logprob_token_ids)
            return
        best = sorted(self.row, reverse=True)[: sampling.num_top_logprobs]
        assert len(set(ids)) == len(ids) == len(best)
        for token_id, logit in zip(ids, best, strict=True):
            assert math.isclose(self.row[token_id], logit, rel_tol=2e-6, abs_tol=2e-5 + 2e-6 * (best[0] - logit))
        assert [other.rank for other in one.alternatives] == sorted(other.rank for other in one.alternatives)


def check_sampled(row: Sequence[float], request: SampleRequest, sampled: Sampled) -> None:
    """Everything that one request was told, against the truth. `row`: its logits."""
    if not all(map(math.isfinite, row)):
        assert sampled == Sampled(None, f"non-finite logits at position {request.position}")
        return
    values = ruled(row, request)
    first = None if sampled.token_id is None else SampledToken(sampled.token_id, sampled.logprob)
    if first is None:
        assert max(values) == -math.inf
        assert sampled.is_final and sampled.error == f"every token is banned at position {request.position}"
        return
    told = [first, *sampled.others]
    assert len(told) == request.num_choices
    for choice, one in enumerate(told, request.choice):
        right = right_tokens(values, request, choice)
        assert one.token_id in right, (one.token_id, right, choice, request)
        assert (one.logprob is not None) == request.sampling.logprobs
        if one.logprob is not None:
            assert one.logprob.token_id == one.token_id
            LogprobTruth(row).check_all(one.logprob, request)
