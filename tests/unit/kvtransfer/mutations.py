"""Conversations with some of their messages changed at random, and a receiver or a sender that takes them."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import grpc.aio
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from kvferry.block_digest import block_digest
from kvferry.errors import KvferryError, Unavailable
from kvferry.rpc.options import DEFAULT_MAX_MESSAGE_BYTES
from kvtransfer.budget import ShipRank
from kvtransfer.codec import receiver_message_to_pb, sender_message_from_bytes, sender_message_to_bytes
from kvtransfer.grpc_transport import _GrpcReceivingStream, _GrpcSendingStream
from kvtransfer.handshake import Hello, LinkTerms, Transport
from kvtransfer.link_codec import hello_to_pb
from kvtransfer.messages import (
    Alive,
    BlockFrames,
    Commit,
    CommitAck,
    Credit,
    Nack,
    Offer,
    ReceiverMessage,
    StagedFrames,
    Want,
)
from kvtransfer.receiver import ShipReceiver
from kvtransfer.receiver_links import ReceiverLinks
from kvtransfer.receiving_end import run_receiving_end
from kvtransfer.sender import ShipSender
from kvtransfer.sender_link import Linked
from kvtransfer.sending_end import run_sending_end
from kvtransfer.staging import HEADER_BYTES, StagingView
from kvtransfer.transport import CommitOutcome, Grant, ReceiveOptions, SendOptions
from proto.kvferry.v1 import ship_pb2
from tests.unit.kvtransfer.pairs import computed, make_terms
from tests.unit.kvtransfer.support import (
    ATTEMPT,
    EPOCH,
    LAYOUT,
    MemorySource,
    contents_of,
    frames_of,
    make_offer,
    payload_of,
    put,
)

TIMEOUT_S = 30.0
"""Progress timeout of the offers: nobody is ever silent here, but a busy machine may be slow."""
WAYS = ("one by one", "together", "staged")
"""How frames travel."""
NUM_STAGED = 40
"""Slots that all honest conversations together use."""
MAX_TURNS = 20
"""Turns of the event loop in which the grant is made for sure."""
TRUE_DIGESTS = {block_digest(contents_of(index)): index for index in range(8)}

# -- changing bytes ---------------------------------------------------------------------------------------------------

ODD_BYTES = (0x00, 0x01, 0x08, 0x0A, 0x12, 0x22, 0x2A, 0x7F, 0x80, 0xFF)


def change_bytes(data: bytes, others: Sequence[bytes], dice: random.Random) -> bytes:
    """`data` with one to four bytes, or a piece, changed; most often at its beginning, where the fields are."""
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        size = len(changed) or 1
        place = dice.randrange(min(size, 70)) if dice.random() < 0.7 else dice.randrange(size)
        match dice.randrange(8):
            case 0 | 1:
                changed[place : place + 1] = bytes((changed[place] ^ 1 << dice.randrange(8),)) if changed else b"\x12"
            case 2:
                changed[place : place + 1] = bytes((dice.choice(ODD_BYTES),))
            case 3:
                del changed[place:]
            case 4:
                del changed[place : place + dice.randrange(1, 9)]
            case 5:
                changed[place:place] = dice.randbytes(dice.randrange(1, 9))
            case 6:
                changed[place:place] = changed[dice.randrange(size) :][: dice.randrange(1, 40)]
            case 7:
                other = dice.choice(others)
                begin = dice.randrange(len(other) or 1)
                changed[place:] = other[begin : begin + dice.choice((4, 40, 400))]
    return bytes(changed)


# -- changing fields --------------------------------------------------------------------------------------------------

_NUMBERS = (0, 1, 2, 3, 4, 5, 63, 64, 127, 128, 129, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
_LARGE_NUMBERS = (*_NUMBERS, 2**32, 2**63 - 1, 2**63, 2**64 - 64, 2**64 - 1)
_SCALARS: dict[int, Callable[[random.Random], object]] = {
    FieldDescriptor.CPPTYPE_UINT32: lambda dice: dice.choice(_NUMBERS),
    FieldDescriptor.CPPTYPE_UINT64: lambda dice: dice.choice(_LARGE_NUMBERS),
    FieldDescriptor.CPPTYPE_INT32: lambda dice: dice.choice((0, -1, 2**31 - 1, -(2**31))),
    FieldDescriptor.CPPTYPE_INT64: lambda dice: dice.choice((0, -1, 2**63 - 1, -(2**63))),
    FieldDescriptor.CPPTYPE_BOOL: lambda dice: dice.random() < 0.5,
    FieldDescriptor.CPPTYPE_ENUM: lambda dice: dice.choice((0, 1, 2, 3, 99, 2**31 - 1)),
    FieldDescriptor.CPPTYPE_DOUBLE: lambda dice: dice.choice((0.0, -1.0, math.nan, math.inf, 1e-300, 3600.0, 1e300)),
    FieldDescriptor.CPPTYPE_FLOAT: lambda dice: dice.choice((0.0, -1.0, math.nan, math.inf, -math.inf, 3e38)),
}


def _text_or_bytes(field: FieldDescriptor, dice: random.Random) -> object:
    size = dice.choice((0, 1, 15, 16, 17, 32, 127, 128, 129, 256, 257, 4096))
    return dice.choice("xé\x00😀") * size if field.type == FieldDescriptor.TYPE_STRING else dice.randbytes(size)


def _scalar(field: FieldDescriptor, dice: random.Random) -> object:
    make = _SCALARS.get(field.cpp_type)
    return _text_or_bytes(field, dice) if make is None else make(dice)


def change_fields(message: Message, dice: random.Random) -> None:
    """Somewhere in `message` a field gets an extreme value, goes, or comes more or fewer times."""
    if not message.DESCRIPTOR.fields:
        return
    set_fields = [field for field, _ in message.ListFields()]
    field: Any = (
        dice.choice(set_fields) if set_fields and dice.random() < 0.8 else dice.choice(message.DESCRIPTOR.fields)
    )
    is_message = field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE
    value: Any = getattr(message, field.name)
    if dice.random() < 0.1:
        message.ClearField(field.name)
    elif field.is_repeated:
        _change_repeated(value, field, is_message, dice)
    elif is_message:
        value.SetInParent()
        change_fields(value, dice)
    else:
        setattr(message, field.name, _scalar(field, dice))


def _change_repeated(values: Any, field: FieldDescriptor, is_message: bool, dice: random.Random) -> None:
    match dice.randrange(4):
        case 0 if len(values):
            del values[dice.randrange(len(values))]
        case 1 if len(values):
            values.extend(list(values[dice.randrange(len(values)) :]) * dice.choice((1, 2, 300)))
        case 2 if len(values) > 1:
            moved = values.pop(dice.randrange(len(values)))
            values.insert(dice.randrange(len(values) + 1), moved)
        case _:
            if not is_message:
                values.append(_scalar(field, dice))
            elif len(values):
                change_fields(dice.choice(values), dice)
            else:
                change_fields(values.add(), dice)


def changed_request(data: bytes, kind: type[Message], others: Sequence[bytes], dice: random.Random) -> bytes:
    """A request changed in its bytes or in its fields, not larger than gRPC takes it."""
    try:
        message = kind.FromString(data)
    except DecodeError:  # it was changed before
        return change_bytes(data, others, dice)
    if dice.random() < 0.5:
        return change_bytes(data, others, dice)
    for _ in range(dice.choice((1, 1, 2))):
        change_fields(message, dice)
    changed = message.SerializeToString()
    return changed if len(changed) <= DEFAULT_MAX_MESSAGE_BYTES else data


# -- conversations ----------------------------------------------------------------------------------------------------


class Conversations:
    """What an honest sender could say, in bytes, and with changes.

    Args:
        link_id: of a link whose segment `view` is.
    """

    def __init__(self, link_id: int, view: StagingView, dice: random.Random) -> None:
        self._dice = dice
        self._view = view
        self._was: list[tuple[int, int]] = []  # places in the segment that are changed, and what was there
        self._honest = [
            self._say(frame_bytes, way, num_tokens, link_id)
            for frame_bytes in (50, 128)
            for way in WAYS
            for num_tokens in (3, 10, 22)
        ]
        self._all = [message for messages in self._honest for message in messages]
        assert view.num_slots - view.num_free_slots == NUM_STAGED

    def _say(self, frame_bytes: int, way: str, num_tokens: int, link_id: int) -> list[bytes]:
        offer = make_offer(num_tokens, progress_timeout_s=TIMEOUT_S)
        offer = dataclasses.replace(offer, link_id=link_id if way == "staged" else 0)
        blocks = [
            frames_of(index, offer.num_tokens_in(index), max_frame_bytes=frame_bytes)
            for index in range(offer.num_blocks)
        ]
        frames = [frame for block in blocks for frame in block]
        messages: list[Any] = [*frames]
        if way == "staged":
            frames = [dataclasses.replace(frame, payload=put(self._view, payload_of(frame))) for frame in frames]
        if way != "one by one":
            many = StagedFrames if way == "staged" else BlockFrames
            messages = [many(tuple(frames[begin : begin + 3])) for begin in range(0, len(frames), 3)]
        said = [offer, Alive(), *messages, Alive(), Commit(ATTEMPT, (5,))]
        return [sender_message_to_bytes(message) for message in said]

    def honest(self) -> list[bytes]:
        self._restore_memory()
        return list(self._dice.choice(self._honest))

    def changed(self) -> tuple[list[bytes], frozenset[int]]:
        """A conversation, and which of its messages are changed or out of place; staged payloads may be changed too."""
        self._restore_memory()
        if self._dice.random() < 0.1:
            self._change_memory()
        while True:
            messages, changed = self._change()
            if not _lies_well(messages):
                return messages, changed

    def _change_memory(self) -> None:
        memory = self._view._view
        for _ in range(self._dice.choice((1, 4))):
            place = self._dice.randrange(HEADER_BYTES, HEADER_BYTES + NUM_STAGED * self._view.slot_bytes)
            self._was.append((place, memory[place]))
            memory[place] ^= 1 << self._dice.randrange(8)

    def _restore_memory(self) -> None:
        while self._was:
            place, value = self._was.pop()
            self._view._view[place] = value

    def _change(self) -> tuple[list[bytes], frozenset[int]]:
        dice, messages = self._dice, list(self._dice.choice(self._honest))
        places: set[int] = set()
        for _ in range(dice.choice((1, 1, 2, 3))):
            place = dice.randrange(len(messages)) if dice.random() < 0.9 else 0
            match dice.randrange(10):
                case 0:
                    other = dice.randrange(len(messages))
                    messages[place], messages[other] = messages[other], messages[place]
                    places |= {place, other}
                case 1:
                    messages[place] = dice.choice(self._all)
                    places.add(place)
                case _:
                    messages[place] = changed_request(messages[place], ship_pb2.ShipRequest, self._all, dice)
                    places.add(place)
        return messages, frozenset(places)


def _lies_well(messages: Sequence[bytes]) -> bool:
    """Whether blocks change names so that each name comes once: then nobody but the sender can know."""
    names: list[int] = []
    true_names: list[int] = []
    for message in messages:
        try:
            request = ship_pb2.ShipRequest.FromString(message)
        except DecodeError:
            continue
        frames: list[Any] = [request.block, *request.blocks, *request.staged.frames]
        for frame in frames:
            if frame.digest in TRUE_DIGESTS:
                names.append(frame.block_index)
                true_names.append(TRUE_DIGESTS[frame.digest])
    return names != true_names and len(set(names)) == len(names)


# -- a receiver -------------------------------------------------------------------------------------------------------


class StrictHost:
    """A decode side that has three blocks of the eight, and takes nothing amiss.

    Attributes:
        blocks: what is reserved; None before the grant and after the end.
        num_committed: shipments whose every block was right.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, bytearray] | None = None
        self.offer: Offer | None = None
        self.blocks_were_reserved = False
        self.num_committed = 0
        self.num_releases = 0

    def open(self, offer: Offer) -> StrictHost:
        assert self.offer is None, "an offer is taken once"
        self.offer = offer
        return self

    async def grant(self, offer: Offer) -> Grant:
        assert offer.num_blocks <= 1 << 16
        if offer.num_blocks > 8:
            raise Unavailable("no room for so many")
        wanted = tuple(range(offer.num_blocks))
        self.blocks = {index: bytearray(LAYOUT.block_bytes) for index in wanted}
        self.blocks_were_reserved = True
        return Grant(wanted)

    def write(self, block_index: int, offset: int, payload: bytes | memoryview) -> None:
        assert self.blocks is not None, "nothing is reserved"
        block = self.blocks[block_index]
        assert offset >= 0 and 0 < len(payload) <= len(block) - offset, "outside the block"
        block[offset : offset + len(payload)] = payload
        assert len(block) == LAYOUT.block_bytes

    def verify(self, block_index: int, digest: bytes, num_tokens: int) -> bool:
        assert self.blocks is not None and self.offer is not None, "nothing is reserved"
        assert num_tokens == self.offer.num_tokens_in(block_index)
        return block_digest(self.blocks[block_index]) == digest

    async def commit(self, first_token_ids: tuple[int, ...], first_logprobs: tuple[float, ...]) -> CommitOutcome:
        assert self.blocks is not None and first_token_ids, "nothing is reserved"
        wrong = [index for index, block in self.blocks.items() if bytes(block) != contents_of(index)]
        assert not wrong, f"blocks {wrong} are wrong and would run"
        self.blocks = None
        self.num_committed += 1
        return CommitOutcome.COMMITTED

    def release(self) -> None:
        self.blocks = None
        self.num_releases += 1

    def check_is_over(self) -> None:
        assert self.blocks is None, "blocks stay reserved"
        assert self.num_committed + self.num_releases == (self.offer is not None)


