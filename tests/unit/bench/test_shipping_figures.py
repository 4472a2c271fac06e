"""What the benchmarks of the hand-off make of their measurements: small cases computed by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import handoff, receive, transfer
from bench.report import Spread, percentile
from bench.spans import RecordedSpan, SpanCollector
from kvferry.telemetry import SpanNames


def test_percentile_is_a_value_that_was_measured() -> None:
    values = [float(number) for number in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1.0, 51.0, 100.0, 100.0]


def test_spread_of_one_and_of_many() -> None:
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)
    assert Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Spread(3.0, 2.0, 4.0)


def test_the_second_token_is_compared_with_later_gaps_only() -> None:
    sample = handoff.Sample((3.0, 3.5, 3.6, 3.7, 4.7), ship_s=0.0, num_blocks_shipped=1)
    assert sample.second_gap_excess_s == pytest.approx(0.4)  # 0.5 late, and a later gap is 0.1 in the median


def test_tail_is_from_the_last_chunk_of_the_request_to_the_end_of_its_shipment() -> None:
    collector = SpanCollector("")
    collector.spans = [
        RecordedSpan(SpanNames.PREFILL_CHUNK, b"warm up", 0, 5),
        RecordedSpan(SpanNames.SHIP, b"warm up", 1, 9),
        RecordedSpan(SpanNames.SHIP, b"shipped", 110, 350_000_000),
        RecordedSpan(SpanNames.PREFILL_CHUNK, b"shipped", 200, 300_000_000),
        RecordedSpan(SpanNames.PREFILL_CHUNK, b"shipped", 100, 200),
        RecordedSpan(SpanNames.PREFILL_CHUNK, b"alone", 100, 200),
    ]
    assert handoff._tails_s(collector, begin_ns=100) == [pytest.approx(0.05)]


def test_steps_belong_to_the_period_they_lie_in_and_ran_all_sequences(tmp_path: Path) -> None:
    file = tmp_path / "steps"
    lines = ["0.5 1.5 16", "1.5 1.7 16", "1.7 1.8 15", "1.8 2.2 16", "2.2 2.9 16", "2.9 3.1 16"]
    file.write_text("\n".join(lines) + "\n")
    period = receive.Period(begin_s=1.0, end_s=3.0, mb_per_s=0.0, itls_s=[])
    receive._add_steps(file, [period])
    assert period.steps_s == pytest.approx([0.2, 0.4, 0.7])
    assert period.intervals_s == pytest.approx([0.3, 0.4])


def test_ratios_are_of_neighbours_in_a_round() -> None:
    samples = {
        transfer.COPY: [transfer.Sample(10.0, 0.1), transfer.Sample(20.0, 0.1)],
        transfer.BARE: [transfer.Sample(1.0, 1.0), transfer.Sample(4.0, 2.0)],
        transfer.BARE_POOLS: [transfer.Sample(1.0, 1.0), transfer.Sample(4.0, 2.0)],
        "grpc": [transfer.Sample(0.5, 2.0), transfer.Sample(2.0, 4.0)],
    }
    line = transfer._lines(1024, 4, samples)[-1]
    assert (line.system, line.block_bytes, line.num_streams) == ("grpc", 1024, 4)
    assert line.of_bare == Spread(0.5, 0.5, 0.5)
    assert line.cpu_of_bare == Spread(2.0, 2.0, 2.0)
    assert line.of_copy.median == pytest.approx(0.075)
    assert line.best_gb_per_s == 2.0
