"""Files of request lengths: what is read, and which line an error names."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry import lengths
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
        ("p,o\n3,-4\n", "line 2: output_len must be a whole number from 1 to 1048576, got '-4'"),
        ("0,4\n", "line 1: prompt_len must be"),
        ("3,4.5\n", "line 1: output_len must be"),
        ("3,4\n3,1048577\n", "line 2: output_len must be a whole number from 1 to 1048576, got '1048577'"),
        (f"3,4\n{'9' * 5000},4\n", f"line 2: prompt_len must be a whole number from 1 to 1048576, got '{'9' * 40}'$"),
        (f"3,{'0' * 5000}\n", "line 1: output_len must be"),
        (f"3,{'9' * 200_000}\n", "cannot be read as CSV"),
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


def test_zeros_before_a_number_do_not_count_as_digits(tmp_path: Path) -> None:
    assert read_lengths(write(tmp_path, f"{'0' * 5000}3,1048576\n")) == [RequestLength(3, 1 << 20)]


def test_known_context_bounds_a_request_as_a_whole(tmp_path: Path) -> None:
    path = write(tmp_path, "p,o\n60,40\n\n60,41\n")
    assert len(read_lengths(path, 101)) == 2
    with pytest.raises(InvalidArgument, match=r"line 4: prompt_len \+ output_len are 101 tokens.*context is 100"):
        read_lengths(path, 100)
    with pytest.raises(InvalidArgument, match="line 2: prompt_len must be a whole number from 1 to 50, got '60'"):
        read_lengths(path, 50)


def test_known_context_may_be_beyond_what_is_believed_without_one(tmp_path: Path) -> None:
    assert read_lengths(write(tmp_path, "2000000,1\n"), 10_000_000) == [RequestLength(2_000_000, 1)]


def test_number_of_requests_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_requests = 1_000
    monkeypatch.setattr(lengths, "MAX_REQUESTS", num_requests)
    assert len(read_lengths(write(tmp_path, "p,o\n" + "1,1\n" * num_requests))) == num_requests
    for header, line in (("p,o\n", num_requests + 2), ("", num_requests + 1)):
        with pytest.raises(InvalidArgument, match=f"line {line}: at most {num_requests} requests"):
            read_lengths(write(tmp_path, header + "1,1\n" * (num_requests + 1)))


def test_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such file"):
        read_lengths(tmp_path / "none.csv")