class FedContext:
    """A call as the servicer sees it, fed with bytes, half-closed behind them."""

    def __init__(self, messages: Sequence[bytes], parse: Callable[[bytes], Any]) -> None:
        self._messages = messages
        self._parse = parse
        self.num_read = 0
        self.written: list[Message] = []

    async def read(self) -> Any:
        if self.num_read == len(self._messages):
            return grpc.aio.EOF
        if self.num_read == 1:  # the Offer: an honest sender awaits the answer to it
            for _ in range(MAX_TURNS):
                if self.written:
                    break
                await asyncio.sleep(0)
        self.num_read += 1
        return self._parse(self._messages[self.num_read - 1])

    async def write(self, message: Message) -> None:
        self.written.append(message)


class Receiver:
    """A receiver without a server, with one link open."""

    def __init__(self, links: ReceiverLinks, terms: LinkTerms) -> None:
        self.links = links
        self._terms = terms

    async def take(self, messages: Sequence[bytes]) -> tuple[int, StrictHost]:
        """Takes a shipment; how many messages it read, and the host. Raises what is no refusal."""
        context, host = FedContext(messages, sender_message_from_bytes), StrictHost()
        receiver = ShipReceiver(layout=LAYOUT, epoch=EPOCH, max_frame_bytes=128)
        stream = _GrpcReceivingStream(context, self.links)  # type: ignore[arg-type]
        with suppress(KvferryError, DecodeError):
            await run_receiving_end(stream, receiver, host.open, ReceiveOptions(max_frame_bytes=128))
        host.check_is_over()
        return context.num_read, host

    async def take_link(self, data: bytes) -> int:
        """Takes the first message of a link; how many links it opened."""
        context = FedContext([data], ship_pb2.LinkRequest.FromString)
        before = (len(self.links), self.links.staging_bytes)
        with suppress(KvferryError, DecodeError):
            await self.links.serve(context, TIMEOUT_S)  # type: ignore[arg-type]
        assert (len(self.links), self.links.staging_bytes) == before, "a link stays"
        return len(context.written)


