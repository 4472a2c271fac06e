"""`kvferry cache` and `--api-key`, as processes against a running deployment with tenants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Protocol

import httpx
import pytest
from pydantic import SecretStr

from kvferry.cli.cache import EXAMPLE_SYSTEM
from kvferry.client import AsyncClient, GenerateOptions
from kvferry.config import TenantConfig
from router.text.chat_template import ChatMessage
from router.text.tokenizer import TextTokenizer
from router.worker import Worker
from tests.support.commands import CommandServer, plain_environment
from tests.support.deployment import chat_folder, deployment_config, running_deployment
from tests.support.workers import core_of, until

pytestmark = pytest.mark.processes

KEY, ROOT_KEY = "key-of-tenant-a", "key-of-the-root"
PROMPT = list(range(1, 14))
PROMPT_IDS = ",".join(map(str, PROMPT))


class Kvferry(Protocol):
    """Exit code, output and errors of `kvferry ARGUMENTS`."""

    async def __call__(self, *arguments: str, stdin: str = "", **variables: str) -> tuple[int | None, str, str]: ...


@pytest.fixture
def kvferry(commands: CommandServer) -> Kvferry:
    async def run(*arguments: str, stdin: str = "", **variables: str) -> tuple[int | None, str, str]:
        environment = {**plain_environment(), **variables}
        done = await commands.run(*arguments, environment=environment, stdin=stdin.encode())
        return done.code, done.stdout, done.stderr

    return run


def queried_tokens(worker: Worker) -> int:
    """As of its last status."""
    return 0 if worker.status is None else sum(hits.num_queried_tokens for hits in worker.status.load.tenant_hits)


async def test_stats_pin_unpin_and_flush(tmp_path: Path, kvferry: Kvferry) -> None:
    config = deployment_config(chat_folder(tmp_path / "model"))
    tenants = (
        TenantConfig(name="a", api_keys=(SecretStr(KEY),), max_used_share=0.5),
        TenantConfig(name="root", api_keys=(SecretStr(ROOT_KEY),), admin=True),
    )
    async with running_deployment(config.model_copy(update={"tenants": tenants})) as deployment:
        target = ("--target", deployment.router.address)
        code, _, stderr = await kvferry("cache", "stats", *target)
        assert code == 1 and "an API key is needed" in stderr
        generate = ("generate", "--prompt-token-ids", PROMPT_IDS, "--max-tokens", "2", "--ignore-eos", *target)
        code, _, stderr = await kvferry(*generate, KVFERRY_CLIENT__API_KEY=KEY)
        assert (code, stderr) == (0, "ended at max_tokens (2)\n")

        code, stdout, _ = await kvferry(
            "cache", "pin", "sys", "--prompt-token-ids", PROMPT_IDS, *target, "--api-key", KEY, "--json"
        )
        assert code == 0
        assert [(worker["role"], worker["num_blocks"]) for worker in json.loads(stdout)] == [
            ("prefill", 3),
            ("decode", 3),
        ]
        code, stdout, _ = await kvferry("cache", "stats", *target, "--api-key", ROOT_KEY, "--json")
        prefill = json.loads(stdout)[0]["memory"]
        assert code == 0
        assert (prefill["num_pinned_blocks"], prefill["num_evictions"], prefill["num_blocks"]) == (3, 0, 128)
        (tenant,) = [row for row in prefill["tenants"] if row["num_queried_tokens"]]
        assert (tenant["tenant"], tenant["num_queried_tokens"], tenant["max_used_blocks"]) == ("a", 13, 64)

        code, stdout, _ = await kvferry("cache", "stats", *target, "--api-key", ROOT_KEY, COLUMNS="200")
        assert code == 0 and "3 of 64" in stdout and "0 of 13 (0.0%)" in stdout
        code, stdout, _ = await kvferry("cache", "stats", *target, "--api-key", KEY, COLUMNS="200")
        assert code == 0 and "3 of 64" in stdout and "128 × 4 tokens" in stdout
        assert "evictions" not in stdout and "free" not in stdout, "totals of all tenants, or zeros instead"
        code, stdout, _ = await kvferry("workers", *target, "--api-key", KEY)
        assert code == 0 and "decode-0" in stdout and "pid" not in stdout and "127.0.0.1" not in stdout
        assert "known" not in stdout, "they tell of other tenants' prompts"
        blocks, address = deployment.router.membership.blocks, deployment.prefill[0].address
        await until(lambda: blocks.known(address).num_blocks == 3)
        code, stdout, _ = await kvferry("workers", *target, "--api-key", ROOT_KEY, COLUMNS="200")
        assert code == 0 and "known blocks" in stdout
        code, stdout, _ = await kvferry("workers", *target, "--api-key", ROOT_KEY, "--json")
        assert json.loads(stdout)[0]["num_known_blocks"] == 3
        code, stdout, _ = await kvferry("workers", *target, "--api-key", KEY, "--json")
        assert json.loads(stdout)[0]["num_known_blocks"] == 0
        code, stdout, _ = await kvferry("cache", "unpin", "sys", *target, "--api-key", KEY)
        assert code == 0 and stdout.count(" 3 ") == 2
        code, stdout, stderr = await kvferry("cache", "flush", *target, "--api-key", ROOT_KEY, "--json")
        assert (code, stderr) == (0, "") and all(worker["num_blocks"] >= 3 for worker in json.loads(stdout))
        await deployment.assert_idle()


async def test_a_system_prompt_is_pinned_as_chats_send_it(tmp_path: Path, kvferry: Kvferry) -> None:
    config = deployment_config(chat_folder(tmp_path / "model"))
    async with running_deployment(config) as deployment:
        target = ("--target", deployment.router.address)
        pin = ("cache", "pin", "brief", "--system", EXAMPLE_SYSTEM, *target)
        code, stdout, stderr = await kvferry(*pin)
        assert (code, stdout) == (1, "") and "not cached on any worker; run a request with it first" in stderr
        code, _, stderr = await kvferry(
            "chat", "--system", EXAMPLE_SYSTEM, "--temperature", "0", "--max-tokens", "2", *target, stdin="hi\n"
        )
        assert (code, stderr) == (0, "ended at max_tokens (2)\n")
        code, stdout, _ = await kvferry(*pin, "--json")
        pinned = [worker["num_blocks"] for worker in json.loads(stdout)]
        tokenizer = TextTokenizer.load(tmp_path / "model")
        prefix = tokenizer.encode_chat([ChatMessage("system", EXAMPLE_SYSTEM)], add_generation_prompt=False)
        assert code == 0 and pinned == 2 * [len(prefix) // 4]
        assert [core_of(worker).pool.num_pinned for worker in deployment.decode] == [len(prefix) // 4]
        code, _, _ = await kvferry("cache", "unpin", "brief", *target)
        assert code == 0
        await deployment.assert_idle()


async def test_what_did_nothing_says_so(tmp_path: Path, kvferry: Kvferry) -> None:
    async with running_deployment(deployment_config(chat_folder(tmp_path / "model"))) as deployment:
        target = ("--target", deployment.router.address)
        for arguments, code, words in (
            (("pin", "x", "--prompt-token-ids", "1,2,3"), 1, "error: prompt: nothing is pinned: 3 tokens are shorter"),
            (("unpin", "nobody"), 1, "error: there is no pin 'nobody' on any worker"),
            (("flush",), 0, "nothing was cached"),
            (("flush", "--tenant", "x"), 1, "error: tenant: there is no tenant 'x'; known tenants: none are"),
            (("pin", "x"), 2, "give one of PROMPT, --prompt-token-ids and --system"),
            (("pin", "x", "text", "--system", "more"), 2, "give one of PROMPT, --prompt-token-ids and --system"),
        ):
            found, stdout, stderr = await kvferry("cache", *arguments, *target, COLUMNS="200")
            assert (found, words in stderr) == (code, True), stderr
            assert bool(stdout) == (code == 0)  # no table beside an error


async def test_a_worker_that_is_gone_is_told_and_the_others_are_flushed(tmp_path: Path, kvferry: Kvferry) -> None:
    config = deployment_config(chat_folder(tmp_path / "model"))
    async with running_deployment(config, num_decode=2) as deployment:
        await deployment.client.complete(GenerateOptions(prompt=PROMPT, max_tokens=2, ignore_eos=True))
        await deployment.decode[1].server.drain(0.0)
        while len(deployment.router.membership.ready(deployment.router.membership.decode[0].role)) > 1:
            await deployment.router.membership.changes.wait_next()
        async with AsyncClient(deployment.router.address) as client:
            flushed = {worker.worker: worker for worker in await client.flush_prefix_cache()}
        assert flushed["prefill-0"].num_blocks >= 3 and not flushed["prefill-0"].error
        assert "connecting" in flushed["decode-1"].error
        code, stdout, stderr = await kvferry("cache", "stats", "--target", deployment.router.address)
        assert code == 1 and "prefill-0" in stdout and "decode-1: " in stderr


async def test_the_figures_are_on_metrics(tmp_path: Path) -> None:
    config = deployment_config(chat_folder(tmp_path / "model"), num_blocks=16)
    tenants = (TenantConfig(name="a", api_keys=(SecretStr(KEY),)),)
    async with running_deployment(config.model_copy(update={"tenants": tenants})) as deployment:
        async with AsyncClient(deployment.router.address, api_key=KEY) as client:
            for first in range(8):
                options = GenerateOptions(prompt=[first, *PROMPT[1:]], max_tokens=2, ignore_eos=True)
                for _ in range(2):
                    await client.complete(options)
        prefill = deployment.router.membership.prefill[0]
        await until(lambda: queried_tokens(prefill) == 16 * len(PROMPT))
        async with httpx.AsyncClient() as http:
            text = (await http.get(f"{deployment.router.http_url}/metrics")).text
        labels = f'address="{prefill.address}",role="prefill"'
        lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
        samples = {name: float(value) for name, _, value in lines}
        assert samples[f'kvferry_worker_evictions_total{{{labels},worker="prefill-0"}}'] > 0
        of_a = f'{labels},tenant="a",worker="prefill-0"'
        assert samples[f"kvferry_worker_prefix_cache_queried_tokens_total{{{of_a}}}"] == 16 * 13
        assert samples[f"kvferry_worker_prefix_cache_hit_tokens_total{{{of_a}}}"] == 8 * 12
        for name in (
            f'preemptions_total{{address="{prefill.address}",kind="recompute",role="prefill"',
            f'preemptions_total{{address="{prefill.address}",kind="swap",role="prefill"',
            f'swapped_blocks_total{{address="{prefill.address}",kind="out",role="prefill"',
            f"recomputed_tokens_total{{{labels}",
            f"blocks_copied_total{{{labels}",
            f"integrity_faults_total{{{labels}",
            f"unsound_blocks_total{{{labels}",
            f"pinned_blocks{{{labels}",
        ):
            assert samples[f'kvferry_worker_{name},worker="prefill-0"}}'] == 0
