"""What one request cost: where its time went and what was shipped, for the response, the metrics and the span."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from proto.kvferry.v1 import inference_pb2, worker_pb2


@dataclass(slots=True)
class RequestLedger:
    """Filled in while a request runs. Clock readings are `time.monotonic()`.

    Attributes:
        received_at_s: when the call came in.
        router_queue_s: waiting in the router for a pair of workers, over all attempts.
        worker_queue_s, prefill_s, num_cached_tokens: of the attempt that made the first token of all choices.
        ship_s, num_blocks_shipped, num_blocks_reused, shipped_bytes: over all attempts.
        num_overshoot_tokens: tokens computed after a stop string was complete.
        workers: names of those that were chosen, each once, in their order.
    """

    received_at_s: float = field(default_factory=time.monotonic)
    tokenize_s: float = 0.0
    router_queue_s: float = 0.0
    worker_queue_s: float = 0.0
    prefill_s: float = 0.0
    ship_s: float = 0.0
    num_cached_tokens: int = 0
    num_blocks_shipped: int = 0
    num_blocks_reused: int = 0
    shipped_bytes: int = 0
    num_attempts: int = 0
    num_overshoot_tokens: int = 0
    workers: dict[str, None] = field(default_factory=dict)
    has_prefill_figures: bool = False
    first_token_at_s: float | None = None
    last_token_at_s: float | None = None

    def tokens_sent(self) -> None:
        """Tokens go to the client now."""
        self.last_token_at_s = time.monotonic()
        if self.first_token_at_s is None:
            self.first_token_at_s = self.last_token_at_s

    def take_prefill(self, message: worker_pb2.PrefillResponse) -> None:
        """Figures of a prefill worker."""
        match message.WhichOneof("event"):
            case "first_token":
                self._take_first(message.first_token)
            case "prompt_computed":
                self._take_figures(message.prompt_computed)
            case "done":
                done = message.done
                self.ship_s += done.ship_s
                self.num_blocks_shipped += done.num_blocks_shipped
                self.num_blocks_reused += done.num_blocks_reused
                self.shipped_bytes += done.shipped_bytes

    def take_decode(self, message: worker_pb2.DecodeResponse) -> None:
        """Figures of a decode worker; those of the prompt only where it computed the prompt itself."""
        match message.WhichOneof("event"):
            case "tokens":
                self._take_first(message.tokens)
            case "beams" if not self.has_prefill_figures:
                self._take_figures(message.beams)

    def _take_first(self, message: worker_pb2.FirstToken | worker_pb2.DecodeTokens) -> None:
        if message.token_index == 0 and not self.has_prefill_figures:
            self._take_figures(message)

    def _take_figures(
        self,
        message: worker_pb2.FirstToken | worker_pb2.DecodeTokens | worker_pb2.Beams | worker_pb2.PromptComputed,
    ) -> None:
        self.has_prefill_figures = True
        self.worker_queue_s = message.queue_s
        self.prefill_s = message.prefill_s
        self.num_cached_tokens = message.num_cached_tokens

    @property
    def time_to_first_token_s(self) -> float | None:
        """None without a token."""
        return None if self.first_token_at_s is None else self.first_token_at_s - self.received_at_s

    @property
    def decode_s(self) -> float:
        """From the first to the last token sent."""
        if self.first_token_at_s is None or self.last_token_at_s is None:
            return 0.0
        return self.last_token_at_s - self.first_token_at_s

    @property
    def total_s(self) -> float:
        """From the call's begin to now."""
        return time.monotonic() - self.received_at_s

    def timings(self) -> inference_pb2.Timings:
        """The figures as the response carries them."""
        return inference_pb2.Timings(
            tokenize_s=self.tokenize_s,
            queue_s=self.router_queue_s + self.worker_queue_s,
            prefill_s=self.prefill_s,
            ship_s=self.ship_s,
            time_to_first_token_s=self.time_to_first_token_s or 0.0,
            decode_s=self.decode_s,
            total_s=self.total_s,
            num_blocks_shipped=self.num_blocks_shipped,
            num_blocks_reused=self.num_blocks_reused,
            shipped_bytes=self.shipped_bytes,
            num_attempts=self.num_attempts,
            num_overshoot_tokens=self.num_overshoot_tokens,
        )
