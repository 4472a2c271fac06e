"""One line a request, with the caller's label and the reason, and never a word of its text."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from kvferry.errors import InvalidArgument
from kvferry.sampling import Finish, FinishKind
from router.metrics import RequestRecord
from router.request_log import logged


def fields_of(caplog: pytest.LogCaptureFixture) -> tuple[str, dict[str, Any]]:
    (record,) = caplog.records
    return record.getMessage(), record.fields  # type: ignore[attr-defined]


def test_a_finished_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    record = RequestRecord(request_id="r1", label="mine", tier="batch", num_prompt_tokens=3, num_output_tokens=5)
    with logged(record):
        record.finish = Finish(FinishKind.LENGTH)
        record.ledger.tokens_sent()
    event, fields = fields_of(caplog)
    assert event == "request_finished"
    assert fields["request"] == "r1" and fields["label"] == "mine" and fields["finish"] == "length"
    assert fields["output_tokens"] == 5 and fields["ttft_s"] >= 0


def test_a_refused_request_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InvalidArgument), logged(RequestRecord()):
        raise InvalidArgument("sampling.temperature", "-1 is below 0")
    event, fields = fields_of(caplog)
    assert event == "request_failed" and fields["error"] == "INVALID_ARGUMENT"
    assert "sampling.temperature" in fields["message"]


async def test_a_cancelled_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(asyncio.CancelledError), logged(RequestRecord()):
        raise asyncio.CancelledError
    assert fields_of(caplog)[0] == "request_cancelled"
