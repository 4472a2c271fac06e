"""`kvferry generate`: a request from the command line."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from kvferry.cli.console import note, write, write_json
from kvferry.cli.constraints import (
    ChoiceOption,
    GrammarOption,
    JsonObjectOption,
    JsonSchemaOption,
    RegexOption,
    StructuralTagOption,
    constraint_of,
)
from kvferry.cli.options import (
    ApiKeyOption,
    ConfigOption,
    ResumeOption,
    RouterTarget,
    SessionOption,
    SetOption,
    TargetOption,
    configuration,
    router_of,
)
from kvferry.cli.router import connected
from kvferry.client import AsyncClient, Choice, Completion, GenerateOptions, Prompt
from kvferry.config import Config
from kvferry.errors import InvalidArgument
from kvferry.rpc import run
from kvferry.sampling import FinishKind
from proto.kvferry.v1 import types_pb2

MAX_TIMEOUT_S = 1e6
"""Eleven days; gRPC cannot hold a deadline without end."""

MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", help="Most output tokens; what fits the context unless told otherwise.")
]
Temperature = Annotated[
    float | None, typer.Option("--temperature", help="0 is greedy; 1 unless told otherwise, which samples.")
]
TopP = Annotated[float | None, typer.Option("--top-p", help="Smallest set of tokens with this probability.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="Only the k most likely tokens; 0 or -1 is off.")]
MinP = Annotated[float | None, typer.Option("--min-p", help="Least probability relative to the most likely token.")]
Seed = Annotated[int | None, typer.Option("--seed", help="The same seed gives the same tokens.")]
ServedModel = Annotated[str, typer.Option("--model", help="Name of the model; the first one served.")]
Tier = Annotated[str, typer.Option("--tier", help="Latency tier.")]


def _deadline(seconds: float | None) -> float | None:
    if seconds is not None and not seconds > 0:  # also what is no number
        raise typer.BadParameter(f"must be above 0, got {seconds:g}")
    if seconds is not None and seconds > MAX_TIMEOUT_S:
        raise typer.BadParameter(f"must be at most {MAX_TIMEOUT_S:.0f}, got {seconds:g}")
    return seconds


Timeout = Annotated[
    float | None,
    typer.Option("--timeout", metavar="SECONDS", callback=_deadline, help="Deadline of the request, above 0."),
]


def register(app: typer.Typer) -> None:
    """Adds the commands to `app`."""
    app.command(
        "generate",
        epilog='Example: kvferry generate --max-tokens 40 --router hostA:50051 --router hostB:50051 "Once upon"\n\n'
        'Example: kvferry generate --choice " Paris" --choice " Rome" "The capital of Italy is"',
    )(generate)


def generate(
    prompt: Annotated[str | None, typer.Argument(help="Text to continue; - reads standard input.")] = None,
    prompt_token_ids: Annotated[
        str | None, typer.Option("--prompt-token-ids", metavar="1,2,3", help="Token ids instead of text.")
    ] = None,
    target: TargetOption = None,
    api_key: ApiKeyOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole response as one JSON object.")] = False,
    max_tokens: MaxTokens = None,
    min_tokens: Annotated[int | None, typer.Option("--min-tokens", help="No end before this many tokens.")] = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    seed: Seed = None,
    presence_penalty: Annotated[
        float | None, typer.Option("--presence-penalty", help="On tokens that the output has; -2 … 2.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option("--frequency-penalty", help="The same, once an occurrence; -2 … 2.")
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option("--repetition-penalty", help="On tokens of prompt and output; 1 is none.")
    ] = None,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option("--logit-bias", metavar="ID=VALUE", help="Added to the logit of a token, -100 … 100; repeatable."),
    ] = None,
    bad_words: Annotated[
        list[str] | None, typer.Option("--bad-word", metavar="TEXT", help="Word that may not come; repeatable.")
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option("--logprobs", help="With --json: log-probabilities of the tokens and of this many likely ones."),
    ] = None,
    prompt_logprobs: Annotated[
        int | None,
        typer.Option("--prompt-logprobs", help="With --json: the same of the prompt's tokens; its first has none."),
    ] = None,
    echo: Annotated[bool, typer.Option("--echo", help="Put the prompt before the output.")] = False,
    truncate_prompt_tokens: Annotated[
        int | None, typer.Option("--truncate-prompt-tokens", help="Keep only this many tokens of the prompt's end.")
    ] = None,
    n: Annotated[int | None, typer.Option("--n", help="Number of choices.")] = None,
    best_of: Annotated[
        int | None, typer.Option("--best-of", help="Number of candidates, of which the best n are shown at the end.")
    ] = None,
    beam_width: Annotated[
        int | None, typer.Option("--beam-width", help="Beam search with this many beams; --n of them are shown.")
    ] = None,
    length_penalty: Annotated[
        float | None, typer.Option("--length-penalty", help="Of the beam search; above 0 prefers longer output.")
    ] = None,
    early_stopping: Annotated[
        bool, typer.Option("--early-stopping", help="End the beam search once enough beams are complete.")
    ] = False,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="Text that ends the output; repeatable.")] = None,
    include_stop: Annotated[
        bool, typer.Option("--include-stop", help="Keep the text of --stop that ended the output.")
    ] = False,
    stop_token_ids: Annotated[
        str | None, typer.Option("--stop-token-ids", metavar="1,2,3", help="Ids that end the output.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end of the sequence.")] = False,
    json_schema: JsonSchemaOption = None,
    json_object: JsonObjectOption = False,
    regex: RegexOption = None,
    choice: ChoiceOption = None,
    grammar: GrammarOption = None,
    structural_tag: StructuralTagOption = None,
    tier: Tier = "",
    session_id: SessionOption = "",
    cache_salt: Annotated[str, typer.Option("--cache-salt", help="Shares the prefix cache with this salt only.")] = "",
    shared_salt: Annotated[
        str, typer.Option("--shared-salt", help="Shares the prefix cache with all tenants that set this salt.")
    ] = "",
    bypass_prefix_cache: Annotated[
        bool, typer.Option("--bypass-prefix-cache", help="Neither look up nor fill the prefix cache.")
    ] = False,
    model: ServedModel = "",
    request_id: Annotated[str, typer.Option("--request-id", help="Label in the server's logs.")] = "",
    timeout_s: Timeout = None,
    resume: ResumeOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Continues a prompt and streams the text."""
    _check_beam_options(beam_width, length_penalty, early_stopping=early_stopping)
    _check_stop_options(stop, include_stop=include_stop)
    effective = configuration(config, settings)
    options = GenerateOptions(
        prompt=prompt_of(prompt, prompt_token_ids),
        model=model,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=0 if top_k == -1 else top_k,
        min_p=min_p,
        seed=seed,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        repetition_penalty=repetition_penalty,
        logit_bias=_bias(logit_bias or ()),
        bad_words=bad_words or (),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        echo=True if echo else None,
        truncate_prompt_tokens=truncate_prompt_tokens,
        n=n,
        best_of=best_of,
        beam_width=beam_width,
        length_penalty=length_penalty,
        early_stopping=True if early_stopping else None,
        stop=stop or (),
        include_stop_str_in_output=True if include_stop else None,
        stop_token_ids=_ids("--stop-token-ids", stop_token_ids) if stop_token_ids is not None else (),
        ignore_eos=True if ignore_eos else None,
        tier=tier,
        cache_salt=cache_salt,
        shared_salt=shared_salt,
        bypass_prefix_cache=True if bypass_prefix_cache else None,
        request_id=request_id,
        session_id=session_id,
        **constraint_of(json_schema, json_object, regex, choice, grammar, structural_tag),
    )
    _answer(router_of(target, api_key, effective, resume=resume), effective, options, timeout_s, as_json=as_json)


