"""The client with several routers: their shares, and what becomes of a response whose router is lost (R120, R122)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from kvferry import client as client_module
from kvferry import client_resume, client_routers
from kvferry.client import AsyncClient, Completion, GenerateOptions
from kvferry.errors import (
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    KvferryError,
    ResourceExhausted,
    RouterDraining,
    Unavailable,
)
from kvferry.retry_budget import RETRY_BURST
from kvferry.sampling import Finish, FinishKind
from kvferry.wire import finish_to_pb
from proto.kvferry.v1 import inference_pb2 as pb
from proto.kvferry.v1 import types_pb2
from tests.support.fake_router import FakeRouter, start_fake_router
from tests.support.workers import free_address, until

GONE = Unavailable("the router is shutting down")
DRAINING = RouterDraining("the router is shutting down", retry_after_s=1.0)
LENGTH = finish_to_pb(Finish(FinishKind.LENGTH))
OPTIONS = GenerateOptions(prompt="x", n=2)
HANG = "hang"
Step = pb.GenerateResponse | KvferryError | asyncio.Event | str
HEARTBEAT = pb.GenerateResponse(heartbeat=pb.StreamHeartbeat())


def started(number: int = 1, digest: bytes = b"digest") -> Step:
    return pb.GenerateResponse(
        started=pb.Started(
            server_request_id=f"id-{number}",
            model="fake",
            tier="fast",
            sampling=pb.SamplingOptions(seed=99),
            stopping=pb.StoppingOptions(max_tokens=4),
            prompt_digest=digest,
        )
    )


def delta(token_index: int, *token_ids: int, text: str = "", index: int = 0) -> Step:
    return pb.GenerateResponse(
        delta=pb.ChoiceDelta(index=index, token_index=token_index, token_ids=token_ids, text=text)
    )


def finish(num_output_tokens: int, index: int = 0) -> Step:
    return pb.GenerateResponse(finish=pb.ChoiceFinish(index=index, finish=LENGTH, num_output_tokens=num_output_tokens))


COMPLETED = pb.GenerateResponse(completed=pb.Completed(usage=pb.Usage(completion_tokens=5)))
BEGIN: list[Step] = [started(), delta(0, 11, 12, text="é"), delta(0, 21, text="u", index=1), finish(1, 1)]
REST: list[Step] = [started(2), delta(2, 13, 14, text="bc"), finish(4), COMPLETED]


class ScriptedRouter(FakeRouter):
    """Answers call after call as the scripts say, the last one over and over."""

    def __init__(self, *scripts: Sequence[Step]) -> None:
        super().__init__()
        self._scripts = itertools.chain(scripts, itertools.repeat(scripts[-1]))
        self.aborts: list[str] = []
        self.aborted: list[str] = []
        self.num_open = 0

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:  # type: ignore[override]
        self.requests.append(request)
        self.num_open += 1
        try:
            for step in next(self._scripts):
                if isinstance(step, KvferryError):
                    raise step
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, str):
                    await asyncio.Event().wait()
                else:
                    await context.write(step)
        finally:
            self.num_open -= 1

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        found = [name for name in request.request_ids if name in self.aborts]
        self.aborted += found
        return pb.AbortResponse(aborted_request_ids=found)


@asynccontextmanager
async def connected(*routers: FakeRouter, dead: int = 0, **options: Any) -> AsyncIterator[AsyncClient]:
    """A client of the routers, and of some more addresses, first, at which nobody listens."""
    async with AsyncExitStack() as stack:
        addresses = [f"127.0.0.1:{port}" for port in range(1, 1 + dead)]
        for router in routers:
            server, address = await start_fake_router(router)
            stack.push_async_callback(server.drain, 0)
            addresses.append(address)
        yield await stack.enter_async_context(AsyncClient(addresses, **options))


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_resume, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(client_resume, "LONGEST_PAUSE_S", 0.02)


def shown(completion: Completion) -> list[tuple[list[int], str]]:
    return [(choice.token_ids, choice.text) for choice in completion.choices]


# --- a response that has begun ---


async def test_a_response_goes_on_at_another_router() -> None:
    first, second = ScriptedRouter([*BEGIN, GONE]), ScriptedRouter(REST)
    async with connected(first, second) as client:
        completion = await client.complete(OPTIONS)
    assert shown(completion) == [([11, 12, 13, 14], "ébc"), ([21], "u")]
    assert completion.started.server_request_id == "id-1", "the caller sees the one that began it"
    assert completion.usage.completion_tokens == 5
    (asked,), (rest,) = first.requests, second.requests
    assert not asked.HasField("resume") and not asked.sampling.HasField("seed")
    assert (rest.text, rest.sampling.n, rest.sampling.seed, rest.stopping.max_tokens) == ("x", 2, 99, 4)
    assert (rest.model, rest.tier) == ("fake", "fast")
    assert rest.resume == pb.Resume(
        prompt_digest=b"digest",
        server_request_id="id-1",
        choices=[
            pb.ResumedChoice(index=0, token_ids=[11, 12], num_text_chars=1),
            pb.ResumedChoice(index=1, token_ids=[21], num_text_chars=1, finish=LENGTH),
        ],
    )


async def test_a_router_is_told_which_log_probabilities_of_the_prompt_came() -> None:
    def scores(first: int, *logprobs: float) -> Step:
        message = types_pb2.PromptLogprobs(token_index=first)
        message.logprobs.extend(types_pb2.TokenLogprob(logprob=value) for value in logprobs)
        return pb.GenerateResponse(prompt_logprobs=message)

    echo = delta(0, text="x")
    first = ScriptedRouter([started(), echo, scores(1, -0.5, -1.0), GONE])
    second = ScriptedRouter([started(2), scores(3, -1.5), delta(0, 7), finish(1), COMPLETED])
    async with connected(first, second) as client:
        completion = await client.complete(GenerateOptions(prompt="x", prompt_logprobs=0, echo=True))
    assert [one.logprob for one in completion.prompt_logprobs] == [-0.5, -1.0, -1.5]
    assert completion.choices[0].text == "x"
    (rest,) = second.requests
    assert rest.resume.num_prompt_logprobs == 2
    assert rest.resume.choices == [pb.ResumedChoice(index=0, num_text_chars=1)]
    doubled = ScriptedRouter([started(), scores(1, -0.5), scores(1, -0.5)])
    async with connected(doubled) as client:
        with pytest.raises(DataLoss, match="prompt token 1 "):
            await client.complete(GenerateOptions(prompt="x", prompt_logprobs=0))


async def test_a_resume_is_resumed_as_often_as_there_is_progress() -> None:
    lives: list[list[Step]] = [[started(), delta(0, 1), GONE]]
    lives += [[started(number), delta(number, 1), GONE] for number in range(1, 9)]
    lives += [[started(), finish(9), COMPLETED]]
    single = ScriptedRouter(*lives)
    async with connected(single, resume=True) as client:
        completion = await client.complete(GenerateOptions(prompt="x"))
    assert completion.choices[0].token_ids == [1] * 9
    assert [len(request.resume.choices[0].token_ids) for request in single.requests[1:]] == list(range(1, 10))


async def test_a_request_that_breaks_every_router_is_given_up() -> None:
    first, second = ScriptedRouter([*BEGIN, GONE], [started(), GONE]), ScriptedRouter([started(), GONE])
    async with connected(first, second) as client:
        with pytest.raises(Unavailable, match="shutting down"):
            await client.complete(OPTIONS)
    assert len(first.requests) + len(second.requests) == 1 + client_resume.MAX_FRUITLESS_STARTS


async def test_without_progress_the_wait_is_bounded() -> None:
    async with connected(ScriptedRouter([*BEGIN, GONE], [GONE]), resume=True, resume_wait_s=0.1) as client:
        with pytest.raises(Unavailable, match="shutting down"):
            await client.complete(OPTIONS)


async def test_the_deadline_also_ends_the_wait() -> None:
    async with connected(ScriptedRouter([*BEGIN, GONE], [GONE]), resume=True) as client:
        with pytest.raises(DeadlineExceeded):
            await client.complete(OPTIONS, timeout_s=0.2)


@pytest.mark.parametrize("resume", [None, False])
async def test_a_single_router_is_not_waited_for_unless_asked(resume: bool | None) -> None:
    router = ScriptedRouter([*BEGIN, GONE])
    async with connected(router, resume=resume) as client:
        completion = Completion()
        with pytest.raises(Unavailable, match="shutting down"):
            async with client.generate(OPTIONS) as events:
                async for event in events:
                    completion.add(event)
    assert shown(completion) == [([11, 12], "é"), ([21], "u")] and not completion.is_complete
    assert len(router.requests) == 1


async def test_resume_can_be_switched_off_with_several_routers() -> None:
    async with connected(ScriptedRouter([*BEGIN, GONE]), ScriptedRouter(REST), resume=False) as client:
        with pytest.raises(Unavailable):
            await client.complete(OPTIONS)


@pytest.mark.parametrize(
    ("first", "second", "kind", "words"),
    [
        ([started(digest=b""), delta(0, 1), GONE], REST, Unavailable, "shutting down"),
        ([*BEGIN, GONE], [started(digest=b"")], FailedPrecondition, "cannot go on"),
        ([*BEGIN, GONE], [started(), delta(0, 11)], DataLoss, "token 0 came after 2"),
        ([*BEGIN, GONE], [InvalidArgument("tier", "no such tier")], InvalidArgument, "tier: no such tier"),
        ([*BEGIN, DataLoss("a block was wrong")], REST, DataLoss, "a block was wrong"),
    ],
)
async def test_what_cannot_be_mended_fails(
    first: list[Step], second: list[Step], kind: type[KvferryError], words: str
) -> None:
    async with connected(ScriptedRouter(first), ScriptedRouter(second)) as client:
        with pytest.raises(kind, match=words):
            await client.complete(OPTIONS)


async def test_a_time_limit_goes_on_running() -> None:
    first, second = ScriptedRouter([*BEGIN, GONE]), ScriptedRouter(REST)
    async with connected(first, second) as client:
        await client.complete(GenerateOptions(prompt="x", n=2, time_limit_s=5.0))
    assert 0 < second.requests[0].stopping.time_limit_s < 5.0


async def test_leaving_cancels_the_call_wherever_it_is() -> None:
    first, second = ScriptedRouter([*BEGIN, GONE]), ScriptedRouter([started(), delta(2, 13), HANG])
    async with connected(first, second) as client:
        async with client.generate(OPTIONS) as events:
            async for event in events:
                if 13 in event.delta.token_ids:
                    break
            assert (first.num_open, second.num_open) == (0, 1)
        await until(lambda: second.num_open == 0)
        with pytest.raises(StopAsyncIteration):
            await anext(events)


async def test_leaving_while_another_task_reads() -> None:
    router = ScriptedRouter([started(), HANG])
    async with connected(router) as client:
        async with client.generate(OPTIONS) as events:
            await anext(events)
            reading = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await reading


async def test_an_abort_between_two_routers_is_done_by_the_next() -> None:
    single = ScriptedRouter([*BEGIN, GONE], [GONE], [GONE], REST)
    single.aborts = ["id-2"]
    async with connected(single, resume=True) as client, client.generate(OPTIONS) as events:
        async for event in events:
            if event.HasField("finish"):
                break
        reading = asyncio.ensure_future(anext(events))
        await until(lambda: len(single.requests) > 1)
        assert await client.abort("other", "id-1") == ("id-1",)
        await reading
        assert single.aborted == ["id-2"]


# --- a router that hangs ---


async def test_a_router_that_falls_silent_is_lost_within_the_limit() -> None:
    first, second = ScriptedRouter([HEARTBEAT, *BEGIN, HANG]), ScriptedRouter([HEARTBEAT, *REST])
    async with connected(first, second, progress_timeout_s=0.2) as client:
        async with client.generate(OPTIONS) as events:
            shown_events = [event async for event in events]
        assert HEARTBEAT not in shown_events
        completion = Completion()
        for event in shown_events:
            completion.add(event)
        assert shown(completion) == [([11, 12, 13, 14], "ébc"), ([21], "u")]
        await until(lambda: first.num_open == 0)
    assert [request.progress_timeout_s for request in (*first.requests, *second.requests)] == [0.2, 0.2]


@pytest.mark.parametrize("begun", [[], BEGIN[:1]])
async def test_it_may_fall_silent_at_its_first_words(begun: list[Step]) -> None:
    first, second = ScriptedRouter([HEARTBEAT, *begun, HANG]), ScriptedRouter([HEARTBEAT, *BEGIN, *REST[1:]])
    async with connected(first, second, progress_timeout_s=0.2) as client:
        assert (await client.complete(OPTIONS, timeout_s=10.0)).is_complete
    assert len(second.requests) == 1


async def test_heartbeats_keep_a_silent_response_alive() -> None:
    """Over more than two limits in all, none of them passed once."""
    gates = [asyncio.Event() for _ in range(5)]
    beating: list[Step] = [step for gate in gates for step in (gate, HEARTBEAT)]
    first, second = ScriptedRouter([HEARTBEAT, *BEGIN, *beating, *REST[1:]]), ScriptedRouter(REST)
    loop = asyncio.get_running_loop()
    async with connected(first, second, progress_timeout_s=2.0) as client:
        answering = asyncio.ensure_future(client.complete(OPTIONS))
        for gate in gates:
            end_s = loop.time() + 0.6
            await until(lambda end_s=end_s: loop.time() > end_s)  # type: ignore[misc]
            gate.set()
        assert shown(await answering) == [([11, 12, 13, 14], "ébc"), ([21], "u")]
    assert second.requests == []


async def test_a_router_that_has_no_heartbeats_may_be_silent() -> None:
    """One of an older version, whose first token may take long."""
    gate, loop = asyncio.Event(), asyncio.get_running_loop()
    first, second = ScriptedRouter([BEGIN[0], gate, *BEGIN[1:], *REST[1:]]), ScriptedRouter(REST)
    async with connected(first, second, progress_timeout_s=0.1) as client:
        answering = asyncio.ensure_future(client.complete(OPTIONS))
        await until(lambda: first.num_open == 1)
        end_s = loop.time() + 0.5
        await until(lambda: loop.time() > end_s)
        gate.set()
        assert shown(await answering) == [([11, 12, 13, 14], "ébc"), ([21], "u")]
    assert second.requests == []


async def test_silence_at_a_single_router_fails_only_where_it_was_bounded() -> None:
    async with connected(ScriptedRouter([HEARTBEAT, *BEGIN, HANG]), progress_timeout_s=0.2) as client:
        words = r"the router at 127\.0\.0\.1:\d+ made no progress for 0\.2 s"
        with pytest.raises(Unavailable, match=words):
            await client.complete(OPTIONS)


async def test_a_request_that_a_router_never_answers_goes_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_resume, "FIRST_MESSAGE_TIMEOUT_S", 0.3)
    first, second = ScriptedRouter([HANG]), ScriptedRouter([*BEGIN, *REST[1:]])
    async with connected(first, second, progress_timeout_s=0.1) as client:
        assert (await client.complete(OPTIONS)).is_complete
    assert len(first.requests) == 1 and not second.requests[0].HasField("resume")


async def test_a_router_that_is_known_to_have_heartbeats_is_borne_no_longer_before_it_begins() -> None:
    first = ScriptedRouter([HEARTBEAT, *BEGIN, *REST[1:]], [HANG])
    second = ScriptedRouter([*BEGIN, *REST[1:]])
    async with connected(first, second, progress_timeout_s=0.1) as client:
        for _ in range(3):
            assert (await client.complete(OPTIONS, timeout_s=5.0)).is_complete
    assert (len(first.requests), len(second.requests)) == (2, 2)


async def test_one_request_at_a_time_tries_a_router_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_resume, "FIRST_MESSAGE_TIMEOUT_S", 0.3)
    monkeypatch.setattr(client_routers, "AVOID_FAILED_S", 0.0)
    hanging, serving = ScriptedRouter([HANG]), ScriptedRouter([*BEGIN, *REST[1:]])
    async with connected(hanging, serving, progress_timeout_s=0.1) as client:
        await client.complete(OPTIONS)
        await asyncio.gather(*(client.complete(OPTIONS) for _ in range(8)))
    assert len(hanging.requests) == 2


async def test_while_one_request_tries_a_router_others_do_not_go_to_one_that_failed_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With none left that is well."""
    routers = client_routers.Routers(["127.0.0.1:1", "127.0.0.1:2"])
    first, second = routers.all
    monkeypatch.setattr(client_routers, "AVOID_FAILED_S", 0.0)
    first.failed()
    monkeypatch.setattr(client_routers, "AVOID_FAILED_S", 5.0)
    second.failed()
    assert [routers.next() for _ in range(3)] == [first] * 3
    first.answered()
    assert [routers.next() for _ in range(3)] == [first] * 3
    second.answered()
    assert {routers.next(), routers.next()} == {first, second}
    await routers.close()


