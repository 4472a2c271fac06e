"""The router's log: one line a request, how it ended and what it cost; one a call of HTTP that was refused or failed.

Never a text, tokens or keys. A call that fails as a request leaves both lines: the request's `label` is the call's
`request_id`, unless the body has one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from kvferry.errors import Cancelled, KvferryError
from kvferry.telemetry import error_type, log_event
from router.metrics import RequestRecord

logger = logging.getLogger(__name__)

MAX_REASON_CHARS = 500


@dataclass(frozen=True, slots=True)
class FailedCall:
    """A call of HTTP that was refused or failed.

    Attributes:
        request_id: as its response tells it in `x-request-id`.
        route: as in the figures; empty where there is none.
        status: of the response; 200 for a stream that had begun, 499 for nobody there to be told.
        code: `error.code`.
        tenant: empty where none are configured, and for a caller who is none.
    """

    request_id: str
    method: str
    route: str
    status: int
    code: str
    tenant: str = ""


def log_failed_call(call: FailedCall, error: KvferryError) -> None:
    """Writes its line."""
    is_gone = isinstance(error, Cancelled)
    log_event(
        logger,
        "http_request_cancelled" if is_gone else "http_request_failed",
        level=logging.INFO if is_gone else logging.WARNING,
        **asdict(call),
        error=error_type(error),
        message=error.message[:MAX_REASON_CHARS],
    )


@contextmanager
def logged(record: RequestRecord) -> Iterator[None]:
    """Around one call; writes its line at the end, whatever the end is."""
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        _write(record, error)


def _write(record: RequestRecord, error: BaseException | None) -> None:
    ledger = record.ledger
    ttft_s = ledger.time_to_first_token_s
    fields: dict[str, Any] = {
        "request": record.request_id,
        "label": record.label,
        "tenant": record.tenant,
        "route": record.route,
        "model": record.model,
        "tier": record.tier,
        "phase": record.phase,
        "prompt_tokens": record.num_prompt_tokens,
        "output_tokens": record.num_output_tokens,
        "cached_tokens": ledger.num_cached_tokens,
        "attempts": ledger.num_attempts,
        "workers": list(ledger.workers),
        "ttft_s": None if ttft_s is None else round(ttft_s, 4),
        "total_s": round(ledger.total_s, 4),
    }
    if error is None:
        finish = record.finish.kind.value if record.finish is not None else None
        log_event(logger, "request_finished", finish=finish, **fields)
    elif isinstance(error, asyncio.CancelledError | Cancelled):
        log_event(logger, "request_cancelled", **fields)
    else:
        message = error.message if isinstance(error, KvferryError) else ""
        log_event(logger, "request_failed", level=logging.WARNING, error=error_type(error), message=message, **fields)
