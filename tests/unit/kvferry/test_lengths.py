"""Files of request lengths: what is read, and which line an error names."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.errors import InvalidArgument, NotFound
from kvferry.lengths import RequestLength, read_lengths


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "lengths.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


@pytest.mark.parametrize("text", ["3,4\n5,6\n", "prompt_len,output_len\r\n3, 4\r\n\r\n5,6", "\ufeffa,b\n3,4\n5,6\n\n"])
def test_requests_are_read_with_and_without_a_header(text: str, tmp_path: Path) -> None:
    assert read_lengths(write(tmp_path, text)) == [RequestLength(3, 4), RequestLength(5, 6)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3,4\n\n5\n", "line 3: 1 cells"),
        ("3,4\n5,6,7\n", "line 2: 3 cells"),
        ("p,o\n3,-4\n", "line 2: output_len must be a whole number from 1 to 16777216, got '-4'"),
        ("0,4\n", "line 1: prompt_len must be"),
        ("3,4.5\n", "line 1: output_len must be"),
        ("3,99999999999\n", "line 1: output_len must be"),
        ("3,\u00b2\n", "line 1: output_len must be"),
        ("", "holds no request"),
        ("prompt_len,output_len\n", "holds no request"),
        (b"\xff\xfe\x00", "cannot be read as CSV"),
    ],
)
def test_errors_name_the_line(text: str | bytes, expected: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=expected.replace("(", r"\(")) as caught:
        read_lengths(write(tmp_path, text))
    assert caught.value.field == "lengths"


def test_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such file"):
        read_lengths(tmp_path / "none.csv")
