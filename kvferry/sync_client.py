"""The public Python client for programs without an event loop: `AsyncClient`, whose calls return when they are done.

    with Client("127.0.0.1:50051") as client:
        print(client.chat("What is the capital of France?", max_tokens=20).text)
        with client.stream(GenerateOptions(prompt="Once upon", max_tokens=20)) as pieces:
            for piece in pieces:
                print(piece, end="")

Leaving the block of a stream cancels the request, and so does Ctrl-C. Several threads may use one client. A call blocks
its thread: in a coroutine that would be the whole loop's, so use `AsyncClient` there; a process that does both has two
loops, which works, but under load grpc.aio may log wake-ups that found nothing (R091).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, contextmanager
from typing import Any, Self, TypeVar

from opentelemetry.trace import Tracer

from kvferry.client import (
    RESUME_WAIT_S,
    AsyncClient,
    ChatMessage,
    Completion,
    GenerateOptions,
    PinOptions,
    Prompt,
    Tool,
)
from kvferry.client_blocks import Block
from kvferry.client_loop import SharedLoop
from proto.kvferry.v1 import admin_pb2, cache_pb2, inference_pb2, types_pb2

_Item = TypeVar("_Item")


class Client:
    """Connections to the routers of one deployment; arguments and methods are those of `AsyncClient`."""

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
        async def connect() -> AsyncClient:  # channels belong to the loop they are made in
            return AsyncClient(
                target,
                tracer=tracer,
                api_key=api_key,
                resume=resume,
                resume_wait_s=resume_wait_s,
                progress_timeout_s=progress_timeout_s,
            )

        self._loop = SharedLoop()
        try:
            self._client = self._loop.run(connect())
        except BaseException:
            self._loop.release()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections; running requests, of other threads, are cancelled. Once is enough."""
        if not self._loop.is_released:
            try:
                self._loop.run(self._client.close())
            finally:
                self._loop.release()

    # -- requests -------------------------------------------------------------------------------------------------

    def generate(
        self, options: GenerateOptions | Prompt, *, timeout_s: float | None = None, **fields: Any
    ) -> AbstractContextManager[Iterator[inference_pb2.GenerateResponse]]:
        """Streams the events of one request; `timeout_s` is its deadline. Leaving the block cancels it.

        The request is `options`, or a prompt; `fields` are those of `GenerateOptions`, and replace the options' own.
        """
        return self._iterating(self._client.generate(options, timeout_s=timeout_s, **fields))

    def stream(
        self, options: GenerateOptions | Prompt, *, timeout_s: float | None = None, **fields: Any
    ) -> AbstractContextManager[Iterator[str]]:
        """Streams the text of one request, piece by piece; else as `generate`."""
        return self._iterating(self._client.stream(options, timeout_s=timeout_s, **fields))

    def complete(
        self, options: GenerateOptions | Prompt, *, timeout_s: float | None = None, **fields: Any
    ) -> Completion:
        """The whole response of one request, given as for `generate`."""
        return self._loop.run(self._client.complete(options, timeout_s=timeout_s, **fields))

    def chat(
        self,
        messages: str | Sequence[ChatMessage | Mapping[str, Any]],
        *,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> Completion:
        """The answer to a conversation, or to one message of a user; `fields` are those of `GenerateOptions`."""
        return self._loop.run(self._client.chat(messages, timeout_s=timeout_s, **fields))

    def tokenize(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        add_special_tokens: bool | None = None,
        tools: Sequence[Tool | Mapping[str, Any]] = (),
    ) -> Sequence[int]:
        """The token ids that a request's prompt becomes: a text, or a conversation with its tools."""
        return self._loop.run(
            self._client.tokenize(prompt, model=model, add_special_tokens=add_special_tokens, tools=tools)
        )

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = False) -> str:
        """The text of token ids, at most as many as the context has."""
        return self._loop.run(self._client.detokenize(token_ids, model=model, skip_special_tokens=skip_special_tokens))

    def abort(self, *request_ids: str) -> Sequence[str]:
        """Ends requests by the server's id or the caller's label; returns the ids found running."""
        return self._loop.run(self._client.abort(*request_ids))

    # -- operation ------------------------------------------------------------------------------------------------

    def capabilities(self, model: str = "") -> types_pb2.Capabilities:
        """Limits, layout and versions of a model; of the default one where none is named."""
        return self._loop.run(self._client.capabilities(model))

    def models(self) -> Sequence[inference_pb2.ServedModel]:
        """Names, aliases and readiness of all models, the default one first."""
        return self._loop.run(self._client.models())

    def workers(self) -> Sequence[inference_pb2.WorkerInfo]:
        """The workers behind a router and their state."""
        return self._loop.run(self._client.workers())

    def drain_worker(
        self, worker: str, *, grace_s: float | None = None, force: bool = False
    ) -> AbstractContextManager[Iterator[admin_pb2.DrainWorkerResponse]]:
        """Has a worker take no new work, and follows what runs there to its end. Leaving does not end the drain."""
        return self._iterating(self._client.drain_worker(worker, grace_s=grace_s, force=force))

    def undrain_worker(self, worker: str) -> admin_pb2.UndrainWorkerResponse:
        """Has a worker take new work again."""
        return self._loop.run(self._client.undrain_worker(worker))

    def memory(self) -> Sequence[cache_pb2.WorkerMemory]:
        """The KV memory of every worker."""
        return self._loop.run(self._client.memory())

    def flush_prefix_cache(self, *, tenant: str = "") -> Sequence[cache_pb2.WorkerBlocks]:
        """Empties the prefix cache; `tenant` is for administrators, who otherwise empty everybody's."""
        return self._loop.run(self._client.flush_prefix_cache(tenant=tenant))

    def pin_prefix(self, options: PinOptions) -> cache_pb2.PinPrefixResponse:
        """Keeps what is cached of a prefix from eviction."""
        return self._loop.run(self._client.pin_prefix(options))

    def unpin_prefix(self, name: str, *, tenant: str = "") -> Sequence[cache_pb2.WorkerBlocks]:
        """Ends a pin."""
        return self._loop.run(self._client.unpin_prefix(name, tenant=tenant))

    def _iterating(
        self, context: AbstractAsyncContextManager[AsyncIterator[_Item], bool | None]
    ) -> Block[Iterator[_Item]]:
        return Block(self._iterate(context))

    @contextmanager
    def _iterate(
        self, context: AbstractAsyncContextManager[AsyncIterator[_Item], bool | None]
    ) -> Iterator[Iterator[_Item]]:
        """`context` as a block of this thread; an error of the block passes through it, as it would in a coroutine."""
        run, stack = self._loop.run, AsyncExitStack()
        try:
            items = run(stack.enter_async_context(context))
            yield _Items(self._loop, items)
        except Exception as error:
            run(stack.__aexit__(type(error), error, error.__traceback__))
            raise
        except BaseException:  # Ctrl-C: it is this thread's, and would end the loop
            run(stack.aclose())
            raise
        run(stack.aclose())


class _Items(Iterator[_Item]):
    """One after the other, each when it is asked for."""

    def __init__(self, loop: SharedLoop, items: AsyncIterator[_Item]) -> None:
        self._loop, self._items = loop, items

    def __next__(self) -> _Item:
        item = self._loop.run(_next(self._items))
        if isinstance(item, _End):
            raise StopIteration
        return item


class _End:
    """What stands for the end of a stream: StopIteration cannot leave a coroutine."""


async def _next(items: AsyncIterator[_Item]) -> _Item | _End:
    return await anext(items, _End())
