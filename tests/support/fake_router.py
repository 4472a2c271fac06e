"""A router that answers every prompt with fixed events: for tests of the client and the command line.

As a program (`python -m tests.support.fake_router`) it stands in for `python -m router`; its workers are those of its
configuration, all in the state that the environment variable FAKE_WORKER_STATE names.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvferry.config import load_config
from kvferry.errors import InvalidArgument
from kvferry.process import StopSignals, print_ready
from kvferry.rpc import RpcServer, run
from proto.kvferry.v1 import inference_pb2, inference_pb2_grpc, types_pb2

SERVICE = "kvferry.v1.InferenceService"
TEXT = "Paris is it."


def events(request: inference_pb2.GenerateRequest) -> list[inference_pb2.GenerateResponse]:
    """What every request is answered: two tokens, five and six, and the end of the sequence, two.

    Further choices have the token seven and their number for a text.
    """
    response = inference_pb2.GenerateResponse
    started = inference_pb2.Started(
        server_request_id="s-1",
        request_id=request.request_id,
        model="fake",
        tier=request.tier or "standard",
        sampling=inference_pb2.SamplingOptions(seed=request.sampling.seed if request.sampling.HasField("seed") else 7),
        num_prompt_tokens=4,
    )
    finish = types_pb2.Finish(reason=types_pb2.FINISH_REASON_END_OF_SEQUENCE, token_id=2)
    usage = inference_pb2.Usage(prompt_tokens=4, completion_tokens=3, cached_tokens=1)
    timings = inference_pb2.Timings(queue_s=0.001, prefill_s=0.02, decode_s=0.5, num_blocks_shipped=2, num_attempts=1)
    return [
        response(started=started),
        response(delta=inference_pb2.ChoiceDelta(token_index=0, position=4, token_ids=[5], text=TEXT[:5])),
        response(delta=inference_pb2.ChoiceDelta(token_index=1, position=5, token_ids=[6, 2], text=TEXT[5:])),
        response(finish=inference_pb2.ChoiceFinish(finish=finish, num_output_tokens=3)),
        *(event for choice in range(1, request.sampling.n) for event in _further_choice(choice, finish)),
        response(completed=inference_pb2.Completed(usage=usage, timings=timings)),
    ]


def _further_choice(choice: int, finish: types_pb2.Finish) -> list[inference_pb2.GenerateResponse]:
    response = inference_pb2.GenerateResponse
    end = inference_pb2.ChoiceFinish(index=choice, finish=finish, num_output_tokens=1, cumulative_logprob=-choice)
    return [
        response(delta=inference_pb2.ChoiceDelta(index=choice, position=4, token_ids=[7], text=f"number {choice}")),
        response(finish=end),
    ]


class FakeRouter(inference_pb2_grpc.InferenceServiceServicer):
    """Keeps the requests it got; leaves out the events in `left_out`."""

    def __init__(self, workers: Sequence[inference_pb2.WorkerInfo] = (), left_out: Sequence[int] = ()) -> None:
        self.requests: list[inference_pb2.GenerateRequest] = []
        self._workers = workers
        self._left_out = left_out

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> None:  # type: ignore[override]
        self.requests.append(request)
        if request.tier == "gold":
            raise InvalidArgument("tier", "there is no tier 'gold'; known tiers: standard")
        for place, event in enumerate(events(request)):
            if place not in self._left_out:
                await context.write(event)

    async def Abort(self, request: inference_pb2.AbortRequest, context: Any) -> inference_pb2.AbortResponse:
        return inference_pb2.AbortResponse(aborted_request_ids=request.request_ids[:1])

    async def GetCapabilities(self, request: Any, context: Any) -> inference_pb2.GetCapabilitiesResponse:
        known = types_pb2.Capabilities(model="fake", tiers=["standard", "batch"])
        return inference_pb2.GetCapabilitiesResponse(capabilities=known)

    async def ListWorkers(self, request: Any, context: Any) -> inference_pb2.ListWorkersResponse:
        return inference_pb2.ListWorkersResponse(workers=self._workers)

    async def Tokenize(self, request: inference_pb2.TokenizeRequest, context: Any) -> inference_pb2.TokenizeResponse:
        return inference_pb2.TokenizeResponse(token_ids=request.text.encode())

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Any
    ) -> inference_pb2.DetokenizeResponse:
        return inference_pb2.DetokenizeResponse(text=bytes(request.token_ids).decode())


async def start_fake_router(fake: FakeRouter, listen: str = "127.0.0.1:0") -> tuple[RpcServer, str]:
    """The running server and its address."""
    server = RpcServer()
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(fake, server.grpc)
    return server, await server.start(listen, [SERVICE])


async def _serve(listen: str, workers: Sequence[inference_pb2.WorkerInfo]) -> None:
    stop = StopSignals().install()
    server, address = await start_fake_router(FakeRouter(workers), listen)
    print_ready(address=address, http="http://127.0.0.1:1")
    await stop.requested.wait()
    await server.drain(1.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--listen")
    options = parser.parse_args()
    config = load_config(options.config)
    state = os.environ.get("FAKE_WORKER_STATE", "ready")
    roles = (("prefill", config.router.prefill), ("decode", config.router.decode))
    workers = [
        inference_pb2.WorkerInfo(id=f"{role}-{place}", role=role, pid=99, address=address, state=state, reason="why")
        for role, addresses in roles
        for place, address in enumerate(addresses)
    ]
    run(_serve(options.listen, workers))


if __name__ == "__main__":
    main()
