"""The models behind this router: each has names, a tokenizer, workers, and limits that follow from both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.config import Config
from kvferry.errors import NotFound, Unavailable
from router.chat import ChatPrompt
from router.cluster import Cluster
from router.generation_defaults import NO_DEFAULTS, GenerationDefaults
from router.model_workers import ModelWorkers
from router.text.tokenizer import PromptLimits, TextTokenizer
from router.tools.formats import ToolFormat
from router.validation import Limits, Prompt, TextPrompt, TokenPrompt
from router.worker import Role


@dataclass(frozen=True, slots=True)
class Model:
    """One of them.

    Attributes:
        name: what responses call it.
        aliases: what requests may call it besides.
        tokenizer: its text plane.
        workers: those that serve it.
        cluster: what the runs of its requests share.
        tool_format: how it writes calls of tools; None where that is not known.
        compact_json: JSON that a grammar makes has no white space unless a request says otherwise.
        defaults: of sampling and length, where a request leaves them unset.
    """

    name: str
    aliases: tuple[str, ...]
    tokenizer: TextTokenizer
    workers: ModelWorkers
    cluster: Cluster
    tool_format: ToolFormat | None = None
    compact_json: bool = False
    defaults: GenerationDefaults = NO_DEFAULTS

    def limits(self, config: Config) -> Limits:
        """What requests are checked against. Raises Unavailable, naming what is missing, until a worker was seen."""
        served, known = self.workers.served, self.workers.accepted
        if served is None or not known:
            raise Unavailable("; ".join(self.workers.missing), retry_after_s=1.0)
        decode = [worker for worker in known if worker.role is Role.DECODE]
        if not decode:
            raise Unavailable(self.workers.why_missing(Role.DECODE), retry_after_s=1.0)
        return Limits(
            model=self.name,
            max_context=min(worker.status.max_context for worker in known if worker.status is not None),
            vocab_size=served.vocab_size,
            tiers={tier.name: tier.rank for tier in config.tiers},
            default_tier=config.default_tier.name,
            max_request_bytes=config.router.max_request_bytes,
            layout=served.layout,
            num_prefill_blocks=max((w.num_blocks for w in known if w.role is Role.PREFILL), default=0),
            num_decode_blocks=max(worker.num_blocks for worker in decode),
            max_beams=max(worker.max_running for worker in decode) or None,
            compact_json=self.compact_json,
            defaults=self.defaults,
        )

    async def tokenize(
        self, prompt: Prompt, limits: Limits, *, num_kept: int | None = None, add_special_tokens: bool = True
    ) -> list[int] | tuple[int, ...]:
        """Token ids of a prompt, the last `num_kept` of them; raises InvalidArgument for one that cannot fit.

        `add_special_tokens` is about a text: the others have theirs.
        """
        most = limits.max_context - 1 if num_kept is None else None
        bounds = PromptLimits(max_tokens=most, max_bytes=limits.max_request_bytes)
        ids = await self._encode(prompt, bounds, add_special_tokens)
        return ids if num_kept is None else ids[-num_kept:]

    async def _encode(
        self, prompt: Prompt, bounds: PromptLimits, add_special_tokens: bool
    ) -> list[int] | tuple[int, ...]:
        match prompt:
            case TokenPrompt(token_ids):
                return token_ids
            case TextPrompt(text):
                return await self.tokenizer.encode_async(text, limits=bounds, add_special_tokens=add_special_tokens)
            case ChatPrompt(messages, add_generation_prompt, tools, arguments):
                return await self.tokenizer.encode_chat_async(
                    messages,
                    tools=tools,
                    arguments=arguments,
                    limits=bounds,
                    add_generation_prompt=add_generation_prompt,
                )


class Models:
    """All of them, the default one first."""

    def __init__(self, models: Sequence[Model]) -> None:
        self.all = tuple(models)
        self._by_name = {name: model for model in models for name in (model.name, *model.aliases)}

    def find(self, name: str) -> Model:
        """By name or alias, the default one for an empty name; raises NotFound naming the known ones."""
        model = self._by_name.get(name) if name else self.all[0]
        if model is None:
            known = ", ".join(model.name for model in self.all)
            raise NotFound(f"model: there is no model {name!r}; known models: {known}", field="model")
        return model

    @property
    def missing(self) -> tuple[str, ...]:
        """Why no request can be served now, whatever its model; empty when one can."""
        reasons = [model.workers.missing for model in self.all]
        if not all(reasons):
            return ()
        if len(self.all) == 1:
            return reasons[0]
        return tuple(f"{model.name}: {line}" for model, lines in zip(self.all, reasons, strict=True) for line in lines)
