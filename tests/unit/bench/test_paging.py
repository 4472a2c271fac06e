"""Our engine in virtual time, workloads, step times: small cases computed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import paper
from bench.paging import beams, step_model
from bench.paging.beams import BeamRecording
from bench.paging.contiguous import ContiguousSystem, Reservation
from bench.paging.ours import PagedSystem
from bench.paging.step_model import StepModel, StepSample
from bench.paging.study import part
from bench.paging.tables import Table
from bench.paging.workload import ALPACA, MAX_TOTAL_TOKENS, SHAREGPT, Arrival, all_at_once, poisson, resized, with_beams
from kvferry.lengths import RequestLength

SECOND_A_STEP = StepModel("one second", 1.0, 0.0, 0.0, "by hand")


def paged(num_slots: int, *, block_size: int = 4, prefix_caching: bool = False) -> PagedSystem:
    return PagedSystem(
        num_slots, SECOND_A_STEP, 64, 64, block_size=block_size, watermark=0.0, prefix_caching=prefix_caching
    )


@pytest.mark.parametrize("shape", [SHAREGPT, ALPACA], ids=lambda shape: shape.name)
def test_samples_have_the_papers_means_and_limit(shape: object) -> None:
    assert shape in (SHAREGPT, ALPACA)
    chosen = SHAREGPT if shape is SHAREGPT else ALPACA
    lengths = chosen.sample(500, seed=3)
    assert sum(one.num_prompt_tokens for one in lengths) / 500 == pytest.approx(chosen.mean_prompt_tokens, abs=0.5)
    assert sum(one.num_output_tokens for one in lengths) / 500 == pytest.approx(chosen.mean_output_tokens, abs=0.5)
    assert max(one.num_tokens for one in lengths) <= MAX_TOTAL_TOKENS
    assert lengths == chosen.sample(500, seed=3)
    assert lengths != chosen.sample(500, seed=4)


def test_parts_keep_order_and_kind() -> None:
    lengths = [RequestLength(1, output) for output in (9, 1, 5, 7, 3, 2, 8, 4, 6, 10)]
    assert [one.num_output_tokens for one in part(lengths, 0.5)] == [2, 8, 4, 6, 10]
    assert part(lengths, 1.0) == lengths


def test_user_lengths_are_repeated_until_there_are_enough_tokens() -> None:
    lengths = [RequestLength(1, 1), RequestLength(2, 3)]
    chosen = resized(lengths, 20, seed=0)
    assert 20 <= sum(one.num_tokens for one in chosen) < 25
    assert chosen == resized(lengths, 20, seed=0)


def test_rates_stretch_the_same_arrivals() -> None:
    slow, quick = (poisson([RequestLength(1, 1)] * 5, rate, seed=0) for rate in (1.0, 2.0))
    assert [one.at_s / 2 for one in slow] == pytest.approx([one.at_s for one in quick])


def test_utilisation_of_one_sequence_by_hand() -> None:
    """Blocks of 4, prompt 3, output 3: steps with 3, 4, 5 tokens in 1, 1, 2 blocks of the only 2 there are."""
    figures = paged(8).run(all_at_once([RequestLength(3, 3)]), is_whole_run=True)
    assert figures.used_of_allocated == pytest.approx((3 + 4 + 5) / (4 + 4 + 8))
    assert figures.used_of_pool == pytest.approx((3 + 4 + 5) / (3 * 8))
    assert figures.internal_of_pool == pytest.approx((1 + 0 + 3) / (3 * 8))
    assert figures.num_held == 1.0
    assert figures.normalised_latency_s == pytest.approx(1.0)


def test_requests_wait_for_memory_and_count_as_saturated() -> None:
    """Two of three prompts of 4 fit beside one another and the watermark, one block; the third waits a step."""
    figures = paged(12).run(all_at_once([RequestLength(4, 1)] * 3))
    assert (figures.num_held, figures.used_of_pool, figures.request_rate_per_s) == (2.0, 8 / 12, 2.0)
    assert figures.normalised_latency_s == pytest.approx((1 + 1 + 2) / 3)


def test_parallel_outputs_share_the_blocks_of_the_prompt() -> None:
    """Prompt 4, two outputs of 3: one block while the prompt runs, then 1 + 2 where 4 would be needed, twice."""
    figures = paged(64).run(all_at_once([RequestLength(4, 3)], num_choices=2), is_whole_run=True)
    assert figures.saved_by_sharing == pytest.approx(1 - (1 + 3 + 3) / (1 + 4 + 4))
    assert figures.normalised_latency_s == pytest.approx(1.0)


def test_beams_go_on_as_recorded() -> None:
    """Two beams, prompt 4, blocks of 4. Both always extend beam 0: only the last block can differ.

    Steps: the prompt, 1 block of 1; then two beams with a block of their own each, 3 blocks of 4, and with the token
    after it, for which the fork's block is copied: 3 of 4 again.
    """
    recording = BeamRecording(2, "", 4, ("00",))
    figures = paged(64).run(with_beams([RequestLength(4, 3)], [recording]), is_whole_run=True)
    assert figures.saved_by_sharing == pytest.approx(1 - (1 + 3 + 3) / (1 + 4 + 4))


def test_beams_that_never_cross_share_the_prompt_alone() -> None:
    """Beams that keep to themselves hold 1 + 2 × 2 blocks where 6 would be needed once they have more than 4 tokens."""
    straight, crossing = (BeamRecording(2, "", 4, (step,)) for step in ("01", "00"))
    saved = [
        paged(256).run(with_beams([RequestLength(4, 40)], [one]), is_whole_run=True).saved_by_sharing
        for one in (straight, crossing)
    ]
    assert saved[0] < 0.2 < 0.4 < saved[1]


def test_prefix_is_computed_once() -> None:
    """The second of two prompts with 8 tokens in common finds them: its prompt of 10 costs 2 tokens."""
    token_times = StepModel("tokens", 0.0, 1.0, 0.0, "by hand")
    system = PagedSystem(64, token_times, 64, 8, block_size=4, watermark=0.0, prefix_caching=True)
    arrivals = [Arrival(number, 100.0 * number, RequestLength(10, 1), 8) for number in range(2)]
    assert system.run(arrivals).normalised_latency_s == pytest.approx((10 + 2) / 2)


def test_all_systems_agree_where_memory_is_no_matter() -> None:
    """The same steps in the same order: only memory distinguishes ours from the contiguous ones."""
    model = StepModel("some", 0.03, 0.001, 1e-6, "by hand")
    lengths = SHAREGPT.sample(40, seed=0)
    ours = PagedSystem(1 << 20, model, 256, 64).run(all_at_once(lengths))
    orca = ContiguousSystem(Reservation.ORACLE, 1 << 20, 2048, model, 256, 64).run(all_at_once(lengths))
    assert ours.normalised_latency_s == pytest.approx(orca.normalised_latency_s, rel=0.02)


def test_step_times_are_found_again() -> None:
    true = StepModel("true", 0.02, 1e-3, 2e-6, "")
    samples = [StepSample(n, n * c, true.step_s(n, n * c)) for n in (1, 8, 32) for c in (10, 100, 500)]
    found = step_model.fit("found", "", samples)
    assert (found.base_s, found.token_s, found.context_token_s) == pytest.approx((0.02, 1e-3, 2e-6))
    assert step_model.worst_relative_error(found, samples) < 1e-6
    assert true.prefill_s(100, 64) == pytest.approx(2 * 0.02 + 100 * 1e-3 + (64 + 100) * 2e-6)


def test_no_coefficient_is_negative() -> None:
    samples = [StepSample(n, c, 1.0 - c / 1000) for n in (1, 2) for c in (10, 100, 500)]
    found = step_model.fit("found", "", samples)
    assert min(found.base_s, found.token_s, found.context_token_s) >= 0


def test_stored_step_times_and_beams_can_be_read() -> None:
    assert step_model.load().step_s(1, 100) > 0
    recorded = beams.load()
    for width in beams.WIDTHS:
        for run in recorded.of_width(width):
            assert {len(step) for step in run.parents} == {width}
            assert max(int(character) for step in run.parents for character in step) < width


def test_table_is_markdown_with_dashes_for_what_is_unknown() -> None:
    table = Table("t", "Title", "What it says.", ("system", "ours", "ours (paper)"), (("a", 1.5, None),), ("Why.",))
    assert "| system | ours | ours (paper) |\n" in table.text()
    assert "| a      | 1.5  | –            |\n" in table.text()
    assert table.records() == [{"system": "a", "ours": 1.5, "ours (paper)": None}]


def test_user_file_is_simulated_and_figures_and_plots_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = tmp_path / "mine.csv"
    lengths.write_text("prompt_len,output_len\n" + "400,100\n100,300\n" * 30)
    arguments = ["--lengths", str(lengths), "--quick", "--tables", "utilisation,held"]
    code = paper.main([*arguments, "--json", str(tmp_path / "out.json"), "--out", str(tmp_path / "plots")])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "## KV memory at saturation" in printed.out
    figures = json.loads((tmp_path / "out.json").read_text())
    by_system = {row["system"]: row["of pool"] for row in figures["tables"][0]["rows"]}
    assert by_system["kvferry"] > by_system["Orca (Oracle)"] > by_system["Orca (Max)"] > 0
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"utilisation.png", "held.png"}


def test_wrong_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = tmp_path / "mine.csv"
    lengths.write_text("10,20\n10,x\n")
    assert paper.main(["--lengths", str(lengths)]) == 1
    assert f"{lengths} line 2: output_len must be a whole number" in capsys.readouterr().err