def some_hello(terms: LinkTerms) -> Hello:
    return terms.hello("prefill", 1, TIMEOUT_S)


@contextmanager
def open_receiver(dice: random.Random) -> Iterator[tuple[Receiver, Conversations]]:
    """A receiver, and conversations over its link."""
    terms = make_terms("shm", transports=(Transport.SHARED_MEMORY, Transport.GRPC), peer_bytes=64 * 128)
    links = ReceiverLinks(terms, EPOCH)
    with links._open(some_hello(terms)) as welcome:
        assert welcome.segment is not None
        view = StagingView(welcome.segment, LAYOUT.block_bytes)
        yield Receiver(links, terms), Conversations(welcome.link_id, view, dice)
        view.close()
    assert len(links) == 0 and links.staging_bytes == 0


def changed_link_request(terms: LinkTerms, dice: random.Random) -> bytes:
    """A Hello with changes."""
    data = ship_pb2.LinkRequest(hello=hello_to_pb(some_hello(terms))).SerializeToString()
    return changed_request(data, ship_pb2.LinkRequest, [data], dice)


# -- a sender ---------------------------------------------------------------------------------------------------------


class FedCall:
    """A call as the sender sees it, fed with the bytes of answers, ended behind them."""

    def __init__(self, answers: Sequence[bytes]) -> None:
        self._answers = answers
        self.num_read = 0
        self.num_written = 0

    async def read(self) -> Any:
        for _ in range(MAX_TURNS):  # the sender gets on with what it has to say
            await asyncio.sleep(0)
        if self.num_read == len(self._answers):
            return grpc.aio.EOF
        self.num_read += 1
        return ship_pb2.ShipResponse.FromString(self._answers[self.num_read - 1])

    async def write(self, message: bytes) -> None:
        self.num_written += 1


