"""Requests that are watched while workers drain."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvferry.client import AsyncClient, Completion, GenerateOptions
from proto.kvferry.v1 import admin_pb2


@dataclass(slots=True)
class Request:
    """One request, as its client sees it so far."""

    completion: Completion = field(default_factory=Completion)
    num_tokens: int = 0

    async def run(self, client: AsyncClient, options: GenerateOptions) -> Completion:
        async with client.generate(options) as events:
            async for event in events:
                self.completion.add(event)
                self.num_tokens += len(event.delta.token_ids)
        self.completion.check_complete()
        return self.completion


async def progress_of(client: AsyncClient, worker: str, **order: Any) -> list[admin_pb2.DrainWorkerResponse]:
    """All that a drain tells."""
    async with client.drain_worker(worker, **order) as progress:
        return [step async for step in progress]