async def test_silence_is_bounded_by_default_where_another_router_can_go_on() -> None:
    first, second = ScriptedRouter([*BEGIN, *REST[1:]]), ScriptedRouter([*BEGIN, *REST[1:]])
    async with connected(first, second) as client:
        await client.complete(OPTIONS)
    async with connected(second, resume=True) as client:
        await client.complete(OPTIONS)
    assert first.requests[0].progress_timeout_s == 10.0
    assert not second.requests[0].HasField("progress_timeout_s")


@pytest.mark.parametrize("timeout_s", [0.0, 0.09, 3601.0, float("nan")])
def test_a_limit_that_no_router_takes_is_refused(timeout_s: float) -> None:
    with pytest.raises(InvalidArgument, match=r"progress_timeout_s: must be 0\.1 … 3600 seconds"):
        AsyncClient("127.0.0.1:1", progress_timeout_s=timeout_s)


# --- a request of which nothing has come ---


async def test_a_new_request_goes_to_another_router() -> None:
    refusing, serving = ScriptedRouter([GONE]), ScriptedRouter([*BEGIN, *REST[1:]])
    async with connected(refusing, serving, dead=1, resume=False) as client:
        assert (await client.complete(OPTIONS)).is_complete
        assert (await client.complete(OPTIONS)).is_complete
    assert len(refusing.requests) == 1, "it is left alone for a while"
    assert not any(request.HasField("resume") for request in serving.requests)


