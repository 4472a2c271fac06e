"""One response from whichever routers it takes: what was received, and how it goes on where a router is lost.

    read ─► PartialResponse ─► caller
     └─ Unavailable ─┬─ nothing came yet ─► the same request, once at each other router that can be reached
                     └─ begun ─► the rest of it (`GenerateRequest.resume`), at another router or, after a pause, at the
                                 same one, until there is progress again or `wait_s` has passed without any

A router that says nothing for `progress_timeout_s` is lost, too. Its first heartbeat comes before `Started`; if none
does, the router is of a version that has none, and its silence behind `Started` means nothing. Before the first
message, which all versions send as soon as the prompt is tokenised, one not known to have heartbeats is borne longer.

The caller's iterator just pauses. All other errors, and the call's deadline, are as with a single router.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from kvferry.client_routers import Router, Routers
from kvferry.errors import DataLoss, DeadlineExceeded, FailedPrecondition, RouterDraining, Unavailable
from kvferry.rpc import read_with_progress_deadline
from kvferry.telemetry import log_event
from proto.kvferry.v1 import inference_pb2 as pb
from proto.kvferry.v1 import types_pb2

if TYPE_CHECKING:  # subscripted at type-check time only; at run time the class is not generic
    from grpc.aio import UnaryStreamCall

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 1.0
"""Between tries while no router answers; doubled each time."""
RECONNECT_WAIT_S = 3.0
"""How long a new request waits for a router that could not be reached, when all others have refused it: above the
longest time until a channel tries to connect again (`rpc/options.py`), so that one that is back is not overlooked."""
MAX_FRUITLESS_STARTS = 3
"""Times in a row that a router may take the rest of a response and be lost before anything new: the request itself may
be what breaks them."""
FIRST_MESSAGE_TIMEOUT_S = 15.0
"""Least silence borne of a router that may have no heartbeats, before its first message: as keepalive bears."""
LEAST_TIME_LIMIT_S = 0.001
"""What a resumed request has left of a time limit that has passed: the router ends it by the same rule."""


@dataclass(slots=True)
class _PartialChoice:
    token_ids: list[int] = field(default_factory=list)
    num_text_chars: int = 0
    finish: types_pb2.Finish | None = None


class PartialResponse:
    """What was received of a response.

    Attributes:
        started: its first message.
    """

    def __init__(self) -> None:
        self.started: pb.Started | None = None
        self._choices: dict[int, _PartialChoice] = {}
        self._num_prompt_logprobs = 0

    @property
    def num_tokens(self) -> int:
        """Output tokens of all choices."""
        return sum(len(choice.token_ids) for choice in self._choices.values())

    @property
    def can_resume(self) -> bool:
        """Whether the router said what another needs; one of an older version does not."""
        return self.started is not None and bool(self.started.prompt_digest)

    def take(self, event: pb.GenerateResponse) -> None:
        """The next message behind `started`. Raises DataLoss when tokens are missing, doubled or out of order."""
        match event.WhichOneof("event"):
            case "prompt_logprobs":
                number = self._num_prompt_logprobs
                if event.prompt_logprobs.token_index != number + 1:
                    raise DataLoss(f"prompt token {event.prompt_logprobs.token_index} was scored after {number}")
                self._num_prompt_logprobs += len(event.prompt_logprobs.logprobs)
            case "delta":
                delta, choice = event.delta, self._choices.setdefault(event.delta.index, _PartialChoice())
                num_tokens = len(choice.token_ids)
                if delta.token_ids and delta.token_index != num_tokens:
                    raise DataLoss(f"choice {delta.index}: token {delta.token_index} came after {num_tokens} tokens")
                choice.token_ids.extend(delta.token_ids)
                choice.num_text_chars += len(delta.text)
            case "finish":
                self._choices.setdefault(event.finish.index, _PartialChoice()).finish = event.finish.finish

    def request_for_rest(self, request: pb.GenerateRequest, spent_s: float) -> pb.GenerateRequest:
        """`request`, which began this response `spent_s` ago, for what is missing of it."""
        assert self.started is not None
        rest = pb.GenerateRequest()
        rest.CopyFrom(request)
        rest.model, rest.tier = self.started.model, self.started.tier
        rest.stopping.max_tokens = self.started.stopping.max_tokens
        if not rest.HasField("beam_search"):
            rest.sampling.seed = self.started.sampling.seed
        if rest.stopping.HasField("time_limit_s"):
            rest.stopping.time_limit_s = max(LEAST_TIME_LIMIT_S, rest.stopping.time_limit_s - spent_s)
        rest.resume.prompt_digest = self.started.prompt_digest
        rest.resume.server_request_id = self.started.server_request_id
        rest.resume.num_prompt_logprobs = self._num_prompt_logprobs
        rest.resume.choices.extend(
            pb.ResumedChoice(
                index=index, token_ids=choice.token_ids, num_text_chars=choice.num_text_chars, finish=choice.finish
            )
            for index, choice in sorted(self._choices.items())
        )
        return rest


class _Attempt:
    """The request at one router. With `request.progress_timeout_s` set, its silence is bounded."""

    def __init__(self, router: Router, request: pb.GenerateRequest, timeout_s: float | None) -> None:
        self.router = router
        self.has_started = False
        self._progress_timeout_s = request.progress_timeout_s if request.HasField("progress_timeout_s") else None
        self._has_heartbeats = False
        self._is_closed = False
        self._context: AbstractAsyncContextManager[UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]]
        self._was_down = router.channel.is_down
        self._context = router.channel.stream(router.stub.Generate, request, timeout_s=timeout_s)
        self._call: UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse] | None = None

    @property
    def was_unreachable(self) -> bool:
        """Of one that failed: the router never saw the request."""
        return not self.has_started and (self._was_down or self.router.channel.is_down)

    async def open(self) -> Self:
        self._call = await self._context.__aenter__()
        return self

    async def read(self) -> pb.GenerateResponse | None:
        """The next message, None at the end. Raises Unavailable after too long a silence.

        After an error the call has ended.
        """
        assert self._call is not None
        try:
            peer = f"the router at {self.router.address}"
            message = await read_with_progress_deadline(self._call, self._longest_silence_s, peer)
        except BaseException as error:
            if not self._is_closed:  # by another task of the caller's
                self._is_closed = True
                await self._context.__aexit__(type(error), error, error.__traceback__)  # raises what a status means
            raise
        if message is not None:
            self._learn(message)
        return message

    def _learn(self, message: pb.GenerateResponse) -> None:
        if message.HasField("started"):
            self.has_started = True
            return
        self._has_heartbeats = self._has_heartbeats or message.HasField("heartbeat")
        self.router.has_heartbeats = self._has_heartbeats

    @property
    def _longest_silence_s(self) -> float | None:
        if self._progress_timeout_s is None or (self.has_started and not self._has_heartbeats):
            return None
        if self._has_heartbeats or self.router.has_heartbeats:
            return self._progress_timeout_s
        return max(self._progress_timeout_s, FIRST_MESSAGE_TIMEOUT_S)

    async def close(self) -> None:
        """Cancels the call, unless it has ended."""
        if not self._is_closed:
            self._is_closed = True
            await self._context.__aexit__(None, None, None)


class ResumingStream(AsyncIterator[pb.GenerateResponse]):
    """The events of one response; `open` once, `close` at the end.

    Args:
        wait_s: how long a response that has begun waits for a router without progress; None fails it at once.
    """

    def __init__(
        self, routers: Routers, request: pb.GenerateRequest, *, timeout_s: float | None, wait_s: float | None
    ) -> None:
        routers.repeats.add_request()
        self._routers = routers
        self._request = request
        self._wait_s = wait_s
        self._timeout_s = timeout_s
        self._begun_at_s = asyncio.get_running_loop().time()
        self._deadline_s = None if timeout_s is None else self._begun_at_s + timeout_s
        self._partial = PartialResponse()
        self._attempt: _Attempt | None = None
        self._is_over = False
        self._tried: list[Router] = []  # they saw the request, while nothing has come
        self._unreached: list[Router] = []  # they did not, in this round
        self._is_round_over = False
        self._has_advanced = False  # since the last loss
        self._lost_at_s = 0.0  # first loss since then
        self._pause_s = FIRST_PAUSE_S
        self._num_fruitless_starts = 0
        self._is_abort_wanted = False

    def abort_between_routers(self, name: str) -> bool:
        """Whether this is the response of that name, and no router runs it now; the next one then ends it at once."""
        started = self._partial.started
        if started is None or name not in (started.server_request_id, self._request.request_id) or self._is_over:
            return False
        is_between = self._attempt is None or not self._attempt.has_started
        self._is_abort_wanted = self._is_abort_wanted or is_between
        return is_between

    async def open(self) -> None:
        """Sends the request, or the rest of it."""
        router = self._routers.next([*self._tried, *self._unreached])
        request = self._request
        if self._partial.started is not None:
            request = self._partial.request_for_rest(request, self._now_s - self._begun_at_s)
        self._attempt = await _Attempt(router, request, self._rest_s).open()

    async def close(self) -> None:
        """Cancels the request, wherever it is."""
        self._is_over = True
        if self._attempt is not None:
            attempt, self._attempt = self._attempt, None
            await attempt.close()

    async def __anext__(self) -> pb.GenerateResponse:
        while not self._is_over:
            try:
                event = await self._read()
                if event is None:
                    await self.close()
                elif await self._take(event):
                    return event
            except Unavailable as error:
                await self._recover(error)
            except DeadlineExceeded as error:
                await self.close()
                raise self._deadline_passed(error) from error
            except BaseException:
                await self.close()
                raise
        raise StopAsyncIteration

    def _deadline_passed(self, error: DeadlineExceeded) -> DeadlineExceeded:
        """The call's own in our words: those of gRPC say neither how long it was nor what had come."""
        if self._timeout_s is None:  # the server's own
            return error
        number = self._partial.num_tokens
        plural = "" if number == 1 else "s"
        return DeadlineExceeded(f"the deadline of {self._timeout_s:g} s passed after {number} token{plural}")

    async def _read(self) -> pb.GenerateResponse | None:
        if self._attempt is None:
            await self.open()
        assert self._attempt is not None
        return await self._attempt.read()

    async def _take(self, event: pb.GenerateResponse) -> bool:
        """Whether the event is for the caller, who gets `started` once."""
        assert self._attempt is not None
        if event.HasField("heartbeat"):
            return False
        if not event.HasField("started"):
            self._partial.take(event)
            self._has_advanced = True
            return True
        self._attempt.router.answered()
        if self._partial.started is not None:
            await self._resumed(event.started)
            return False
        self._partial.started, self._has_advanced = event.started, True
        self._tried, self._unreached = [], []
        return True

    async def _resumed(self, started: pb.Started) -> None:
        assert self._attempt is not None and self._partial.started is not None
        router = self._attempt.router
        if not started.prompt_digest:
            raise FailedPrecondition(
                f"resume: the router at {router.address} is of a version that cannot go on with a response",
                field="resume",
            )
        log_event(
            logger,
            "response_resumed",
            request=self._partial.started.server_request_id,
            request_there=started.server_request_id,
            router=router.address,
            tokens=self._partial.num_tokens,
            pause_s=round(self._now_s - self._lost_at_s, 3),
        )
        if self._is_abort_wanted:
            request = pb.AbortRequest(request_ids=[started.server_request_id])
            await router.channel.unary(router.stub.Abort, request, timeout_s=self._rest_s)

    # --- a router is lost ---

    async def _recover(self, error: Unavailable) -> None:
        """Returns when another try may be made; raises `error` when none may."""
        assert self._attempt is not None
        attempt, self._attempt = self._attempt, None
        await attempt.close()
        attempt.router.failed()
        may_go_on = self._may_repeat(attempt, error) if self._partial.started is None else self._may_resume(attempt)
        if not may_go_on:
            self._is_over = True
            raise error
        log_event(
            logger,
            "router_lost",
            router=attempt.router.address,
            request=self._partial.started.server_request_id if self._partial.started is not None else "",
            tokens=self._partial.num_tokens,
            error=error.message,
        )
        if self._is_round_over or (self._partial.started is not None and self._routers.are_all_avoided):
            self._is_round_over = False
            await self._pause(error)

    def _may_repeat(self, attempt: _Attempt, error: Unavailable) -> bool:
        """A router that saw the request gets it once, the others in further rounds while there is time.

        What costs no router any work, or is an order, is not counted against the budget.
        """
        (self._unreached if attempt.was_unreachable else self._tried).append(attempt.router)
        if len(self._tried) + len(self._unreached) == len(self._routers.all):
            is_in_time = self._now_s < self._begun_at_s + min(self._wait_s or 0.0, RECONNECT_WAIT_S)
            if not self._unreached or not is_in_time:
                return False
            self._unreached, self._is_round_over = [], True
        return attempt.was_unreachable or isinstance(error, RouterDraining) or self._routers.repeats.take()

    def _may_resume(self, attempt: _Attempt) -> bool:
        if self._wait_s is None or not self._partial.can_resume:
            return False
        if self._has_advanced:
            self._has_advanced, self._lost_at_s = False, self._now_s
            self._pause_s, self._num_fruitless_starts = FIRST_PAUSE_S, 0
        elif attempt.has_started:
            self._num_fruitless_starts += 1
        is_in_time = self._now_s < self._lost_at_s + self._wait_s
        return is_in_time and self._num_fruitless_starts < MAX_FRUITLESS_STARTS

    async def _pause(self, error: Unavailable) -> None:
        """Time for a router to come back, within the deadline."""
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
        rest_s = self._rest_s
        await asyncio.sleep(pause_s if rest_s is None else min(pause_s, rest_s))
        if rest_s is not None and rest_s <= pause_s:
            self._is_over = True
            raise DeadlineExceeded(
                f"the call's deadline passed while no router went on with the response: {error.message}"
            ) from error

    @property
    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def _rest_s(self) -> float | None:
        """Time left of the call; None for no deadline."""
        return None if self._deadline_s is None else max(0.0, self._deadline_s - self._now_s)
