"""Blocks that arrive wrong, late, twice or not at all, and shipments under a wrong name: never another token."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from engine.sequence import SequenceStatus
from engine.specs import sequence_from_spec
from kvferry.client import GenerateOptions
from kvferry.errors import DataLoss, FailedPrecondition, KvferryError, NotFound, Unavailable
from kvferry.rpc import RpcChannel
from kvferry.spec import AttemptId
from kvtransfer.codec import receiver_message_from_pb, sender_message_to_bytes
from kvtransfer.faults import Fault, FaultKind
from kvtransfer.frames import cut_block
from kvtransfer.messages import Alive, BlockFrame, Commit, CommitAck, Offer, ReceiverMessage, SenderMessage, Want
from tests.support.deployment import chat_folder, deployment_config, running_deployment
from tests.support.pair import FULL_BLOCKS, Pair, scripted_pair
from tests.support.pair_request import Ending, PairRequest, failure_of
from tests.support.shipping import ship_call
from tests.support.workers import core_of, set_faults, until

FOR_EVER_S = 60.0
EVERY_BLOCK = range(FULL_BLOCKS + 1)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    async with scripted_pair(tmp_path / "model") as pair:
        yield pair
        await pair.check_serves()
        await pair.check_idle()


# -- blocks -----------------------------------------------------------------------------------------------------------


async def test_a_block_that_arrives_wrong_once_is_sent_again(pair: Pair) -> None:
    for number, block_index in enumerate(EVERY_BLOCK, 1):
        pair.set_faults(Fault(FaultKind.CORRUPT, block_index, nth=1))
        request = await pair.check_serves()
        assert request.result.done is not None and request.result.done.num_nacks == 1
        assert request.result.done.num_blocks_shipped == FULL_BLOCKS + 1
        assert [worker.role.load().num_nacks for worker in (pair.prefill, pair.decode)] == [number, number]
    pair.set_faults()


async def test_all_blocks_that_arrive_wrong_once_are_sent_again(pair: Pair) -> None:
    pair.set_faults(*(Fault(FaultKind.CORRUPT, block_index, nth=1) for block_index in EVERY_BLOCK))
    request = await pair.check_serves()
    assert request.result.done is not None and request.result.done.num_nacks == FULL_BLOCKS + 1
    pair.set_faults()


@pytest.mark.parametrize("block_index", [0, 2, FULL_BLOCKS])
async def test_a_block_that_arrives_wrong_twice_fails_the_attempt_and_the_next_one_works(
    pair: Pair, block_index: int
) -> None:
    prompt, name = pair.prompts.draw(), pair.prompts.next_id()
    pair.set_faults(Fault(FaultKind.CORRUPT, block_index))
    request = pair.begin(prompt, request_id=name)
    failure = await failure_of(request.prefill)
    assert isinstance(failure, DataLoss) and f"block {block_index} " in failure.message
    await until(lambda: pair.num_used_blocks(pair.decode) == 0 and pair.num_used_blocks(pair.prefill) == 0)
    assert not request.decode.done()  # the call is the router's to end
    await request.end(Ending.DECODE)
    pair.set_faults()
    retry = await pair.check_serves(prompt, request_id=name, attempt=2)
    assert retry.result.first_token is not None and retry.result.done is not None
    assert retry.result.first_token.num_cached_tokens == 4 * block_index  # from there on prefill's own may be wrong
    assert retry.result.done.num_blocks_reused == block_index  # what had arrived well is not lost
    await request.end(Ending.CHANNELS)


@pytest.mark.parametrize("kind", [FaultKind.DROP, FaultKind.DUPLICATE])
async def test_a_block_that_is_missing_or_comes_twice_fails_the_attempt_and_the_next_one_works(
    pair: Pair, kind: FaultKind
) -> None:
    for block_index in EVERY_BLOCK:
        prompt, name = pair.prompts.draw(), pair.prompts.next_id()
        pair.set_faults(Fault(kind, block_index))
        request = pair.begin(prompt, request_id=name)
        failure = await failure_of(request.prefill)
        assert isinstance(failure, Unavailable) and f"block {block_index}" in failure.message
        await until(lambda: pair.num_used_blocks(pair.decode) == 0 and pair.num_used_blocks(pair.prefill) == 0)
        assert not request.decode.done() and request.result.committed is None
        await request.end(Ending.CHANNELS)
        pair.set_faults()
        await pair.check_serves(prompt, request_id=name, attempt=2)


async def test_a_late_block_delays_its_own_request_alone(pair: Pair) -> None:
    pair.delay_block(3, FOR_EVER_S)
    num_arrived = pair.num_arrived_blocks
    late = pair.begin()
    await until(lambda: pair.num_arrived_blocks == num_arrived + 3)
    pair.set_faults()
    for _ in range(5):
        await pair.check_serves()
    assert not late.decode.done() and not late.prefill.done()
    await late.end(Ending.BOTH)
    await late.end(Ending.CHANNELS)
    pair.set_faults(*(Fault(FaultKind.DELAY, block_index, delay_s=0.01) for block_index in EVERY_BLOCK))
    await pair.check_serves()
    pair.set_faults()


async def test_random_faults_under_load_never_change_a_token(pair: Pair) -> None:
    rng = random.Random(0)

    def some_faults() -> list[Fault]:
        kinds = [kind for kind in FaultKind if kind is not FaultKind.STALL and rng.random() < 0.3]  # stalls are slow
        return [
            Fault(kind, rng.choice(EVERY_BLOCK), nth=rng.choice([1, None]), delay_s=rng.random() / 100)
            for kind in kinds
        ]

    async def client() -> None:
        for _ in range(10):
            pair.set_faults(*some_faults())
            prompt, name = pair.prompts.draw(), pair.prompts.next_id()
            for attempt in range(1, 100):
                request = pair.begin(prompt, request_id=name, attempt=attempt)
                try:
                    await request.finished()
                except (DataLoss, Unavailable):
                    pair.set_faults(*some_faults())
                    continue
                assert pair.prompts.is_right(request)
                break

    await asyncio.gather(*(client() for _ in range(8)))
    assert pair.decode.role.load().num_nacks > 5
    pair.set_faults()


# -- names ------------------------------------------------------------------------------------------------------------


def offer_of(pair: Pair, request: PairRequest, **changes: Any) -> Offer:
    """What prefill would offer for a request."""
    core = core_of(pair.decode)
    sequence = sequence_from_spec(request.spec, core, arrival=0)
    num_tokens = len(request.spec.token_ids)
    hashes = tuple(sequence.block_hashes(num_tokens // core.layout.block_size, core.layout.block_size))
    epoch = pair.decode.context.identity.epoch
    return dataclasses.replace(Offer(request.spec.id, epoch, core.layout, hashes, num_tokens, 5.0), **changes)


async def answer_to(pair: Pair, *messages: SenderMessage) -> ReceiverMessage:
    """The answer to the last of these messages, the first one's awaited before the second; raises what is refused."""
    async with (
        RpcChannel(pair.decode.address) as channel,
        ship_call(channel) as call,
    ):
        for number, message in enumerate(messages):
            if number == 1:
                await next_answer(call)
            await call.write(sender_message_to_bytes(message))
        return await next_answer(call)


