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
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

from opentelemetry.trace import Tracer

from kvferry.client_resume import ResumingStream
from kvferry.client_routers import Router, Routers
from kvferry.errors import DataLoss, DeadlineExceeded, InvalidArgument, Unavailable
from kvferry.sampling import Finish
from kvferry.wire import finish_from_pb
from kvferry.worker import check_progress_timeout
from proto.kvferry.v1 import admin_pb2, cache_pb2, inference_pb2, types_pb2

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


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function that the assistant asked for in a message; `arguments` is an object in JSON."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model is told of; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: str = ""


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation.

    Attributes:
        tool_calls: what the assistant asked for in it.
        tool_call_id: the call that it answers.
        name: of the function that answers, or of the speaker.
    """

    role: str
    content: str
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""
    name: str = ""

    def to_pb(self) -> inference_pb2.ChatMessage:
        """The message; raises ValueError or TypeError for a value its field cannot hold."""
        calls = [inference_pb2.ToolCall(id=c.id, name=c.name, arguments=c.arguments) for c in self.tool_calls]
        return inference_pb2.ChatMessage(
            role=self.role, content=self.content, tool_calls=calls, tool_call_id=self.tool_call_id, name=self.name
        )


Prompt = str | Sequence[int] | Sequence[ChatMessage]
"""Text, token ids, or a conversation."""


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """One request. None leaves a value to the server's default, which `Started` echoes.

    Attributes:
        tools: functions that a conversation's model is told of; its calls are text of the output.
        structural_tag: JSON, as `GenerateRequest.structural_tag`.
        kept_special_token_ids: special tokens that stay in the text, though others are left out.
    """

    prompt: Prompt
    tools: Sequence[Tool] = ()
    model: str = ""
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    json_schema: str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] = ()
    grammar: str | None = None
    structural_tag: str | None = None
    n: int | None = None
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    time_limit_s: float | None = None
    logprobs: int | None = None
    logprob_token_ids: Sequence[int] = ()
    prompt_logprobs: int | None = None
    echo: bool | None = None
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool | None = None
    kept_special_token_ids: Sequence[int] = ()
    tier: str = ""
    tenant: str = ""
    adapter: str = ""
    bypass_prefix_cache: bool | None = None
    cache_salt: str = ""
    shared_salt: str = ""
    request_id: str = ""
    session_id: str = ""

    def to_pb(self) -> inference_pb2.GenerateRequest:
        """The message; raises InvalidArgument for a value its field cannot hold."""
        request = inference_pb2.GenerateRequest()
        for name in _LABEL_FIELDS:
            _set(request, name, getattr(self, name))
        _set_prompt(request, self.prompt)
        _set_tools(request, self.tools)
        _set(request, "truncate_prompt_tokens", self.truncate_prompt_tokens)
        for name in _SAMPLING_FIELDS:
            _set(request.sampling, f"sampling.{name}", getattr(self, name))
        _update(request.sampling.logit_bias, "sampling.logit_bias", self.logit_bias)
        _extend(request.sampling.allowed_token_ids, "sampling.allowed_token_ids", self.allowed_token_ids)
        _extend(request.sampling.bad_words, "sampling.bad_words", self.bad_words)
        _set_constraint(request, self)
        _set_beam_search(request, self)
        for name in _STOPPING_FIELDS:
            _set(request.stopping, f"stopping.{name}", getattr(self, name))
        for name in _RESPONSE_FIELDS:
            _set(request.response, f"response.{name}", getattr(self, name))
        _extend(request.response.logprob_token_ids, "response.logprob_token_ids", self.logprob_token_ids)
        kept = request.response.kept_special_token_ids
        _extend(kept, "response.kept_special_token_ids", self.kept_special_token_ids)
        for name in _CACHE_FIELDS:
            _set(request.cache, f"cache.{name}", getattr(self, name) or None)
        _extend(request.stopping.stop, "stopping.stop", self.stop)
        _extend(request.stopping.stop_token_ids, "stopping.stop_token_ids", self.stop_token_ids)
        return request


_LABEL_FIELDS = ("model", "tier", "tenant", "adapter", "request_id", "session_id")
_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "n",
    "best_of",
)
_CONSTRAINT_FIELDS = ("json_schema", "json_object", "regex", "grammar", "structural_tag")
_STOPPING_FIELDS = ("max_tokens", "min_tokens", "include_stop_str_in_output", "ignore_eos", "time_limit_s")
_RESPONSE_FIELDS = ("logprobs", "prompt_logprobs", "echo", "skip_special_tokens")
_CACHE_FIELDS = ("bypass_prefix_cache", "cache_salt", "shared_salt")


@dataclass(frozen=True, slots=True)
class PinOptions:
    """A prefix to pin, as a request would begin; `tenant` is for administrators, who may act for others.

    A conversation is pinned up to the end of its last message, without the beginning of an answer; `tools` are those
    that its requests have.
    """

    name: str
    prompt: Prompt
    model: str = ""
    adapter: str = ""
    cache_salt: str = ""
    shared_salt: str = ""
    tenant: str = ""
    tools: Sequence[Tool] = ()

    def to_pb(self) -> cache_pb2.PinPrefixRequest:
        """The message; raises InvalidArgument for a value its field cannot hold."""
        request = cache_pb2.PinPrefixRequest()
        for name in ("name", "model", "adapter", "tenant"):
            _set(request, name, getattr(self, name))
        _set_prompt(request, self.prompt)
        _set_tools(request, self.tools)
        if request.HasField("chat"):
            request.chat.add_generation_prompt = False
        for name in ("cache_salt", "shared_salt"):
            _set(request.cache, f"cache.{name}", getattr(self, name) or None)
        return request


def _set_prompt(
    request: inference_pb2.GenerateRequest | cache_pb2.PinPrefixRequest | inference_pb2.TokenizeRequest, prompt: Prompt
) -> None:
    if isinstance(prompt, str):
        _set(request, "prompt.text", prompt)
    elif prompt and isinstance(prompt[0], ChatMessage):
        # made while `_extend` watches: text that is not UTF-8 is found here
        messages = (message.to_pb() for message in prompt if isinstance(message, ChatMessage))
        _extend(request.chat.messages, "prompt.chat", messages)
    elif isinstance(request, inference_pb2.TokenizeRequest):
        raise InvalidArgument("prompt", "must be text or a conversation that is not empty")
    else:
        request.token_ids.SetInParent()
        _extend(request.token_ids.ids, "prompt.token_ids", prompt)


def _set_tools(request: inference_pb2.GenerateRequest | cache_pb2.PinPrefixRequest, tools: Sequence[Tool]) -> None:
    """The server cannot refuse what is not on its way: tools of a prompt that is no conversation."""
    if tools and not request.HasField("chat"):
        raise InvalidArgument("tools", "is only for a conversation")
    messages = (inference_pb2.Tool(name=t.name, description=t.description, parameters=t.parameters) for t in tools)
    if tools:
        _extend(request.chat.tools, "prompt.chat.tools", messages)


def _set_constraint(request: inference_pb2.GenerateRequest, options: GenerateOptions) -> None:
    """At most one: the last would silently win."""
    named = [name for name in (*_CONSTRAINT_FIELDS, "choice") if getattr(options, name) not in (None, ())]
    if len(named) > 1:
        raise InvalidArgument(named[1], f"cannot be combined with {named[0]}")
    for name in _CONSTRAINT_FIELDS:
        _set(request, name, getattr(options, name))
    if options.choice:
        _extend(request.choice.choices, "choice", options.choice)


def _set_beam_search(request: inference_pb2.GenerateRequest, options: GenerateOptions) -> None:
    """A width makes it a beam search; the server refuses the other two without one."""
    for name, value in (
        ("width", options.beam_width),
        ("length_penalty", options.length_penalty),
        ("early_stopping", options.early_stopping),
    ):
        if value is not None:
            _set(request.beam_search, f"beam_search.{name}", value)


def _set(message: Any, path: str, value: object) -> None:
    """Sets the last part of `path`, which is the field's name in errors, as the server's are."""
    if value is None:
        return
    try:
        setattr(message, path.rpartition(".")[2], value)
    except (ValueError, TypeError, UnicodeError) as error:
        raise InvalidArgument(path, f"cannot be {value!r:.80}: {error}") from error


def _extend(target: Any, path: str, values: Iterable[object]) -> None:
    try:
        target.extend(values)
    except (ValueError, TypeError, UnicodeError) as error:
        raise InvalidArgument(path, f"holds a value it cannot: {error}") from error


def _update(target: Any, path: str, values: Mapping[int, float]) -> None:
    try:
        target.update(values)
    except (ValueError, TypeError, UnicodeError) as error:
        raise InvalidArgument(path, f"holds a value it cannot: {error}") from error


@dataclass(slots=True)
class Choice:
    """One output, complete once `finish` is set; `logprobs` has one entry a token where they were asked for."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[types_pb2.TokenLogprob] = field(default_factory=list)
    text: str = ""
    finish: Finish | None = None
    cumulative_logprob: float | None = None


