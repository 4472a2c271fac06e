"""The hand-off over every transport: what two workers agree on, blocks that go wrong on their way, deployments."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import decode_svc.role
from engine.scripted import ScriptConfig, load_script_config, reference_continuation
from kvferry.client import Completion, GenerateOptions
from kvferry.config import Config
from kvferry.errors import KvferryError, Unavailable
from kvferry.worker_process import RunningWorker
from kvtransfer.faults import Fault, FaultKind
from kvtransfer.grpc_transport import add_ship_service
from kvtransfer.receiver_links import ReceiverLinks
from tests.support.deployment import Deployment, chat_folder, deployment_config, running_deployment
from tests.support.pair import FULL_BLOCKS, OUTPUT_TOKENS, Pair, scripted_pair
from tests.support.pair_request import Ending, failure_of
from tests.support.staging import StagingTraces, staging_traces
from tests.support.workers import core_of, set_faults, until

TRANSPORTS = ("grpc", "shm")
EVERY_BLOCK = range(FULL_BLOCKS + 1)
MIB = 1 << 20


def links_of(decode: RunningWorker) -> ReceiverLinks:
    links = decode.role.ship_servicer.links  # type: ignore[attr-defined]
    assert isinstance(links, ReceiverLinks)
    return links


def uses_memory(pair: Pair) -> bool:
    """Whether the pair ships through shared memory, now that it has shipped."""
    return links_of(pair.decode).staging_bytes > 0


# -- what two workers agree on ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        ("auto", "auto", True),
        ("auto", "grpc", False),
        ("grpc", "auto", False),
        ("grpc", "grpc", False),
        ("shm", "auto", True),
        ("auto", "shm", True),
        ("shm", "shm", True),
    ],
)
async def test_workers_use_the_best_that_both_may(tmp_path: Path, prefill: str, decode: str, expected: bool) -> None:
    transfers = {"prefill_transfer": {"transport": prefill}, "decode_transfer": {"transport": decode}}
    async with scripted_pair(tmp_path / "model", **transfers) as pair:
        for _ in range(3):
            await pair.check_serves()
        assert uses_memory(pair) == expected and len(links_of(pair.decode)) == 1
        await pair.check_idle()


@pytest.mark.parametrize(("prefill", "decode"), [("shm", "grpc"), ("grpc", "shm")])
async def test_transports_that_do_not_go_together_are_refused_with_both_named(
    tmp_path: Path, prefill: str, decode: str
) -> None:
    transfers = {"prefill_transfer": {"transport": prefill}, "decode_transfer": {"transport": decode}}
    async with scripted_pair(tmp_path / "model", **transfers) as pair:
        for _ in range(2):
            request = pair.begin()
            failure = await failure_of(request.prefill)
            assert isinstance(failure, KvferryError)
            assert f"transfer.transport: {decode} at the decode worker, {prefill} at prefill worker" in failure.message
            await request.end(Ending.CHANNELS)
        await pair.check_idle()


async def test_a_decode_worker_without_memory_to_share_is_served_over_grpc(tmp_path: Path) -> None:
    async with scripted_pair(tmp_path / "model", decode_transfer={"max_staging_bytes": 0}) as pair:
        await pair.check_serves()
        assert not uses_memory(pair)


async def test_a_decode_worker_of_version_1_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_links(*arguments: Any) -> None:
        add_ship_service(*arguments, links=False)

    monkeypatch.setattr(decode_svc.role, "add_ship_service", without_links)
    async with scripted_pair(tmp_path / "model") as pair:
        for block_index in EVERY_BLOCK:
            pair.set_faults(Fault(FaultKind.CORRUPT, block_index, nth=1))
            await pair.check_serves()
        assert len(links_of(pair.decode)) == 0
        await pair.check_idle()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_little_memory_on_the_way_is_enough(tmp_path: Path, transport: str) -> None:
    """Prompts of many times the bytes that may be on their way, all at once."""
    transfer = {"transport": transport, "max_inflight_bytes_per_peer": MIB, "max_inflight_bytes": MIB}
    engine = {"num_blocks": 4096, "max_chunk_tokens": 64}
    transfers = {"prefill_transfer": transfer, "decode_transfer": transfer}
    async with scripted_pair(tmp_path / "model", prefill=engine, decode=engine, **transfers) as pair:
        requests = [pair.begin(pair.prompts.draw(1000)) for _ in range(6)]
        await asyncio.gather(*(request.finished() for request in requests))
        assert all(pair.prompts.is_right(request) for request in requests)
        await pair.check_idle()


# -- links that are lost ----------------------------------------------------------------------------------------------


async def test_a_link_that_is_lost_fails_what_was_under_way_and_the_next_request_opens_another(tmp_path: Path) -> None:
    transfer = {"transport": "shm"}
    before = staging_traces()
    async with scripted_pair(tmp_path / "model", prefill_transfer=transfer, decode_transfer=transfer) as pair:
        pair.delay_block(3, 0.3)
        num_arrived = pair.num_arrived_blocks
        under_way = pair.begin()
        await until(lambda: pair.num_arrived_blocks == num_arrived + 3)
        (peer,) = pair.prefill.role.servicer.peers._peers.values()  # type: ignore[attr-defined]
        await peer.link.close()
        assert isinstance(await failure_of(under_way.prefill), Unavailable)
        await until(lambda: pair.num_used_blocks(pair.decode) == 0 and pair.num_used_blocks(pair.prefill) == 0)
        await under_way.end(Ending.CHANNELS)
        await until(lambda: len(links_of(pair.decode)) == 0)
        assert staging_traces() == before
        pair.set_faults()
        await pair.check_serves()
        assert uses_memory(pair)
        await pair.check_idle()
    await until(lambda: staging_traces() == StagingTraces())


# -- blocks that go wrong ---------------------------------------------------------------------------------------------


@pytest.fixture(params=TRANSPORTS)
async def deployment(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Deployment]:
    config = deployment_config(chat_folder(tmp_path / "model"), max_chunk_tokens=4)
    config = config.replace("router", retry_budget=1.0).replace("transfer", transport=request.param)
    async with running_deployment(config, num_prefill=2, num_decode=2) as deployment:
        yield deployment
        await deployment.assert_idle()
        assert any(links_of(worker).staging_bytes for worker in deployment.decode) == (request.param == "shm")


def set_all_faults(deployment: Deployment, *faults: Fault) -> None:
    for worker in deployment.prefill:
        set_faults(worker, *faults)


class Asker:
    """Asks a deployment for prompts that no cache knows; every answer is compared with what has to come out."""

    def __init__(self, deployment: Deployment, seed: int = 0) -> None:
        self._client = deployment.client
        self._script = self._script_of(deployment.decode[0].context.config)
        self._dice = random.Random(seed)

    @staticmethod
    def _script_of(config: Config) -> ScriptConfig:
        assert config.model.path is not None
        return load_script_config(Path(config.model.path))

    async def ask(self, num_tokens: int = 22) -> Completion:
        prompt = [self._dice.randrange(20, 200) for _ in range(num_tokens)]
        options = GenerateOptions(prompt=prompt, max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
        answer = await self._client.complete(options, timeout_s=60.0)
        right = reference_continuation(prompt, OUTPUT_TOKENS, self._script)
        assert list(answer.choices[0].token_ids) == right, "a wrong token"
        return answer


FIRST_ATTEMPTS: dict[FaultKind, tuple[dict[str, Any], int]] = {
    FaultKind.CORRUPT: ({"nth": 1}, 1),
    FaultKind.DELAY: ({"delay_s": 0.01}, 1),
    FaultKind.DROP: ({"attempt": 1}, 2),
    FaultKind.DUPLICATE: ({"attempt": 1}, 2),
}
"""How a fault is committed once, and in how many attempts a request is answered then."""


@pytest.mark.parametrize("kind", FIRST_ATTEMPTS)
async def test_every_block_once_corrupted_dropped_delayed_or_doubled(deployment: Deployment, kind: FaultKind) -> None:
    details, num_attempts = FIRST_ATTEMPTS[kind]
    asker = Asker(deployment)
    for block_index in EVERY_BLOCK:
        set_all_faults(deployment, Fault(kind, block_index, **details))
        assert (await asker.ask()).timings.num_attempts == num_attempts
    set_all_faults(deployment)


@pytest.mark.parametrize("kind", FIRST_ATTEMPTS)
async def test_all_blocks_of_a_request_at_once(deployment: Deployment, kind: FaultKind) -> None:
    details, num_attempts = FIRST_ATTEMPTS[kind]
    set_all_faults(deployment, Fault(kind, **details))
    assert (await Asker(deployment).ask(42)).timings.num_attempts == num_attempts
    set_all_faults(deployment)


async def test_a_block_that_is_always_wrong_is_computed_anew_from_it_on(deployment: Deployment) -> None:
    """In the first attempt both sendings are wrong: prefill's own copy may be."""
    set_all_faults(deployment, Fault(FaultKind.CORRUPT, 3, attempt=1))
    assert (await Asker(deployment).ask()).timings.num_attempts == 2
    set_all_faults(deployment)


