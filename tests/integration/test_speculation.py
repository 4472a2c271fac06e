"""Several tokens a step through real services: messages, indices, usage, counters, the trace."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvferry.client import GenerateOptions
from tests.support.deployment import chat_folder, deployment_config, running_deployment
from tests.support.workers import core_of, until

SCRIPT = tuple(range(40, 52))
NUM_TOKENS = 100


@pytest.mark.parametrize("num_prefill", [0, 1], ids=["alone", "split"])
async def test_an_answer_in_a_loop_comes_several_tokens_at_a_time(tmp_path: Path, num_prefill: int) -> None:
    folder = chat_folder(tmp_path / "model", mode="script", script=SCRIPT)
    config = deployment_config(folder, speculation="prompt_lookup")
    async with running_deployment(config, num_prefill=num_prefill) as deployment:
        options = GenerateOptions(prompt=[1, 2, 3], max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, logprobs=0)
        tokens: list[int] = []
        sizes: list[int] = []
        async with deployment.client.generate(options) as events:
            async for event in events:
                if event.WhichOneof("event") == "delta":
                    assert event.delta.token_index == len(tokens)
                    tokens += event.delta.token_ids
                    sizes.append(len(event.delta.token_ids))
                    assert [one.token_id for one in event.delta.logprobs] == list(event.delta.token_ids)
        assert tokens == [SCRIPT[index % len(SCRIPT)] for index in range(NUM_TOKENS)]
        assert max(sizes) > 4
        stats = core_of(deployment.decode[0]).stats()
        assert stats.num_steps < NUM_TOKENS / 2
        assert 0 < stats.num_accepted_tokens <= stats.num_draft_tokens
        registry = deployment.telemetry.metrics.registry
        counted = {
            "drafts": stats.num_drafts,
            "draft_tokens": stats.num_draft_tokens,
            "accepted_tokens": stats.num_accepted_tokens,
        }

        def shown(name: str) -> float:
            samples = [one for metric in registry.collect() for one in metric.samples]
            full = f"kvferry_worker_spec_decode_num_{name}_total"
            return sum(one.value for one in samples if one.name == full and one.labels["role"] == "decode")

        await until(lambda: {name: shown(name) for name in counted} == counted)
        await deployment.assert_idle()
        assert await asyncio.to_thread(deployment.decode[0].context.telemetry.provider.force_flush, 5_000)
        (span,) = [one for one in deployment.exporter.get_finished_spans() if one.name == "kvferry.decode"]
        assert span.attributes is not None
        assert span.attributes["kvferry.num_accepted_tokens"] == stats.num_accepted_tokens