async def next_answer(call: Any) -> ReceiverMessage:
    while (answer := await call.read()) is not grpc.aio.EOF:
        if not answer.HasField("heartbeat"):
            return receiver_message_from_pb(answer)
    raise AssertionError("the stream ended with status OK")


REFUSED_OFFERS: dict[str, tuple[dict[str, Any], type[KvferryError], str]] = {
    "an attempt that is not registered": ({"id": AttemptId("nobody", 1)}, NotFound, "nobody/1"),
    "an attempt that is over": ({"id": AttemptId("held", 1)}, NotFound, "held/1"),
    "an attempt that is still to come": ({"id": AttemptId("held", 3)}, NotFound, "held/3"),
    "another life of the worker": ({"receiver_epoch": 4}, FailedPrecondition, "epoch"),
    "another prompt": ({"block_hashes": (b"x" * 32,) * FULL_BLOCKS}, FailedPrecondition, "being shipped already"),
    "another length": ({"num_tokens": 21}, FailedPrecondition, "being shipped already"),
    "the very shipment under way": ({}, FailedPrecondition, "being shipped already"),
}


async def test_offers_that_are_refused_leave_the_shipment_under_way_alone(pair: Pair) -> None:
    pair.delay_block(3, 1.0)
    num_arrived = pair.num_arrived_blocks
    held = pair.begin(request_id="held", attempt=2)
    await until(lambda: pair.num_arrived_blocks == num_arrived + 3)
    num_used = pair.num_used_blocks(pair.decode)
    for changes, kind, words in REFUSED_OFFERS.values():
        with pytest.raises(kind, match=words):
            await answer_to(pair, offer_of(pair, held, **changes))
    assert held.result.committed is None, "the delay was too short for this machine"
    assert pair.num_used_blocks(pair.decode) == num_used, "the first shipment's reservation is freed"
    await held.finished()
    assert pair.prompts.is_right(held)
    pair.set_faults()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_hashes": (b"x" * 32,) * FULL_BLOCKS}, "not those of the registered sequence"),
        ({"num_tokens": 23}, "num_tokens: 23 offered, 22 registered"),
        ({"num_tokens": 20}, "num_tokens: 20 offered, 22 registered"),
    ],
)
async def test_an_offer_of_something_else_reserves_nothing(pair: Pair, changes: dict[str, Any], words: str) -> None:
    async with registered(pair) as request:
        with pytest.raises(FailedPrecondition, match=words):
            await answer_to(pair, offer_of(pair, request, **changes))
        assert pair.num_used_blocks(pair.decode) == 0
        assert await answer_to(pair, offer_of(pair, request)) == Want(tuple(EVERY_BLOCK))


