"""Public requests: every field is honoured or refused by name, every limit names itself."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from kvferry.errors import (
    ContextExceeded,
    InvalidArgument,
    KvferryError,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    UnsupportedField,
)
from kvferry.kv_layout import KvLayout
from kvferry.sampling import BeamParams
from proto.kvferry.v1 import inference_pb2 as pb
from router.chat import ChatPrompt
from router.validation import (
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    UNSUPPORTED_FIELDS,
    Limits,
    Request,
    TextPrompt,
    TokenPrompt,
    fit,
    num_blocks_needed,
    validate,
)

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=16, dtype="float32", model_fingerprint="tiny")
LIMITS = Limits(
    model="tiny",
    max_context=64,
    vocab_size=100,
    tiers={"fast": 0, "slow": 1},
    default_tier="fast",
    max_request_bytes=1000,
    layout=LAYOUT,
    num_prefill_blocks=8,
    num_decode_blocks=8,
    adapters=("lora",),
)


def checked(message: pb.GenerateRequest, limits: Limits = LIMITS, tenant: str = "") -> Request:
    return validate(message, limits, lambda: 7, tenant=tenant)


def with_prompt(**fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="hello", **fields)  # type: ignore[arg-type]


# --- every field, by descriptor ---

FULL_VALUES: dict[str, object] = {
    "request_id": "r",
    "model": "tiny",
    "text": "other",
    "token_ids": {"ids": [4]},
    "chat": {"messages": [{"role": "user", "content": "x"}]},
    "chat.messages": None,  # covered by chat
    "chat.add_generation_prompt": None,
    "tier": "slow",
    "tenant": "t",
    "adapter": "lora",
    "session_id": "s",
    "json_schema": "{}",
    "json_object": True,
    "regex": "a",
    "choice": {"choices": ["a"]},
    "grammar": "g",
    "structural_tag": '{"structures":[{"begin":"a","schema":{},"end":"b"}],"triggers":["a"]}',
    "compact_json": True,
    "beam_search": {"width": 2},
    "truncate_prompt_tokens": 3,
    "resume": {"prompt_digest": b"d"},
    "progress_timeout_s": 5.0,
    "sampling.temperature": 0.5,
    "sampling.top_p": 0.5,
    "sampling.top_k": 5,
    "sampling.min_p": 0.5,
    "sampling.seed": 9,
    "sampling.n": 2,
    "sampling.best_of": 2,
    "sampling.presence_penalty": 0.5,
    "sampling.frequency_penalty": 0.5,
    "sampling.repetition_penalty": 1.5,
    "sampling.logit_bias": {1: 1.0},
    "sampling.allowed_token_ids": [1],
    "sampling.bad_words": ["w"],
    "stopping.max_tokens": 5,
    "stopping.min_tokens": 1,
    "stopping.stop": ["x"],
    "stopping.stop_token_ids": [1],
    "stopping.include_stop_str_in_output": True,
    "stopping.ignore_eos": True,
    "stopping.time_limit_s": 1.0,
    "response.text": False,
    "response.token_ids": False,
    "response.skip_special_tokens": False,
    "response.prompt_token_ids": True,
    "response.logprobs": 0,
    "response.prompt_logprobs": 0,
    "response.logprob_token_ids": [1],
    "response.echo": True,
    "response.kept_special_token_ids": [1],
    "cache.bypass_prefix_cache": True,
    "cache.cache_salt": "salt",
    "cache.shared_salt": "salt",
}
SECTIONS = ("sampling", "stopping", "response", "cache")
SAME_AS_DEFAULT = {"model", "tenant"}
"""Honoured, but there is only one value: that of the one served model, that of the API key."""


def leaf_names(descriptor: Any, prefix: str = "") -> list[str]:
    names: list[str] = []
    for field in descriptor.fields:
        name = prefix + field.name
        is_section = field.type == FieldDescriptor.TYPE_MESSAGE and name in SECTIONS
        names += leaf_names(field.message_type, f"{name}.") if is_section else [name]
    return names


def message_with(name: str) -> pb.GenerateRequest:
    section, _, leaf = name.rpartition(".")
    value = {leaf: FULL_VALUES[name]}
    prompts = {"text", "token_ids", "chat"}
    base: dict[str, object] = {} if name in prompts else {"text": "hello"}
    if name == "resume":  # refused without what Started told
        base |= {"sampling": {"seed": 9}, "stopping": {"max_tokens": 5}}
    if name == "compact_json":
        base |= {"json_object": True}
    return pb.GenerateRequest(**base, **({section: value} if section else value))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", leaf_names(pb.GenerateRequest.DESCRIPTOR))
def test_every_field_is_honoured_or_refused_by_name(name: str) -> None:
    assert name in FULL_VALUES, "a new public field: honour it or refuse it, and add it here"
    message = message_with(name)
    if name in UNSUPPORTED_FIELDS:
        with pytest.raises(UnsupportedField) as refused:
            checked(message)
        assert refused.value.field == name
    else:
        plain = checked(with_prompt(), tenant="t")
        assert (checked(message, tenant="t") != plain) or name in SAME_AS_DEFAULT


def test_no_json_object_is_no_constraint_and_one_needs_its_end() -> None:
    assert checked(with_prompt(json_object=False)) == checked(with_prompt())
    with pytest.raises(InvalidArgument, match=r"stopping\.ignore_eos: cannot be combined with regex"):
        checked(with_prompt(regex="a", stopping=pb.StoppingOptions(ignore_eos=True)))
    with pytest.raises(InvalidArgument, match="json_object: cannot be combined with beam_search"):
        checked(with_prompt(json_object=True, beam_search=pb.BeamSearch(width=2)))


def test_the_neutral_value_of_an_unsupported_field_is_accepted() -> None:
    neutral = pb.SamplingOptions(n=1, best_of=1, presence_penalty=0, frequency_penalty=0, repetition_penalty=1)
    assert checked(with_prompt(sampling=neutral, response=pb.ResponseOptions(echo=False))) == checked(with_prompt())


def test_defaults_are_filled_in_and_zero_is_not_unset() -> None:
    request = checked(with_prompt())
    assert (request.temperature, request.top_p, request.top_k, request.min_p, request.seed) == (1.0, 1.0, 0, 0.0, 7)
    assert (request.carries.text, request.carries.token_ids, request.carries.skip_special_tokens) == (True, True, True)
    assert (request.tier, request.tier_rank, request.max_tokens) == ("fast", 0, None)
    assert checked(with_prompt(sampling=pb.SamplingOptions(temperature=0, seed=0))).temperature == 0
    assert checked(with_prompt(sampling=pb.SamplingOptions(seed=0))).seed == 0
    assert checked(pb.GenerateRequest(token_ids={"ids": [1]})).prompt == TokenPrompt((1,))
    assert checked(with_prompt()).prompt == TextPrompt("hello")
    chat = checked(pb.GenerateRequest(chat={"messages": [{"role": "user", "content": ""}]})).prompt
    assert isinstance(chat, ChatPrompt)
    assert chat.add_generation_prompt


# --- limits ---

NAN, INF = math.nan, math.inf
BAD: list[tuple[dict[str, Any], type[KvferryError], str]] = [
    ({}, InvalidArgument, "prompt"),
    ({"text": ""}, InvalidArgument, "prompt.text"),
    ({"text": "a" * 1001}, InvalidArgument, "prompt: the request has .* at most 1000"),
    ({"token_ids": {"ids": []}}, InvalidArgument, "prompt.token_ids"),
    ({"token_ids": {"ids": [1, 100]}}, InvalidArgument, r"token_ids\[1\]: 100 .* 100 ids"),
    ({"chat": {"messages": []}}, InvalidArgument, "chat.messages"),
    ({"chat": {"messages": [{"role": "", "content": "x"}]}}, InvalidArgument, r"messages\[0\].role"),
    ({"text": "a", "request_id": "x" * 257}, InvalidArgument, "request_id.*256"),
    ({"text": "a", "request_id": "a\nb"}, InvalidArgument, "request_id"),
    ({"text": "a", "adapter": "other"}, NotFound, "adapter.*lora"),
    ({"text": "a", "tier": "other"}, InvalidArgument, "tier.*fast, slow"),
    *(
        ({"text": "a", "sampling": {name: value}}, InvalidArgument, f"sampling.{name}")
        for name, values in (
            ("temperature", (-0.1, NAN, INF, -INF)),
            ("top_p", (0.0, 1.1, -1.0, NAN)),
            ("min_p", (-0.1, 1.1, NAN)),
            ("presence_penalty", (-2.1, 2.1, NAN, INF)),
            ("frequency_penalty", (-2.1, 2.1, NAN, -INF)),
            ("repetition_penalty", (0.0, -1.0, NAN, INF)),
            ("logit_bias", ({1: 100.5}, {1: NAN}, {1: -INF}, {100: 1.0})),
            ("allowed_token_ids", ([1, 100],)),
            ("bad_words", (["a", ""], ["  "], ["a" * 257], ["a"] * 257)),
        )
        for value in values
    ),
    ({"text": "a", "stopping": {"max_tokens": 0}}, InvalidArgument, "max_tokens: 0 .* 63"),
    ({"text": "a", "stopping": {"max_tokens": 64}}, ContextExceeded, "max_tokens: 64 .* 63"),
    ({"text": "a", "stopping": {"min_tokens": 9, "max_tokens": 8}}, InvalidArgument, "min_tokens: 9 .* 8"),
    ({"text": "a", "stopping": {"min_tokens": 64}}, InvalidArgument, "min_tokens"),
    ({"text": "a", "stopping": {"stop": ["a", ""]}}, InvalidArgument, r"stop\[1\]"),
    ({"text": "a", "stopping": {"stop": ["a"] * (MAX_STOP_STRINGS + 1)}}, InvalidArgument, "stop.*16"),
    ({"text": "a", "stopping": {"stop": ["a" * (MAX_STOP_STRING_CHARS + 1)]}}, InvalidArgument, "stop.*256"),
    ({"text": "a", "stopping": {"stop_token_ids": [100]}}, InvalidArgument, "stop_token_ids"),
    ({"text": "a", "stopping": {"stop_token_ids": [1] * (MAX_STOP_TOKEN_IDS + 1)}}, InvalidArgument, "128"),
    *(
        ({"text": "a", "stopping": {"time_limit_s": value}}, InvalidArgument, "time_limit_s")
        for value in (0.0, -1.0, NAN, INF)
    ),
    ({"text": "a", "response": {"logprobs": 21}}, InvalidArgument, "response.logprobs: 21 .* 20"),
    ({"text": "a", "response": {"logprob_token_ids": [100]}}, InvalidArgument, "response.logprob_token_ids.* 100"),
    ({"text": "a", "response": {"logprob_token_ids": range(129)}}, InvalidArgument, "response.logprob_token_ids"),
    ({"text": "a", "response": {"logprobs": 1, "logprob_token_ids": [1]}}, InvalidArgument, "cannot be combined"),
    ({"text": "a", "beam_search": {"width": 2}, "response": {"logprobs": 0}}, InvalidArgument, "cannot be combined"),
    ({"text": "a", "response": {"prompt_logprobs": 21}}, InvalidArgument, "response.prompt_logprobs: 21 .* 20"),
    (
        {"text": "a", "beam_search": {"width": 2}, "response": {"prompt_logprobs": 0}},
        InvalidArgument,
        "response.prompt_logprobs: cannot be combined",
    ),
    ({"text": "a", "response": {"echo": True, "text": False}}, InvalidArgument, "response.echo.*response.text"),
    (
        {"chat": {"messages": [{"role": "user", "content": "x"}]}, "response": {"echo": True}},
        InvalidArgument,
        "response.echo: .* chat",
    ),
    *(
        ({"text": "a", "truncate_prompt_tokens": value}, InvalidArgument, f"truncate_prompt_tokens: {value} .* 63")
        for value in (0, 64, 1 << 31)
    ),
    ({"text": "a", "cache": {"cache_salt": "x" * 257}}, InvalidArgument, "cache_salt.*256"),
    ({"text": "a", "cache": {"shared_salt": "x" * 257}}, InvalidArgument, "shared_salt.*256"),
    ({"text": "a", "tenant": "other"}, PermissionDenied, "tenant"),
    ({"text": "a", "session_id": "x" * 257}, InvalidArgument, "session_id: has 257 characters; at most 256"),
    ({"text": "a", "session_id": "a\nb"}, InvalidArgument, "session_id: .* not printable"),
    *(
        ({"text": "a", "sampling": sampling}, InvalidArgument, message)
        for sampling, message in (
            ({"n": 0}, "sampling.n: 0 .* 1 and 64"),
            ({"n": 65}, "sampling.n: 65 .* 1 and 64"),
            ({"n": 3, "best_of": 2}, "sampling.best_of: 2 .* n, 3, and 64"),
            ({"best_of": 65}, "sampling.best_of: 65 .* 64"),
            ({"n": 2, "temperature": 0}, "sampling.n: n > 1 with temperature 0 gives n equal choices"),
            ({"best_of": 2, "temperature": 1e-6}, "sampling.best_of: best_of > 1 with temperature 0"),
        )
    ),
    *(
        ({"text": "a", "beam_search": beam}, InvalidArgument, message)
        for beam, message in (
            ({}, "beam_search.width: 0 .* 1 and 16"),
            ({"width": 17}, "beam_search.width: 17 .* 1 and 16"),
            ({"width": 2, "length_penalty": NAN}, "beam_search.length_penalty"),
            ({"width": 2, "length_penalty": INF}, "beam_search.length_penalty"),
        )
    ),
    *(
        ({"text": "a", "beam_search": {"width": 2}, section: fields}, InvalidArgument, message)
        for section, fields, message in (
            ("sampling", {"n": 3}, "sampling.n: 3 is above beam_search.width, 2"),
            ("sampling", {"n": 1, "best_of": 2}, "sampling.best_of: cannot be combined with beam_search"),
            ("sampling", {"temperature": 0.5}, "sampling.temperature: cannot be combined"),
            ("sampling", {"top_p": 0.5}, "sampling.top_p: cannot be combined"),
            ("sampling", {"top_k": 5}, "sampling.top_k: cannot be combined"),
            ("sampling", {"min_p": 0.5}, "sampling.min_p: cannot be combined"),
            ("sampling", {"seed": 5}, "sampling.seed: cannot be combined"),
            ("sampling", {"presence_penalty": 1.0}, "sampling.presence_penalty: cannot be combined"),
            ("sampling", {"logit_bias": {1: 1.0}}, "sampling.logit_bias: cannot be combined"),
            ("sampling", {"bad_words": ["a"]}, "sampling.bad_words: cannot be combined"),
            ("stopping", {"stop": ["x"]}, "stopping.stop: cannot be combined"),
        )
    ),
]


@pytest.mark.parametrize(("fields", "kind", "message"), BAD)
def test_bad_input_names_field_and_limit(fields: dict[str, object], kind: type[KvferryError], message: str) -> None:
    with pytest.raises(kind, match=message):
        checked(pb.GenerateRequest(**fields))  # type: ignore[arg-type]


def test_duplicates_in_stop_rules_are_one() -> None:
    request = checked(with_prompt(stopping=pb.StoppingOptions(stop=["a", "a"], stop_token_ids=[1, 1])))
    assert (request.stop, request.stop_token_ids) == (("a",), (1,))


# --- once the prompt's length is known ---


def stopping(**fields: object) -> Request:
    return checked(with_prompt(stopping=pb.StoppingOptions(**fields)))  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_prompt_tokens", "expected"), [(1, 63), (62, 2), (63, 1)])
def test_max_tokens_left_out_is_what_fits(num_prompt_tokens: int, expected: int) -> None:
    assert fit(stopping(), num_prompt_tokens, LIMITS) == expected


@pytest.mark.parametrize("num_prompt_tokens", [0, 64, 65])
def test_prompts_that_leave_no_room_are_refused(num_prompt_tokens: int) -> None:
    with pytest.raises(InvalidArgument, match="prompt"):
        fit(stopping(), num_prompt_tokens, LIMITS)


def test_prompt_and_output_share_the_context() -> None:
    assert fit(stopping(max_tokens=4), 60, LIMITS) == 4
    with pytest.raises(ContextExceeded, match=r"max_tokens: 5 .* 60 .* 64; at most 4"):
        fit(stopping(max_tokens=5), 60, LIMITS)
    with pytest.raises(InvalidArgument, match="min_tokens: 9"):
        fit(stopping(min_tokens=9), 60, LIMITS)


def test_what_no_pool_holds_is_refused_with_both_numbers() -> None:
    small = replace(LIMITS, num_decode_blocks=2)
    assert fit(stopping(max_tokens=3), 30, small) == 3  # 32 tokens of KV: the last token's is never stored
    with pytest.raises(ResourceExhausted, match=r"needs 3 KV blocks .* decode worker has 2") as refused:
        fit(stopping(max_tokens=4), 30, small)
    assert refused.value.retry_after_s is None
    assert fit(stopping(), 30, small) == 3
    with pytest.raises(ResourceExhausted, match=r"needs 2 KV blocks .* prefill worker has 1"):
        fit(stopping(max_tokens=1), 17, replace(LIMITS, num_prefill_blocks=1))


# --- several choices and beams ---


def test_best_of_is_n_where_it_is_left_out() -> None:
    request = checked(with_prompt(sampling=pb.SamplingOptions(n=3)))
    assert (request.n, request.best_of, request.ranks_candidates) == (3, 3, False)
    assert not request.sampling_params(4, ()).logprobs
    request = checked(with_prompt(sampling=pb.SamplingOptions(n=1, best_of=4)))
    assert (request.n, request.best_of, request.ranks_candidates) == (1, 4, True)
    assert request.sampling_params(4, ()).logprobs


def beams(width: int, n: int = 1, **fields: object) -> Request:
    sampling = pb.SamplingOptions(n=n, temperature=0, top_p=1, min_p=0, best_of=n)
    return checked(with_prompt(beam_search={"width": width, **fields}, sampling=sampling))


def test_beam_search_has_defaults_and_takes_neutral_sampling_fields() -> None:
    request = beams(4, n=2)
    assert request.beam == BeamParams(width=4, length_penalty=1.0, early_stopping=False, num_returned=2)
    assert (request.n, request.best_of, request.ranks_candidates) == (2, 2, False)
    assert beams(1, length_penalty=-2.5).beam == BeamParams(width=1, length_penalty=-2.5)
    assert beams(1, length_penalty=0.0, early_stopping=True).beam == BeamParams(1, 0.0, True)


def test_beam_search_honours_the_stop_rules_of_tokens() -> None:
    stopping = pb.StoppingOptions(max_tokens=8, min_tokens=3, stop_token_ids=[9], ignore_eos=True)
    request = checked(with_prompt(beam_search={"width": 2}, stopping=stopping))
    sampling = request.sampling_params(8, (2,))
    assert (sampling.min_tokens, sampling.stop_token_ids, sampling.ignore_eos) == (3, (9,), True)


def test_one_choice_must_fit_alone_and_beams_together() -> None:
    limits = replace(LIMITS, num_decode_blocks=3)
    several = checked(with_prompt(sampling=pb.SamplingOptions(n=8), stopping=pb.StoppingOptions(max_tokens=29)))
    assert fit(several, 20, limits) == 29  # 48 tokens of KV: all 3 blocks, for one choice at a time
    assert fit(beams(2), 20, limits) == 13  # one block shared, then one each
    one_more = replace(beams(2), max_tokens=14)
    with pytest.raises(ResourceExhausted, match=r"needs 5 KV blocks \(2 beams of up to 33 tokens\).* has 3"):
        fit(one_more, 20, limits)
    assert fit(beams(3), 20, limits) == 1  # no beam forks for one token
    with pytest.raises(ResourceExhausted, match=r"needs 4 KV blocks \(3 beams of up to 21 tokens\).* has 3"):
        fit(replace(beams(3), max_tokens=2), 20, limits)
    assert num_blocks_needed(one_more, 20, 14, LAYOUT) == 1 + 2 * 2
    assert num_blocks_needed(one_more, 32, 1, LAYOUT) == 2
    assert num_blocks_needed(several, 20, 29, LAYOUT) == 3


@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("num_prompt_tokens", [1, 15, 16, 17, 33])
@pytest.mark.parametrize("num_blocks", [3, 5, 8, 40])
def test_max_tokens_left_out_for_beams_is_the_most_that_fits(
    width: int, num_prompt_tokens: int, num_blocks: int
) -> None:
    limits = replace(LIMITS, num_decode_blocks=num_blocks, num_prefill_blocks=num_blocks, max_context=200)
    request = beams(width)
    fitting = [
        max_tokens
        for max_tokens in range(1, 201 - num_prompt_tokens)
        if num_blocks_needed(request, num_prompt_tokens, max_tokens, LAYOUT) <= num_blocks
    ]
    if fitting:
        assert fit(request, num_prompt_tokens, limits) == max(fitting)
    else:
        with pytest.raises(ResourceExhausted):
            fit(request, num_prompt_tokens, limits)


def test_a_tenant_where_there_are_none_is_refused_without_talk_of_a_key() -> None:
    with pytest.raises(PermissionDenied, match="tenant: this router has no tenants; leave it unset, not 'q'"):
        checked(with_prompt(tenant="q"))
