"""Memory between two processes: whose it is, what a peer may name in it, and that it goes with its owner."""

from __future__ import annotations

import dataclasses
import fcntl
import gc
import itertools
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.errors import FailedPrecondition, InvalidArgument, Unavailable
from kvtransfer.messages import Region
from kvtransfer.staging import (
    HEADER_BYTES,
    TOKEN_BYTES,
    SegmentName,
    StagingSegment,
    StagingView,
    can_share_memory,
    host_id,
)
from tests.support.staging import StagingTraces, num_open_files, staging_traces
from tests.unit.kvtransfer.support import put

ROOT = Path(__file__).parents[3]
NUM_BYTES = 4096
PAYLOAD = bytes(range(1, 101))


@pytest.fixture(autouse=True)
def nothing_of_earlier_tests() -> None:
    """Coroutines that an event loop left behind when it was closed end now, and with them what they hold."""
    gc.collect()


@pytest.fixture
def segment() -> Iterator[StagingSegment]:
    made = StagingSegment(NUM_BYTES)
    yield made
    made.close()


@contextmanager
def opened(name: SegmentName, slot_bytes: int = 128) -> Iterator[StagingView]:
    view = StagingView(name, slot_bytes)
    try:
        yield view
    finally:
        view.close()


def test_what_one_side_puts_the_other_finds(segment: StagingSegment) -> None:
    with opened(segment.name) as view:
        regions = [put(view, bytes([index]) * (index + 1)) for index in range(5)]
        assert [bytes(segment.payload(region)) for region in regions] == [bytes([i]) * (i + 1) for i in range(5)]


def test_this_machine_has_a_name_and_can_share_memory() -> None:
    assert can_share_memory() and host_id() == host_id() != ""


def test_two_segments_have_nothing_in_common(segment: StagingSegment) -> None:
    other = StagingSegment(NUM_BYTES)
    assert other.name.token != segment.name.token and len(other.name.token) == TOKEN_BYTES
    with opened(segment.name) as left, opened(other.name) as right:
        region = put(left, PAYLOAD)
        assert put(right, bytes(100)) == region
        assert segment.payload(region) == PAYLOAD and other.payload(region) == bytes(100)
    other.close()


# -- slots ------------------------------------------------------------------------------------------------------------


def test_slots_are_aligned_apart_and_as_many_as_fit(segment: StagingSegment) -> None:
    with opened(segment.name, slot_bytes=100) as view:
        assert view.slot_bytes == 128 and view.num_slots == (NUM_BYTES - HEADER_BYTES) // 128
        regions = [put(view, PAYLOAD) for _ in range(view.num_slots)]
        assert view.num_free_slots == 0
        offsets = sorted(region.offset for region in regions)
        assert offsets[0] == HEADER_BYTES and offsets[-1] + 128 <= NUM_BYTES
        assert all(offset % 64 == 0 for offset in offsets)
        assert all(right - left == 128 for left, right in itertools.pairwise(offsets))
        assert segment.payload(Region(HEADER_BYTES, 100)) == PAYLOAD


def test_the_slot_freed_last_is_used_first(segment: StagingSegment) -> None:
    with opened(segment.name) as view:
        first, second = put(view, PAYLOAD), put(view, PAYLOAD)
        view.free(first)
        view.free(second)
        assert (put(view, PAYLOAD), put(view, PAYLOAD)) == (second, first)


@given(st.lists(st.booleans(), max_size=80))
def test_no_slot_is_in_two_hands(puts: list[bool]) -> None:
    segment = StagingSegment(2048)
    dice, held = random.Random(len(puts)), dict[Region, bytes]()
    with opened(segment.name) as view:
        for is_put in puts:
            if is_put and view.num_free_slots:
                contents = dice.randbytes(dice.randrange(1, 129))
                held[put(view, contents)] = contents
            elif held:
                region = dice.choice(list(held))
                del held[region]
                view.free(region)
            assert view.num_free_slots == view.num_slots - len(held)
            assert all(segment.payload(region) == contents for region, contents in held.items())
    segment.close()


def test_a_segment_without_room_for_a_frame_is_refused(segment: StagingSegment) -> None:
    with pytest.raises(FailedPrecondition, match="no room for a frame of 5000 bytes"):
        StagingView(segment.name, 5000)


# -- regions that a peer names ----------------------------------------------------------------------------------------


def test_the_first_and_the_last_byte_may_be_named(segment: StagingSegment) -> None:
    assert len(segment.payload(Region(HEADER_BYTES, NUM_BYTES - HEADER_BYTES))) == NUM_BYTES - HEADER_BYTES
    assert len(segment.payload(Region(NUM_BYTES - 1, 1))) == 1