@asynccontextmanager
async def registered(pair: Pair) -> AsyncIterator[PairRequest]:
    """An attempt that decode expects and nobody prefills."""
    request = pair.begin(stop_token_ids=(7,))
    request.prefill.cancel()
    try:
        await request.registered
        yield request
    finally:
        await request.end(Ending.CHANNELS)


async def test_an_offer_for_a_committed_attempt_changes_nothing(tmp_path: Path) -> None:
    """ALREADY_COMMITTED while it decodes; unknown when it is over."""
    async with scripted_pair(tmp_path / "model", step_delay_s=0.005) as pair:
        request = pair.begin(max_tokens=30)
        await request.has_tokens(3)
        for _ in range(5):
            assert await answer_to(pair, offer_of(pair, request)) == CommitAck(already_committed=True)
        await request.finished()
        assert pair.prompts.is_right(request)
        await pair.check_idle()
        with pytest.raises(NotFound):
            await answer_to(pair, offer_of(pair, request))


async def test_a_shipment_that_broke_may_be_begun_again(pair: Pair) -> None:
    """Within the same attempt: the first one's reservation is freed, the second one gets its own."""
    async with registered(pair) as request:
        for _ in range(10):
            assert await answer_to(pair, offer_of(pair, request)) == Want(tuple(EVERY_BLOCK))  # and hangs up
            await until(lambda: pair.num_used_blocks(pair.decode) == 0)


def frame(request: PairRequest, block_index: int, **changes: Any) -> BlockFrame:
    """A block of zeros with the right digest."""
    made = cut_block(bytes(32), id=request.spec.id, block_index=block_index, num_tokens=4)[0]
    return dataclasses.replace(made, **changes)


def rest_of(request: PairRequest) -> list[BlockFrame]:
    """All blocks of a request."""
    full = [frame(request, index) for index in range(FULL_BLOCKS)]
    return [*full, frame(request, FULL_BLOCKS, num_tokens=2)]


