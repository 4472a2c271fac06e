"""What a client has of a response that broke off, and how this router goes on exactly behind that.

    GenerateRequest.resume ─► resume_of (validation) ─► check_prompt (once tokenised) ─► RequestOutput.restore: the
    tokens run through the text plane, `Received` leaves out what the client has ─► a lifecycle for each open choice

The state of a choice is a function of its tokens: half characters, text held back for a stop string, penalties and seed
positions included. So a router needs nothing of the one before it, and a client may count text and tokens apart.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import xxhash

from kvferry.errors import DataLoss, FailedPrecondition, InvalidArgument
from kvferry.sampling import Finish
from kvferry.wire import finish_from_pb
from proto.kvferry.v1 import inference_pb2 as pb

RESUME_FIELD = "resume"
DIGEST_FIELD = "resume.prompt_digest"
SCORES_FIELD = "resume.num_prompt_logprobs"
MAX_SERVER_ID_CHARS = 64
"""Ids that routers give have half of that; it is kept as a name of the request."""


@dataclass(frozen=True, slots=True)
class ReceivedChoice:
    """What the client has of one choice.

    Attributes:
        finish: its end, if that came.
    """

    token_ids: tuple[int, ...] = ()
    num_text_chars: int = 0
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class ReceivedResponse:
    """What the client has of a response.

    Attributes:
        choices: by index, those of which it has something.
        server_request_id: the id it began with; empty where the client did not say.
        num_prompt_logprobs: prompt tokens of which it has the log-probability.
    """

    prompt_digest: bytes
    choices: Mapping[int, ReceivedChoice] = field(default_factory=lambda: MappingProxyType({}))
    server_request_id: str = ""
    num_prompt_logprobs: int = 0

    @property
    def is_begun(self) -> bool:
        """Whether the client has anything of any choice."""
        return any(choice.token_ids or choice.finish is not None for choice in self.choices.values())

    @property
    def num_tokens(self) -> int:
        """Output tokens that the client has, of all choices."""
        return sum(len(choice.token_ids) for choice in self.choices.values())


def prompt_digest(token_ids: Sequence[int]) -> bytes:
    """Tells whether two routers turned a prompt into the same tokens; no protection against forgery."""
    return xxhash.xxh3_128_digest(struct.pack(f"<{len(token_ids)}I", *token_ids))


def resume_of(message: pb.GenerateRequest, *, n: int, vocab_size: int) -> ReceivedResponse | None:
    """What the request says its client has; None where the response begins at its beginning. Raises InvalidArgument."""
    if not message.HasField("resume"):
        return None
    _require_echoes(message)
    resume = message.resume
    if not resume.prompt_digest:
        raise InvalidArgument(DIGEST_FIELD, "is empty; a resumed request gives back what Started told")
    choices: dict[int, ReceivedChoice] = {}
    for place, choice in enumerate(resume.choices):
        path = f"{RESUME_FIELD}.choices[{place}]"
        if choice.index >= n or choice.index in choices:
            why = f"is not below n, {n}" if choice.index >= n else "is there twice"
            raise InvalidArgument(f"{path}.index", f"{choice.index} {why}")
        choices[choice.index] = _choice(choice, path, message.stopping.max_tokens, vocab_size)
    if resume.num_prompt_logprobs and not message.response.HasField("prompt_logprobs"):
        raise InvalidArgument(SCORES_FIELD, f"{resume.num_prompt_logprobs}, and response.prompt_logprobs is not set")
    return ReceivedResponse(
        resume.prompt_digest,
        MappingProxyType(choices),
        _server_id(resume.server_request_id),
        resume.num_prompt_logprobs,
    )


def check_prompt(resume: ReceivedResponse | None, token_ids: Sequence[int]) -> None:
    """Raises FailedPrecondition where the prompt is not, in tokens, the one that the response began with."""
    if resume is not None and resume.prompt_digest != prompt_digest(token_ids):
        raise FailedPrecondition(
            f"{DIGEST_FIELD}: the prompt has other tokens here ({len(token_ids)}) than where the response began; "
            "the routers differ in tokenizer, chat template or model, or the prompt was changed",
            field=DIGEST_FIELD,
        )


def check_prompt_logprobs(resume: ReceivedResponse | None, num_prompt_tokens: int) -> None:
    """Of a request that asks for them. Raises InvalidArgument for more of them than there are.

    Tokens come behind the last of them, so a client that has tokens has them all.
    """
    if resume is None:
        return
    given, number = resume.num_prompt_logprobs, num_prompt_tokens - 1
    if given > number:
        raise InvalidArgument(SCORES_FIELD, f"{given} is above {number}, all there are")
    if resume.num_tokens and given < number:
        raise InvalidArgument(SCORES_FIELD, f"{given} is below {number}, all of which come before the tokens given")


def _require_echoes(message: pb.GenerateRequest) -> None:
    """Defaults may differ between routers, and a drawn seed is known to nobody but the client."""
    if not message.stopping.HasField("max_tokens"):
        raise InvalidArgument("stopping.max_tokens", "must be set beside resume, to the value that Started told")
    if not message.HasField("beam_search") and not message.sampling.HasField("seed"):
        raise InvalidArgument("sampling.seed", "must be set beside resume, to the value that Started told")


def _choice(choice: pb.ResumedChoice, path: str, max_tokens: int, vocab_size: int) -> ReceivedChoice:
    ids = tuple(choice.token_ids)
    if len(ids) > max_tokens:
        raise InvalidArgument(f"{path}.token_ids", f"has {len(ids)} ids; stopping.max_tokens is {max_tokens}")
    if ids and max(ids) >= vocab_size:
        raise InvalidArgument(f"{path}.token_ids", f"{max(ids)} is not in the vocabulary of {vocab_size} ids")
    return ReceivedChoice(ids, choice.num_text_chars, _finish(choice, path))


def _finish(choice: pb.ResumedChoice, path: str) -> Finish | None:
    if not choice.HasField("finish"):
        return None
    try:
        return finish_from_pb(choice.finish)
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}.finish", error.message) from error


def _server_id(server_id: str) -> str:
    if len(server_id) > MAX_SERVER_ID_CHARS or not server_id.isprintable():
        raise InvalidArgument(
            f"{RESUME_FIELD}.server_request_id",
            f"is no id of a router: at most {MAX_SERVER_ID_CHARS} printable characters",
        )
    return server_id


class Received:
    """Between one choice's output and its client: leaves out what the client has, and passes the rest on.

    Args:
        put: takes the rest.
    """

    def __init__(self, choice: ReceivedChoice, put: Callable[[pb.GenerateResponse], None]) -> None:
        self._choice = choice
        self._put = put
        self._num_tokens_seen = 0
        self._num_chars_left = choice.num_text_chars

    def put(self, message: pb.GenerateResponse) -> None:
        """The choice's next message. Raises DataLoss where output that was made again is not what the client has."""
        if self._choice.finish is not None:
            return
        if message.HasField("delta"):
            self._leave_out_tokens(message.delta)
            self._leave_out_text(message.delta)
            if not (message.delta.token_ids or message.delta.text or message.delta.logprobs):
                return
        self._put(message)

    def _leave_out_tokens(self, delta: pb.ChoiceDelta) -> None:
        known = self._choice.token_ids[self._num_tokens_seen :][: len(delta.token_ids)]
        if list(known) != delta.token_ids[: len(known)]:
            raise DataLoss(
                f"choice {delta.index}: the output was made again and differs, from token {delta.token_index} on, from "
                "what the client has; the same seed gives the same tokens with dtype float32 only"
            )
        self._num_tokens_seen += len(known)
        del delta.token_ids[: len(known)]
        del delta.logprobs[: len(known)]
        delta.token_index += len(known)
        delta.position += len(known)

    def _leave_out_text(self, delta: pb.ChoiceDelta) -> None:
        num_known = min(self._num_chars_left, len(delta.text))
        self._num_chars_left -= num_known
        delta.text = delta.text[num_known:]
