"""Turns a public request into a `Request` value with every default filled in, or refuses it by field and limit.

Everything a client may get wrong stops here, before tokenising where that is possible; `fit` does the rest once the
prompt's length is known. Unset and zero are told apart by presence. A field this version does not support is refused by
name (`UNSUPPORTED_FIELDS`), never ignored; its neutral value is accepted, since it changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from kvferry.errors import (
    ContextExceeded,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    UnsupportedField,
)
from kvferry.kv_layout import KvLayout, num_beam_blocks
from kvferry.sampling import GREEDY_BELOW_TEMPERATURE, BeamParams, LogitRules, SamplingParams
from kvferry.worker import check_progress_timeout
from proto.kvferry.v1 import inference_pb2 as pb
from router.chat import ChatPrompt, chat_prompt
from router.constraint import CONSTRAINT_FIELDS, OutputConstraint, constraint_of
from router.generation_defaults import NO_DEFAULTS, GenerationDefaults
from router.logit_rules import checked_bad_words, logit_rules
from router.response_parts import ResponseParts, response_parts
from router.resume import ReceivedResponse, resume_of
from router.session import Session
from router.text.tokenizer import TEXT_FIELD

HEARTBEATS_PER_TIMEOUT = 3
MAX_REQUEST_ID_CHARS = 256
MAX_SESSION_ID_CHARS = 256
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_CACHE_SALT_BYTES = 256
SEED_LIMIT = 1 << 64
MAX_CHOICES = 64
"""Choices or candidates of a request: each is a sequence on decode, and its output is kept for the client."""
MAX_BEAM_WIDTH = 16
"""Beams step together, so all of them must find room at once."""
MAX_LENGTH_PENALTY = 10.0
"""An exponent on the length: beyond this every score is zero or beyond float32."""

PROMPT_FIELD = "prompt"
TOKENS_FIELD = "prompt.token_ids"


@dataclass(frozen=True, slots=True)
class Limits:
    """What this deployment serves, from its workers and its configuration.

    Attributes:
        model: name of the served model.
        max_context: most prompt and output tokens together.
        vocab_size: token ids are below it.
        tiers: rank by name of tier.
        default_tier: tier of a request that names none.
        max_request_bytes: largest request message.
        layout: of the KV blocks.
        num_prefill_blocks: blocks of the largest prefill pool; 0 where decode computes prompts itself.
        num_decode_blocks: blocks of the largest decode pool.
        max_beams: places in the largest batch of a decode worker; None where none has said.
        adapters: adapters that may be named.
        num_quota_prefill_blocks, num_quota_decode_blocks: most blocks of the caller's tenant in those pools; None where
            it has no quota.
        compact_json: default of the request's field.
        defaults: of sampling and length, the model's own; a beam search takes the length alone.
    """

    model: str
    max_context: int
    vocab_size: int
    tiers: Mapping[str, int]
    default_tier: str
    max_request_bytes: int
    layout: KvLayout
    num_prefill_blocks: int
    num_decode_blocks: int
    max_beams: int | None = None
    adapters: tuple[str, ...] = ()
    num_quota_prefill_blocks: int | None = None
    num_quota_decode_blocks: int | None = None
    compact_json: bool = False
    defaults: GenerationDefaults = NO_DEFAULTS

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""
        return self.layout.block_size


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text."""

    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids as they are."""

    token_ids: tuple[int, ...]


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class Request:
    """A request as the router works with it: nothing left open but what depends on the prompt's length.

    Attributes:
        label: the caller's own id; echoed, logged, never a key.
        max_tokens: most output tokens, None for what fits.
        seed: the caller's, or drawn.
        rules: penalties, bias and allowed ids; `bad_words` join them once they are token ids.
        n: choices returned.
        best_of: candidates of which they are chosen, `n` where there is no choosing.
        beam: beam search instead of sampling; then `best_of` is `n`.
        time_limit_s: None for no limit.
        tenant: whose request it is, by its API key.
        carries: what the response carries.
        truncate_prompt_tokens: most tokens of the prompt, its last ones; None for all.
        session: whose workers are preferred; None for none.
        constraint: what the output has to be; None where it is free.
        resume: what the client has of the response already; None where it begins.
        heartbeat_interval_s: longest silence before a heartbeat; None for none.
        The rest as in the public request.
    """

    label: str
    model: str
    prompt: Prompt
    truncate_prompt_tokens: int | None
    tier: str
    tier_rank: int
    adapter: str
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    rules: LogitRules
    bad_words: tuple[str, ...]
    n: int
    best_of: int
    beam: BeamParams | None
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    include_stop_str_in_output: bool
    time_limit_s: float | None
    carries: ResponseParts
    bypass_prefix_cache: bool
    cache_salt: str
    shared_salt: str
    tenant: str
    session: Session | None = None
    constraint: OutputConstraint | None = None
    resume: ReceivedResponse | None = None
    heartbeat_interval_s: float | None = None

    @property
    def ranks_candidates(self) -> bool:
        """Whether the choices are the best of more candidates; nothing is sent before all have ended then."""
        return self.best_of > self.n

    @property
    def comes_at_end(self) -> bool:
        """Whether all output comes once everything has ended, best first."""
        return self.ranks_candidates or self.beam is not None

    @property
    def operation(self) -> str:
        """The operation's name in OpenTelemetry's conventions."""
        return "chat" if isinstance(self.prompt, ChatPrompt) else "text_completion"

    def sampling_params(
        self,
        max_tokens: int,
        eos_token_ids: Sequence[int],
        bad_words: Sequence[tuple[int, ...]] = (),
        grammar: str = "",
    ) -> SamplingParams:
        """The sampling parameters in force, for the workers; `bad_words` as token ids, the constraint as a grammar."""
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            eos_token_ids=tuple(eos_token_ids),
            stop_token_ids=self.stop_token_ids,
            logprobs=self.ranks_candidates or self.carries.logprobs,
            num_top_logprobs=self.carries.num_logprobs or 0,
            logprob_token_ids=self.carries.logprob_token_ids,
            rules=replace(self.rules, bad_words=tuple(bad_words)),
            grammar=grammar,
        )


def validate(message: pb.GenerateRequest, limits: Limits, draw_seed: Callable[[], int], *, tenant: str = "") -> Request:
    """The request of a tenant with every default filled in.

    Raises:
        UnsupportedField: a field this version does not support is set.
        InvalidArgument: a field is out of its limits.
        NotFound: no such adapter.
        PermissionDenied: another tenant is named.
    """
    _refuse(message, limits)
    return _request(message, limits, draw_seed, tenant)


def _request(message: pb.GenerateRequest, limits: Limits, draw_seed: Callable[[], int], tenant: str) -> Request:
    is_beam_search, stopping = message.HasField("beam_search"), message.stopping
    sampling = message.sampling if is_beam_search else limits.defaults.filled(message.sampling)
    n, temperature, tier = _n(sampling), _temperature(sampling), message.tier or limits.default_tier
    return Request(
        label=_printable("request_id", message.request_id, MAX_REQUEST_ID_CHARS),
        model=limits.model,
        prompt=_prompt(message, limits),
        truncate_prompt_tokens=_truncate_prompt_tokens(message, limits),
        tier=tier,
        tier_rank=_tier_rank(tier, limits),
        adapter=_adapter(message.adapter, limits),
        temperature=temperature,
        top_k=sampling.top_k,
        top_p=_top_p(sampling),
        min_p=_min_p(sampling),
        seed=_seed(message, draw_seed),
        rules=logit_rules(sampling, limits.vocab_size),
        bad_words=checked_bad_words(sampling.bad_words),
        n=n,
        best_of=n if is_beam_search else _best_of(sampling, n, temperature),
        beam=_beam(message, n, limits),
        max_tokens=_max_tokens(stopping, limits),
        min_tokens=_min_tokens(stopping, limits),
        ignore_eos=stopping.ignore_eos,
        stop=_stop(stopping.stop),
        stop_token_ids=_stop_token_ids(stopping.stop_token_ids, limits),
        include_stop_str_in_output=stopping.include_stop_str_in_output,
        time_limit_s=_time_limit_s(stopping),
        carries=response_parts(message, limits.vocab_size),
        bypass_prefix_cache=message.cache.bypass_prefix_cache,
        cache_salt=_salt("cache.cache_salt", message.cache.cache_salt),
        shared_salt=_salt("cache.shared_salt", message.cache.shared_salt),
        tenant=_tenant(message.tenant, tenant),
        session=_session(message.session_id, tenant),
        constraint=_constraint(message, limits),
        resume=resume_of(message, n=n, vocab_size=limits.vocab_size),
        heartbeat_interval_s=heartbeat_interval_s(message),
    )


def is_request_id(value: str) -> bool:
    """Whether a caller's id may be told, logged and taken by Abort."""
    return bool(value) and value.isprintable() and len(value) <= MAX_REQUEST_ID_CHARS