def some_faults(dice: random.Random) -> list[Fault]:
    """Of any kind but a stall, on blocks of the first attempt."""
    kinds = [kind for kind in FIRST_ATTEMPTS if dice.random() < 0.4]
    return [
        Fault(
            kind,
            dice.choice([None, *EVERY_BLOCK]) if kind is FaultKind.CORRUPT else dice.choice(EVERY_BLOCK),
            nth=dice.choice([1, 1, None]),
            delay_s=dice.random() / 50 if kind is FaultKind.DELAY else 0.0,
            attempt=1,
        )
        for kind in kinds
    ]


async def check_random_faults(deployment: Deployment, num_requests: int, *, num_at_once: int = 8) -> None:
    """Every request is answered right, whatever became of its blocks; some need another attempt, some blocks go twice.

    Which fault meets which block is a matter of timing: where a round was spared, there is another.
    """
    dice, answers = random.Random(1), list[Completion]()

    async def client(seed: int, numbers: Iterator[int]) -> None:
        asker = Asker(deployment, seed)
        for number in numbers:
            set_all_faults(deployment, *some_faults(dice))
            answers.append(await asker.ask(dice.choice([1, 4, 21, 22, 24, 90])))
            if number % 100 == 0:
                for worker in (*deployment.prefill, *deployment.decode):
                    await worker.role.engine.run(lambda core: core.check_integrity())  # type: ignore[attr-defined]

    def was_hit() -> bool:
        num_retried = sum(answer.timings.num_attempts > 1 for answer in answers)
        num_nacks = sum(worker.role.load().num_nacks for worker in deployment.decode)
        return min(num_retried, num_nacks) > num_requests // 100

    for round_ in range(10):
        numbers = iter(range(num_requests))
        await asyncio.gather(*(client(num_at_once * round_ + place, numbers) for place in range(num_at_once)))
        if was_hit():
            break
    assert was_hit() and len(answers) >= num_requests and all(answer.is_complete for answer in answers)
    assert max(answer.timings.num_attempts for answer in answers) <= 3
    assert all(core_of(worker).num_integrity_faults == 0 for worker in (*deployment.prefill, *deployment.decode))
    set_all_faults(deployment)


async def test_random_faults_never_change_a_token(deployment: Deployment) -> None:
    await check_random_faults(deployment, 60)


@pytest.mark.soak
@pytest.mark.timeout(3_600)
async def test_a_thousand_requests_with_random_faults(deployment: Deployment) -> None:
    await check_random_faults(deployment, 1_000)
