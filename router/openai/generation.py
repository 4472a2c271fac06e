"""`/v1/completions` and `/v1/chat/completions`: one HTTP call, one GenerateRequest for each of its prompts.

    body ─► fields ─► GenerateRequest … ─► Serving.generate, side by side ─► Writer ─► client

The first request that fails ends the others: a response has all its choices, or is an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial

from opentelemetry.context import attach
from opentelemetry.trace import set_span_in_context

from kvferry.telemetry import Attributes, SpanNames
from proto.kvferry.v1 import inference_pb2 as pb
from router.models import Model
from router.openai.body import parse
from router.openai.endpoint import Call
from router.openai.errors import told_in_http
from router.openai.exchange import SESSION_ID
from router.openai.fields import GenerationFields
from router.openai.logprobs import ChatLogprobs, CompletionLogprobs, TokenTexts
from router.openai.requests import ChatBody, CompletionBody, fit_roles
from router.openai.responses import Form, Logprobs, ResponseText
from router.openai.tools import Calling
from router.openai.writers import EventWriter, WholeWriter, Writer
from router.text.detokenizer import Detokenizer
from router.text.token_bytes import TokenBytes


async def complete(call: Call) -> None:
    """`POST /v1/completions`."""
    body = parse(CompletionBody, await call.body())
    messages = body.requests(call.exchange.request_id)
    await _generate(call, body, messages, _form(body, messages[0], _model(call, messages[0]), is_chat=False))


async def chat(call: Call) -> None:
    """`POST /v1/chat/completions`."""
    body = parse(ChatBody, await call.body())
    (message,) = body.requests(call.exchange.request_id)
    model = _model(call, message)
    fit_roles(message.chat, model.tokenizer.chat_template)
    with told_in_http(body.names()):
        calling = body.calling(message, model)
    await _generate(call, body, (message,), _form(body, message, model, is_chat=True, calling=calling))


def _model(call: Call, message: pb.GenerateRequest) -> Model:
    return call.serving.parts.models.find(message.model)


async def _generate(call: Call, body: GenerationFields, messages: Sequence[pb.GenerateRequest], form: Form) -> None:
    names = _names(body, form)
    for message in messages:
        message.session_id = message.session_id or call.exchange.headers.get(SESSION_ID, "")
    if body.user:
        call.span.set_attribute(Attributes.END_USER_ID, body.user)
    response = ResponseText(form, num_choices=max(1, messages[0].sampling.n))
    writer: Writer
    if body.stream:
        writer = EventWriter(call.exchange, response, num_prompts=len(messages), includes_usage=body.includes_usage)
    else:
        writer = WholeWriter(call.exchange, response)
    await _run_all([_run(call, messages, prompt, writer, names(prompt)) for prompt in range(len(messages))])
    await writer.end()


def _names(body: GenerationFields, form: Form) -> Callable[[int], Mapping[str, str]]:
    """Names of fields by prompt; the grammar of tools is no caller's, for then there is one."""
    is_of_tools = form.calling is not None and bool(form.calling.grammar)
    return lambda prompt: {**body.names(prompt), **({"grammar": "tools"} if is_of_tools else {})}


async def _run(
    call: Call, messages: Sequence[pb.GenerateRequest], prompt: int, writer: Writer, names: Mapping[str, str]
) -> None:
    """One prompt's request, under a span of its own where there are several."""
    message, serving = messages[prompt], call.serving
    write = partial(writer.write, prompt)
    with told_in_http(names):
        if len(messages) == 1:
            await serving.generate(message, call.metadata, write, route=call.route)
            return
        with serving.parts.telemetry.span(SpanNames.PROMPT) as span:
            attach(set_span_in_context(span))  # ends with the task
            await serving.generate(message, call.metadata, write, route=call.route)


async def _run_all(requests: Iterable[Coroutine[None, None, None]]) -> None:
    """Runs them together; when one fails the others are ended, and its error is raised."""
    tasks = [asyncio.create_task(request) for request in requests]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _form(
    body: GenerationFields,
    message: pb.GenerateRequest,
    model: Model,
    *,
    is_chat: bool,
    calling: Calling | None = None,
) -> Form:
    return Form(
        id_prefix="chatcmpl-" if is_chat else "cmpl-",
        whole="chat.completion" if is_chat else "text_completion",
        chunk="chat.completion.chunk" if is_chat else "text_completion",
        is_chat=is_chat,
        new_logprobs=_new_logprobs(body, message, model.tokenizer.token_bytes, is_chat=is_chat),
        shows_ids=bool(body.return_token_ids),
        echoes=message.response.echo,
        calling=calling,
    )


def _new_logprobs(
    body: GenerationFields, message: pb.GenerateRequest, table: TokenBytes, *, is_chat: bool
) -> Callable[[], Logprobs] | None:
    """Makes a choice's; None where none are asked for."""
    if not (message.response.HasField("logprobs") or message.response.logprob_token_ids):
        return None
    texts = TokenTexts(table, as_ids=bool(body.return_tokens_as_token_ids))
    if is_chat:
        return lambda: ChatLogprobs(texts)
    skips = body.skip_special_tokens is not False
    if message.response.echo or not message.HasField("token_ids"):
        continues = message.HasField("text") and not message.response.echo
        offsets = Detokenizer(table, skip_special_tokens=skips, continues_text=continues)
    else:
        offsets = Detokenizer.behind(table, message.token_ids.ids, skip_special_tokens=skips)
    return lambda: CompletionLogprobs(texts, offsets.copy())
