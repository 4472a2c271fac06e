"""Ids, text, log-probabilities and usage have the relation that docs/api.md tells, for every end (R076)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from proto.kvferry.v1 import inference_pb2 as pb
from proto.kvferry.v1 import types_pb2
from tests.support.fake_workers import FakeNetwork, Point
from tests.unit.router.conftest import ask
from tests.unit.router.openai_gateway.conftest import EOS, OUTPUT, Gateway, StartGateway

HALF = 0xF0
"""Stands for the id of half a character."""


@dataclass(frozen=True, slots=True)
class End:
    """A way to end, and what is told then.

    Attributes:
        output: ids that the model would make.
        fields: of HTTP.
        cut_at: token that never comes; the request is cut short before it.
        finish: the reason in gRPC; in HTTP, the reason and what matched.
    """

    output: list[int]
    fields: dict[str, Any]
    num_tokens: int
    text: str
    finish: tuple[int, str, object]
    cut_at: int | None = None


LENGTH, STRING = types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_STOP_STRING
ENDS = {
    "end of sequence": End([*OUTPUT[:3], EOS], {}, 4, "HEL", (types_pb2.FINISH_REASON_END_OF_SEQUENCE, "stop", None)),
    "end of sequence at once": End([EOS], {}, 1, "", (types_pb2.FINISH_REASON_END_OF_SEQUENCE, "stop", None)),
    "stop id": End(
        OUTPUT, {"stop_token_ids": [OUTPUT[4]]}, 5, "HELL", (types_pb2.FINISH_REASON_STOP_TOKEN, "stop", OUTPUT[4])
    ),
    "stop string": End(OUTPUT, {"stop": ["LO", "X"]}, 5, "HEL", (STRING, "stop", "LO")),
    "stop string that stays": End(
        OUTPUT, {"stop": ["LO"], "include_stop_str_in_output": True}, 5, "HELLO", (STRING, "stop", "LO")
    ),
    "length": End(OUTPUT, {"stop": ["LOX"]}, 8, "HELLOWOR", (LENGTH, "length", None)),
    "length in half a character": End([*OUTPUT[:7], HALF], {}, 8, "HELLOWO\ufffd", (LENGTH, "length", None)),
    "abort": End(OUTPUT, {"stop": ["LX"]}, 3, "HEL", (types_pb2.FINISH_REASON_CANCELLED, "abort", None), cut_at=3),
    "time limit": End(
        OUTPUT,
        {"stop": ["LX"], "time_limit_s": 0.3},
        3,
        "HEL",
        (types_pb2.FINISH_REASON_DEADLINE, "length", "time_limit"),
        cut_at=3,
    ),
}


async def abort_once_cut(gateway: Gateway, end: End, times: int) -> None:
    """Cuts the request short, where the end is that."""
    if end.cut_at is None or "time_limit_s" in end.fields:
        return
    await gateway.network.reached(Point.TOKEN, end.cut_at, times=times)
    reply = await gateway.router.stub.Abort(pb.AbortRequest(request_ids=["mine"]))
    assert list(reply.aborted_request_ids) == ["mine"]


def check_output(end: End, output: list[int], token_ids: list[int], text: str) -> None:
    """Of a request that is cut short the last tokens may be under way still."""
    num_tokens = len(token_ids)
    assert num_tokens == end.num_tokens or (end.cut_at is not None and 0 < num_tokens < end.num_tokens)
    assert token_ids == output[:num_tokens]
    assert text == (end.text if end.cut_at is None else end.text[:num_tokens])


async def check_grpc(gateway: Gateway, end: End, output: list[int]) -> None:
    fields = {name: value for name, value in end.fields.items() if name != "stop"}
    message = ask(stop=tuple(end.fields.get("stop", ())), label="mine", stopping=fields, response={"logprobs": 0})
    answer, _ = await asyncio.gather(gateway.router.generate(message), abort_once_cut(gateway, end, 1))
    logprobs = [one.token_id for part in answer.messages for one in part.delta.logprobs]
    check_output(end, output, answer.token_ids, answer.text)
    assert answer.finish.finish.reason == end.finish[0]
    assert logprobs == answer.token_ids
    assert answer.finish.num_output_tokens == answer.completed.usage.completion_tokens == len(answer.token_ids)


async def check_http(gateway: Gateway, end: End, output: list[int], *, stream: bool) -> None:
    extra = {**end.fields, "return_token_ids": True}
    fields: Any = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 8, "logprobs": 0, "extra_body": extra}
    fields |= {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    calling = gateway.openai.completions.create(**fields, temperature=0, extra_headers={"x-request-id": "mine"})
    cutting = asyncio.create_task(abort_once_cut(gateway, end, 3 if stream else 2))
    answer: Any = await calling
    parts = [chunk async for chunk in answer] if stream else [answer]
    await cutting
    choices = [choice for part in parts for choice in part.choices]
    told = [token_id for choice in choices for token_id in choice.model_extra["token_ids"]]
    logprobs = [value for choice in choices if choice.logprobs for value in choice.logprobs.token_logprobs]
    check_output(end, output, told, "".join(choice.text for choice in choices))
    assert parts[-1].usage.completion_tokens == len(logprobs) == len(told)
    assert (choices[-1].finish_reason, choices[-1].model_extra["stop_reason"]) == end.finish[1:]


@pytest.mark.parametrize("name", ENDS)
async def test_the_relation(start_gateway: StartGateway, name: str) -> None:
    end = ENDS[name]
    async with start_gateway(FakeNetwork(list(end.output))) as gateway:
        table = gateway.router.app.models.find("tiny").tokenizer.token_bytes
        half = next(token_id for token_id in range(300) if table.get(token_id) == b"\xf0")
        output = [half if token_id == HALF else token_id for token_id in end.output]
        gateway.network.output[:] = output
        if end.cut_at is not None:
            gateway.network.hold(Point.TOKEN, end.cut_at)
        await check_grpc(gateway, end, output)
        for stream in (False, True):
            await check_http(gateway, end, output, stream=stream)
