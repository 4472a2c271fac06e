"""One request running: a lifecycle for all its choices, or after a split one for each that is not over.

    RequestRun ─► LifecycleRun (all choices) ──SplitChoices──► LifecycleRun (choice 0), LifecycleRun (choice 2), …

A response that another router began starts behind the split: its choices have different tokens.
What ends a request from outside reaches every lifecycle; an error of one ends the others.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time

from opentelemetry.context import Context

from kvferry.errors import DeadlineExceeded, KvferryError
from kvferry.sampling import Finish, FinishKind
from kvferry.telemetry import log_event
from router.cluster import Cluster
from router.events import Abort, ClientGone, Event, SplitChoice, SplitChoices, TimeLimit
from router.ledger import RequestLedger
from router.lifecycle import Phase
from router.lifecycle_run import LifecycleRun
from router.prepared_request import PreparedRequest
from router.request_context import RequestContext
from router.request_output import RequestOutput
from router.tracing import AttemptSpans

logger = logging.getLogger(__name__)

CUT_SHORT = (FinishKind.CANCELLED, FinishKind.DEADLINE)


class RequestRun:
    """Runs one request to its end; `run` once."""

    def __init__(
        self, prepared: PreparedRequest, cluster: Cluster, output: RequestOutput, ledger: RequestLedger, parent: Context
    ) -> None:
        self._prepared = prepared
        self._output = output
        self._ledger = ledger
        self._context = RequestContext(
            prepared, cluster, output, ledger, itertools.count(1), split=self._on_split, ended=self._on_ended
        )
        self._runs = self._first_runs(AttemptSpans(cluster.tracer, parent))
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed_in: str | None = None
        self._error: KvferryError | None = None

    @property
    def prepared(self) -> PreparedRequest:
        return self._prepared

    @property
    def names(self) -> tuple[str, ...]:
        """What an abort may call it: its id, its caller's label, and the id another router gave it."""
        request = self._prepared.request
        resumed = () if request.resume is None else (request.resume.server_request_id,)
        return (self._prepared.id, request.label, *resumed)

    @property
    def phase(self) -> str:
        """Where the request is, or was when it ended; for metrics."""
        return self._failed_in or (self._runs[-1].phase if self._runs else Phase.DONE.name.lower())

    @property
    def finish(self) -> Finish | None:
        """How the request ended: cut short from outside, or as its first choice; None while no choice has ended."""
        finishes = self._output.finishes
        return next((finish for finish in finishes if finish.kind in CUT_SHORT), next(iter(finishes), None))

    async def run(self) -> None:
        """Serves the request to the end of all its choices. Raises the error that ended it otherwise."""
        timers = self._start_timers()
        try:
            for run in tuple(self._runs):
                self._start(run)
            while self._tasks:  # a split adds to them
                done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for timer in timers:
                timer.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        """Ends the request with what there is."""
        self._post(Abort())

    def client_gone(self, error: KvferryError) -> None:
        """Cancels everything, within this call."""
        self._post(ClientGone(error))

    def _post(self, event: Event) -> None:
        for run in tuple(self._runs):
            run.post(event)

    # --- lifecycles ---

    def _first_runs(self, spans: AttemptSpans) -> list[LifecycleRun]:
        """One for all choices, or one for each that another router began and that is not over."""
        request, resumed = self._prepared.request, self._output.resumed
        if request.resume is not None:
            log_event(
                logger,
                "request_resumed",
                request=self._prepared.id,
                began_as=request.resume.server_request_id,
                received_tokens=request.resume.num_tokens,
            )
        if resumed is None:
            return [LifecycleRun(self._context, spans)]
        return [self._part(SplitChoice(choice, ids, frozenset(), None), spans) for choice, ids in resumed.items()]

    def _start(self, run: LifecycleRun) -> None:
        task = asyncio.create_task(run.wait())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        run.start()

    def _on_split(self, action: SplitChoices, spans: AttemptSpans) -> None:
        parts = [self._part(choice, spans) for choice in action.choices]
        self._runs.extend(parts)
        for part in parts:
            self._start(part)

    def _part(self, choice: SplitChoice, spans: AttemptSpans) -> LifecycleRun:
        return LifecycleRun(self._context, spans.of_choice(choice.choice), choice)

    def _on_ended(self, error: KvferryError | None) -> None:
        if error is None or self._error is not None:
            return
        self._error = error
        self._failed_in = next(run.phase for run in self._runs if run.has_failed)
        self._post(ClientGone(error))

    def _start_timers(self) -> list[asyncio.TimerHandle]:
        loop = asyncio.get_running_loop()
        timers: list[asyncio.TimerHandle] = []
        rest_s = self._prepared.rest_of_deadline_s
        if rest_s is not None:
            error = DeadlineExceeded("the call's deadline passed before the request ended")
            timers.append(loop.call_later(rest_s, self.client_gone, error))
        limit_s = self._prepared.request.time_limit_s
        if limit_s is not None:
            spent_s = time.monotonic() - self._ledger.received_at_s
            timers.append(loop.call_later(max(0.0, limit_s - spent_s), self._post, TimeLimit()))
        return timers
