"""One line a request in the router's log: how it ended and what it cost. Never its text or tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvferry.errors import Cancelled, KvferryError
from kvferry.telemetry import error_type, log_event
from router.metrics import RequestRecord

logger = logging.getLogger(__name__)


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
        "tier": record.tier,
        "phase": record.phase,
        "prompt_tokens": record.num_prompt_tokens,
        "output_tokens": record.num_output_tokens,
        "cached_tokens": ledger.num_cached_tokens,
        "attempts": ledger.num_attempts,
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
