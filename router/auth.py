"""Whose call it is: the API key in its metadata, `authorization: Bearer KEY`, names the tenant, or lets a worker join.

A tenant is never taken from the caller's word; a request may only repeat what its key says. Keys are compared in
constant time, all of them on every call, and appear in no message, log line or span.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvferry.config import Config, RouterConfig
from kvferry.errors import InvalidArgument, KvferryError, PermissionDenied, Unauthenticated

AUTHORIZATION = "authorization"
PLACE = re.compile(r"(?:ipv[46]:)?(?:\[[^\]\s]+\]|%5B\S+?%5D|[A-Za-z0-9_.-]+):[0-9]{1,5}\b")
"""host:port, also as gRPC words it."""
SCHEME = "bearer"

Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who calls; the anonymous tenant, where none are configured, has no name and may do everything."""

    name: str
    is_admin: bool


ANONYMOUS = Tenant("", is_admin=True)


class Authenticator:
    """Knows the tenants of `config`, and their keys as digests."""

    def __init__(self, config: Config) -> None:
        self._names = [tenant.name for tenant in config.tenants]
        self._owners = [
            (_digest(key.get_secret_value()), Tenant(tenant.name, tenant.admin))
            for tenant in config.tenants
            for key in tenant.api_keys
        ]

    def tenant(self, metadata: Metadata | None) -> Tenant:
        """Whose call carries this metadata.

        Raises:
            Unauthenticated: tenants are configured, and there is no key or one that nobody has.
        """
        if not self._names:
            return ANONYMOUS
        digest = _digest(_key(metadata or ()))
        found: Tenant | None = None
        for known, owner in self._owners:
            if hmac.compare_digest(known, digest):
                found = owner
        if found is None:
            raise Unauthenticated("the API key is not known to this router")
        return found

    @contextmanager
    def answering(self, metadata: Metadata | None) -> Iterator[None]:
        """Errors that leave the block say where workers run to administrators only."""
        try:
            yield
        except KvferryError as error:
            if not self._is_admin(metadata):
                error.message = without_places(error.message)
                error.args = (error.message,)
            raise

    def _is_admin(self, metadata: Metadata | None) -> bool:
        try:
            return self.tenant(metadata).is_admin
        except Unauthenticated:
            return False

    def acting_for(self, caller: Tenant, named: str) -> str:
        """The tenant a request of administration is about: the one it names, or the caller's.

        Raises:
            PermissionDenied: it names another, and the caller is no administrator.
            InvalidArgument: there is no tenant of this name; said to administrators only.
        """
        if not named or named == caller.name:
            return caller.name
        if not caller.is_admin:
            raise PermissionDenied(
                f"tenant: only an administrator may name another tenant; this API key is of tenant {caller.name!r}",
                field="tenant",
            )
        if named not in self._names:
            known = ", ".join(self._names) or "none are configured"
            raise InvalidArgument("tenant", f"there is no tenant {named!r}; known tenants: {known}")
        return named


def without_places(text: str) -> str:
    """`text` with every host:port hidden."""
    return PLACE.sub("…", text)


class JoinKeys:
    """Knows the keys with which workers may join, as digests; without any, every worker may."""

    def __init__(self, config: RouterConfig) -> None:
        self._digests = [_digest(key.get_secret_value()) for key in config.join_keys]

    def check(self, metadata: Metadata | None) -> None:
        """Raises Unauthenticated where keys are configured and the call carries none of them."""
        if not self._digests:
            return
        digest = _digest(_key(metadata or (), NO_JOIN_KEY))
        if not any([hmac.compare_digest(known, digest) for known in self._digests]):  # all of them, in constant time
            raise Unauthenticated("the join key is not known to this router")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


NO_JOIN_KEY = "a join key is needed: the worker's join.key must be one of the router's router.join_keys"
NO_API_KEY = "an API key is needed: send the metadata `authorization: Bearer KEY` (`--api-key`)"


def _key(metadata: Metadata, if_none: str = NO_API_KEY) -> str:
    values = [value for name, value in metadata if name.lower() == AUTHORIZATION]
    if not values:
        raise Unauthenticated(if_none)
    if len(values) > 1:
        raise Unauthenticated("the metadata has more than one `authorization`")
    value = values[0] if isinstance(values[0], str) else values[0].decode("utf-8", "surrogateescape")
    scheme, _, key = value.strip().partition(" ")
    if scheme.lower() != SCHEME or not key.strip():
        raise Unauthenticated("the metadata `authorization` must be `Bearer KEY`")
    return key.strip()