async def test_each_router_is_asked_once_and_other_errors_are_final() -> None:
    routers = [ScriptedRouter([GONE]) for _ in range(3)]
    async with connected(*routers) as client:
        with pytest.raises(Unavailable):
            await client.complete(OPTIONS)
    assert [len(router.requests) for router in routers] == [1, 1, 1]
    full, other = ScriptedRouter([ResourceExhausted("full", retry_after_s=1.0)]), ScriptedRouter(BEGIN)
    async with connected(full, other) as client:
        with pytest.raises(ResourceExhausted):
            await client.complete(OPTIONS)
    assert len(other.requests) == 0


async def test_routers_that_all_refuse_get_little_more_than_the_load() -> None:
    routers, num_requests = [ScriptedRouter([GONE]) for _ in range(2)], 100
    async with connected(*routers) as client:
        for _ in range(num_requests):
            with pytest.raises(Unavailable):
                await client.complete(OPTIONS)
    num_calls = sum(len(router.requests) for router in routers)
    most = max(num_requests * (1 + client_routers.REPEAT_SHARE), num_requests + RETRY_BURST)
    assert num_requests < num_calls <= most


async def test_a_router_that_drains_is_left_alone_while_its_streams_go_on() -> None:
    draining = ScriptedRouter([started(), delta(0, 11), delta(1, 12), delta(2, 13), HANG], [DRAINING])
    serving = ScriptedRouter([*BEGIN, *REST[1:]])
    async with connected(draining, serving) as client, client.generate(OPTIONS) as events:
        for token_id in (11, 12, 13):
            while token_id not in (await anext(events)).delta.token_ids:
                pass
            for _ in range(2):
                await client.complete(OPTIONS)
    assert len(draining.requests) == 2, "the stream, and the one that was refused"


