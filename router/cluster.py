"""What all runs of a model's requests share: the workers, how they are chosen, and how long and how often to try."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from opentelemetry.trace import Tracer

from kvferry.errors import KvferryError
from kvferry.retry_budget import RetryBudget
from router.model_workers import ModelWorkers
from router.selection import PairSelector


@dataclass(frozen=True, slots=True)
class Cluster:
    """What all runs share.

    Attributes:
        workers: those of the model.
        selector: chooses pairs.
        retries: budget for attempts without progress.
        progress_timeout_s: longest silence of a worker's stream.
        recovery_wait_s: how long a request whose tokens are under way waits for a worker to come back.
        max_attempts: attempts in a row without progress.
        min_moved_tokens: from how many output tokens on a choice leaves a draining worker with its blocks; 0: never.
        tracer: makes the attempts' spans.
        count_retry: called with the error that made an attempt necessary.
        count_move: called for each sequence that left a draining worker with its blocks, with how many were shipped.
    """

    workers: ModelWorkers
    selector: PairSelector
    retries: RetryBudget
    progress_timeout_s: float
    recovery_wait_s: float
    max_attempts: int
    min_moved_tokens: int
    tracer: Tracer
    count_retry: Callable[[KvferryError], None]
    count_move: Callable[[int], None]