@pytest.mark.parametrize(
    ("offset", "num_bytes"),
    [
        (0, 1),
        (HEADER_BYTES - 1, 1),
        (HEADER_BYTES - 1, NUM_BYTES),
        (HEADER_BYTES, NUM_BYTES),
        (NUM_BYTES - 1, 2),
        (NUM_BYTES, 1),
        (NUM_BYTES + 1, 1),
        (2**32, 1),
        (HEADER_BYTES, 2**32 - 1),
        (2**63 - 1, 1),
        (2**64 - 1, 1),
        (2**64 - 1, 2**32 - 1),
        (2**64 - NUM_BYTES, NUM_BYTES),
    ],
)
def test_a_region_outside_the_slots_is_refused(segment: StagingSegment, offset: int, num_bytes: int) -> None:
    with pytest.raises(InvalidArgument) as caught:
        segment.payload(Region(offset, num_bytes))
    assert caught.value.field == "staged.frames.staging_offset"


@given(st.integers(0, 2**64 - 1) | st.integers(0, 5000), st.integers(1, 2**32 - 1) | st.integers(1, 5000))
def test_any_region_is_inside_or_refused(offset: int, num_bytes: int) -> None:
    segment = StagingSegment(NUM_BYTES)
    with suppress(InvalidArgument):
        assert len(segment.payload(Region(offset, num_bytes))) == num_bytes
        assert offset >= HEADER_BYTES and offset + num_bytes <= NUM_BYTES
    segment.close()


# -- the right segment, of the right size -----------------------------------------------------------------------------