def heartbeat_interval_s(message: pb.GenerateRequest) -> float | None:
    """How long the response may be silent; None for as long as it likes. Raises InvalidArgument."""
    if not message.HasField("progress_timeout_s"):
        return None
    check_progress_timeout("progress_timeout_s", message.progress_timeout_s)
    return message.progress_timeout_s / HEARTBEATS_PER_TIMEOUT


def fit(request: Request, num_prompt_tokens: int, limits: Limits) -> int:
    """Most output tokens in force for a prompt of this length.

    Raises:
        InvalidArgument: the prompt is empty, or more tokens are needed than may be made.
        ContextExceeded: it, or it and its output, is beyond the context.
        ResourceExhausted: no worker's whole pool could hold it, so it can never run.
    """
    if num_prompt_tokens < 1:
        raise InvalidArgument(PROMPT_FIELD, "has no tokens; at least 1 is needed")
    room = limits.max_context - num_prompt_tokens
    if room < 1:
        raise ContextExceeded(
            PROMPT_FIELD,
            f"has {num_prompt_tokens} tokens; at most {limits.max_context - 1} fit the context of "
            f"{limits.max_context} with one output token",
        )
    if request.max_tokens is not None and request.max_tokens > room:
        raise ContextExceeded(
            "stopping.max_tokens",
            f"{request.max_tokens} output tokens after {num_prompt_tokens} prompt tokens exceed the context of "
            f"{limits.max_context}; at most {room} fit",
        )
    default = min(room, limits.defaults.max_tokens or room)
    max_tokens = request.max_tokens or min(default, max(1, _room_in_pool(request, num_prompt_tokens, limits)))
    _check_pools(request, num_prompt_tokens, max_tokens, limits)
    if request.min_tokens > max_tokens:
        raise InvalidArgument("stopping.min_tokens", f"{request.min_tokens} is above max_tokens, {max_tokens}")
    return max_tokens


