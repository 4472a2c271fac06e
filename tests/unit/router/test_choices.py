"""n, best_of and beam search as a client meets them, in front of scripted workers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvferry.errors import Internal, InvalidArgument, Unavailable
from kvferry.sampling import Finish, FinishKind
from kvferry.telemetry import Attributes
from kvferry.wire import finish_to_pb
from proto.kvferry.v1 import inference_pb2 as pb
from proto.kvferry.v1 import types_pb2, worker_pb2
from tests.support.fake_workers import FakeNetwork, Point
from tests.unit.router.conftest import Answer, Router, StartRouter, ask


def ids(text: str) -> list[int]:
    """Byte-level ids."""
    return [ord(letter) - ord("A") + 35 for letter in text]


EOS = 2
OUTPUTS = {0: [*ids("HELLO"), EOS], 1: [*ids("WORLDAGAIN"), EOS], 2: [*ids("YES"), EOS]}


LONG = ids("HELLOWORLDAGAIN")


def network_of_choices(**workers: int) -> FakeNetwork:
    network = FakeNetwork(OUTPUTS[0], **workers)
    network.outputs = dict(OUTPUTS)
    return network


def sample(
    n: int | None = None, best_of: int | None = None, max_tokens: int = 8, **fields: object
) -> pb.GenerateRequest:
    request = ask(max_tokens=max_tokens, temperature=1.0, **fields)  # type: ignore[arg-type]
    if n is not None:
        request.sampling.n = n
    if best_of is not None:
        request.sampling.best_of = best_of
    return request


def texts(answer: Answer) -> dict[int, str]:
    found: dict[int, str] = {}
    for delta in (message.delta for message in answer.messages if message.HasField("delta")):
        found[delta.index] = found.get(delta.index, "") + delta.text
    return found


def finishes(answer: Answer) -> dict[int, pb.ChoiceFinish]:
    return {message.finish.index: message.finish for message in answer.messages if message.HasField("finish")}


async def test_n_choices_come_from_one_prompt(start_router: StartRouter) -> None:
    async with network_of_choices() as network, start_router(network) as router:
        answer = await router.generate(sample(n=3))
        assert texts(answer) == {0: "HELLO", 1: "WORLDAGA", 2: "YES"}
        reasons = {index: finish.finish.reason for index, finish in finishes(answer).items()}
        eos, length = types_pb2.FINISH_REASON_END_OF_SEQUENCE, types_pb2.FINISH_REASON_LENGTH
        assert reasons == {0: eos, 1: length, 2: eos}
        assert not any(finish.HasField("cumulative_logprob") for finish in finishes(answer).values())
        assert answer.completed.usage.completion_tokens == 6 + 8 + 4
        assert answer.completed.usage.prompt_tokens == 3
        assert (answer.started.sampling.n, answer.started.sampling.best_of) == (3, 3)
        assert [(call.spec.choice, call.spec.num_choices) for call in network.calls] == [(0, 3), (0, 3)]
        assert not network.calls[0].spec.sampling.logprobs
        await network.all_ended()
        assert not any(call.cancelled for call in network.calls)
        served = {"gen_ai_request_model": "tiny", "kvferry_tier": "standard"}
        assert router.sample("gen_ai_server_time_to_first_token_seconds_count", **served) == 1


async def test_n_without_prefill_workers(start_router: StartRouter) -> None:
    async with network_of_choices(num_prefill=0) as network, start_router(network) as router:
        assert texts(await router.generate(sample(n=3))) == {0: "HELLO", 1: "WORLDAGA", 2: "YES"}


async def test_deltas_of_each_choice_are_gapless(start_router: StartRouter) -> None:
    async with network_of_choices() as network, start_router(network) as router:
        expected = {0: 0, 1: 0, 2: 0}
        for delta in (message.delta for message in (await router.generate(sample(n=3))).messages):
            if delta.token_ids:
                assert (delta.token_index, delta.position) == (expected[delta.index], 3 + expected[delta.index])
                expected[delta.index] += len(delta.token_ids)
        assert expected == {0: 6, 1: 8, 2: 4}


async def test_first_tokens_may_end_some_choices_or_all(start_router: StartRouter) -> None:
    async with network_of_choices() as network, start_router(network) as router:
        network.outputs[1] = [EOS]
        assert texts(await router.generate(sample(n=3))) == {0: "HELLO", 1: "", 2: "YES"}
        network.outputs[0] = network.outputs[2] = [EOS]
        answer = await router.generate(sample(n=3))
        assert len(finishes(answer)) == 3
        await network.all_ended()
        assert network.calls_of("decode")[-1].cancelled, "nothing was committed"
        assert len(finishes(await router.generate(sample(n=2, max_tokens=1)))) == 2


async def test_a_stop_string_ends_one_choice(start_router: StartRouter) -> None:
    async with network_of_choices() as network, start_router(network) as router:
        network.outputs[0] = ids("HELL" + "O" * 200)  # so long that the stop comes before its end
        answer = await router.generate(sample(n=3, stop=("LL",), max_tokens=200))
        assert texts(answer) == {0: "HE", 1: "WORLDAGAIN", 2: "YES"}
        assert finishes(answer)[0].finish.stop_string == "LL"
        assert network.decode[0].stops == [(0, 4)]
        await network.all_ended()
        assert not any(call.cancelled for call in network.calls)


async def test_a_stop_string_in_a_first_token_before_the_commit(start_router: StartRouter) -> None:
    async with network_of_choices() as network, start_router(network) as router:
        network.outputs[0] = ids("HELL" + "O" * 200)
        answer = await router.generate(sample(n=3, stop=("H",), max_tokens=200))
        assert texts(answer) == {0: "", 1: "WORLDAGAIN", 2: "YES"}
        assert network.decode[0].stops == [(0, 1)]


# --- failures ---


async def test_before_a_token_the_attempt_is_repeated_as_a_group(start_router: StartRouter) -> None:
    async with network_of_choices(num_prefill=2) as network, start_router(network) as router:
        network.fail(Point.PREFILL_START, Unavailable("died"))
        answer = await router.generate(sample(n=3))
        assert texts(answer) == {0: "HELLO", 1: "WORLDAGA", 2: "YES"}
        assert answer.completed.timings.num_attempts == 2
        assert [call.spec.num_choices for call in network.calls] == [3, 3, 3, 3]


async def test_in_mid_stream_choices_part_ways_with_their_own_tokens(start_router: StartRouter) -> None:
    async with network_of_choices(num_decode=2) as network, start_router(network) as router:
        network.hold(Point.TOKEN, 5)
        messages: list[pb.GenerateResponse] = []
        async with router.channel.stream(router.stub.Generate, sample(n=3), timeout_s=10) as call:
            async for message in call:
                messages.append(message)
                if message.finish.index == 2:  # choice 2 has ended, as far as the router knows
                    await network.reached(Point.TOKEN, 5)
                    network.release(Point.TOKEN, 5)
                    await network.calls_of("decode")[0].worker.stop()
        answer = Answer(messages)
        assert texts(answer) == {0: "HELLO", 1: "WORLDAGA", 2: "YES"}
        assert answer.completed.usage.completion_tokens == 6 + 8 + 4
        specs = [call.spec for call in network.calls_of("prefill")[1:]]
        resumed = {spec.choice: spec for spec in specs}
        assert set(resumed) == {0, 1}, "choice 2 had ended"
        assert all(spec.num_choices == 1 for spec in specs)
        for choice, spec in resumed.items():
            assert list(spec.token_ids) == [5, 6, 7, *OUTPUTS[choice][: len(spec.token_ids) - 3]]
            assert len(spec.token_ids) > 3
        assert sorted(spec.id.attempt for spec in specs) == [2, 3]
        assert answer.completed.timings.num_attempts == 3
        await network.all_ended()
        spans = await attempt_spans(router)
        assert [span.get(Attributes.CHOICE) for span in spans] == [None, 0, 1]


async def attempt_spans(router: Router) -> list[dict[str, object]]:
    await router.app.drain(1.0)
    router.telemetry.provider.force_flush()
    spans = router.exporter.get_finished_spans()
    attempts: list[dict[str, object]] = [
        dict(span.attributes or {}) for span in spans if span.name == "kvferry.attempt"
    ]
    return sorted(attempts, key=lambda attributes: str(attributes[Attributes.ATTEMPT]))


async def test_prefill_that_dies_between_two_first_tokens(start_router: StartRouter) -> None:
    async with network_of_choices(num_prefill=2) as network, start_router(network) as router:
        network.fail(Point.FIRST_TOKEN_SENT, Unavailable("died"))  # of choice 0
        answer = await router.generate(sample(n=2))
        assert texts(answer) == {0: "HELLO", 1: "WORLDAGA"}
        resumed = [(call.spec.choice, len(call.spec.token_ids)) for call in network.calls_of("prefill")[1:]]
        assert sorted(resumed) == [(0, 4), (1, 3)]


async def test_one_choice_that_cannot_be_mended_fails_the_request(start_router: StartRouter) -> None:
    async with network_of_choices(num_decode=2) as network, start_router(network) as router:
        network.hold(Point.TOKEN, 5)
        answering = asyncio.create_task(router.generate(sample(n=3)))
        await network.reached(Point.TOKEN, 5)
        network.fail(Point.PREFILL_START, Unavailable("overheated"), times=20)
        await network.calls_of("decode")[0].worker.stop()
        with pytest.raises(Unavailable, match="overheated"):
            await answering
        await network.all_ended()
        await router.app.drain(1.0)
        assert all(worker.num_requests == 0 for worker in router.app.membership.workers)


@pytest.mark.parametrize("is_split", [False, True])
async def test_cancel_and_abort_reach_every_choice(start_router: StartRouter, is_split: bool) -> None:
    async with network_of_choices(num_decode=2) as network, start_router(network) as router:
        network.hold(Point.TOKEN, 5)
        for by in ("cancel", "abort"):
            num_calls = len(network.calls)
            call = router.stub.Generate(sample(n=2, label=by))
            messages: list[pb.GenerateResponse] = []
            reading = asyncio.create_task(_read(call, messages))
            await network.reached(Point.TOKEN, 5, times=1 if by == "cancel" else 2)
            if is_split:
                network.hold(Point.PREFILL_START)
                worker = network.calls_of("decode")[-1].worker
                await worker.stop()
                await network.reached(Point.PREFILL_START, times=3 if by == "cancel" else 6)
                network.release(Point.PREFILL_START)
            if by == "cancel":
                call.cancel()
            else:
                await router.channel.unary(router.stub.Abort, pb.AbortRequest(request_ids=[by]))
            await asyncio.gather(reading, return_exceptions=True)
            await network.all_ended(2.0)
            assert len(network.calls) > num_calls
            if is_split:
                await worker.start()
                assert await router.app.wait_ready(5)
        reasons = [message.finish.finish.reason for message in messages if message.HasField("finish")]
        assert reasons == [types_pb2.FINISH_REASON_CANCELLED] * 2


async def _read(call: object, messages: list[pb.GenerateResponse]) -> None:
    async for message in call:  # type: ignore[attr-defined]
        messages.append(message)


async def test_time_limit_ends_all_choices(start_router: StartRouter) -> None:
    async with network_of_choices() as network, start_router(network) as router:
        network.hold(Point.TOKEN, 2)
        answer = await router.generate(sample(n=3, stopping=pb.StoppingOptions(time_limit_s=0.3)))
        reasons = [finish.finish.reason for finish in finishes(answer).values()]
        assert reasons == [types_pb2.FINISH_REASON_DEADLINE] * 3
        await network.all_ended()


# --- best_of ---


async def test_the_best_candidates_are_sent_best_first(start_router: StartRouter) -> None:
    async with network_of_choices() as network, start_router(network) as router:
        network.logprobs = {0: -2.0, 1: -3.0, 2: -0.5}
        answer = await router.generate(sample(n=2, best_of=3))
        assert texts(answer) == {0: "YES", 1: "HELLO"}
        assert {index: finish.cumulative_logprob for index, finish in finishes(answer).items()} == {0: -2.0, 1: -12.0}
        assert [message.WhichOneof("event") for message in answer.messages] == [
            "started",
            "delta",
            "finish",
            "delta",
            "finish",
            "completed",
        ]
        assert answer.completed.usage.completion_tokens == 6 + 8 + 4, "all candidates are counted"
        assert (answer.started.sampling.n, answer.started.sampling.best_of) == (2, 3)
        assert all(call.spec.sampling.logprobs for call in network.calls)


async def test_equal_candidates_are_ordered_by_number(start_router: StartRouter) -> None:
    async with network_of_choices() as network, start_router(network) as router:
        assert texts(await router.generate(sample(n=2, best_of=3))) == {0: "HELLO", 1: "WORLDAGA"}


async def test_tokens_after_a_stop_string_do_not_count_for_a_candidate(start_router: StartRouter) -> None:
    async with network_of_choices() as network, start_router(network) as router:
        network.tokens_per_message = 8
        answer = await router.generate(sample(n=1, best_of=2, stop=("EL", "OR")))
        assert texts(answer) == {0: "H"}
        assert finishes(answer)[0].cumulative_logprob == -3.0
        assert answer.completed.usage.completion_tokens == 6
        assert answer.completed.timings.num_overshoot_tokens == 3 + 5


async def test_candidates_survive_a_split(start_router: StartRouter) -> None:
    async with network_of_choices(num_decode=2) as network, start_router(network) as router:
        network.logprobs = {0: -2.0, 1: -0.25, 2: -0.5}
        network.hold(Point.TOKEN, 5)
        answering = asyncio.create_task(router.generate(sample(n=1, best_of=3)))
        await network.reached(Point.TOKEN, 5)
        network.release(Point.TOKEN, 5)
        await network.calls_of("decode")[0].worker.stop()
        answer = await answering
        assert texts(answer) == {0: "WORLDAGA"}
        assert finishes(answer)[0].cumulative_logprob == -2.0


async def test_a_worker_without_the_log_probabilities_asked_for_is_an_error(start_router: StartRouter) -> None:
    async with network_of_choices() as network, start_router(network) as router:
        network.logprobs = {1: None}
        with pytest.raises(Internal, match="1 tokens with 0 log-probabilities"):
            await router.generate(sample(n=1, best_of=2))


# --- beam search ---


def beam_request(n: int = 1, width: int = 2) -> pb.GenerateRequest:
    request = ask(max_tokens=4, beam_search=pb.BeamSearch(width=width))
    request.sampling.n = n
    request.stopping.min_tokens = 2
    return request


def beam(text: str, logprob: float) -> worker_pb2.Beam:
    finish = finish_to_pb(Finish(FinishKind.LENGTH))
    return worker_pb2.Beam(token_ids=ids(text), finish=finish, cumulative_logprob=logprob, score=logprob / 4)


@pytest.mark.parametrize("num_prefill", [0, 1])
async def test_hypotheses_come_at_the_end_best_first(start_router: StartRouter, num_prefill: int) -> None:
    async with network_of_choices(num_prefill=num_prefill) as network, start_router(network) as router:
        network.beams = [beam("GOOD", -1.5), beam("ALSO", -2.5)]
        answer = await router.generate(beam_request(n=2))
        assert texts(answer) == {0: "GOOD", 1: "ALSO"}
        assert [finish.cumulative_logprob for finish in finishes(answer).values()] == [-1.5, -2.5]
        assert answer.completed.usage.completion_tokens == 8
        spec = network.calls[0].spec
        assert spec.beam is not None
        assert (spec.beam.width, spec.beam.length_penalty, spec.beam.num_returned) == (2, 1.0, 2)
        assert spec.sampling.min_tokens == answer.started.stopping.min_tokens == 2
        await network.all_ended()
        assert not any(call.cancelled for call in network.calls)


async def test_a_failed_beam_search_is_repeated(start_router: StartRouter) -> None:
    async with network_of_choices(num_decode=2) as network, start_router(network) as router:
        network.beams = [beam("GOOD", -1.5)]
        network.fail(Point.COMMITTED, Unavailable("died"))
        answer = await router.generate(beam_request())
        assert texts(answer) == {0: "GOOD"}
        assert answer.completed.timings.num_attempts == 2


async def test_greedy_choices_are_refused(start_router: StartRouter) -> None:
    async with network_of_choices() as network, start_router(network) as router:
        request = ask(temperature=0.0)
        request.sampling.n = 2
        with pytest.raises(InvalidArgument, match="n > 1 with temperature 0 gives n equal choices"):
            await router.generate(request)


async def test_latencies_of_tokens_are_of_the_longest_choice_and_only_where_choices_are_streamed(
    start_router: StartRouter,
) -> None:
    name, first = "gen_ai_server_time_per_output_token_seconds", "gen_ai_server_time_to_first_token_seconds"
    served = {"gen_ai_request_model": "tiny", "kvferry_tier": "standard"}
    async with network_of_choices() as network, start_router(network) as router:
        answer = await router.generate(sample(n=3))
        per_token_s = answer.completed.timings.decode_s / 7
        assert router.sample(f"{name}_sum", **served) == pytest.approx(per_token_s)
        network.beams = [beam("GOOD", -1.5)]
        for withheld in (sample(n=1, best_of=3), beam_request()):
            answer = await router.generate(withheld)
            assert 0 < answer.completed.timings.time_to_first_token_s <= answer.completed.timings.total_s
        assert router.sample(f"{name}_count", **served) == router.sample(f"{first}_count", **served) == 1


# --- log-probabilities for the client ---


@pytest.mark.parametrize("fields", [{}, {"token_ids": False}, {"text": False}, {"token_ids": False, "text": False}])
async def test_log_probabilities_come_one_a_token(start_router: StartRouter, fields: dict[str, Any]) -> None:
    """Whatever else the response carries; the first token's from prefill, the others' from decode."""
    response = pb.ResponseOptions(logprobs=2, **fields)
    async with FakeNetwork(LONG) as network, start_router(network) as router:
        network.tokens_per_message = 3
        answer = await router.generate(ask(max_tokens=8, response=response))
        told = [one for message in answer.messages for one in message.delta.logprobs]
        assert [one.token_id for one in told] == LONG[:8]
        assert all(one.logprob == -1.0 and one.rank == 1 for one in told)
        top = [[other.token_id for other in one.top] for one in told]
        assert top == [[token, token + 1] for token in LONG[:8]]
        assert not any(finish.HasField("cumulative_logprob") for finish in finishes(answer).values())


async def test_log_probabilities_end_with_a_stop_string(start_router: StartRouter) -> None:
    async with FakeNetwork(LONG) as network, start_router(network) as router:
        network.tokens_per_message = 8
        answer = await router.generate(ask(max_tokens=15, stop=("LL",), response=pb.ResponseOptions(logprobs=0)))
        told = [one.token_id for message in answer.messages for one in message.delta.logprobs]
        assert told == answer.token_ids == LONG[:4]


async def test_log_probabilities_go_on_after_a_lost_worker(start_router: StartRouter) -> None:
    async with FakeNetwork(LONG, num_decode=2) as network, start_router(network) as router:
        network.fail(Point.TOKEN, Unavailable("died"), index=4)
        answer = await router.generate(ask(max_tokens=8, response=pb.ResponseOptions(logprobs=1)))
        told = [one.token_id for message in answer.messages for one in message.delta.logprobs]
        assert told == answer.token_ids == LONG[:8]
        assert answer.completed.timings.num_attempts == 2
