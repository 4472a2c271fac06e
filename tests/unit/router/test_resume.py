"""A response that another router began goes on exactly behind what its client has (R040, R071, R123)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.client import AsyncClient, GenerateOptions
from kvferry.errors import DataLoss, FailedPrecondition, InvalidArgument, KvferryError
from kvferry.kv_layout import KvLayout
from kvferry.sampling import Finish, FinishKind
from kvferry.wire import finish_to_pb
from proto.kvferry.v1 import inference_pb2 as pb
from proto.kvferry.v1 import types_pb2, worker_pb2
from router.ledger import RequestLedger
from router.outbox import Outbox
from router.request_output import RequestOutput
from router.resume import prompt_digest
from router.text.detokenizer import decode
from router.text.echo import PIECE_CHARS, EchoedPrompt
from router.text.token_bytes import TokenBytes
from router.validation import Limits, validate
from tests.support.fake_workers import FakeNetwork, Point
from tests.support.relay import Direction, Relay
from tests.support.tokenizers import byte_level_tokenizer
from tests.unit.router.conftest import Router, StartRouter, ask

OUTPUT = [ord(letter) - ord("A") + 35 for letter in "HELLOWORLDAGAIN"]  # byte-level ids of these letters
PROMPT = (5, 6, 7)
EOS = 2
LENGTH = finish_to_pb(Finish(FinishKind.LENGTH))


# --- text and tokens, for every cut ---

TABLE = TokenBytes.of(byte_level_tokenizer())
LIMITS = Limits(
    model="tiny",
    max_context=256,
    vocab_size=len(TABLE.by_id),
    tiers={"standard": 0},
    default_tier="standard",
    max_request_bytes=1 << 20,
    layout=KvLayout(2, 1, 4, 16, "float32", "tiny"),
    num_prefill_blocks=64,
    num_decode_blocks=64,
)
PIECES = [TABLE.by_id.index(bytes([byte])) for byte in [*b"abc ", *"😀é".encode()]]
"""Letters of which stop strings are made, and parts of characters."""


@dataclass(slots=True)
class Seen:
    """What a client got."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    end: pb.ChoiceFinish | None = None

    def take(self, outbox: Outbox) -> None:
        for message in outbox.take_all():
            delta = message.delta
            assert not delta.token_ids or delta.token_index == len(self.token_ids)
            assert self.end is None, "nothing comes behind the end"
            self.token_ids += delta.token_ids
            self.text += delta.text
            self.end = message.finish if message.HasField("finish") else None


class Plane:
    """The text plane of one router for a request of one choice, and a worker that makes the given tokens."""

    def __init__(self, message: pb.GenerateRequest, echo: EchoedPrompt | None = None) -> None:
        request = validate(message, LIMITS, lambda: 0)
        self.outbox = Outbox()
        self._sampling = request.sampling_params(message.stopping.max_tokens, [EOS])
        self._output = RequestOutput(
            request,
            self._sampling,
            num_prompt_tokens=3,
            token_bytes=TABLE,
            echo=echo,
            outbox=self.outbox,
            ledger=RequestLedger(),
        )
        self._output.begin()

    def make(self, token_ids: Sequence[int], seen: Seen, lengths: list[int] | None = None) -> None:
        """From where the output is; `lengths` takes the length of the text behind every token."""
        seen.take(self.outbox)
        while seen.end is None:
            index = self._output.num_tokens_of(0)
            self._output.push(0, (token_ids[index],))
            seen.take(self.outbox)
            if lengths is not None:
                lengths.append(len(seen.text))
            finish = self._output.stop_of(0) or self._sampling.finish_after(token_ids[index], index + 1)
            if finish is not None:
                self._output.finish(0, finish)
                seen.take(self.outbox)


def cut_request(whole: pb.GenerateRequest, token_ids: Sequence[int], num_chars: int) -> pb.GenerateRequest:
    request = pb.GenerateRequest()
    request.CopyFrom(whole)
    request.resume.prompt_digest = b"digest"
    request.resume.choices.add(token_ids=token_ids, num_text_chars=num_chars)
    return request