def num_blocks_needed(request: Request, num_prompt_tokens: int, max_tokens: int, layout: KvLayout) -> int:
    """Blocks that the request must find at once in a decode pool; the KV of a last token is never stored.

    One choice must fit alone, since choices are preempted one by one. Beams must fit together.
    """
    num_kv_tokens = num_prompt_tokens + max_tokens - 1
    if request.beam is None:
        return layout.num_blocks_for(num_kv_tokens)
    return num_beam_blocks(num_prompt_tokens, num_kv_tokens, request.beam.width, block_size=layout.block_size)


def _room_in_pool(request: Request, num_prompt_tokens: int, limits: Limits) -> int:
    """Output tokens that the largest decode pool, or the quota in it, can hold; the last one's KV is never stored."""
    width = 1 if request.beam is None else request.beam.width
    num_shared = num_prompt_tokens // limits.block_size
    num_usable = limits.num_decode_blocks if limits.num_quota_decode_blocks is None else limits.num_quota_decode_blocks
    num_blocks = num_shared + (num_usable - num_shared) // width
    return num_blocks * limits.block_size - num_prompt_tokens + 1


def _check_pools(request: Request, num_prompt_tokens: int, max_tokens: int, limits: Limits) -> None:
    num_last = num_prompt_tokens + max_tokens - 1
    what = f"{num_last} tokens" if request.beam is None else f"{request.beam.width} beams of up to {num_last} tokens"
    needed = num_blocks_needed(request, num_prompt_tokens, max_tokens, limits.layout)
    _check_pool("decode", needed, what, limits.num_decode_blocks)
    _check_quota("decode", request.tenant, needed, what, limits.num_quota_decode_blocks)
    if limits.num_prefill_blocks:
        needed = limits.layout.num_blocks_for(num_prompt_tokens)
        _check_pool("prefill", needed, f"{num_prompt_tokens} tokens", limits.num_prefill_blocks)
        what = f"{num_prompt_tokens} tokens"
        _check_quota("prefill", request.tenant, needed, what, limits.num_quota_prefill_blocks)


def _check_pool(role: str, num_needed: int, what: str, num_blocks: int) -> None:
    if num_needed > num_blocks:
        raise ResourceExhausted(
            f"the request needs {num_needed} KV blocks ({what}); "
            f"the whole pool of a {role} worker has {num_blocks}, so it can never run"
        )


