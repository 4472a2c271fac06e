"""The router as a client meets it, in front of scripted workers."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvferry.errors import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    RouterDraining,
    TargetUnavailable,
    Unavailable,
)
from proto.kvferry.v1 import inference_pb2 as pb
from proto.kvferry.v1 import types_pb2
from router import lifecycle_run
from router.breaker import FAULTS_TO_OPEN
from tests.support.fake_workers import FakeNetwork, Point
from tests.support.workers import until
from tests.unit.router.conftest import StartRouter, ask

OUTPUT = [ord(letter) - ord("A") + 35 for letter in "HELLOWORLDAGAIN"]  # byte-level ids of these letters
EOS = 2


async def test_the_usual_way(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        answer = await router.generate(ask(5, 6, 7, max_tokens=5, label="mine"))
        assert answer.token_ids == OUTPUT[:5]
        assert answer.text == "HELLO"
        assert answer.started.request_id == "mine"
        assert answer.started.server_request_id not in ("", "mine")
        assert answer.finish.finish.reason == types_pb2.FINISH_REASON_LENGTH
        usage, timings = answer.completed.usage, answer.completed.timings
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (3, 5, 3)
        assert (timings.num_blocks_shipped, timings.num_blocks_reused, timings.shipped_bytes) == (2, 1, 64)
        assert (timings.prefill_s, timings.ship_s, timings.num_attempts) == (0.125, 0.5, 1)
        assert timings.queue_s >= 0.25
        await network.all_ended()
        assert not any(call.cancelled for call in network.calls)


async def test_positions_and_indices_are_gapless(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        answer = await router.generate(ask(5, 6, 7, max_tokens=9))
        expected = 0
        for delta in (message.delta for message in answer.messages if message.HasField("delta")):
            assert (delta.token_index, delta.position) == (expected, 3 + expected)
            expected += len(delta.token_ids)
        assert expected == 9


async def test_text_and_chat_prompts_are_tokenised_and_the_ids_returned(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        request = pb.GenerateRequest(text="AB")
        request.stopping.max_tokens = 2
        request.response.prompt_token_ids = True
        answer = await router.generate(request)
        assert list(answer.started.prompt_token_ids) == [35, 36]
        chat = pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")]))
        chat.stopping.max_tokens = 2
        assert (await router.generate(chat)).started.num_prompt_tokens > 2


async def test_effective_parameters_and_the_drawn_seed_are_echoed_and_sent(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        request = pb.GenerateRequest(text="AB", stopping=pb.StoppingOptions(max_tokens=3))
        first, second = await router.generate(request), await router.generate(request)
        assert first.started.sampling.seed != second.started.sampling.seed
        assert first.started.sampling.temperature == 1
        assert network.calls[0].spec.sampling.seed == first.started.sampling.seed
        assert network.calls[0].spec.sampling.eos_token_ids == (2, 0)


async def test_response_switches(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        only_text = await router.generate(ask(max_tokens=5, response=pb.ResponseOptions(token_ids=False)))
        assert (only_text.token_ids, only_text.text) == ([], "HELLO")
        only_ids = await router.generate(ask(max_tokens=5, response=pb.ResponseOptions(text=False)))
        assert (only_ids.token_ids, only_ids.text) == (OUTPUT[:5], "")


async def test_one_token_reaches_no_decode(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        answer = await router.generate(ask(max_tokens=1))
        assert (answer.token_ids, answer.text) == (OUTPUT[:1], "H")
        assert network.calls_of("decode") == []


async def test_first_token_that_ends_the_text_commits_nothing(start_router: StartRouter) -> None:
    async with FakeNetwork([EOS, 9, 9]) as network, start_router(network) as router:
        answer = await router.generate(ask())
        assert (answer.token_ids, answer.text) == ([EOS], "")
        assert answer.finish.finish.reason == types_pb2.FINISH_REASON_END_OF_SEQUENCE
        assert answer.finish.finish.token_id == EOS
        await network.all_ended()
        assert [call.cancelled for call in network.calls] == [True, False]


async def test_local_prefill_without_prefill_workers(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT, num_prefill=0) as network, start_router(network) as router:
        assert (await router.generate(ask(max_tokens=5))).text == "HELLO"
        assert len(network.calls) == 1


async def test_sixteen_at_once_get_their_own(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT, num_decode=2) as network, start_router(network) as router:
        answers = await asyncio.gather(*(router.generate(ask(max_tokens=n)) for n in range(1, 15)))
        assert [answer.token_ids for answer in answers] == [OUTPUT[:n] for n in range(1, 15)]
        used = {call.worker.name for call in network.calls_of("decode")}
        assert used == {"decode-0", "decode-1"}


# --- stop strings ---


async def test_stop_string_over_the_border_of_prefill_and_decode(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        network.hold(Point.TOKEN, 3)
        answer = await router.generate(ask(max_tokens=8, stop=("HE",)))
        assert (answer.token_ids, answer.text) == (OUTPUT[:2], "")
        assert answer.finish.finish.stop_string == "HE"
        assert answer.completed.usage.completion_tokens == 2
        await network.all_ended()


async def test_tokens_after_a_stop_string_are_overshoot(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        network.tokens_per_message = 4
        answer = await router.generate(ask(max_tokens=15, stop=("LL",)))
        assert (answer.token_ids, answer.text) == (OUTPUT[:4], "HE")
        assert answer.completed.usage.completion_tokens == 4
        assert answer.completed.timings.num_overshoot_tokens >= 1
        await network.all_ended()


async def test_stop_string_tells_decode_how_many_are_wanted(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle_run, "CLOSING_GRACE_S", 5.0)  # a busy machine's calls take longer to end
    async with FakeNetwork(OUTPUT * 40) as network, start_router(network) as router:
        network.overshoot = 3
        answer = await router.generate(ask(max_tokens=200, stop=("LO",)))
        assert answer.text == "HEL"
        await until(lambda: network.decode[0].stops == [(0, 5)])
        assert answer.completed.timings.num_overshoot_tokens >= 3


# --- failures and retries ---


async def test_prefill_that_dies_before_its_token_is_replaced(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT, num_prefill=2) as network, start_router(network) as router:
        network.fail(Point.PREFILL_START, Unavailable("died"))
        answer = await router.generate(ask(max_tokens=6))
        assert answer.token_ids == OUTPUT[:6]
        assert answer.completed.timings.num_attempts == 2
        names = [call.worker.name for call in network.calls_of("prefill")]
        assert len(set(names)) == 2
        await network.all_ended()


async def test_prefill_that_dies_between_first_token_and_commit(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        network.fail(Point.FIRST_TOKEN_SENT, Unavailable("died"))
        answer = await router.generate(ask(5, 6, 7, max_tokens=6))
        assert answer.token_ids == OUTPUT[:6]
        assert network.calls[-1].spec.token_ids == (5, 6, 7, OUTPUT[0])
        assert network.calls[-1].spec.num_prompt_tokens == 3
        seeds = {call.spec.sampling.seed for call in network.calls}
        assert len(seeds) == 1


async def test_decode_that_dies_in_mid_stream_is_resumed_on_another(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT, num_decode=2) as network, start_router(network) as router:
        network.hold(Point.TOKEN, 6)
        answering = asyncio.create_task(router.generate(ask(5, 6, 7, max_tokens=12)))
        await network.reached(Point.TOKEN, 6)
        network.release(Point.TOKEN, 6)
        await network.calls_of("decode")[0].worker.stop()
        answer = await answering
        assert answer.token_ids == OUTPUT[:12]
        assert answer.text == "HELLOWORLDAG"
        assert answer.completed.usage.completion_tokens == 12
        names = [call.worker.name for call in network.calls_of("decode")]
        assert len(names) == len(set(names)) == 2
        await network.all_ended()


async def test_a_lone_decode_that_comes_back_in_mid_stream(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        network.hold(Point.TOKEN, 6)
        answering = asyncio.create_task(router.generate(ask(max_tokens=12)))
        await network.reached(Point.TOKEN, 6)
        network.release(Point.TOKEN, 6)
        await network.decode[0].stop()
        await network.decode[0].start()
        assert (await answering).token_ids == OUTPUT[:12]


async def test_a_lone_decode_that_stays_dead_is_never_a_clean_end(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network, recovery_wait_s=0.6) as router:
        network.hold(Point.TOKEN, 6)
        answering = asyncio.create_task(router.generate(ask(max_tokens=12)))
        await network.reached(Point.TOKEN, 6)
        await network.decode[0].stop()
        with pytest.raises(Unavailable, match="decode"):
            await answering


async def test_prefill_that_refuses_gives_its_status_at_once(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        network.fail(Point.PREFILL_START, FailedPrecondition("the layouts differ"))
        began_s = time.monotonic()
        with pytest.raises(FailedPrecondition, match="the layouts differ"):
            await router.generate(ask())
        assert time.monotonic() - began_s < 1
        await network.all_ended()
        assert network.calls_of("decode")[0].cancelled


async def test_decode_that_cannot_be_reached_cancels_everything_fast(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        await network.decode[0].stop()
        began_s = time.monotonic()
        with pytest.raises(Unavailable, match="decode"):
            await router.generate(ask())
        assert time.monotonic() - began_s < 2
        assert network.calls == []


async def test_missing_prefill_reaches_no_decode_and_recovers(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        await network.prefill[0].stop()
        with pytest.raises(Unavailable, match="prefill"):
            for _ in range(20):  # the call may come before the router notices; then the attempt itself fails
                await router.generate(ask())
        num_calls = len(network.calls)
        with pytest.raises(Unavailable, match="no prefill worker is ready"):
            await router.generate(ask())
        assert len(network.calls) == num_calls
        await network.prefill[0].start()
        assert await router.app.wait_ready(5)
        assert (await router.generate(ask(max_tokens=3))).text == "HEL"


async def test_three_failures_in_a_row_are_told(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        network.fail(Point.DECODE_START, Unavailable("overheated"), times=3)
        with pytest.raises(Unavailable, match="overheated"):
            await router.generate(ask())
        assert len(network.calls_of("decode")) == 3
        assert network.calls_of("prefill") == []


async def test_shipments_that_fail_are_the_fault_of_where_they_go(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT, num_decode=2) as network, start_router(network) as router:
        (prefill,), (first, second) = router.app.membership.prefill, router.app.membership.decode
        network.fail(Point.PREFILL_START, TargetUnavailable("it took nothing"), times=2 * FAULTS_TO_OPEN)
        for _ in range(2):  # of three attempts each
            with pytest.raises(Unavailable, match="it took nothing"):
                await router.generate(ask(max_tokens=4))
        assert [one.breaker.is_open(0.0) for one in (prefill, first, second)] == [False, True, True]
        assert (await router.generate(ask(max_tokens=4))).text == "HELL", "with none that is well any will do"
        assert first.breaker.is_open(0.0) is not second.breaker.is_open(0.0), "the one that served is well"


async def test_a_silent_prefill_is_given_up(start_router: StartRouter) -> None:
    async with (
        FakeNetwork(OUTPUT, num_prefill=2) as network,
        start_router(network, progress_timeout_s=0.4) as router,
    ):
        network.hold(Point.PREFILL_START)
        answering = asyncio.create_task(router.generate(ask(max_tokens=4)))
        await network.reached(Point.PREFILL_START)
        network.release(Point.PREFILL_START)
        assert (await answering).token_ids == OUTPUT[:4]
        await network.all_ended()


async def test_bad_requests_do_no_harm(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        for _ in range(20):
            with pytest.raises(InvalidArgument, match="temperature"):
                await router.generate(ask(temperature=-1))
        assert network.calls == []
        assert (await router.generate(ask(max_tokens=5))).text == "HELLO"


# --- cancel, abort, time ---

PHASES = [
    (Point.DECODE_START, 0),
    (Point.PREFILL_START, 0),
    (Point.FIRST_TOKEN_SENT, 0),
    (Point.SHIPPED, 0),
    (Point.COMMITTED, 0),
    (Point.TOKEN, 3),
]


@pytest.mark.parametrize(("point", "index"), PHASES)
async def test_client_cancel_ends_every_call(start_router: StartRouter, point: Point, index: int) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        network.hold(point, index)
        network.hold(Point.TOKEN, 3)
        for round_number in range(1, 6):
            call = router.stub.Generate(ask())
            reading = asyncio.create_task(_drain(call))
            await network.reached(point, index, times=round_number)
            call.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await network.all_ended(1.0)
        assert len({known.spec.id.request_id for known in network.calls}) == 5
        await router.app.drain(1.0)
        assert router.app.serving.num_running == 0
        assert all(worker.num_requests == 0 for worker in router.app.membership.workers)


async def _drain(call: object) -> None:
    async for _ in call:  # type: ignore[attr-defined]
        pass


@pytest.mark.parametrize("by", ["id", "label"])
async def test_abort_ends_with_what_there_is(start_router: StartRouter, by: str) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        network.hold(Point.TOKEN, 3)
        async with router.channel.stream(router.stub.Generate, ask(label="mine"), timeout_s=10) as call:
            messages = aiter(call)
            name = (await anext(messages)).started.server_request_id if by == "id" else "mine"
            ids: list[int] = []
            while len(ids) < 3:
                ids += (await anext(messages)).delta.token_ids
            response = await router.channel.unary(router.stub.Abort, pb.AbortRequest(request_ids=[name, "unknown"]))
            assert list(response.aborted_request_ids) == [name]
            rest = [message async for message in messages]
        assert ids == OUTPUT[:3]
        assert [message.WhichOneof("event") for message in rest] == ["finish", "completed"]
        assert rest[0].finish.finish.reason == types_pb2.FINISH_REASON_CANCELLED
        await network.all_ended()


async def test_duplicate_labels_are_two_requests(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        answers = await asyncio.gather(*(router.generate(ask(label="same", max_tokens=n)) for n in (3, 7)))
        assert [answer.token_ids for answer in answers] == [OUTPUT[:3], OUTPUT[:7]]
        assert len({answer.started.server_request_id for answer in answers}) == 2


async def test_time_limit_ends_with_what_there_is(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        network.hold(Point.TOKEN, 2)
        answer = await router.generate(ask(stopping=pb.StoppingOptions(time_limit_s=0.3)))
        assert answer.token_ids == OUTPUT[: len(answer.token_ids)]
        assert answer.completed.usage.completion_tokens == len(answer.token_ids) <= 2
        assert answer.finish.finish.reason == types_pb2.FINISH_REASON_DEADLINE
        await network.all_ended()


async def test_the_deadline_is_passed_on_and_kept(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        network.hold(Point.PREFILL_START)
        with pytest.raises(DeadlineExceeded):
            await router.generate(ask(), timeout_s=0.3)
        await network.all_ended(1.0)
        for call in network.calls:
            assert 0 < call.spec.deadline_unix_ms / 1000 - time.time() + 1 < 1.5


async def test_a_slow_client_slows_only_itself(start_router: StartRouter) -> None:
    output = [*OUTPUT, *([OUTPUT[0]] * 3000)]  # more messages than the transport's window holds
    async with FakeNetwork(output, max_context=8192) as network, start_router(network) as router:
        async with router.channel.stream(router.stub.Generate, ask(max_tokens=3000), timeout_s=30) as slow:
            messages = aiter(slow)
            await anext(messages)
            await network.reached(Point.TOKEN, 1)
            await network.all_ended(20)  # the workers are done though nothing more is read
            assert (await router.generate(ask(max_tokens=5))).text == "HELLO"
            ids = [token_id async for message in messages for token_id in message.delta.token_ids]
        assert ids == output[:3000]


# --- heartbeats ---


async def test_silence_is_filled_with_heartbeats_while_a_request_is_under_way(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        network.hold(Point.PREFILL_START)
        loop, request = asyncio.get_running_loop(), ask(label="mine", progress_timeout_s=1.5)
        async with router.channel.stream(router.stub.Generate, request, timeout_s=10) as call:
            messages = aiter(call)
            assert [(await anext(messages)).WhichOneof("event") for _ in range(2)] == ["heartbeat", "started"]
            for _ in range(2):
                before_s = loop.time()
                assert (await anext(messages)).HasField("heartbeat")
                assert loop.time() - before_s < 1.5
            await router.stub.Abort(pb.AbortRequest(request_ids=["mine"]))
            kinds = [message.WhichOneof("event") async for message in messages]
            assert [kind for kind in kinds if kind != "heartbeat"] == ["finish", "completed"]
        await network.all_ended()


async def test_a_stream_that_flows_has_one_heartbeat_and_one_that_asked_for_none_has_none(
    start_router: StartRouter,
) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        for request, num_heartbeats in ((ask(progress_timeout_s=60.0), 1), (ask(), 0)):
            answer = await router.generate(request)
            kinds = [message.WhichOneof("event") for message in answer.messages]
            assert kinds.count("heartbeat") == num_heartbeats
            assert answer.token_ids == OUTPUT[:8]


@pytest.mark.parametrize("timeout_s", [0, 0.09, 3601, -1, float("nan"), float("inf")])
async def test_a_silence_that_nobody_can_keep_is_refused_by_field(start_router: StartRouter, timeout_s: float) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        with pytest.raises(InvalidArgument, match=r"progress_timeout_s: must be 0.1 … 3600 seconds, got") as refused:
            await router.generate(ask(progress_timeout_s=timeout_s))
        assert refused.value.field == "progress_timeout_s"


async def test_too_many_requests_are_told_to_come_back(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network, max_queue=1) as router:
        network.hold(Point.PREFILL_START)
        first = asyncio.create_task(router.generate(ask()))
        await network.reached(Point.PREFILL_START)
        with pytest.raises(ResourceExhausted) as refused:
            await router.generate(ask())
        assert refused.value.retry_after_s == 1.0
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await network.all_ended()


async def test_a_request_no_pool_could_hold_is_refused_without_a_retry(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT, num_blocks=2) as network, start_router(network) as router:
        with pytest.raises(ResourceExhausted, match=r"3 KV blocks.*has 2") as refused:
            await router.generate(ask(5, 6, max_tokens=32))
        assert refused.value.retry_after_s is None
        assert len((await router.generate(ask(*range(20, 48), max_tokens=None))).token_ids) == 5


# --- drain ---


async def test_drain_lets_running_requests_end_and_refuses_new_ones(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        network.hold(Point.TOKEN, 3)
        answering = asyncio.create_task(router.generate(ask(max_tokens=5)))
        await network.reached(Point.TOKEN, 3)
        draining = asyncio.create_task(router.app.drain(0.5))
        await asyncio.sleep(0)
        with pytest.raises(RouterDraining, match="shutting down"):
            await router.generate(ask())
        with pytest.raises(RouterDraining, match="shutting down"):
            await answering
        await draining
        await network.all_ended()


async def test_hurry_cuts_the_grace_short(start_router: StartRouter) -> None:
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        network.hold(Point.TOKEN, 3)
        answering = asyncio.create_task(router.generate(ask(max_tokens=5)))
        await network.reached(Point.TOKEN, 3)
        hurry = asyncio.Event()
        hurry.set()
        async with asyncio.timeout(5):
            await router.app.drain(60.0, hurry)
        with pytest.raises((Unavailable, Cancelled)):
            await answering


async def test_the_text_of_a_stop_token_never_slips_out_of_a_message_of_many(start_router: StartRouter) -> None:
    """R072: ids and text end together, however the tokens are grouped."""
    async with FakeNetwork(OUTPUT) as network, start_router(network) as router:
        for network.tokens_per_message in (1, 3, 8):
            answer = await router.generate(ask(stopping=pb.StoppingOptions(stop_token_ids=[OUTPUT[4]])))
            assert (answer.token_ids, answer.text) == (OUTPUT[:5], "HELL")
            assert answer.finish.finish.reason == types_pb2.FINISH_REASON_STOP_TOKEN
            assert answer.completed.usage.completion_tokens == 5