@settings(max_examples=150, deadline=None)
@given(
    token_ids=st.lists(st.sampled_from([*PIECES, EOS]), min_size=1, max_size=10),
    stops=st.lists(st.text("abc é", min_size=1, max_size=4), max_size=2, unique=True),
    includes_stop=st.booleans(),
    min_tokens=st.integers(0, 4),
    ignores_eos=st.booleans(),
    echoed=st.lists(st.sampled_from(PIECES), max_size=4),
)
def test_text_and_tokens_go_on_exactly_at_every_cut(
    token_ids: list[int], stops: list[str], includes_stop: bool, min_tokens: int, ignores_eos: bool, echoed: list[int]
) -> None:
    """A client may have any part of the text that its tokens show; an end may be lost alone or with text held back.

    Before it any part of an echoed prompt, which may end in half a character.
    """
    echo = EchoedPrompt.of_tokens(echoed, TABLE, skip_special_tokens=True) if echoed else None
    stopping = pb.StoppingOptions(
        max_tokens=len(token_ids),
        min_tokens=min(min_tokens, len(token_ids)),
        stop=stops,
        include_stop_str_in_output=includes_stop,
        ignore_eos=ignores_eos,
    )
    whole = pb.GenerateRequest(text="x", sampling=pb.SamplingOptions(seed=1), stopping=stopping)
    uncut, lengths = Seen(), [0 if echo is None else len(echo.text)]
    Plane(whole, echo).make(token_ids, uncut, lengths)
    assert uncut.text.startswith("" if echo is None else echo.text)
    lengths[-1] = len(uncut.text)
    for num_tokens, most_chars in enumerate(lengths):
        for num_chars in range(most_chars + 1):
            seen = Seen(uncut.token_ids[:num_tokens], uncut.text[:num_chars])
            Plane(cut_request(whole, seen.token_ids, num_chars), echo).make(token_ids, seen)
            assert seen == uncut, f"cut behind {num_tokens} tokens and {num_chars} characters"


@settings(max_examples=100, deadline=None)
@given(
    echoed=st.lists(st.sampled_from(PIECES), min_size=1, max_size=6),
    token_ids=st.lists(st.sampled_from(PIECES), min_size=1, max_size=6),
)
def test_an_echoed_prompt_and_the_output_are_one_text(echoed: list[int], token_ids: list[int]) -> None:
    """Also where a character is cut by the border; a stop string in the prompt ends nothing."""
    echo = EchoedPrompt.of_tokens(echoed, TABLE, skip_special_tokens=True)
    stop = decode(TABLE, echoed)[-1:]
    stopping = pb.StoppingOptions(max_tokens=len(token_ids), stop=[stop] if stop in "abc " else [])
    seen = Seen()
    Plane(pb.GenerateRequest(text="x", stopping=stopping), echo).make(token_ids, seen)
    whole = decode(TABLE, [*echoed, *token_ids])
    assert seen.text.startswith(echo.text) and whole.startswith(seen.text)
    if stopping.stop:
        assert stop not in seen.text[len(echo.text) :]
    else:
        assert seen.text == whole


def test_a_long_echo_comes_in_messages_of_bounded_size() -> None:
    text = "é" * (2 * PIECE_CHARS + 5)
    plane = Plane(pb.GenerateRequest(text="x"), EchoedPrompt(text))
    pieces = [message.delta.text for message in plane.outbox.take_all()]
    assert "".join(pieces) == text and max(map(len, pieces)) == PIECE_CHARS


# --- through a router ---


def rest_of(whole: pb.GenerateRequest, *choices: pb.ResumedChoice, server_id: str = "") -> pb.GenerateRequest:
    request = pb.GenerateRequest()
    request.CopyFrom(whole)
    if not request.HasField("beam_search"):
        request.sampling.seed = 77
    request.resume.prompt_digest = prompt_digest(PROMPT)
    request.resume.server_request_id = server_id
    request.resume.choices.extend(choices)
    return request


def received(num_tokens: int, index: int = 0, num_chars: int | None = None) -> pb.ResumedChoice:
    ids = OUTPUT[:num_tokens]
    return pb.ResumedChoice(index=index, token_ids=ids, num_text_chars=num_tokens if num_chars is None else num_chars)