def _check_quota(role: str, tenant: str, num_needed: int, what: str, num_blocks: int | None) -> None:
    if num_blocks is not None and num_needed > num_blocks:
        raise ResourceExhausted(
            f"the request needs {num_needed} KV blocks ({what}); "
            f"the quota of tenant {tenant!r} on a {role} worker is {num_blocks}, so it can never run"
        )


# --- fields this version does not support: name → whether it is set to something that would change the output ---

UNSUPPORTED_FIELDS: Mapping[str, Callable[[pb.GenerateRequest], bool]] = MappingProxyType({})


def _refuse(message: pb.GenerateRequest, limits: Limits) -> None:
    _check_size(message, limits)
    _refuse_unsupported(message)
    _refuse_idle_beside_beams(message)


def _refuse_unsupported(message: pb.GenerateRequest) -> None:
    for name, is_set in UNSUPPORTED_FIELDS.items():
        if is_set(message):
            raise UnsupportedField(name)


def _is_set(name: str, message: pb.GenerateRequest) -> bool:
    return message.HasField(name) and not (name == "json_object" and not message.json_object)


# --- fields that would do nothing in a beam search: name → whether it is set to something not neutral ---

IDLE_BESIDE_BEAMS: Mapping[str, Callable[[pb.GenerateRequest], bool]] = MappingProxyType(
    {
        # 0 asks for no noise, which a beam search has none of.
        "sampling.temperature": lambda m: m.sampling.HasField("temperature") and m.sampling.temperature not in (0, 1),
        "sampling.top_p": lambda m: m.sampling.HasField("top_p") and m.sampling.top_p != 1,
        "sampling.top_k": lambda m: m.sampling.top_k != 0,
        "sampling.min_p": lambda m: m.sampling.min_p != 0,
        "sampling.seed": lambda m: m.sampling.HasField("seed"),
        "sampling.presence_penalty": lambda m: m.sampling.presence_penalty != 0,
        "sampling.frequency_penalty": lambda m: m.sampling.frequency_penalty != 0,
        "sampling.repetition_penalty": lambda m: (
            m.sampling.HasField("repetition_penalty") and m.sampling.repetition_penalty != 1
        ),
        "sampling.logit_bias": lambda m: bool(m.sampling.logit_bias),
        "sampling.allowed_token_ids": lambda m: bool(m.sampling.allowed_token_ids),
        "sampling.bad_words": lambda m: bool(m.sampling.bad_words),
        "sampling.best_of": lambda m: m.sampling.HasField("best_of") and m.sampling.best_of != (m.sampling.n or 1),
        "stopping.stop": lambda m: bool(m.stopping.stop),
        **{name: partial(_is_set, name) for name in CONSTRAINT_FIELDS},
        "response.logprobs": lambda m: m.response.HasField("logprobs"),
        "response.logprob_token_ids": lambda m: bool(m.response.logprob_token_ids),
        "response.prompt_logprobs": lambda m: m.response.HasField("prompt_logprobs"),
    }
)


def _refuse_idle_beside_beams(message: pb.GenerateRequest) -> None:
    if not message.HasField("beam_search"):
        return
    for name, is_set in IDLE_BESIDE_BEAMS.items():
        if is_set(message):
            raise InvalidArgument(name, "cannot be combined with beam_search, in which it has no effect")


# --- one field each ---


def _constraint(message: pb.GenerateRequest, limits: Limits) -> OutputConstraint | None:
    constraint = constraint_of(message, compact_json=limits.compact_json)
    if constraint is not None and message.stopping.ignore_eos:
        raise InvalidArgument(
            "stopping.ignore_eos", f"cannot be combined with {constraint.field}: a complete output ends there"
        )
    return constraint


def _check_size(message: pb.GenerateRequest, limits: Limits) -> None:
    num_bytes = message.ByteSize()
    if num_bytes > limits.max_request_bytes:
        raise InvalidArgument(PROMPT_FIELD, f"the request has {num_bytes} bytes; at most {limits.max_request_bytes}")


def _printable(field: str, text: str, max_chars: int) -> str:
    if len(text) > max_chars:
        raise InvalidArgument(field, f"has {len(text)} characters; at most {max_chars}")
    if not text.isprintable():
        raise InvalidArgument(field, "holds a character that is not printable")
    return text


def _session(name: str, tenant: str) -> Session | None:
    return Session(tenant, _printable("session_id", name, MAX_SESSION_ID_CHARS)) if name else None


