"""What the lifecycles of one request share: the request, where its output goes, who is told of a split or an end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvferry.errors import KvferryError
from router.cluster import Cluster
from router.events import SplitChoices
from router.ledger import RequestLedger
from router.prepared_request import PreparedRequest
from router.request_output import RequestOutput
from router.tracing import AttemptSpans


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What the lifecycles of one request share.

    Attributes:
        attempts: numbers of its attempts.
        split: takes choices that go on by themselves.
        ended: told when a lifecycle has ended, and why if not well; the run's calls may be open still.
    """

    prepared: PreparedRequest
    cluster: Cluster
    output: RequestOutput
    ledger: RequestLedger
    attempts: Iterator[int]
    split: Callable[[SplitChoices, AttemptSpans], None]
    ended: Callable[[KvferryError | None], None]
