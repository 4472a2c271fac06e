"""The bounds of the router: what waits for a client, what is in flight, what is retried."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.errors import ResourceExhausted, Unavailable
from kvferry.retry_budget import RETRY_BURST, RetryBudget
from proto.kvferry.v1 import inference_pb2 as pb
from proto.kvferry.v1 import types_pb2
from router.admission import Admission
from router.outbox import MAX_MERGED_TOKENS, Outbox, beating
from tests.support.workers import until


def delta(index: int, *token_ids: int, text: str = "") -> pb.GenerateResponse:
    return pb.GenerateResponse(delta=pb.ChoiceDelta(token_index=index, position=index, token_ids=token_ids, text=text))


async def test_deltas_that_wait_are_merged_in_order() -> None:
    outbox = Outbox()
    outbox.put(pb.GenerateResponse(started=pb.Started(model="m")))
    outbox.put(delta(0, text="a"))
    outbox.put(delta(0, 5, text="b"))
    outbox.put(delta(1, 6))
    outbox.put(pb.GenerateResponse(finish=pb.ChoiceFinish()))
    outbox.close()
    kinds = [await outbox.take() for _ in range(4)]
    assert [message.WhichOneof("event") if message else None for message in kinds] == [
        "started",
        "delta",
        "finish",
        None,
    ]
    assert kinds[1] == delta(0, 5, 6, text="ab")


async def test_no_token_slips_before_the_log_probabilities_of_the_prompt() -> None:
    """Into the text of an echoed prompt that still waits."""
    outbox, scores = Outbox(), pb.GenerateResponse(prompt_logprobs=types_pb2.PromptLogprobs(token_index=1))
    for message in (delta(0, text="prompt"), scores, delta(0, 5, text="a"), delta(1, 6, text="b")):
        outbox.put(message)
    assert outbox.take_all() == [delta(0, text="prompt"), scores, delta(0, 5, 6, text="ab")]


async def test_deltas_of_choices_are_merged_each_for_itself() -> None:
    outbox = Outbox()
    for choice, token_id in ((0, 5), (1, 6), (0, 7), (1, 8)):
        message = delta(0 if token_id < 7 else 1, token_id)
        message.delta.index = choice
        outbox.put(message)
    first, second = (message.delta for message in outbox.take_all())
    assert (first.index, list(first.token_ids)) == (0, [5, 7])
    assert (second.index, list(second.token_ids)) == (1, [6, 8])
    outbox.put(delta(2, 9))
    assert await outbox.take() == delta(2, 9), "what was taken is not merged into"
    outbox.put(delta(3, 9))
    assert await outbox.take() == delta(3, 9)


async def test_merging_is_bounded() -> None:
    outbox = Outbox()
    for index in range(MAX_MERGED_TOKENS * 2):
        outbox.put(delta(index, index))
    first, second = await outbox.take(), await outbox.take()
    assert first is not None
    assert second is not None
    assert second.delta.token_index == len(first.delta.token_ids) == MAX_MERGED_TOKENS


async def test_the_error_comes_after_what_was_put_before_it() -> None:
    outbox = Outbox()
    outbox.put(delta(0, 5))
    outbox.close(Unavailable("gone"))
    outbox.close()
    assert await outbox.take() == delta(0, 5)
    with pytest.raises(Unavailable, match="gone"):
        await outbox.take()


async def test_a_consumer_that_waits_is_woken() -> None:
    outbox = Outbox()
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    outbox.put(delta(0, 5))
    assert await taking == delta(0, 5)


# --- heartbeats ---

HEARTBEAT = pb.GenerateResponse(heartbeat=pb.StreamHeartbeat())
STARTED = pb.GenerateResponse(started=pb.Started(model="m"))


async def test_a_heartbeat_comes_before_started_and_in_every_silence() -> None:
    outbox, loop = Outbox(heartbeat_interval_s=0.1), asyncio.get_running_loop()
    outbox.put(STARTED)
    outbox.put(delta(0, 5))
    assert [await outbox.take() for _ in range(3)] == [HEARTBEAT, STARTED, delta(0, 5)]
    for _ in range(2):
        before_s = loop.time()
        assert await outbox.take() == HEARTBEAT
        assert loop.time() - before_s > 0.09
    outbox.close()
    assert await outbox.take() is None, "there is no heartbeat of a request that has ended"


async def test_what_comes_in_time_takes_the_place_of_a_heartbeat() -> None:
    outbox = Outbox(heartbeat_interval_s=1200)
    taking = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    outbox.put(delta(0, 5))
    assert await taking == delta(0, 5)


async def test_a_client_that_takes_nothing_gets_no_heap_of_heartbeats() -> None:
    """One is made when it can be written, so none waits behind another."""
    outbox, loop = Outbox(heartbeat_interval_s=0.01), asyncio.get_running_loop()
    outbox.put(delta(0, 5))
    end_s = loop.time() + 0.2
    await until(lambda: loop.time() > end_s)
    outbox.close()
    assert [await outbox.take(), await outbox.take()] == [delta(0, 5), None]


async def test_no_heartbeats_unless_asked_for() -> None:
    outbox = Outbox()
    outbox.put(STARTED)
    outbox.put(delta(0, 5))
    assert [await outbox.take(), await outbox.take()] == [STARTED, delta(0, 5)]


async def test_work_before_the_response_is_filled_with_heartbeats() -> None:
    has_beaten, written = asyncio.Event(), []

    async def write(message: pb.GenerateResponse) -> None:
        written.append(message)
        has_beaten.set()

    async def work() -> str:
        await has_beaten.wait()
        return "done"

    assert await beating(work(), write, 0.01) == "done"
    assert written and all(message == HEARTBEAT for message in written)
    assert await beating(work(), write, None) == "done"


async def test_a_client_that_goes_before_the_response_ends_the_work() -> None:
    was_cancelled = asyncio.Event()

    async def write(message: pb.GenerateResponse) -> None:
        raise Unavailable("the client went away")

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            was_cancelled.set()

    with pytest.raises(Unavailable):
        await beating(work(), write, 0.01)
    assert was_cancelled.is_set()


# --- admission ---


def test_admission_gives_places_back() -> None:
    admission = Admission(1)
    for _ in range(3):
        with admission.admit(), pytest.raises(ResourceExhausted, match="at most 1") as refused, admission.admit():
            pass
        assert refused.value.retry_after_s == 1.0
    assert admission.num_requests == 0


def test_retries_are_a_share_of_requests_after_a_burst() -> None:
    budget = RetryBudget(0.1, max_saved=1)
    assert sum(budget.take() for _ in range(100)) == RETRY_BURST
    for _ in range(100):  # their share is the burst
        budget.add_request()
    assert not budget.take()
    for _ in range(21):
        budget.add_request()
    assert [budget.take() for _ in range(3)] == [True, True, False]


def test_retries_are_saved_for_a_fault_that_hits_all_requests_in_flight() -> None:
    budget = RetryBudget(0.5, max_saved=40)
    for _ in range(1000):
        budget.add_request()
    assert sum(budget.take() for _ in range(1000)) == 40
    for _ in range(10):
        budget.add_request()
    assert [budget.take() for _ in range(6)] == [True] * 5 + [False]
