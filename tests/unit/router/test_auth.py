"""Authentication: which metadata is whose, and what a tenant may name."""

from __future__ import annotations

import pytest
from pydantic import SecretStr

from kvferry.config import Config, TenantConfig
from kvferry.errors import InvalidArgument, PermissionDenied, Unauthenticated, Unavailable
from router.auth import ANONYMOUS, Authenticator, Tenant, without_places

KEY, OTHER_KEY, ROOT_KEY = "key-one-of-a", "key-two-of-a", "key-of-root"


@pytest.fixture
def authenticator() -> Authenticator:
    return Authenticator(
        Config(
            tenants=(
                TenantConfig(name="a", api_keys=(SecretStr(KEY), SecretStr(OTHER_KEY))),
                TenantConfig(name="root", api_keys=(SecretStr(ROOT_KEY),), admin=True),
                TenantConfig(name="keyless"),
            )
        )
    )


@pytest.mark.parametrize(
    "value", [f"Bearer {KEY}", f"bearer {OTHER_KEY}", f"BEARER   {KEY} ", f"Bearer {KEY}".encode()]
)
def test_a_known_key_is_its_tenants(authenticator: Authenticator, value: str | bytes) -> None:
    assert authenticator.tenant([("user-agent", "x"), ("authorization", value)]) == Tenant("a", is_admin=False)
    assert authenticator.tenant([("Authorization", f"Bearer {ROOT_KEY}")]) == Tenant("root", is_admin=True)


@pytest.mark.parametrize(
    "values",
    [
        [],
        [""],
        ["Bearer"],
        ["Bearer "],
        [KEY],
        [f"Basic {KEY}"],
        [f"Bearer {KEY}x"],
        [f"Bearer {KEY[:-1]}"],
        [f"Bearer {KEY.upper()}"],
        ["Bearer **********"],
        ["Bearer \udcff"],
        [b"Bearer \xff\x00"],
        [f"Bearer {KEY}", f"Bearer {KEY}"],
    ],
)
def test_anything_else_is_refused_without_repeating_it(authenticator: Authenticator, values: list[str | bytes]) -> None:
    with pytest.raises(Unauthenticated) as caught:
        authenticator.tenant([("authorization", value) for value in values])
    assert KEY[:-1] not in caught.value.message


def test_without_tenants_everybody_may_do_everything() -> None:
    assert Authenticator(Config()).tenant([("authorization", "Bearer whatever")]) == ANONYMOUS
    assert Authenticator(Config()).tenant(None) == ANONYMOUS


def test_with_tenants_but_no_keys_nobody_gets_in() -> None:
    authenticator = Authenticator(Config(tenants=(TenantConfig(name="a"),)))
    for metadata in (None, [("authorization", "Bearer ")], [("authorization", "Bearer some-key")]):
        with pytest.raises(Unauthenticated):
            authenticator.tenant(metadata)


def test_only_administrators_act_for_others(authenticator: Authenticator) -> None:
    a, root = Tenant("a", is_admin=False), Tenant("root", is_admin=True)
    for caller, named, owner in ((a, "", "a"), (a, "a", "a"), (root, "", "root"), (root, "a", "a")):
        assert authenticator.acting_for(caller, named) == owner
    for other in ("root", "nobody"):  # does not tell which exist
        with pytest.raises(PermissionDenied, match="only an administrator"):
            authenticator.acting_for(a, other)


def test_an_unknown_tenant_is_refused_with_the_known_ones(authenticator: Authenticator) -> None:
    root = Tenant("root", is_admin=True)
    with pytest.raises(InvalidArgument, match="there is no tenant 'serach'; known tenants: a, root, keyless") as caught:
        authenticator.acting_for(root, "serach")
    assert caught.value.field == "tenant"
    with pytest.raises(InvalidArgument, match="there is no tenant 'x'; known tenants: none are configured"):
        Authenticator(Config()).acting_for(ANONYMOUS, "x")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no decode worker is ready (127.0.0.1:9 is connecting)", "no decode worker is ready (… is connecting)"),
        ("last error: UNKNOWN: ipv4:127.0.0.1:9: refused", "last error: UNKNOWN: …: refused"),
        ("ipv6:%5B::1%5D:50061: refused; [::1]:50061", "…: refused; …"),
        ("host-a.internal:50061 is refused: model: a here, b there", "… is refused: model: a here, b there"),
        ("max_tokens: 64 is above 63", "max_tokens: 64 is above 63"),
        ("worker decode-0 is draining; moved", "worker decode-0 is draining; moved"),
    ],
)
def test_places_are_hidden_in_texts(text: str, shown: str) -> None:
    assert without_places(text) == shown


def test_errors_say_where_workers_run_to_administrators_only() -> None:
    keys = {name: f"the-key-of-{name}" for name in ("plain", "root")}
    tenants = [{"name": name, "api_keys": [key], "admin": name == "root"} for name, key in keys.items()]
    authenticator = Authenticator(Config(tenants=tenants))  # type: ignore[arg-type]

    def told(key: str) -> Unavailable:
        with pytest.raises(Unavailable) as caught, authenticator.answering([("authorization", f"Bearer {key}")]):
            raise Unavailable("10.0.0.7:50061 is gone", retry_after_s=2.0)
        return caught.value

    with pytest.raises(InvalidArgument) as caught, authenticator.answering(None):
        raise InvalidArgument("stopping.max_tokens", "0 is too few")
    assert caught.value.message == "stopping.max_tokens: 0 is too few" and caught.value.field == "stopping.max_tokens"
    assert told(keys["root"]).message == "10.0.0.7:50061 is gone"
    for key in (keys["plain"], "nobody's-key"):
        error = told(key)
        assert (error.message, str(error), error.retry_after_s) == ("… is gone", "… is gone", 2.0)
