"""Addresses to listen on: their form, and whether they can be had, known before anything slow is done."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from kvferry.errors import FailedPrecondition

WILDCARD_HOSTS = ("0.0.0.0", "[::]")  # noqa: S104 - compared with, not bound


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """Host (without brackets) and port; port 0 is any."""

    host: str
    port: int


def parse_address(listen: str) -> ListenAddress:
    """The parts of host:port; raises FailedPrecondition when it is something else."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise FailedPrecondition(f"listen address {listen!r} must be host:port", field="listen")
    return ListenAddress(host.strip("[]"), int(port))


def check_can_listen(listen: str) -> None:
    """Raises FailedPrecondition when host:port is taken or not ours."""
    address = parse_address(listen)
    try:
        family, kind, protocol, _, found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed connection's rest does not count
            probe.bind(found)
            probe.listen()
    except OSError as error:
        raise FailedPrecondition(f"cannot listen on {listen}: {error.strerror or error}", field="listen") from error
