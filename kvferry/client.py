"""The public Python client, for programs with an event loop; `sync_client.py` is for those without.

    async with AsyncClient("127.0.0.1:50051") as client:
        answer = await client.chat("What is the capital of France?", max_tokens=20)
        completion = await client.complete(GenerateOptions(prompt="Once upon", max_tokens=20))
        async with client.generate(GenerateOptions(prompt=[ChatMessage("user", "Hello")])) as events:
            async for event in events:          # messages as documented in proto/kvferry/v1/inference.proto
                print(event.delta.text, end="")

Leaving the block cancels the request, wherever it is. Errors are those of `kvferry.errors`. Where the router knows
tenants, `AsyncClient(target, api_key=…)` says whose calls these are. With several routers,
`AsyncClient(["a:50051", "b:50051"])`, a router that dies is a pause in the response and nothing else
(`client_resume.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Self

from opentelemetry.trace import Tracer

from kvferry.client_blocks import async_block
from kvferry.client_chat import ChatMessage, Tool, ToolCall
from kvferry.client_completion import Choice, Completion
from kvferry.client_fields import set_field, set_list
from kvferry.client_options import GenerateOptions, PinOptions, Prompt, conversation, options_of, set_prompt, set_tools
from kvferry.client_resume import ResumingStream
from kvferry.client_routers import Router, Routers
from kvferry.errors import DeadlineExceeded, InvalidArgument, Unavailable
from kvferry.worker import check_progress_timeout
from proto.kvferry.v1 import admin_pb2, cache_pb2, inference_pb2, types_pb2

__all__ = [
    "AsyncClient",
    "ChatMessage",
    "Choice",
    "Completion",
    "GenerateOptions",
    "PinOptions",
    "Prompt",
    "Tool",
    "ToolCall",
]

CONTROL_TIMEOUT_S = 10.0
"""For calls that only ask."""
TOKENIZE_TIMEOUT_S = 30.0
"""For texts: a few megabytes take seconds, and wait behind others."""
CACHE_TIMEOUT_S = 15.0
"""Longer than the router waits for a worker."""
RESUME_WAIT_S = 30.0
"""A router's restart, its workers' connections included."""
PROGRESS_TIMEOUT_S = 10.0
"""Where another router can go on: as long as workers' silence is borne by default."""


