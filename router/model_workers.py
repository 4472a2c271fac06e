"""The workers of one model, as its requests see them: who takes requests now, and if nobody, why."""

from __future__ import annotations

from router.membership import Membership
from router.worker import MemberState, Role, ServedModel, Worker


class ModelWorkers:
    """A view of the membership.

    Args:
        membership: all workers.
        model: name of the model.
    """

    def __init__(self, membership: Membership, model: str) -> None:
        self._membership = membership
        self._model = model

    @property
    def local_prefill(self) -> bool:
        """Decode computes prompts itself."""
        return self._membership.local_prefill

    @property
    def served(self) -> ServedModel | None:
        """What these workers agree on; None until one was accepted."""
        return self._membership.served(self._model)

    @property
    def accepted(self) -> list[Worker]:
        """Workers whose last status fits this model, whether they are there now or not."""
        return [worker for worker in self._membership.workers if worker.was_accepted and worker.model == self._model]

    def ready(self, role: Role) -> list[Worker]:
        """Workers of a role that take requests now."""
        return [worker for worker in self._membership.ready(role) if worker.model == self._model]

    @property
    def missing(self) -> tuple[str, ...]:
        """Why no request can be served now, one line a role; empty when one can."""
        roles = (Role.DECODE,) if self.local_prefill else (Role.PREFILL, Role.DECODE)
        return tuple(self.why_missing(role) for role in roles if not self.ready(role))

    def why_missing(self, role: Role) -> str:
        """For people: no worker of this role is ready, and why each that may be this model's is not."""
        candidates = [
            worker
            for worker in self._membership.workers
            if worker.role is role and (worker.model in ("", self._model) or not worker.was_accepted)
        ]
        reasons = "; ".join(f"{worker.address} is {_state(worker)}" for worker in candidates)
        return f"no {role.value} worker is ready ({reasons or 'none is known'})"

    async def wait_changed(self) -> None:
        """Returns at the next change of any worker's state."""
        await self._membership.changes.wait_next()


def _state(worker: Worker) -> str:
    return worker.state.value if worker.state is MemberState.READY else f"{worker.state.value}: {worker.reason}"