async def test_started_tells_what_a_resume_needs(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        started = (await router.generate(ask())).started
        assert started.prompt_digest == prompt_digest(PROMPT) != prompt_digest((7, 6, 5))
        assert started.stopping.max_tokens == 8


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_workers_get_the_prompt_with_the_tokens_so_far(start_router: StartRouter, num_prefill: int) -> None:
    """With the border between prompt and output, so that min_tokens, seed positions and penalties are exact."""
    async with FakeNetwork(OUTPUT, num_prefill=num_prefill) as network, start_router(network) as router:
        answer = await router.generate(rest_of(ask(max_tokens=8), received(3, num_chars=1)))
        assert (answer.token_ids, answer.text) == (OUTPUT[3:8], "ELLOWOR")
        first = next(message.delta for message in answer.messages if message.delta.token_ids)
        assert (first.token_index, first.position) == (3, 6)
        assert answer.finish == pb.ChoiceFinish(finish=LENGTH, num_output_tokens=8)
        assert (answer.completed.usage.prompt_tokens, answer.completed.usage.completion_tokens) == (3, 8)
        for call in network.calls:
            spec = call.spec
            assert (spec.token_ids, spec.num_prompt_tokens) == ((*PROMPT, *OUTPUT[:3]), 3)
            assert (spec.sampling.seed, spec.sampling.max_tokens, spec.choice) == (77, 8, 0)
        num_counted = router.sample("kvferry_tokens_total", kind="output", tenant="")
        assert num_counted == 5, "the others were counted where they were made"


async def test_without_a_token_all_choices_share_an_attempt(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        answer = await router.generate(rest_of(ask(max_tokens=4, temperature=1.0, sampling={"n": 2})))
        assert len(answer.token_ids) == 8
        assert len(network.calls_of("prefill")) == 1


async def test_of_two_choices_one_is_over_and_one_goes_on(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        network.outputs[1] = OUTPUT[::-1]
        over = received(2)
        over.finish.CopyFrom(types_pb2.Finish(reason=types_pb2.FINISH_REASON_END_OF_SEQUENCE, token_id=EOS))
        going = pb.ResumedChoice(index=1, token_ids=OUTPUT[::-1][:4], num_text_chars=4)
        answer = await router.generate(rest_of(ask(max_tokens=6, temperature=1.0, sampling={"n": 2}), over, going))
        assert {message.delta.index for message in answer.messages if message.HasField("delta")} == {1}
        assert answer.token_ids == OUTPUT[::-1][4:6]
        assert [message.finish.index for message in answer.messages if message.HasField("finish")] == [1]
        assert answer.completed.usage.completion_tokens == 2 + 6
        assert {(call.spec.choice, call.spec.num_choices) for call in network.calls} == {(1, 1)}


async def test_only_the_last_message_was_lost(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        over = received(4)
        over.finish.CopyFrom(LENGTH)
        answer = await router.generate(rest_of(ask(max_tokens=4), over))
        assert [message.WhichOneof("event") for message in answer.messages] == ["started", "completed"]
        assert answer.completed.usage.completion_tokens == 4
        assert network.calls == []


@pytest.mark.parametrize(
    ("choice", "stop", "reason"),
    [
        (received(8), (), types_pb2.FINISH_REASON_LENGTH),
        (received(5, num_chars=3), ("LO",), types_pb2.FINISH_REASON_STOP_STRING),
        (pb.ResumedChoice(token_ids=[*OUTPUT[:2], EOS]), (), types_pb2.FINISH_REASON_END_OF_SEQUENCE),
    ],
)
async def test_tokens_that_end_a_choice_leave_only_its_end_to_send(
    start_router: StartRouter, choice: pb.ResumedChoice, stop: tuple[str, ...], reason: int
) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        answer = await router.generate(rest_of(ask(max_tokens=8, stop=stop), choice))
        assert answer.token_ids == []
        assert answer.finish.finish.reason == reason
        assert answer.finish.num_output_tokens == len(choice.token_ids)
        assert network.calls == []


async def test_a_stop_string_over_the_border_of_two_routers(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        answer = await router.generate(rest_of(ask(max_tokens=12, stop=("LOWO",)), received(5, num_chars=3)))
        assert (answer.text, answer.finish.finish.stop_string) == ("", "LOWO")
        assert answer.token_ids == OUTPUT[5:7]


async def test_best_candidates_are_made_again_and_sent_behind_what_came(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        network.logprobs = {0: -2.0, 1: -1.0, 2: -3.0}
        network.outputs = {1: OUTPUT[::-1]}
        whole = ask(max_tokens=5, temperature=1.0, sampling={"n": 2, "best_of": 3})
        best, second = OUTPUT[::-1][:5], OUTPUT[:5]
        answer = await router.generate(rest_of(whole, pb.ResumedChoice(token_ids=best[:2], num_text_chars=1)))
        assert answer.token_ids == [*best[2:], *second]
        assert (answer.messages[1].delta.token_index, answer.messages[1].delta.position) == (2, 5)
        assert answer.completed.usage.completion_tokens == 15
        assert {call.spec.num_prompt_tokens - len(call.spec.token_ids) for call in network.calls} == {0}
        over = pb.ResumedChoice(token_ids=best, num_text_chars=5, finish=LENGTH)
        answer = await router.generate(rest_of(whole, over))
        assert [message.finish.index for message in answer.messages if message.HasField("finish")] == [1]
        assert answer.token_ids == second
        with pytest.raises(DataLoss, match="made again and differs"):
            await router.generate(rest_of(whole, pb.ResumedChoice(token_ids=second[:2])))


async def test_beams_are_searched_again(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        network.beams = [worker_pb2.Beam(token_ids=OUTPUT[:4], finish=LENGTH, cumulative_logprob=-1.0)]
        whole = ask(max_tokens=4, beam_search={"width": 2})
        answer = await router.generate(rest_of(whole, received(3)))
        assert (answer.token_ids, answer.text) == (OUTPUT[3:4], "L")


async def test_abort_takes_the_id_the_response_began_with(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        network.hold(Point.TOKEN, 5)
        request = rest_of(ask(max_tokens=12), received(3), server_id="first-id")
        async with router.channel.stream(router.stub.Generate, request, timeout_s=10.0) as call:
            await network.reached(Point.TOKEN, 5)
            found = await router.channel.unary(router.stub.Abort, pb.AbortRequest(request_ids=["first-id", "other"]))
            assert list(found.aborted_request_ids) == ["first-id"]
            finish = [message.finish async for message in call if message.HasField("finish")]
        assert [end.finish.reason for end in finish] == [types_pb2.FINISH_REASON_CANCELLED]


async def test_a_request_whose_router_goes_before_it_answers_is_run_to_the_end_once(start_router: StartRouter) -> None:
    """R120: what the first router had begun is cancelled with its client's connection, and holds nothing."""
    async with (
        FakeNetwork(OUTPUT) as network,
        start_router(network) as first,
        start_router(network) as second,
        Relay() as relay,
        AsyncClient([relay.address, second.app.address]) as client,
    ):
        relay.forward_to(first.app.address)
        for _ in range(2):  # both connections are there, and it is the relay's turn
            await client.capabilities()
        network.hold(Point.PREFILL_START)
        relay.hold(Direction.FROM_TARGET)
        answer = asyncio.ensure_future(client.complete(GenerateOptions(prompt=PROMPT, max_tokens=8), timeout_s=10.0))
        await network.reached(Point.PREFILL_START)
        network.release(Point.PREFILL_START)
        await relay.cut()
        assert (await answer).choices[0].token_ids == OUTPUT[:8]
        await network.all_ended()
        assert [call.cancelled for call in network.calls_of("prefill")] == [True, False]
        assert [call.cancelled for call in network.calls_of("decode")] == [True, False]
        assert len({call.spec.id.request_id for call in network.calls}) == 2


# --- what is refused ---


def broken(**changes: object) -> pb.GenerateRequest:
    request = rest_of(ask(max_tokens=8, stop=("LL",)), received(3, num_chars=2))
    for path, value in changes.items():
        *sections, name = path.split("__")
        message = request
        for section in sections:
            message = getattr(message, section)
        if value is None:
            message.ClearField(name)
        elif isinstance(value, list):
            message.ClearField(name)
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    return request


async def refusal(router: Router, request: pb.GenerateRequest) -> KvferryError:
    with pytest.raises(KvferryError) as caught:
        await router.generate(request)
    return caught.value


@pytest.mark.parametrize(
    ("request_", "path", "words"),
    [
        (broken(sampling__seed=None), "sampling.seed", "that Started told"),
        (broken(stopping__max_tokens=None), "stopping.max_tokens", "that Started told"),
        (broken(resume__prompt_digest=None), "resume.prompt_digest", "is empty"),
        (broken(resume__server_request_id="x" * 65), "resume.server_request_id", "at most 64"),
        (broken(resume__choices=[received(9)]), "resume.choices[0].token_ids", "has 9 ids; stopping.max_tokens is 8"),
        (broken(resume__choices=[received(1, index=1)]), "resume.choices[0].index", "not below n, 1"),
        (broken(resume__choices=[received(1), received(2)]), "resume.choices[1].index", "there twice"),
        (
            broken(resume__choices=[pb.ResumedChoice(token_ids=[400])]),
            "resume.choices[0].token_ids",
            "400 is not in the vocabulary of 400 ids",
        ),
        (broken(resume__choices=[received(5)]), "resume.choices[0].token_ids", "ended the choice with number 4"),
        (broken(resume__choices=[received(2, num_chars=9)]), "resume.choices[0].num_text_chars", "9 is above 5"),
        (
            broken(resume__choices=[pb.ResumedChoice(finish=types_pb2.Finish())]),
            "resume.choices[0].finish",
            "unknown value 0",
        ),
    ],
)
async def test_what_cannot_be_is_refused_by_field(
    start_router: StartRouter, request_: pb.GenerateRequest, path: str, words: str
) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        error = await refusal(router, request_)
        assert isinstance(error, InvalidArgument) and error.field == path
        assert words in error.message
        assert network.calls == []


async def test_a_prompt_with_other_tokens_is_refused(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        error = await refusal(router, broken(resume__prompt_digest=prompt_digest((5, 6, 8))))
        assert isinstance(error, FailedPrecondition) and error.field == "resume.prompt_digest"
        assert network.calls == []