async def test_an_order_to_go_elsewhere_costs_nothing_of_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_routers, "AVOID_FAILED_S", 0.0)  # as if they came seconds apart
    draining, serving = ScriptedRouter([DRAINING]), ScriptedRouter([*BEGIN, *REST[1:]])
    async with connected(draining, serving) as client:
        for _ in range(60):
            await client.complete(OPTIONS)
    assert len(draining.requests) > 2 * RETRY_BURST, "it did refuse more than the budget has"


async def test_a_router_that_cannot_be_reached_costs_nothing_of_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_routers, "AVOID_FAILED_S", 0.0)
    serving = ScriptedRouter([*BEGIN, *REST[1:]])
    async with connected(serving, dead=1) as client:
        for _ in range(60):
            await client.complete(OPTIONS)
    assert len(serving.requests) == 60


async def test_a_new_request_meets_a_router_that_is_just_back_where_the_other_one_drains() -> None:
    """The client finds out later than whoever restarts them: its channel tries to connect now and then only."""
    draining, back = ScriptedRouter([DRAINING]), ScriptedRouter([*BEGIN, *REST[1:]])
    address = free_address()
    async with AsyncExitStack() as stack:
        other, other_address = await start_fake_router(draining)
        stack.push_async_callback(other.drain, 0)
        client = await stack.enter_async_context(AsyncClient([address, other_address]))
        completing = asyncio.ensure_future(client.complete(OPTIONS))
        await until(lambda: len(draining.requests) == 1)
        server, _ = await start_fake_router(back, address)
        stack.push_async_callback(server.drain, 0)
        assert (await completing).is_complete
    assert len(draining.requests) == 1, "who saw it and refused it is not asked again"