def _answer(
    router: RouterTarget, config: Config, options: GenerateOptions, timeout_s: float | None, *, as_json: bool
) -> None:
    if not as_json:
        _check_shown_options(options)
    completion = run(request(router, config, options, timeout_s, is_quiet=as_json))
    if as_json:
        write_json(completion_json(completion))
        return
    for choice in completion.choices:
        if why := early_end(completion, choice):
            note(f"choice {choice.index} {why}" if len(completion.choices) > 1 else why)


def early_end(completion: Completion, choice: Choice) -> str:
    """How a choice ended, where neither the model nor a stop ended it; else nothing."""
    match choice.finish and choice.finish.kind:
        case FinishKind.LENGTH:
            return f"ended at max_tokens ({completion.started.stopping.max_tokens or len(choice.token_ids)})"
        case FinishKind.CANCELLED:
            return "ended by an abort"
        case FinishKind.DEADLINE:
            return "ended at its time limit"
    return ""


def completion_json(completion: Completion) -> dict[str, object]:
    """A response as scripts read it."""
    started = completion.started
    return {
        "id": started.server_request_id,
        "request_id": started.request_id,
        "model": started.model,
        "tier": started.tier,
        "seed": started.sampling.seed,
        "prompt_logprobs": [_logprob_json(one) for one in completion.prompt_logprobs] or None,
        "choices": [
            {
                "index": choice.index,
                "text": choice.text,
                "token_ids": choice.token_ids,
                "finish_reason": choice.finish.kind.value if choice.finish else None,
                "stop_token_id": choice.finish.token_id if choice.finish else None,
                "stop_string": choice.finish.stop_string if choice.finish else None,
                "cumulative_logprob": choice.cumulative_logprob,
                "logprobs": [_logprob_json(one) for one in choice.logprobs] or None,
            }
            for choice in completion.choices
        ],
        "usage": _fields(completion.usage),
        "timings": _fields(completion.timings),
    }