def _adapter(name: str, limits: Limits) -> str:
    if name and name not in limits.adapters:
        known = ", ".join(limits.adapters) or "none"
        raise NotFound(f"adapter: there is no adapter {name!r}; known adapters: {known}", field="adapter")
    return name


def _tenant(named: str, tenant: str) -> str:
    if named and named != tenant:
        if not tenant:
            raise PermissionDenied(
                f"tenant: this router has no tenants; leave it unset, not {named!r:.80}", field="tenant"
            )
        raise PermissionDenied(f"tenant: this API key is of tenant {tenant!r}, not of {named!r:.80}", field="tenant")
    return tenant


def _tier_rank(tier: str, limits: Limits) -> int:
    rank = limits.tiers.get(tier)
    if rank is None:
        raise InvalidArgument("tier", f"there is no tier {tier!r}; known tiers: {', '.join(limits.tiers)}")
    return rank


def _prompt(message: pb.GenerateRequest, limits: Limits) -> Prompt:
    match message.WhichOneof("prompt"):
        case "text":
            if not message.text:
                raise InvalidArgument(TEXT_FIELD, "is empty; at least one character is needed")
            return TextPrompt(message.text)
        case "token_ids":
            if not message.token_ids.ids:
                raise InvalidArgument(TOKENS_FIELD, "is empty; at least one id is needed")
            return TokenPrompt(_in_vocabulary(TOKENS_FIELD, message.token_ids.ids, limits))
        case "chat":
            return chat_prompt(message.chat)
        case _:
            raise InvalidArgument(PROMPT_FIELD, "one of text, token_ids and chat must be set")


def _in_vocabulary(field: str, token_ids: Sequence[int], limits: Limits) -> tuple[int, ...]:
    ids = tuple(token_ids)
    if max(ids) >= limits.vocab_size:
        index = next(index for index, token_id in enumerate(ids) if token_id >= limits.vocab_size)
        raise InvalidArgument(f"{field}[{index}]", f"{ids[index]} is not in the vocabulary of {limits.vocab_size} ids")
    return ids


def _finite(field: str, value: float) -> float:
    if not math.isfinite(value):
        raise InvalidArgument(field, f"{value} is not a finite number")
    return value


def _temperature(sampling: pb.SamplingOptions) -> float:
    value = _finite("sampling.temperature", sampling.temperature) if sampling.HasField("temperature") else 1.0
    if value < 0:
        raise InvalidArgument("sampling.temperature", f"{value} is below 0")
    return value


def _top_p(sampling: pb.SamplingOptions) -> float:
    value = _finite("sampling.top_p", sampling.top_p) if sampling.HasField("top_p") else 1.0
    if not 0 < value <= 1:
        raise InvalidArgument("sampling.top_p", f"{value} is not above 0 and at most 1")
    return value


def _min_p(sampling: pb.SamplingOptions) -> float:
    value = _finite("sampling.min_p", sampling.min_p)
    if not 0 <= value <= 1:
        raise InvalidArgument("sampling.min_p", f"{value} is not between 0 and 1")
    return value


def _seed(message: pb.GenerateRequest, draw_seed: Callable[[], int]) -> int:
    """The caller's, or drawn; a beam search has no noise."""
    if message.sampling.HasField("seed") or message.HasField("beam_search"):
        return message.sampling.seed
    seed = draw_seed()
    assert 0 <= seed < SEED_LIMIT
    return seed


def _n(sampling: pb.SamplingOptions) -> int:
    n = sampling.n if sampling.HasField("n") else 1
    if not 1 <= n <= MAX_CHOICES:
        raise InvalidArgument("sampling.n", f"{n} is not between 1 and {MAX_CHOICES}")
    return n


def _best_of(sampling: pb.SamplingOptions, n: int, temperature: float) -> int:
    best_of = sampling.best_of if sampling.HasField("best_of") else n
    if not n <= best_of <= MAX_CHOICES:
        raise InvalidArgument("sampling.best_of", f"{best_of} is not between n, {n}, and {MAX_CHOICES}")
    if best_of > 1 and temperature < GREEDY_BELOW_TEMPERATURE:
        name = "n" if n > 1 else "best_of"
        raise InvalidArgument(f"sampling.{name}", f"{name} > 1 with temperature 0 gives {name} equal choices")
    return best_of