@dataclass(slots=True)
class Completion:
    """A whole response, gathered from its events.

    Attributes:
        prompt_logprobs: of every token of the prompt but the first, where they were asked for.
    """

    started: inference_pb2.Started = field(default_factory=inference_pb2.Started)
    prompt_logprobs: list[types_pb2.TokenLogprob] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    usage: inference_pb2.Usage = field(default_factory=inference_pb2.Usage)
    timings: inference_pb2.Timings = field(default_factory=inference_pb2.Timings)
    is_complete: bool = False

    @property
    def text(self) -> str:
        """That of the first choice."""
        return self.choices[0].text if self.choices else ""

    def add(self, event: inference_pb2.GenerateResponse) -> None:
        """Takes the next event; raises DataLoss when tokens are missing, doubled or out of order."""
        match event.WhichOneof("event"):
            case "started":
                self.started = event.started
            case "prompt_logprobs":
                self._add_prompt_logprobs(event.prompt_logprobs)
            case "delta":
                self._add_delta(event.delta)
            case "finish":
                choice = self._choice(event.finish.index)
                choice.finish = finish_from_pb(event.finish.finish)
                if event.finish.HasField("cumulative_logprob"):
                    choice.cumulative_logprob = event.finish.cumulative_logprob
                self._check_count(choice, event.finish.num_output_tokens)
            case "completed":
                self.usage, self.timings = event.completed.usage, event.completed.timings
                self.is_complete = True

    def check_complete(self) -> None:
        """Raises DataLoss when the stream ended before its last event."""
        if not self.is_complete:
            raise DataLoss("the stream ended without its last message")

    def _add_prompt_logprobs(self, message: types_pb2.PromptLogprobs) -> None:
        if message.token_index != len(self.prompt_logprobs) + 1:
            raise DataLoss(
                f"the log-probability of prompt token {message.token_index} came after {len(self.prompt_logprobs)}"
            )
        self.prompt_logprobs.extend(message.logprobs)

    def _add_delta(self, delta: inference_pb2.ChoiceDelta) -> None:
        choice = self._choice(delta.index)
        if delta.token_ids and delta.token_index != len(choice.token_ids):
            raise DataLoss(f"choice {delta.index}: token {delta.token_index} came after {len(choice.token_ids)} tokens")
        choice.token_ids.extend(delta.token_ids)
        choice.logprobs.extend(delta.logprobs)
        choice.text += delta.text

    def _check_count(self, choice: Choice, num_output_tokens: int) -> None:
        if choice.token_ids and len(choice.token_ids) != num_output_tokens:
            raise DataLoss(f"choice {choice.index}: {len(choice.token_ids)} tokens came, {num_output_tokens} were made")

    def _choice(self, index: int) -> Choice:
        while len(self.choices) <= index:
            self.choices.append(Choice(len(self.choices)))
        return self.choices[index]


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

    @asynccontextmanager
    async def generate(
        self, options: GenerateOptions, *, timeout_s: float | None = None
    ) -> AsyncIterator[AsyncIterator[inference_pb2.GenerateResponse]]:
        """Streams the events of one request; `timeout_s` is its deadline. Leaving the block cancels it.

        `Started` comes once, from the router that began the response; `Completed` counts the whole output. Heartbeats
        are not shown.
        """
        request = options.to_pb()
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

    async def complete(self, options: GenerateOptions, *, timeout_s: float | None = None) -> Completion:
        """The whole response of one request."""
        completion = Completion()
        async with self.generate(options, timeout_s=timeout_s) as events:
            async for event in events:
                completion.add(event)
        completion.check_complete()
        return completion

    @asynccontextmanager
    async def stream(
        self, options: GenerateOptions, *, timeout_s: float | None = None
    ) -> AsyncIterator[AsyncIterator[str]]:
        """Streams the text of one request, piece by piece; else as `generate`.

        Raises InvalidArgument for `n` above 1.
        """
        if (options.n or 1) > 1:
            raise InvalidArgument("sampling.n", "choices come side by side; `generate` tells them apart")
        async with self.generate(options, timeout_s=timeout_s) as events:
            yield (event.delta.text async for event in events if event.delta.text)

    async def chat(
        self, messages: str | Sequence[ChatMessage], *, timeout_s: float | None = None, **options: Any
    ) -> Completion:
        """The answer to a conversation, or to one message of a user; `options` are those of `GenerateOptions`."""
        prompt = [ChatMessage("user", messages)] if isinstance(messages, str) else messages
        return await self.complete(GenerateOptions(prompt=prompt, **options), timeout_s=timeout_s)

    async def tokenize(
        self, prompt: str | Sequence[ChatMessage], *, model: str = "", add_special_tokens: bool | None = None
    ) -> Sequence[int]:
        """The token ids that a request's prompt becomes."""
        request = inference_pb2.TokenizeRequest(add_special_tokens=add_special_tokens)
        _set(request, "model", model)
        _set_prompt(request, prompt)
        response = await self._routers.ask(
            lambda router: router.channel.unary(router.stub.Tokenize, request, timeout_s=TOKENIZE_TIMEOUT_S)
        )
        return tuple(response.token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = False) -> str:
        """The text of token ids, at most as many as the context has."""
        request = inference_pb2.DetokenizeRequest(skip_special_tokens=skip_special_tokens)
        _set(request, "model", model)
        _extend(request.token_ids, "token_ids", token_ids)
        response = await self._routers.ask(
            lambda router: router.channel.unary(router.stub.Detokenize, request, timeout_s=TOKENIZE_TIMEOUT_S)
        )
        return response.text

    async def abort(self, *request_ids: str) -> Sequence[str]:
        """Ends requests by the server's id or the caller's label; returns the ids found running.

        Every router is asked, for any may run them; raises Unavailable only when none answers. A request of this client
        that is on its way from one router to another is ended by the next.
        """
        between = {name for name in request_ids for stream in self._streams if stream.abort_between_routers(name)}
        request = inference_pb2.AbortRequest()
        _extend(request.request_ids, "request_ids", request_ids)
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
        _set(request, "model", model)
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

    @asynccontextmanager
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
