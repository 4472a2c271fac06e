"""Both state machines joined by two queues, driven through random orders of delivery, progress, grants and damage."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from kvferry.block_digest import block_digest
from kvferry.errors import DataLoss, KvferryError
from kvtransfer.frames import cut_block
from kvtransfer.messages import Alive, BlockFrame, Commit, CommitAck, Nack, ReceiverMessage, Region, SenderMessage, Want
from kvtransfer.receiver import (
    CommitSequence,
    ReceiveFailed,
    ReceiveFinished,
    ReceiverAction,
    ReceiverState,
    RequestGrant,
    SendCommitAck,
    SendNack,
    SendWant,
    ShipReceiver,
    VerifyBlock,
    WriteFrame,
)
from kvtransfer.sender import (
    SendBlock,
    SendCommit,
    SenderAction,
    SenderState,
    SendOffer,
    ShipFailed,
    ShipFinished,
    ShipSender,
    ShipSummary,
)
from tests.unit.kvtransfer.support import ATTEMPT, EPOCH, LAYOUT, contents_of, make_offer


@dataclasses.dataclass(frozen=True)
class Plan:
    num_tokens: int
    held: frozenset[int]
    num_damaged: dict[int, int]  # sendings of a block that arrive damaged, from the first on
    max_frame_bytes: int
    choices: list[int]  # which of the possible next steps is taken; 0 when they run out


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    num_tokens = draw(st.integers(1, 22))
    num_full = num_tokens // LAYOUT.block_size
    held = draw(st.frozensets(st.integers(0, max(num_full - 1, 0)), max_size=num_full)) if num_full else frozenset()
    damaged = draw(
        st.dictionaries(st.integers(0, LAYOUT.num_blocks_for(num_tokens) - 1), st.integers(1, 2), max_size=2)
    )
    frame_bytes = draw(st.sampled_from([30, 64, 128]))
    return Plan(num_tokens, held, damaged, frame_bytes, draw(st.lists(st.integers(0, 9), max_size=120)))


class Pair:
    """The two ends, what is on the way between them, and what their surroundings still owe them."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.sender = ShipSender(make_offer(plan.num_tokens))
        self.receiver = ShipReceiver(layout=LAYOUT, epoch=EPOCH, max_frame_bytes=plan.max_frame_bytes)
        self.to_receiver: deque[SenderMessage] = deque()
        self.to_sender: deque[ReceiverMessage] = deque()
        self.owed: deque[Callable[[], list[ReceiverAction]]] = deque()
        self.pool: dict[int, bytearray] = {}
        self.num_computed = 0
        self.is_sampled = False
        self.num_sends: dict[int, int] = {}
        self.committed: tuple[int, ...] = ()
        self.summary: ShipSummary | None = None
        self.error: KvferryError | None = None

    def steps(self) -> list[Callable[[], None]]:
        """Everything that may happen next."""
        possible: list[tuple[object, Callable[[], None]]] = [
            (self.to_receiver, self.deliver_to_receiver),
            (self.to_sender, self.deliver_to_sender),
            (self.owed, self.answer),
            (self.num_computed < self.plan.num_tokens, self.compute),
            (self.num_computed == self.plan.num_tokens and not self.is_sampled, self.sample),
        ]
        return [step for is_possible, step in possible if is_possible]

    def deliver_to_receiver(self) -> None:
        self.perform(self.receiver.on_message(self.to_receiver.popleft()))

    def deliver_to_sender(self) -> None:
        self.act(self.sender.on_message(self.to_sender.popleft()))

    def answer(self) -> None:
        self.perform(self.owed.popleft()())

    def compute(self) -> None:
        self.num_computed = min(self.num_computed + 3, self.plan.num_tokens)
        self.act(self.sender.on_tokens_computed(self.num_computed))
        self.to_receiver.append(Alive())

    def sample(self) -> None:
        self.is_sampled = True
        self.act(self.sender.on_first_token((42,)))

    def act(self, actions: list[SenderAction]) -> None:
        for action in actions:
            match action:
                case SendOffer(offer=offer):
                    self.to_receiver.append(offer)
                case SendBlock(block_index=index, num_tokens=num_tokens):
                    assert (index + 1) * LAYOUT.block_size <= self.num_computed or self.is_sampled
                    self.to_receiver.extend(self.frames(index, num_tokens))
                case SendCommit(first_token_ids=ids):
                    self.to_receiver.append(Commit(ATTEMPT, ids))
                case ShipFinished(summary=summary):
                    self.summary = summary
                case ShipFailed(error=error):
                    self.error = error

    def frames(self, index: int, num_tokens: int) -> list[BlockFrame]:
        self.num_sends[index] = self.num_sends.get(index, 0) + 1
        frames = cut_block(
            contents_of(index),
            id=ATTEMPT,
            block_index=index,
            num_tokens=num_tokens,
            max_frame_bytes=self.plan.max_frame_bytes,
        )
        if self.num_sends[index] <= self.plan.num_damaged.get(index, 0):
            frames[-1] = dataclasses.replace(frames[-1], payload=bytes(len(frames[-1].payload)))
        return frames

    def perform(self, actions: list[ReceiverAction]) -> None:
        for action in actions:
            match action:
                case RequestGrant(offer=offer):
                    wanted = tuple(index for index in range(offer.num_blocks) if index not in self.plan.held)
                    self.pool = {index: bytearray(LAYOUT.block_bytes) for index in wanted}
                    self.owed.append(lambda wanted=wanted: self.receiver.on_granted(wanted))  # type: ignore[misc]
                case SendWant(block_indices=indices):
                    self.to_sender.append(Want(indices))
                case WriteFrame(block_index=index, offset=offset, payload=payload):
                    assert not isinstance(payload, Region)
                    self.pool[index][offset : offset + len(payload)] = payload
                case VerifyBlock(block_index=index, digest=digest):
                    is_right = block_digest(self.pool[index]) == digest
                    self.owed.append(
                        lambda index=index, is_right=is_right: self.receiver.on_block_written(  # type: ignore[misc]
                            index, digest_ok=is_right
                        )
                    )
                case SendNack(block_index=index):
                    self.to_sender.append(Nack(index))
                case CommitSequence(first_token_ids=ids):
                    self.committed = ids
                    self.owed.append(lambda: self.receiver.on_committed(already_committed=False))
                case SendCommitAck(already_committed=already):
                    self.to_sender.append(CommitAck(already))
                case ReceiveFinished():
                    pass
                case ReceiveFailed(error=error):
                    raise error

    def run(self) -> None:
        choices = deque(self.plan.choices)
        self.act(self.sender.start())
        while (steps := self.steps()) and self.error is None:
            choice = choices.popleft() if choices else 0
            steps[choice % len(steps)]()


@given(plans())
def test_every_order_ends_right(plan: Plan) -> None:
    pair = Pair(plan)
    pair.run()
    wanted = [index for index in range(LAYOUT.num_blocks_for(plan.num_tokens)) if index not in plan.held]
    hopeless = [index for index in wanted if plan.num_damaged.get(index, 0) >= 2]
    if hopeless:
        assert isinstance(pair.error, DataLoss)
        assert pair.error.field in [f"block[{index}]" for index in hopeless]
        assert pair.sender.state is SenderState.FAILED
        assert pair.committed == ()
        return
    assert pair.error is None
    assert pair.receiver.state is ReceiverState.DONE
    assert pair.committed == (42,)
    assert {index: bytes(block) for index, block in pair.pool.items()} == {i: contents_of(i) for i in wanted}
    num_nacks = sum(index in plan.num_damaged for index in wanted)
    num_bytes = (len(wanted) + num_nacks) * LAYOUT.block_bytes
    assert pair.summary == ShipSummary(len(wanted), len(plan.held), num_bytes, num_nacks, False)