STRANGER = AttemptId("stranger", 1)
MISFITS: dict[str, Callable[[PairRequest], list[SenderMessage]]] = {
    "a block frame of another attempt": lambda request: [frame(request, 0, id=STRANGER)],
    "a Commit of another attempt": lambda request: [*rest_of(request), Commit(STRANGER, (1,))],
    "a Commit without block 5": lambda request: [*rest_of(request)[:-1], Commit(request.spec.id, (1,))],
    "block 6 is not wanted": lambda request: [frame(request, 6)],
    "at offset 8, 0 due": lambda request: [frame(request, 0, offset=8)],
    "33 bytes, a block has 32": lambda request: [frame(request, 0, payload=bytes(33))],
    "a digest of 0 bytes, 16 due": lambda request: [frame(request, 0, digest=b"")],
    "3 tokens, 4 due": lambda request: [frame(request, 0, num_tokens=3)],
    "4 tokens, 2 due": lambda request: [frame(request, FULL_BLOCKS)],
    "block 0 again, which is verified": lambda request: [frame(request, 0), frame(request, 0)],
    "2 tokens for 1 choices": lambda request: [*rest_of(request), Commit(request.spec.id, (1, 2))],
    "token 7 ends the sequence": lambda request: [*rest_of(request), Commit(request.spec.id, (7,))],
}


async def test_messages_that_do_not_fit_fail_their_shipment_and_free_it(pair: Pair) -> None:
    for words, messages_for in MISFITS.items():
        async with registered(pair) as request:
            with pytest.raises(FailedPrecondition, match=words):
                await answer_to(pair, offer_of(pair, request), *messages_for(request))
            await until(lambda: pair.num_used_blocks(pair.decode) == 0)
            assert not request.decode.done()


async def test_a_shipment_that_does_not_begin_with_an_offer_is_refused(pair: Pair) -> None:
    async with registered(pair) as request:
        for message in (Alive(), frame(request, 0), Commit(request.spec.id, (1,))):
            with pytest.raises(FailedPrecondition, match="before the Offer"):
                await answer_to(pair, message)


# -- the sender's own memory ------------------------------------------------------------------------------------------


async def test_a_cached_block_of_prefill_that_changes_is_computed_again(tmp_path: Path) -> None:
    """Prefill would compute its tail, and the first token, from it."""
    config = deployment_config(chat_folder(tmp_path / "model"))
    options = GenerateOptions(prompt=list(range(20, 43)), max_tokens=8, temperature=0.0, ignore_eos=True)
    async with running_deployment(config) as deployment:
        prefill, decode = core_of(deployment.prefill[0]), core_of(deployment.decode[0])
        right = (await deployment.client.complete(options)).choices[0].token_ids
        for number in range(5):
            decode.pool.flush()
            blocks = sorted(prefill.pool.published_blocks())
            prefill.runner.block_view(blocks[number])[3] ^= 1
            answer = await deployment.client.complete(options)
            assert answer.choices[0].token_ids == right
            assert answer.timings.num_attempts == 1
        assert prefill.block_manager.num_unsound_hits == 5
        await deployment.assert_idle()


async def test_a_block_that_changes_before_it_is_sent_never_runs(tmp_path: Path) -> None:
    """Its digest was made when it filled, so decode finds out; the router tries again, and all is computed anew."""
    config = deployment_config(chat_folder(tmp_path / "model"))
    options = GenerateOptions(prompt=list(range(20, 60)), max_tokens=8, temperature=0.0, ignore_eos=True)
    async with running_deployment(config) as deployment:
        right = (await deployment.client.complete(options)).choices[0].token_ids
        await deployment.assert_idle()  # the block to change is the next request's, not one of this one
        prefill, decode = core_of(deployment.prefill[0]), core_of(deployment.decode[0])
        prefill.pool.flush()
        decode.pool.flush()
        set_faults(deployment.prefill[0], Fault(FaultKind.DELAY, 0, nth=1, delay_s=0.2))
        call = asyncio.ensure_future(deployment.client.complete(options))
        await until(lambda: any(one.status is SequenceStatus.HELD for one in prefill.sequences.values()))
        (sequence,) = prefill.sequences.values()
        prefill.runner.block_view(sequence.block_table[1])[:] = bytes(prefill.layout.block_bytes)
        answer = await call
        assert answer.choices[0].token_ids == right
        assert answer.timings.num_attempts == 2
        await deployment.assert_idle()