def test_a_segment_with_another_token_or_size_is_refused(segment: StagingSegment) -> None:
    for wrong in ({"token": bytes(TOKEN_BYTES)}, {"num_bytes": NUM_BYTES * 2}, {"num_bytes": NUM_BYTES // 2}):
        with pytest.raises(FailedPrecondition, match="not the one that it named"):
            StagingView(dataclasses.replace(segment.name, **wrong), 128)


@pytest.mark.parametrize(
    "wrong", [{"fd": 10_000}, {"fd": 2**32 - 1}, {"pid": 2**31 - 1}, {"pid": 0}, {"pid": 2**32 - 1}]
)
def test_a_file_that_is_not_there_is_refused(segment: StagingSegment, wrong: dict[str, int]) -> None:
    with pytest.raises(FailedPrecondition, match="cannot be opened"):
        StagingView(dataclasses.replace(segment.name, **wrong), 128)  # type: ignore[arg-type]


def test_files_that_are_no_segments_are_refused(segment: StagingSegment, tmp_path: Path) -> None:
    """As where the process id means another process to the sender."""
    plain = tmp_path / "plain"
    plain.write_bytes(segment.name.token + bytes(NUM_BYTES - TOKEN_BYTES))
    read_end, write_end = os.pipe()
    with plain.open("r+b") as file:
        for fd in (file.fileno(), read_end, write_end):
            with pytest.raises(FailedPrecondition):
                StagingView(dataclasses.replace(segment.name, fd=fd), 128)
    os.close(read_end)
    os.close(write_end)


def test_memory_that_could_shrink_is_refused(segment: StagingSegment) -> None:
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, NUM_BYTES)
    os.pwrite(fd, segment.name.token, 0)
    with pytest.raises(FailedPrecondition, match="could shrink"):
        StagingView(dataclasses.replace(segment.name, fd=fd), 128)
    os.close(fd)


def test_the_peer_cannot_change_its_size(segment: StagingSegment) -> None:
    fd = os.open(f"/proc/{segment.name.pid}/fd/{segment.name.fd}", os.O_RDWR)
    for num_bytes in (0, NUM_BYTES // 2, NUM_BYTES * 2):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, num_bytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, 1033, 8)  # no further seals either, which would keep an honest sender from writing
    os.close(fd)
    assert len(segment.payload(Region(HEADER_BYTES, 1000))) == 1000


def test_the_owner_cannot_write_by_mistake(segment: StagingSegment) -> None:
    with pytest.raises(TypeError):
        segment.payload(Region(HEADER_BYTES, 1))[0] = 1


def test_no_memory_is_said_as_such() -> None:
    before = num_open_files()
    with pytest.raises(Unavailable, match="no shared memory of"):
        StagingSegment(1 << 62)
    assert num_open_files() <= before


# -- the end ----------------------------------------------------------------------------------------------------------


def test_closing_gives_files_and_mappings_back_once() -> None:
    before = (num_open_files(), staging_traces())
    segment = StagingSegment(NUM_BYTES)
    view = StagingView(segment.name, 128)
    assert staging_traces().num_files > before[1].num_files
    assert staging_traces().num_mappings == before[1].num_mappings + 2
    for _ in range(3):
        view.close()
        segment.close()
    assert num_open_files() <= before[0] and staging_traces() == before[1]


def test_a_refused_view_leaves_nothing(segment: StagingSegment) -> None:
    before = (num_open_files(), staging_traces())
    with pytest.raises(FailedPrecondition):
        StagingView(dataclasses.replace(segment.name, token=bytes(TOKEN_BYTES)), 128)
    assert num_open_files() <= before[0] and staging_traces() == before[1]


def test_use_after_the_end_is_an_error_not_a_crash() -> None:
    segment = StagingSegment(NUM_BYTES)
    view = StagingView(segment.name, 128)
    region = put(view, PAYLOAD)
    view.close()
    with pytest.raises(Unavailable):
        view.reserve(1)
    with pytest.raises(Unavailable):
        view.write(region, PAYLOAD)
    view.free(region)
    segment.close()
    with pytest.raises(Unavailable):
        segment.payload(region)


def test_each_side_outlives_the_other() -> None:
    segment = StagingSegment(NUM_BYTES)
    with opened(segment.name) as view:
        payload = segment.payload(put(view, PAYLOAD))
        segment.close()
        assert payload == PAYLOAD  # whoever is copying goes on
        assert staging_traces().num_mappings == 2
        del payload
        put(view, PAYLOAD)
        with pytest.raises(FailedPrecondition):
            StagingView(segment.name, 128)
    del segment
    assert staging_traces() == StagingTraces()


# -- another process --------------------------------------------------------------------------------------------------

SENDER = """
import sys
from kvtransfer.staging import SegmentName, StagingView
pid, fd, num_bytes, token = sys.argv[1:]
view = StagingView(SegmentName(int(pid), int(fd), int(num_bytes), bytes.fromhex(token)), 128)
region = view.reserve(9)
view.write(region, b"from afar")
print(region.offset, region.num_bytes, flush=True)
sys.stdin.read()
"""
OWNER = """
import sys
from kvtransfer.staging import StagingSegment
segment = StagingSegment(64 << 20)
name = segment.name
print(name.pid, name.fd, name.num_bytes, name.token.hex(), flush=True)
sys.stdin.read()
"""


@contextmanager
def python(source: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of this source; killed at the end of the block."""
    command = [sys.executable, "-c", source, *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def words_of(process: subprocess.Popen[bytes]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().decode().split()


@pytest.mark.processes
def test_another_process_opens_and_fills_it(segment: StagingSegment) -> None:
    name = segment.name
    arguments = [str(name.pid), str(name.fd), str(name.num_bytes), name.token.hex()]
    with python(SENDER, *arguments) as sender:
        offset, num_bytes = map(int, words_of(sender))
        assert bytes(segment.payload(Region(offset, num_bytes))) == b"from afar"
        sender.send_signal(signal.SIGKILL)
        sender.wait()
        assert bytes(segment.payload(Region(offset, num_bytes))) == b"from afar"


@pytest.mark.processes
def test_it_goes_with_its_owner_even_when_that_is_killed() -> None:
    names_before = set(os.listdir("/dev/shm"))
    with python(OWNER) as owner:
        pid, fd, num_bytes, token = words_of(owner)
        name = SegmentName(int(pid), int(fd), int(num_bytes), bytes.fromhex(token))
        with opened(name, 1 << 20) as view:
            while view.num_free_slots:
                put(view, bytes(1 << 20))  # its pages exist now
            assert shared_kib() > 32 << 10
            assert staging_traces(name.pid).num_mappings == 1
            owner.send_signal(signal.SIGKILL)
            owner.wait()
            view.free(Region(HEADER_BYTES, 1))
            put(view, PAYLOAD)  # no fault: the mapping is the sender's own
        with pytest.raises(FailedPrecondition):
            StagingView(name, 1 << 20)
    assert set(os.listdir("/dev/shm")) <= names_before
    assert staging_traces() == StagingTraces()


def shared_kib() -> int:
    """Shared memory that this process has touched."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssShmem:")[1].split()[0])


@pytest.mark.processes
def test_a_process_of_the_same_number_elsewhere_is_not_taken_for_the_owner(segment: StagingSegment) -> None:
    """Process ids mean something else in another container: the token tells."""
    with python(OWNER) as other:
        pid, fd, _, _ = words_of(other)
        with pytest.raises(FailedPrecondition):
            StagingView(dataclasses.replace(segment.name, pid=int(pid), fd=int(fd)), 128)


def test_pages_are_shared_not_copied(segment: StagingSegment) -> None:
    with opened(segment.name) as view:
        region = put(view, PAYLOAD)
        seen = segment.payload(region)
        view.free(region)
        assert put(view, bytes(100)) == region
        assert seen == bytes(100)
