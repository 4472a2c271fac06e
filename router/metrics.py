"""The router's metrics: requests by outcome, latencies, and a view of every worker, on the process's registry.

Every call counts once as started and once as finished, failed or cancelled, whatever was retried; the first token
is one sample a request whose tokens are sent as they come. Figures of workers are read from their last status when the
registry is scraped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

from prometheus_client import Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvferry.errors import Cancelled, DeadlineExceeded, KvferryError
from kvferry.sampling import Finish, FinishKind
from kvferry.telemetry import Metrics, error_type
from router.ledger import RequestLedger
from router.membership import Membership
from router.worker import MemberState, Role, Worker

REFUSED_PHASE = "validation"
"""Phase of requests that end before they run."""
DONE_PHASE = "done"

WORKER_LABELS = ("worker", "role", "address")  # two workers may have been given one name


COUNTERS = (
    ("blocks_shipped", "num_blocks_shipped", "Blocks sent by a prefill worker, received by a decode worker."),
    ("shipped_bytes", "shipped_bytes", "Bytes of block contents."),
    ("nacks", "num_nacks", "Blocks that arrived with a wrong digest: refusals at decode, blocks at prefill."),
    ("steps", "num_steps", "Steps run."),
    ("prefill_tokens", "num_prefill_tokens", "Prompt tokens computed."),
    ("cached_tokens", "num_cached_tokens", "Prompt tokens found in the prefix cache."),
    ("sampled_tokens", "num_sampled_tokens", "Tokens sampled."),
    ("evictions", "num_evictions", "Cached blocks whose contents were given up, for room or by a quota."),
    ("parked_prompts", "num_parked_prompts", "Finished prompts whose KV was dropped while they waited for a grant."),
    ("moved_sequences", "num_moved_sequences", "Sequences that a draining decode worker shipped to another one."),
    ("moved_blocks", "num_blocks_moved", "Blocks sent with them."),
    ("recomputed_tokens", "num_recomputed_tokens", "Tokens whose KV was dropped and not found cached again."),
    ("blocks_copied", "num_blocks_copied", "Blocks copied on write."),
    ("spec_decode_num_drafts", "num_drafts", "Drafts of speculation that were verified."),
    ("spec_decode_num_draft_tokens", "num_draft_tokens", "Tokens of those drafts."),
    ("spec_decode_num_accepted_tokens", "num_accepted_tokens", "Those of them that came out."),
    ("integrity_faults", "num_integrity_faults", "Times the books of the pool proved wrong when they were checked."),
    (
        "unsound_blocks",
        "num_unsound_hits",
        "Cached blocks that had changed in memory, found out before they were used.",
    ),
)
"""Metric, field of WorkerLoad, and what it counts."""
PREEMPTIONS = MappingProxyType({"recompute": "num_recompute_preemptions", "swap": "num_swap_preemptions"})
SWAPS = MappingProxyType({"out": "num_blocks_swapped_out", "in": "num_blocks_swapped_in"})


@dataclass(slots=True)
class RequestRecord:
    """What the metrics need to know of one request; its handler fills it in.

    Attributes:
        request_id: made by the router.
        label: the caller's; over HTTP the call's id, unless the body has one.
        route: what was called: the rpc's name, or the path of HTTP.
        tenant: whose request it is; empty where no tenants are configured, and for a caller who is none.
        phase: where the request was when it ended.
        num_output_tokens: over all choices and candidates.
        num_longest_choice_tokens: of the longest choice.
        is_streamed: tokens were sent as they came, not withheld until the end (best_of above n, beam search).
    """

    ledger: RequestLedger = field(default_factory=RequestLedger)
    tenant: str = ""
    model: str = ""
    tier: str = ""
    request_id: str = ""
    label: str = ""
    route: str = ""
    phase: str = REFUSED_PHASE
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_longest_choice_tokens: int = 0
    is_streamed: bool = True
    finish: Finish | None = None


class RouterMetrics:
    """Counts requests and, by `membership`, shows workers."""

    def __init__(self, metrics: Metrics, membership: Membership) -> None:
        self._metrics = metrics
        registry = metrics.registry
        self._started = Counter("kvferry_requests_started", "Calls of Generate that began.", registry=registry)
        self._ended = Counter(
            "kvferry_requests",
            "Calls of Generate that ended, by how and in which phase.",
            ("outcome", "phase"),
            registry=registry,
        )
        self._moved = Counter(
            "kvferry_moved_sequences", "Sequences that left a draining worker with their blocks.", registry=registry
        )
        self._moved_blocks = Counter("kvferry_moved_blocks", "Blocks shipped with them.", registry=registry)
        self._session_choices = Counter(
            "kvferry_session_choices",
            "Workers chosen for requests with a session, by whether it was the session's own (kept).",
            ("role", "kept"),
            registry=registry,
        )
        waiting = Gauge("kvferry_requests_waiting", "Requests without a first token yet.", registry=registry)
        waiting.set_function(lambda: self._num_waiting)
        self._running: dict[int, RequestRecord] = {}
        registry.register(WorkerCollector(membership))

    @property
    def _num_waiting(self) -> int:
        return sum(record.ledger.first_token_at_s is None for record in self._running.values())

    @contextmanager
    def request(self) -> Iterator[RequestRecord]:
        """Around one call: counts it at both ends."""
        record = RequestRecord()
        self._running[id(record)] = record
        self._started.inc()
        self._metrics.requests_running.inc()
        error: BaseException | None = None
        try:
            yield record
        except BaseException as raised:
            error = raised
            raise
        finally:
            del self._running[id(record)]
            self._metrics.requests_running.dec()
            self._observe(record, error)

    def count_retry(self, cause: KvferryError) -> None:
        """One attempt after the first."""
        self._metrics.retries.labels(error_type(cause)).inc()

    def count_move(self, num_blocks: int) -> None:
        """One sequence that left a draining worker, and the blocks that were shipped with it."""
        self._moved.inc()
        self._moved_blocks.inc(num_blocks)

    def count_session(self, role: Role, is_kept: bool) -> None:
        """One worker chosen for a request with a session."""
        self._session_choices.labels(role.value, str(is_kept).lower()).inc()

    def _observe(self, record: RequestRecord, error: BaseException | None) -> None:
        outcome = _outcome(record, error)
        self._ended.labels(outcome, DONE_PHASE if outcome == "finished" else record.phase).inc()
        served = (record.model, record.tier)
        ledger = record.ledger
        kind = "" if error is None else error_type(error)
        self._metrics.request_duration_s.labels(*served, kind).observe(ledger.total_s)
        if record.is_streamed and ledger.time_to_first_token_s is not None:
            self._metrics.time_to_first_token_s.labels(*served).observe(ledger.time_to_first_token_s)
        if record.is_streamed and record.num_longest_choice_tokens > 1:
            per_token_s = ledger.decode_s / (record.num_longest_choice_tokens - 1)
            self._metrics.time_per_output_token_s.labels(*served).observe(per_token_s)
        self._metrics.tokens.labels("prompt", record.tenant).inc(record.num_prompt_tokens)
        self._metrics.tokens.labels("output", record.tenant).inc(record.num_output_tokens)
        self._metrics.tokens.labels("cached", record.tenant).inc(ledger.num_cached_tokens)


def _outcome(record: RequestRecord, error: BaseException | None) -> str:
    if error is None:
        is_aborted = record.finish is not None and record.finish.kind is FinishKind.CANCELLED
        return "cancelled" if is_aborted else "finished"
    return "cancelled" if isinstance(error, asyncio.CancelledError | Cancelled | DeadlineExceeded) else "failed"


class WorkerCollector(Collector):
    """Figures of all workers as of their last status."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def collect(self) -> Iterable[Metric]:
        """One family a figure, one sample a worker."""
        workers = self._membership.workers
        yield self._up(workers)
        yield self._blocks(workers)
        yield self._requests(workers)
        yield self._gauge(workers, "pinned_blocks", "num_pinned_blocks", "Blocks that pins hold; among the used.")
        yield from self._known_blocks(workers)
        yield self._by_kind(workers, "preemptions", "Sequences preempted, by what became of their KV.", PREEMPTIONS)
        yield self._by_kind(workers, "swapped_blocks", "Blocks copied to the host pool (out) and back (in).", SWAPS)
        yield from self._prefix_cache(workers)
        for name, field_name, text in COUNTERS:
            family = self._counter(name, text)
            for worker in workers:
                if worker.status is not None:
                    family.add_metric(_labels(worker), getattr(worker.status.load, field_name))
            yield family

    def _counter(self, name: str, text: str, *labels: str) -> CounterMetricFamily:
        labels = (*WORKER_LABELS, *labels)
        return CounterMetricFamily(f"kvferry_worker_{name}", f"{text} Since the worker's start.", None, labels)

    def _gauge(self, workers: Iterable[Worker], name: str, field_name: str, text: str) -> Metric:
        family = GaugeMetricFamily(f"kvferry_worker_{name}", text, None, WORKER_LABELS)
        for worker in workers:
            if worker.status is not None:
                family.add_metric(_labels(worker), getattr(worker.status.load, field_name))
        return family

    def _by_kind(self, workers: Iterable[Worker], name: str, text: str, kinds: Mapping[str, str]) -> Metric:
        family = self._counter(name, text, "kind")
        for worker in workers:
            if worker.status is not None:
                for kind, field_name in kinds.items():
                    family.add_metric((*_labels(worker), kind), getattr(worker.status.load, field_name))
        return family

    def _prefix_cache(self, workers: Iterable[Worker]) -> Iterable[Metric]:
        """Tokens looked for in the prefix cache and found there; their ratio is a tenant's hit rate."""
        queried = self._counter("prefix_cache_queried_tokens", "Prompt tokens of admitted sequences.", "tenant")
        hit = self._counter("prefix_cache_hit_tokens", "Those of them found in the prefix cache.", "tenant")
        for worker in workers:
            for hits in worker.status.load.tenant_hits if worker.status is not None else ():
                labels = (*_labels(worker), hits.tenant)
                queried.add_metric(labels, hits.num_queried_tokens)
                hit.add_metric(labels, hits.num_hit_tokens)
        return (queried, hit)

    def _up(self, workers: Iterable[Worker]) -> Metric:
        family = GaugeMetricFamily("kvferry_worker_ready", "1 while requests may go there.", None, WORKER_LABELS)
        for worker in workers:
            family.add_metric(_labels(worker), float(worker.state is MemberState.READY))
        return family

    def _blocks(self, workers: Iterable[Worker]) -> Metric:
        family = GaugeMetricFamily(
            "kvferry_worker_blocks", "Blocks of the pool by state.", None, (*WORKER_LABELS, "state")
        )
        for worker in workers:
            if worker.status is not None:
                load = worker.status.load
                family.add_metric((*_labels(worker), "free"), load.num_free_blocks)
                family.add_metric((*_labels(worker), "cached"), load.num_cached_blocks)
                family.add_metric((*_labels(worker), "used"), load.num_used_blocks)
        return family

    def _known_blocks(self, workers: Iterable[Worker]) -> Iterable[Metric]:
        num_known = GaugeMetricFamily(
            "kvferry_worker_known_blocks", "Full blocks that this router knows can be hit.", None, WORKER_LABELS
        )
        partial = GaugeMetricFamily(
            "kvferry_worker_known_blocks_partial",
            "1 while the router's index has no room for all.",
            None,
            WORKER_LABELS,
        )
        for worker in workers:
            known = worker.known_blocks
            num_known.add_metric(_labels(worker), known.num_blocks)
            partial.add_metric(_labels(worker), float(known.is_partial))
        return (num_known, partial)

    def _requests(self, workers: Iterable[Worker]) -> Metric:
        family = GaugeMetricFamily(
            "kvferry_worker_requests",
            "Sequences running and waiting there, and attempts of this router.",
            None,
            (*WORKER_LABELS, "state"),
        )
        for worker in workers:
            family.add_metric((*_labels(worker), "ours"), worker.num_requests)
            if worker.status is not None:
                family.add_metric((*_labels(worker), "running"), worker.status.load.num_running)
                family.add_metric((*_labels(worker), "waiting"), worker.status.load.num_waiting)
        return family


def _labels(worker: Worker) -> tuple[str, str, str]:
    return (worker.name, worker.role.value, worker.address)
