"""`kvferry chat`: a conversation in the terminal.

    line ─┬─ /command ─► changes the conversation, or shows it
          └─ text ─► the whole conversation as a request ─► answer, streamed, kept with its question

A turn that fails is told and left out, the conversation goes on. Nothing is forgotten unless the user says so.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated

import typer

from kvferry.cli.console import note, note_dim, write, write_error
from kvferry.cli.generate import MaxTokens, Seed, ServedModel, Tier, accept_any_bytes, early_end, request
from kvferry.cli.options import (
    ApiKeyOption,
    ConfigOption,
    ResumeOption,
    RouterTarget,
    SetOption,
    TargetOption,
    configuration,
    router_of,
)
from kvferry.cli.router import connected
from kvferry.client import ChatMessage, Completion, GenerateOptions
from kvferry.config import Config
from kvferry.errors import ContextExceeded, KvferryError
from kvferry.rpc import run

CHAT_TEMPERATURE = 0.2
CHAT_TOP_P = 0.9
"""What the makers of SmolLM2, the default model, recommend for conversations."""

Temperature = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
TopP = Annotated[float, typer.Option("--top-p", help="Smallest set of tokens with this probability.")]
System = Annotated[str | None, typer.Option("--system", help="What the assistant is told first.")]
Timing = Annotated[
    bool | None,
    typer.Option(
        "--timing/--no-timing",
        help="A line of figures on standard error after each answer; on a terminal unless told otherwise.",
        show_default=False,
    ),
]
DropOldest = Annotated[
    bool, typer.Option("--drop-oldest", help="Forget the oldest turns when the conversation outgrows the context.")
]


def register(app: typer.Typer) -> None:
    """Adds the command to `app`."""
    app.command("chat", epilog='Example: kvferry chat --system "You answer in one sentence."')(chat)


def chat(
    target: TargetOption = None,
    api_key: ApiKeyOption = None,
    model: ServedModel = "",
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = CHAT_TEMPERATURE,
    top_p: TopP = CHAT_TOP_P,
    seed: Seed = None,
    tier: Tier = "",
    timing: Timing = None,
    drop_oldest: DropOldest = False,
    resume: ResumeOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Talks with the model; /help shows what else can be typed, /quit or Ctrl-D ends. Ctrl-C ends an answer.

    Samples as SmolLM2's makers recommend. A turn that fails is told and left out; the conversation goes on.
    """
    effective = configuration(config, settings)
    options = _Options(
        router=router_of(target, api_key, effective, resume=resume),
        config=effective,
        model=model,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        shows_timing=sys.stderr.isatty() if timing is None else timing,
        drops_oldest=drop_oldest,
    )
    talk = _Talk(options, Conversation(system=system or "", tier=tier))
    accept_any_bytes()
    while not talk.is_over and (line := _read_line()) is not None:
        talk.take(line)


@dataclass(slots=True)
class Conversation:
    """What was said.

    Attributes:
        system: what the assistant is told first; empty for nothing.
        tier: latency tier of the next requests; empty for the server's own.
        turns: question and answer, oldest first.
        session_id: tells routers which workers have its blocks.
    """

    system: str = ""
    tier: str = ""
    turns: list[tuple[str, str]] = field(default_factory=list)
    session_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def messages(self, question: str | None = None) -> list[ChatMessage]:
        """All of it, and a next question."""
        said = [ChatMessage("system", self.system)] if self.system else []
        for asked, answered in self.turns:
            said += (ChatMessage("user", asked), ChatMessage("assistant", answered))
        return said if question is None else [*said, ChatMessage("user", question)]

    def clear(self) -> None:
        """Forgets all turns; what comes is another session."""
        self.turns.clear()
        self.session_id = uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class _Options:
    """What stays as it is for all turns."""

    router: RouterTarget
    config: Config
    model: str
    max_tokens: int | None
    temperature: float
    top_p: float
    seed: int | None
    shows_timing: bool
    drops_oldest: bool