def _logprob_json(one: types_pb2.TokenLogprob) -> dict[str, object]:
    return {
        "token_id": one.token_id,
        "logprob": one.logprob,
        "rank": one.rank,
        "top": [{"token_id": other.token_id, "logprob": other.logprob} for other in one.top],
    }


def _bias(entries: Sequence[str]) -> dict[int, float]:
    """Raises InvalidArgument for an entry that is not ID=VALUE."""
    bias: dict[int, float] = {}
    for entry in entries:
        token_id, _, value = entry.partition("=")
        try:
            bias[int(token_id)] = float(value)
        except ValueError as error:
            raise InvalidArgument("--logit-bias", f"must be ID=VALUE, such as 42=-100, got {entry!r}") from error
    return bias


async def stream_answer(
    client: AsyncClient, options: GenerateOptions, timeout_s: float | None = None, *, is_quiet: bool = False
) -> Completion:
    """Writes the text of the first choice as it comes, unless quiet; returns the whole response.

    Of several choices the first one's text has a header. The line is ended however this ends.
    """
    completion = Completion()
    header = _header(0) if _has_several_choices(options) else ""
    try:
        async with client.generate(options, timeout_s=timeout_s) as events:
            async for event in events:
                completion.add(event)
                if not is_quiet and event.delta.text and event.delta.index == 0:
                    write(header + event.delta.text)
                    header = ""
    finally:
        if any(choice.text for choice in completion.choices[:1]) and not is_quiet:
            write("\n")
    completion.check_complete()
    return completion


async def request(
    router: RouterTarget, config: Config, options: GenerateOptions, timeout_s: float | None, *, is_quiet: bool
) -> Completion:
    """One request over a connection of its own; its text is written as it comes, unless quiet."""
    options.to_pb()  # what can never be sent is refused before a router is needed
    async with connected(router, config.telemetry) as client:
        completion = await stream_answer(client, options, timeout_s, is_quiet=is_quiet)
    if not is_quiet and _has_several_choices(options):
        for choice in completion.choices:
            if choice.index > 0 or not choice.text:  # the first one's text was written as it came
                write(f"{_header(choice.index)}{choice.text}\n")
    return completion


def _has_several_choices(options: GenerateOptions) -> bool:
    return (options.n or 1) > 1


def _header(choice: int) -> str:
    return f"--- choice {choice}\n"


def _check_beam_options(beam_width: int | None, length_penalty: float | None, *, early_stopping: bool) -> None:
    """Raises InvalidArgument for an option of the beam search without one."""
    for option, is_set in (("--length-penalty", length_penalty is not None), ("--early-stopping", early_stopping)):
        if is_set and beam_width is None:
            raise InvalidArgument(option, "needs --beam-width")


def _check_stop_options(stop: Sequence[str] | None, *, include_stop: bool) -> None:
    """Raises InvalidArgument for an option of stop strings without one."""
    if include_stop and not stop:
        raise InvalidArgument("--include-stop", "needs --stop")


def _check_shown_options(options: GenerateOptions) -> None:
    """Raises InvalidArgument for figures that text does not show."""
    for option, number in (("--logprobs", options.logprobs), ("--prompt-logprobs", options.prompt_logprobs)):
        if number is not None:
            raise InvalidArgument(option, "needs --json")


def prompt_of(text: str | None, token_ids: str | None) -> Prompt:
    """Text, standard input for `-`, or ids; exactly one source must be given."""
    if (text is None) == (token_ids is None):
        raise typer.BadParameter("give either PROMPT or --prompt-token-ids")
    if token_ids is not None:
        return _ids("--prompt-token-ids", token_ids)
    if text != "-":
        return text or ""
    accept_any_bytes()
    return sys.stdin.read()


def accept_any_bytes() -> None:
    """Bytes of standard input that are not UTF-8 become lone surrogates, which the request refuses by its field."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")


def _ids(option: str, text: str) -> Sequence[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise InvalidArgument(option, f"must be numbers separated by commas, got {text[:80]!r}") from error


def _fields(message: object) -> dict[str, object]:
    names = [field.name for field in message.DESCRIPTOR.fields]  # type: ignore[attr-defined]
    return {name: getattr(message, name) for name in names}