def _beam(message: pb.GenerateRequest, n: int, limits: Limits) -> BeamParams | None:
    if not message.HasField("beam_search"):
        return None
    beam = message.beam_search
    if not 1 <= beam.width <= MAX_BEAM_WIDTH:
        raise InvalidArgument("beam_search.width", f"{beam.width} is not between 1 and {MAX_BEAM_WIDTH}")
    if 2 * beam.width > limits.vocab_size:
        most = limits.vocab_size // 2
        raise InvalidArgument("beam_search.width", f"{beam.width} is above {most}, half the vocabulary")
    if limits.max_beams is not None and beam.width > limits.max_beams:
        most = limits.max_beams
        raise InvalidArgument("beam_search.width", f"{beam.width} is above {most}, the places of the largest batch")
    if n > beam.width:
        raise InvalidArgument("sampling.n", f"{n} is above beam_search.width, {beam.width}")
    length_penalty = _finite("beam_search.length_penalty", beam.length_penalty)
    if abs(length_penalty) > MAX_LENGTH_PENALTY:
        bounds = f"-{MAX_LENGTH_PENALTY:g} and {MAX_LENGTH_PENALTY:g}"
        raise InvalidArgument("beam_search.length_penalty", f"{length_penalty:g} is not between {bounds}")
    return BeamParams(
        width=beam.width,
        length_penalty=length_penalty if beam.HasField("length_penalty") else 1.0,
        early_stopping=beam.early_stopping,
        num_returned=n,
    )


def _max_tokens(stopping: pb.StoppingOptions, limits: Limits) -> int | None:
    if not stopping.HasField("max_tokens"):
        return None
    if not 1 <= stopping.max_tokens < limits.max_context:
        kind = ContextExceeded if stopping.max_tokens else InvalidArgument
        raise kind(
            "stopping.max_tokens",
            f"{stopping.max_tokens} is not between 1 and {limits.max_context - 1} (a context of {limits.max_context})",
        )
    return stopping.max_tokens


def _min_tokens(stopping: pb.StoppingOptions, limits: Limits) -> int:
    limit = stopping.max_tokens if stopping.HasField("max_tokens") else limits.max_context - 1
    if stopping.min_tokens > limit:
        raise InvalidArgument("stopping.min_tokens", f"{stopping.min_tokens} is above max_tokens, {limit}")
    return stopping.min_tokens


def _truncate_prompt_tokens(message: pb.GenerateRequest, limits: Limits) -> int | None:
    if not message.HasField("truncate_prompt_tokens"):
        return None
    number, most = message.truncate_prompt_tokens, limits.max_context - 1
    if not 1 <= number <= most:
        raise InvalidArgument(
            "truncate_prompt_tokens", f"{number} is not between 1 and {most} (a context of {limits.max_context})"
        )
    return number


def _stop(stops: Sequence[str]) -> tuple[str, ...]:
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidArgument("stopping.stop", f"has {len(stops)} strings; at most {MAX_STOP_STRINGS}")
    for index, stop in enumerate(stops):
        if not stop:
            raise InvalidArgument(f"stopping.stop[{index}]", "is empty; a stop string has at least one character")
        if len(stop) > MAX_STOP_STRING_CHARS:
            raise InvalidArgument(
                f"stopping.stop[{index}]", f"has {len(stop)} characters; at most {MAX_STOP_STRING_CHARS}"
            )
    return tuple(dict.fromkeys(stops))


def _stop_token_ids(token_ids: Sequence[int], limits: Limits) -> tuple[int, ...]:
    if len(token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidArgument("stopping.stop_token_ids", f"has {len(token_ids)} ids; at most {MAX_STOP_TOKEN_IDS}")
    if not token_ids:
        return ()
    return tuple(dict.fromkeys(_in_vocabulary("stopping.stop_token_ids", token_ids, limits)))


def _time_limit_s(stopping: pb.StoppingOptions) -> float | None:
    if not stopping.HasField("time_limit_s"):
        return None
    value = _finite("stopping.time_limit_s", stopping.time_limit_s)
    if value <= 0:
        raise InvalidArgument("stopping.time_limit_s", f"{value} is not above 0")
    return value


def _salt(field: str, salt: str) -> str:
    num_bytes = len(salt.encode())
    if num_bytes > MAX_CACHE_SALT_BYTES:
        raise InvalidArgument(field, f"has {num_bytes} bytes; at most {MAX_CACHE_SALT_BYTES}")
    return salt