class _Talk:
    """Takes the user's lines.

    Attributes:
        is_over: the user wants to leave.
    """

    def __init__(self, options: _Options, conversation: Conversation) -> None:
        self._options, self._conversation = options, conversation
        self._failed_question = ""
        self.is_over = False

    def take(self, line: str) -> None:
        """A command, a question, or nothing; `//` begins a question with a slash."""
        if line.startswith("/") and not line.startswith("//"):
            name, _, argument = line[1:].partition(" ")
            command = COMMANDS.get(name)
            if command is None:
                write_error(f"there is no /{name[:80]}; /help shows what there is, and // begins a text with a slash")
            else:
                command(self, argument.strip())
        elif line:
            self._ask(line.replace("//", "/", 1) if line.startswith("//") else line)

    # -- a turn ---------------------------------------------------------------------------------------------------

    def _ask(self, question: str) -> None:
        options, conversation = self._options, self._conversation
        self._failed_question = question
        while True:
            try:
                asking = request(options.router, options.config, self._request(question), None, is_quiet=False)
                completion = run(asking)
            except KeyboardInterrupt:  # ends this answer, not the conversation
                return note("interrupted; this turn is left out, /retry asks again")
            except ContextExceeded as error:
                if not (options.drops_oldest and conversation.turns):
                    return self._tell_too_long(error)
                self._drop("")
            except KvferryError as error:
                return write_error(error.message)
            else:
                conversation.turns.append((question, completion.text))
                self._failed_question = ""
                return self._tell_end(completion)

    def _tell_end(self, completion: Completion) -> None:
        why = early_end(completion, completion.choices[0]) if completion.choices else ""
        if self._options.shows_timing:
            note_dim(timing_line(completion) + (f"; {why}" if why else ""))
        elif why:
            note(why)

    def _request(self, question: str) -> GenerateOptions:
        options, conversation = self._options, self._conversation
        return GenerateOptions(
            prompt=conversation.messages(question),
            model=options.model,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=options.seed,
            tier=conversation.tier,
            session_id=conversation.session_id,
        )

    def _tell_too_long(self, error: ContextExceeded) -> None:
        write_error(error.message)
        if self._conversation.turns:
            note("/drop forgets the oldest turn, /clear all of them; then /retry asks again")

    # -- commands -------------------------------------------------------------------------------------------------

    def _help(self, _: str) -> None:
        """Shows this."""
        for command in dict.fromkeys(COMMANDS.values()):
            names = ", ".join(f"/{name}" for name, other in COMMANDS.items() if other is command)
            shown = f"{names} {ARGUMENTS.get(command, '')}"
            write(f"{shown:18}{command.__doc__}\n")

    def _history(self, _: str) -> None:
        """Shows the conversation."""
        for message in self._conversation.messages():
            write(f"{message.role}: {message.content}\n")

    def _clear(self, _: str) -> None:
        """Forgets the conversation, but not what the assistant is told first."""
        self._conversation.clear()
        note("forgotten")

    def _drop(self, argument: str) -> None:
        """Forgets the oldest turn, or as many as are named."""
        turns = self._conversation.turns
        if argument and not (argument.isdecimal() and int(argument) > 0):
            return write_error(f"/drop takes a number of turns, at least 1, got {argument[:80]!r}")
        number = min(int(argument or 1), len(turns))
        del turns[:number]
        note(f"{number} turn{'' if number == 1 else 's'} forgotten, {len(turns)} kept")

    def _retry(self, _: str) -> None:
        """Asks again what was not answered."""
        if self._failed_question:
            self._ask(self._failed_question)
        else:
            write_error("there is nothing to ask again")

    def _system(self, argument: str) -> None:
        """Tells the assistant this first, from the next turn on; - tells it nothing; without a text, shows it."""
        if argument:
            self._conversation.system = "" if argument == "-" else argument
            note("from the next turn on")
        else:
            note(self._conversation.system or "the assistant is told nothing first")

    def _tier(self, argument: str) -> None:
        """Changes the latency tier; without a name, shows it."""
        if not argument:
            return note(self._conversation.tier or "the server's default tier")
        try:
            tiers = run(self._tiers())
        except KvferryError as error:
            return write_error(error.message)
        if argument not in tiers:
            return write_error(f"there is no tier {argument[:80]!r}; known tiers: {', '.join(tiers)}")
        self._conversation.tier = argument
        note("from the next turn on")

    async def _tiers(self) -> Sequence[str]:
        async with connected(self._options.router) as client:
            return tuple((await client.capabilities(self._options.model)).tiers)

    def _quit(self, _: str) -> None:
        """Ends the conversation."""
        self.is_over = True


COMMANDS: Mapping[str, Callable[[_Talk, str], None]] = MappingProxyType(
    {
        "help": _Talk._help,
        "history": _Talk._history,
        "clear": _Talk._clear,
        "reset": _Talk._clear,
        "drop": _Talk._drop,
        "retry": _Talk._retry,
        "system": _Talk._system,
        "tier": _Talk._tier,
        "quit": _Talk._quit,
    }
)

ARGUMENTS: Mapping[Callable[[_Talk, str], None], str] = MappingProxyType(
    {_Talk._drop: "[NUMBER]", _Talk._system: "[TEXT|-]", _Talk._tier: "[NAME]"}
)


def timing_line(completion: Completion) -> str:
    """What an answer took, for people."""
    usage, timings = completion.usage, completion.timings
    after_first = usage.completion_tokens - 1
    rate = f"{after_first / timings.decode_s:.1f}" if timings.decode_s > 0 and after_first > 0 else "-"
    return (
        f"{usage.completion_tokens} tokens, first after {timings.time_to_first_token_s:.3f} s, {rate} tokens/s, "
        f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens cached"
    )


def _read_line() -> str | None:
    """None at the end."""
    is_terminal = sys.stdin.isatty()
    try:
        return input("> " if is_terminal else "").strip()
    except EOFError:
        write("\n" if is_terminal else "")
        return None
