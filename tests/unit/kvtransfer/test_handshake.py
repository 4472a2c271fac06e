"""What two processes agree on, and every mismatch refused with both values named."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import kvferry
import kvtransfer.handshake
from kvferry.config import TransferConfig
from kvferry.errors import FailedPrecondition
from kvferry.kv_layout import KV_WIRE_VERSION, OLDEST_WIRE_VERSION
from kvtransfer.handshake import (
    Agreement,
    Hello,
    LinkTerms,
    Transport,
    WireVersions,
    agree,
    terms_of,
    transports_of,
)
from tests.unit.kvtransfer.support import LAYOUT

SHM, GRPC = Transport.SHARED_MEMORY, Transport.GRPC
EITHER = (SHM, GRPC)


def make_terms(**changes: Any) -> LinkTerms:
    return dataclasses.replace(LinkTerms(LAYOUT, EITHER, host_id="machine"), **changes)


def make_hello(**changes: Any) -> Hello:
    return dataclasses.replace(make_terms().hello("prefill-0", 3, 5.0), **changes)


def refusal(hello: Hello, terms: LinkTerms) -> FailedPrecondition:
    with pytest.raises(FailedPrecondition) as caught:
        agree(hello, terms)
    return caught.value


def test_a_sender_says_what_its_terms_are() -> None:
    terms = make_terms(versions=WireVersions(4, 5), max_frame_bytes=9000, peer_bytes=1 << 21)
    expected = Hello("prefill-0", 3, WireVersions(4, 5), LAYOUT, EITHER, "machine", 9000, 5.0, 1 << 21)
    assert terms.hello("prefill-0", 3, 5.0) == expected


def test_equal_terms_go_together() -> None:
    assert agree(make_hello(), make_terms()) == Agreement(KV_WIRE_VERSION, SHM, make_terms().max_frame_bytes)


def test_the_smaller_frame_is_agreed_on() -> None:
    assert agree(make_hello(max_frame_bytes=5000), make_terms(max_frame_bytes=9000)).max_frame_bytes == 5000
    assert agree(make_hello(max_frame_bytes=9000), make_terms(max_frame_bytes=5000)).max_frame_bytes == 5000


# -- wire version -----------------------------------------------------------------------------------------------------


def test_this_version_knows_the_one_before_it() -> None:
    assert WireVersions() == WireVersions(KV_WIRE_VERSION - 1, KV_WIRE_VERSION)
    assert OLDEST_WIRE_VERSION == KV_WIRE_VERSION - 1


@pytest.mark.parametrize("newer", [2, 3, 9])
def test_neighbouring_versions_speak_the_older_one_both_ways(newer: int) -> None:
    new, old = WireVersions(newer - 1, newer), WireVersions(newer - 2, newer - 1)
    assert agree(make_hello(versions=new), make_terms(versions=old)).wire_version == newer - 1
    assert agree(make_hello(versions=old), make_terms(versions=new)).wire_version == newer - 1
    assert agree(make_hello(versions=new), make_terms(versions=new)).wire_version == newer


def test_versions_two_apart_are_refused_both_ways_with_both_named() -> None:
    new, old = WireVersions(3, 4), WireVersions(1, 2)
    error = refusal(make_hello(versions=old), make_terms(versions=new))
    assert error.message == "wire version: 3 … 4 here, 1 … 2 there; workers may be one version apart"
    assert error.field == "wire_version"
    assert "1 … 2 here, 3 … 4 there" in refusal(make_hello(versions=new), make_terms(versions=old)).message


def test_versions_in_the_wrong_order_are_refused() -> None:
    assert "9 … 1 there" in refusal(make_hello(versions=WireVersions(9, 1)), make_terms()).message


@pytest.mark.parametrize("version", ["0.0.1", "99.0"])
def test_the_version_of_the_package_plays_no_part(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = repr(make_hello())
    monkeypatch.setattr(kvferry, "__version__", version)
    assert repr(make_hello()) == here and kvferry.__version__ not in here
    assert not hasattr(kvtransfer.handshake, "__version__")


# -- layout -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "there"),
    [
        ("num_layers", 2),
        ("num_kv_heads", 3),
        ("head_dim", 8),
        ("block_size", 16),
        ("dtype", "bfloat16"),
        ("model_fingerprint", "another"),
        ("rope_digest", "theta 5"),
        ("wire_version", KV_WIRE_VERSION + 2),
    ],
)
def test_a_layout_that_differs_is_refused_with_both_values_named(field: str, there: object) -> None:
    layout = dataclasses.replace(LAYOUT, rope_digest="theta 4")
    other = dataclasses.replace(layout, **{field: there})  # type: ignore[arg-type]
    error = refusal(make_hello(layout=other), make_terms(layout=layout))
    assert error.message == f"another layout: {field}: {getattr(layout, field)} here, {there} there"
    assert error.field == "layout"


def test_every_difference_is_named() -> None:
    other = dataclasses.replace(LAYOUT, block_size=8, dtype="bfloat16")
    message = refusal(make_hello(layout=other), make_terms()).message
    assert "block_size: 4 here, 8 there" in message and "dtype: float32 here, bfloat16 there" in message


@pytest.mark.parametrize("digests", [("", "theta 4"), ("theta 4", "")])
def test_a_side_that_does_not_tell_its_rope_is_not_asked(digests: tuple[str, str]) -> None:
    here, there = (dataclasses.replace(LAYOUT, rope_digest=digest) for digest in digests)
    agree(make_hello(layout=there), make_terms(layout=here))


def test_a_model_without_rope_is_not_one_with_it() -> None:
    here, there = (dataclasses.replace(LAYOUT, rope_digest=digest) for digest in ("none", "theta 4"))
    assert "rope_digest: none here, theta 4 there" in refusal(make_hello(layout=there), make_terms(layout=here)).message


# -- transport --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sender", "receiver", "is_one_host", "expected"),
    [
        (EITHER, EITHER, True, SHM),
        (EITHER, EITHER, False, GRPC),
        ((GRPC, SHM), EITHER, True, GRPC),  # best first is the sender's order
        (EITHER, (GRPC,), True, GRPC),
        ((GRPC,), EITHER, True, GRPC),
        ((SHM,), EITHER, True, SHM),
        (EITHER, (SHM,), True, SHM),
    ],
)
def test_the_best_that_both_can(
    sender: tuple[Transport, ...], receiver: tuple[Transport, ...], is_one_host: bool, expected: Transport
) -> None:
    hello = make_hello(transports=sender, host_id="machine" if is_one_host else "another")
    assert agree(hello, make_terms(transports=receiver)).transport is expected


@pytest.mark.parametrize(
    ("sender", "receiver", "host_id", "says"),
    [
        ((SHM,), (GRPC,), "machine", "transport: grpc at the decode worker, shm at"),
        ((GRPC,), (SHM,), "machine", "transport: shm at the decode worker, grpc at"),
        (
            (SHM,),
            EITHER,
            "another",
            "transport: shm, grpc at the decode worker, shm at",
        ),
        (EITHER, (SHM,), "another", "transport: shm at the decode worker, shm, grpc at"),
        ((SHM,), (SHM,), "", "shared memory needs one machine"),
        ((), EITHER, "machine", "transport: shm, grpc at the decode worker, none at"),
    ],
)
def test_no_common_transport_is_refused_by_name(
    sender: tuple[Transport, ...], receiver: tuple[Transport, ...], host_id: str, says: str
) -> None:
    error = refusal(make_hello(transports=sender, host_id=host_id), make_terms(transports=receiver))
    assert error.message.startswith(says) or says in error.message
    assert error.field == "transfer.transport"


def test_machines_without_a_name_share_nothing() -> None:
    assert agree(make_hello(host_id=""), make_terms(host_id="")).transport is GRPC


# -- configuration ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "can", "expected"),
    [
        ("auto", True, EITHER),
        ("auto", False, (GRPC,)),
        ("grpc", True, (GRPC,)),
        ("grpc", False, (GRPC,)),
        ("shm", True, (SHM,)),
    ],
)
def test_transports_of_a_configuration(transport: Any, can: bool, expected: tuple[Transport, ...]) -> None:
    assert transports_of(TransferConfig(transport=transport), can_share_memory=can) == expected


def test_forced_shared_memory_where_there_is_none_is_refused() -> None:
    with pytest.raises(FailedPrecondition, match=r"transfer\.transport: shm needs Linux's memfd and /proc"):
        transports_of(TransferConfig(transport="shm"), can_share_memory=False)


def test_terms_of_a_configuration() -> None:
    config = TransferConfig(
        max_frame_bytes=5000, max_inflight_bytes_per_peer=2 << 20, max_staging_bytes=3 << 20, transport="grpc"
    )
    terms = terms_of(config, LAYOUT)
    assert (terms.layout, terms.transports, terms.versions) == (LAYOUT, (GRPC,), WireVersions())
    assert (terms.max_frame_bytes, terms.peer_bytes, terms.max_staging_bytes) == (5000, 2 << 20, 3 << 20)
    assert terms.host_id != ""