def changed_answers(num_blocks: int, dice: random.Random, *, is_staged: bool) -> list[bytes]:
    """What an honest receiver answers, with some of it changed or out of place."""
    said: list[ReceiverMessage] = [
        Want(tuple(range(num_blocks))),
        Alive(),
        Credit(2),
        Nack(1),
        Credit(num_blocks - 1),
        CommitAck(False),
    ]
    if is_staged:
        said[2:3] = [Credit(2), Nack(1), Credit(num_blocks - 1)]
    answers = [receiver_message_to_pb(message).SerializeToString() for message in said]
    for _ in range(dice.choice((1, 1, 2))):
        place = dice.randrange(len(answers))
        if dice.random() < 0.2:
            answers[place] = dice.choice(answers)
        else:
            answers[place] = changed_request(answers[place], ship_pb2.ShipResponse, answers, dice)
    return answers


async def hear_answers(answers: Sequence[bytes], linked: Linked) -> bool:
    """Runs a shipment that is answered so; whether it succeeded. Raises what is no refusal."""
    call, events = FedCall(answers), computed(22)
    stream = _GrpcSendingStream(call, linked)  # type: ignore[arg-type]
    sender = ShipSender(make_offer(22, progress_timeout_s=TIMEOUT_S))
    with suppress(KvferryError, DecodeError):
        await run_sending_end(stream, sender, MemorySource(), events, SendOptions(), linked.lane(ShipRank()))
        return True
    return False
