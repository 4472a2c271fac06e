"""Names of workers that were given none."""

from __future__ import annotations

import socket

import pytest

from kvferry.worker_process import default_worker_id


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("10.0.0.1:50062", "decode-10.0.0.1:50062"),
        ("[::1]:5", "decode-[::1]:5"),
        ("0.0.0.0:50062", f"decode-{socket.gethostname()}:50062"),
        ("[::]:50062", f"decode-{socket.gethostname()}:50062"),
    ],
)
def test_a_worker_is_called_after_its_role_and_address(address: str, name: str) -> None:
    assert default_worker_id("decode", address) == name