async def test_the_wait_for_routers_that_are_gone_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_resume, "RECONNECT_WAIT_S", 0.1)
    async with connected(dead=2) as client:
        with pytest.raises(Unavailable, match="Connection refused"):
            await client.complete(OPTIONS)
        monkeypatch.setattr(client_resume, "RECONNECT_WAIT_S", 60.0)
        with pytest.raises(DeadlineExceeded):
            await client.complete(OPTIONS, timeout_s=0.2)


# --- all routers ---


async def test_every_router_gets_its_share() -> None:
    routers = [ScriptedRouter([*BEGIN, *REST[1:]]) for _ in range(3)]
    async with connected(*routers) as client:
        for _ in range(9):
            await client.complete(OPTIONS)
    assert [len(router.requests) for router in routers] == [3, 3, 3]


async def test_abort_reaches_the_router_that_runs_the_request() -> None:
    routers = [ScriptedRouter(BEGIN), ScriptedRouter(BEGIN)]
    routers[0].aborts, routers[1].aborts = ["b"], ["a", "b"]
    async with connected(*routers, dead=1) as client:
        assert await client.abort("a", "b", "c", "a") == ("a", "b")
    async with connected(dead=2) as client:
        with pytest.raises(Unavailable):
            await client.abort("a")


async def test_plain_calls_go_to_a_router_that_is_there() -> None:
    async with connected(FakeRouter(), dead=2) as client:
        assert [(await client.capabilities()).model for _ in range(4)] == ["fake"] * 4
    async with connected(dead=2) as client:
        with pytest.raises(Unavailable):
            await client.workers()


async def test_plain_calls_do_not_stay_at_a_router_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(FakeRouter):
        async def GetCapabilities(self, request: Any, context: Any) -> Any:
            await asyncio.Event().wait()

    monkeypatch.setattr(client_module, "CONTROL_TIMEOUT_S", 2.0)
    async with connected(Hanging(), FakeRouter()) as client:
        assert [(await client.capabilities()).model for _ in range(2)] == ["fake"] * 2
    async with connected(Hanging()) as client:
        with pytest.raises(DeadlineExceeded):
            await client.capabilities()


def test_a_client_needs_a_router() -> None:
    with pytest.raises(InvalidArgument, match="at least one"):
        AsyncClient([])
