"""Sessions before real workers: turns of one find their blocks again, whichever router they come through."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from kvferry.client import AsyncClient, Completion, GenerateOptions
from kvferry.telemetry import start_telemetry
from router.app import RouterApp
from router.session import Session
from tests.support.deployment import Deployment, chat_folder, deployment_config, running_deployment
from tests.support.drains import progress_of
from tests.support.workers import until

SESSIONS = [f"session-{number}" for number in range(6)]
BLOCK_SIZE = 4
NUM_TURN_TOKENS = 9
MAX_TOKENS = 8


@dataclass(frozen=True, slots=True)
class TwoRouters:
    """Both before the same two pairs of workers."""

    deployment: Deployment
    clients: Sequence[AsyncClient]


@asynccontextmanager
async def two_routers(folder: Path) -> AsyncIterator[TwoRouters]:
    config = deployment_config(chat_folder(folder / "model"), block_size=BLOCK_SIZE, num_blocks=1024)
    async with running_deployment(config, num_prefill=2, num_decode=2) as deployment:
        roles = {"prefill": deployment.prefill, "decode": deployment.decode}
        addresses = {role: [worker.address for worker in workers][::-1] for role, workers in roles.items()}
        telemetry = start_telemetry(config.telemetry, "router", "second")
        async with (
            RouterApp(config.replace("router", **addresses), telemetry) as second,
            AsyncClient(second.address) as client,
        ):
            routers = (deployment.router, second)
            await until(
                lambda: all(worker.state.value == "ready" for router in routers for worker in router.membership.workers)
            )
            yield TwoRouters(deployment, (deployment.client, client))
        await telemetry.shutdown()


async def turn(client: AsyncClient, number: int, history: list[int], session_id: str) -> Completion:
    """Asks with `history` and something new, and puts both the question and the answer there."""
    history += [(7 * number + place) % 200 for place in range(NUM_TURN_TOKENS)]
    completion = await client.complete(
        GenerateOptions(prompt=history, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True, session_id=session_id),
        timeout_s=30.0,
    )
    history += completion.choices[0].token_ids
    return completion


def num_held_blocks(num_tokens_before: int) -> int:
    """Full blocks of the turn before, whose last token's keys and values nobody has."""
    return (num_tokens_before - 1) // BLOCK_SIZE


async def test_turns_of_a_session_find_their_blocks_through_either_router(tmp_path: Path) -> None:
    """On both workers: what prefill had computed isn't computed again, what decode has isn't shipped again."""
    async with two_routers(tmp_path) as routers:
        for offset, session_id in enumerate(SESSIONS):
            history: list[int] = [offset, 199 - offset] * 4
            for number in range(4):
                num_before = len(history)
                answer = await turn(routers.clients[number % 2], number, history, session_id)
                if number:
                    num_computed = num_before - MAX_TOKENS
                    assert answer.usage.cached_tokens >= num_computed // BLOCK_SIZE * BLOCK_SIZE, (session_id, number)
                    assert answer.timings.num_blocks_reused >= num_held_blocks(num_before), (session_id, number)
        await routers.deployment.assert_idle()


async def test_without_a_session_turns_miss_them(tmp_path: Path) -> None:
    """What the test above compares with: workers of equal load take turns."""
    async with two_routers(tmp_path) as routers:
        history = [1, 2] * 4
        answers = [await turn(routers.clients[0], number, history, "") for number in range(4)]
        assert answers[1].usage.cached_tokens == 0 and answers[1].timings.num_blocks_reused == 0


async def test_a_session_leaves_a_draining_worker_and_comes_back(tmp_path: Path) -> None:
    async with two_routers(tmp_path) as routers:
        client, session_id = routers.clients[0], SESSIONS[0]
        mine = Session("", session_id).preferred(worker.address for worker in routers.deployment.decode)
        history = [3, 5] * 4
        await turn(client, 0, history, session_id)
        await progress_of(client, mine)
        elsewhere = await turn(client, 1, history, session_id)
        assert elsewhere.timings.num_blocks_reused == 0 and elsewhere.timings.num_attempts == 1
        num_before = len(history)
        again = await turn(client, 2, history, session_id)
        assert again.timings.num_blocks_reused >= num_held_blocks(num_before)
        await client.undrain_worker(mine)
        back = await turn(client, 3, history, session_id)
        assert 0 < back.timings.num_blocks_reused < num_held_blocks(num_before)
        await routers.deployment.assert_idle()
