"""A session, and which worker of a role its requests prefer.

Rendezvous hashing: every worker has a score for a session, and the highest of those that may serve is preferred.
Nothing is remembered, so all routers that know a worker by one address prefer the same; a worker that goes moves its
own sessions alone, and they come back with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Session:
    """Whose session it is and what its owner calls it; sessions of two tenants have nothing in common."""

    tenant: str
    id: str

    def preferred(self, addresses: Iterable[str]) -> str:
        """Of at least one address."""
        return max(addresses, key=lambda address: (self._score(address), address))

    def _score(self, address: str) -> bytes:
        parts = [part.encode() for part in (self.tenant, self.id, address)]
        return hashlib.blake2b(b"".join(len(part).to_bytes(4, "big") + part for part in parts), digest_size=8).digest()