class AsyncClient:
    """Connections to the routers of one deployment; `api_key` goes with every call.

    Args:
        target: host:port of a router, or of several. Each gets its share of the requests; one that fails is left alone
            for a while, and a request of which nothing has come from it is sent to another.
        resume: a response goes on, exactly where it broke off, at another router or, with a single one, at the same
            when it is back. Default: where there are several.
        resume_wait_s: how long a response waits without progress before it fails with the loss.
        progress_timeout_s: longest silence of a router within a response; then it counts as lost. 0.1 … 3600; by
            default 10 where there are several, and no limit for a single one. Of a router that may be of a version
            without heartbeats at least 15 s are borne before the response begins, and any silence after.
    """

    def __init__(
        self,
        target: str | Sequence[str],
        *,
        tracer: Tracer | None = None,
        api_key: str | None = None,
        resume: bool | None = None,
        resume_wait_s: float = RESUME_WAIT_S,
        progress_timeout_s: float | None = None,
    ) -> None:
        if progress_timeout_s is not None:
            check_progress_timeout("progress_timeout_s", progress_timeout_s)
        headers = {} if api_key is None else {"authorization": f"Bearer {_checked_key(api_key)}"}
        self._routers = Routers(target, tracer=tracer, headers=headers)
        has_several = len(self._routers.all) > 1
        self._resume_wait_s = resume_wait_s if (has_several if resume is None else resume) else None
        self._progress_timeout_s = progress_timeout_s or (PROGRESS_TIMEOUT_S if has_several else None)
        self._streams: set[ResumingStream] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections; running requests are cancelled."""
        await self._routers.close()

    @async_block
    async def generate(
        self, options: GenerateOptions | Prompt, *, timeout_s: float | None = None, **fields: Any
    ) -> AsyncIterator[AsyncIterator[inference_pb2.GenerateResponse]]:
        """Streams the events of one request; `timeout_s` is its deadline. Leaving the block cancels it.

        The request is `options`, or a prompt; `fields` are those of `GenerateOptions`, and replace the options' own.

        `Started` comes once, from the router that began the response; `Completed` counts the whole output. Heartbeats
        are not shown.
        """
        request = options_of(options, fields).to_pb()
        if self._progress_timeout_s is not None:
            request.progress_timeout_s = self._progress_timeout_s
        stream = ResumingStream(self._routers, request, timeout_s=timeout_s, wait_s=self._resume_wait_s)
        self._streams.add(stream)
        try:
            await stream.open()
            yield stream
        finally:
            self._streams.discard(stream)
            await stream.close()

    async def complete(
        self, options: GenerateOptions | Prompt, *, timeout_s: float | None = None, **fields: Any
    ) -> Completion:
        """The whole response of one request, given as for `generate`."""
        completion = Completion()
        async with self.generate(options, timeout_s=timeout_s, **fields) as events:
            async for event in events:
                completion.add(event)
        completion.check_complete()
        return completion

    @async_block
    async def stream(
        self, options: GenerateOptions | Prompt, *, timeout_s: float | None = None, **fields: Any
    ) -> AsyncIterator[AsyncIterator[str]]:
        """Streams the text of one request, piece by piece; else as `generate`.

        Raises InvalidArgument for `n` above 1.
        """
        options = options_of(options, fields)
        if (options.n or 1) > 1:
            raise InvalidArgument("sampling.n", "choices come side by side; `generate` tells them apart")
        async with self.generate(options, timeout_s=timeout_s) as events:
            yield (event.delta.text async for event in events if event.delta.text)

    async def chat(
        self,
        messages: str | Sequence[ChatMessage | Mapping[str, Any]],
        *,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> Completion:
        """The answer to a conversation, or to one message of a user; `fields` are those of `GenerateOptions`."""
        return await self.complete(GenerateOptions(prompt=conversation(messages), **fields), timeout_s=timeout_s)

    async def tokenize(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        add_special_tokens: bool | None = None,
        tools: Sequence[Tool | Mapping[str, Any]] = (),
    ) -> Sequence[int]:
        """The token ids that a request's prompt becomes: a text, or a conversation with its tools."""
        request = inference_pb2.TokenizeRequest(add_special_tokens=add_special_tokens)
        set_field(request, "model", model)
        set_prompt(request, prompt)
        set_tools(request, tools)
        response = await self._routers.ask(
            lambda router: router.channel.unary(router.stub.Tokenize, request, timeout_s=TOKENIZE_TIMEOUT_S)
        )
        return tuple(response.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = False) -> str:
        """The text of token ids, at most as many as the context has."""
        request = inference_pb2.DetokenizeRequest(skip_special_tokens=skip_special_tokens)
        set_field(request, "model", model)
        set_list(request.token_ids, "token_ids", token_ids)
        response = await self._routers.ask(
            lambda router: router.channel.unary(router.stub.Detokenize, request, timeout_s=TOKENIZE_TIMEOUT_S)
        )
        return response.text

    async def abort(self, *request_ids: str) -> Sequence[str]:
        """Ends requests by the server's id or the caller's label; returns the ids found running.

        Every router is asked, for any may run them; raises Unavailable only when none answers. A request of this client
        that is on its way from one router to another is ended by the next.
        """
        request = inference_pb2.AbortRequest()
        set_list(request.request_ids, "request_ids", request_ids)
        between = {name for name in request_ids for stream in self._streams if stream.abort_between_routers(name)}
        answers = await asyncio.gather(
            *(
                router.channel.unary(router.stub.Abort, request, timeout_s=CONTROL_TIMEOUT_S)
                for router in self._routers.all
            ),
            return_exceptions=True,
        )
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        error = next((error for error in errors if not isinstance(error, Unavailable | DeadlineExceeded)), None)
        if error is not None or (len(errors) == len(answers) and not between):
            raise error or errors[0]
        told = [answer.aborted_request_ids for answer in answers if not isinstance(answer, BaseException)]
        return tuple(name for name in dict.fromkeys(request_ids) if any(name in names for names in [between, *told]))

    async def capabilities(self, model: str = "") -> types_pb2.Capabilities:
        """Limits, layout and versions of a model; of the default one where none is named."""
        return (await self._capabilities(model)).capabilities

    async def models(self) -> Sequence[inference_pb2.ServedModel]:
        """Names, aliases and readiness of all models, the default one first."""
        return tuple((await self._capabilities("")).models)

    async def _capabilities(self, model: str) -> inference_pb2.GetCapabilitiesResponse:
        request = inference_pb2.GetCapabilitiesRequest()
        set_field(request, "model", model)
        return await self._routers.ask(
            lambda router: router.channel.unary(router.stub.GetCapabilities, request, timeout_s=CONTROL_TIMEOUT_S)
        )

    async def workers(self) -> Sequence[inference_pb2.WorkerInfo]:
        """The workers behind a router and their state."""
        request = inference_pb2.ListWorkersRequest()
        response = await self._routers.ask(
            lambda router: router.channel.unary(router.stub.ListWorkers, request, timeout_s=CONTROL_TIMEOUT_S)
        )
        return tuple(response.workers)

    # -- operation ------------------------------------------------------------------------------------------------

    def drain_worker(
        self, worker: str, *, grace_s: float | None = None, force: bool = False
    ) -> AbstractAsyncContextManager[AsyncIterator[admin_pb2.DrainWorkerResponse]]:
        """Has a worker take no new work, and follows what runs there to its end. Leaving does not end the drain.

        `worker` is its name or host:port, `grace_s` how long what runs may go on there, None what the worker has
        configured; `force` also takes the last ready worker of its role.
        """
        request = admin_pb2.DrainWorkerRequest(worker=worker, grace_s=grace_s, force=force)
        return self._progress(self._routers.next(), request)

    @async_block
    async def _progress(
        self, router: Router, request: admin_pb2.DrainWorkerRequest
    ) -> AsyncIterator[AsyncIterator[admin_pb2.DrainWorkerResponse]]:
        async with router.channel.stream(router.admin_stub.DrainWorker, request) as call:
            yield aiter(call)

    async def undrain_worker(self, worker: str) -> admin_pb2.UndrainWorkerResponse:
        """Has a worker take new work again."""
        request = admin_pb2.UndrainWorkerRequest(worker=worker)
        return await self._routers.ask(
            lambda router: router.channel.unary(router.admin_stub.UndrainWorker, request, timeout_s=CONTROL_TIMEOUT_S)
        )

    # -- KV memory ------------------------------------------------------------------------------------------------

    async def memory(self) -> Sequence[cache_pb2.WorkerMemory]:
        """The KV memory of every worker."""
        request = cache_pb2.GetMemoryRequest()
        response = await self._routers.ask(
            lambda router: router.channel.unary(router.cache_stub.GetMemory, request, timeout_s=CACHE_TIMEOUT_S)
        )
        return tuple(response.workers)

    async def flush_prefix_cache(self, *, tenant: str = "") -> Sequence[cache_pb2.WorkerBlocks]:
        """Empties the prefix cache; `tenant` is for administrators, who otherwise empty everybody's."""
        request = cache_pb2.FlushPrefixCacheRequest(tenant=tenant)
        response = await self._routers.ask(
            lambda router: router.channel.unary(router.cache_stub.FlushPrefixCache, request, timeout_s=CACHE_TIMEOUT_S)
        )
        return tuple(response.workers)

    async def pin_prefix(self, options: PinOptions) -> cache_pb2.PinPrefixResponse:
        """Keeps what is cached of a prefix from eviction."""
        request = options.to_pb()
        return await self._routers.ask(
            lambda router: router.channel.unary(router.cache_stub.PinPrefix, request, timeout_s=CACHE_TIMEOUT_S)
        )

    async def unpin_prefix(self, name: str, *, tenant: str = "") -> Sequence[cache_pb2.WorkerBlocks]:
        """Ends a pin."""
        request = cache_pb2.UnpinPrefixRequest(name=name, tenant=tenant)
        response = await self._routers.ask(
            lambda router: router.channel.unary(router.cache_stub.UnpinPrefix, request, timeout_s=CACHE_TIMEOUT_S)
        )
        return tuple(response.workers)


def _checked_key(api_key: str) -> str:
    """Metadata holds printable ASCII only; the library's own message would repeat the key."""
    if not api_key or not all("!" <= character <= "~" for character in api_key):
        raise InvalidArgument("api_key", "must be printable ASCII characters without spaces, at least one")
    return api_key
