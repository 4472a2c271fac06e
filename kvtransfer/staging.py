"""Memory between two processes of one machine: the receiver owns it, the sender writes payloads into it.

    receiver: create ─► StagingSegment ── pid, fd, token (Welcome) ──► sender: open ─► StagingView, cut into slots
                              │ payload(region): a view to copy from        │ reserve, write: into a free slot

The segment is an anonymous file (memfd): it has no name that could be left behind, and the kernel frees it when the
last process that has it open ends, by whatever signal. Its size is sealed, so neither side can make the other fault by
shrinking it. The sender finds it by the owner's process id and file number, which are only as good as the process
namespace: the token at its beginning says whether it is the right one.

Slots begin on cache lines, as blocks of the pools do: copies between addresses that differ by less take twice as long
(measured: 17 and 38 µs for 360 KB).

Regions come from a peer and are checked against the segment before they are read.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass

from kvferry.errors import FailedPrecondition, InvalidArgument, Unavailable
from kvtransfer.messages import Region

TOKEN_BYTES = 32
HEADER_BYTES = 64
"""Before the first slot: the token."""
SLOT_ALIGNMENT_BYTES = 64
CREDITS_PER_SEGMENT = 8
"""A sender fills a quarter of a segment with one message and half of it before it waits."""

# Linux's numbers; the modules know some of them only from Python 3.12 on.
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4


@dataclass(frozen=True, slots=True)
class SegmentName:
    """How the sender finds a segment."""

    pid: int
    fd: int
    num_bytes: int
    token: bytes


def can_share_memory() -> bool:
    """Whether this system has what staging needs."""
    return hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd")


def host_id() -> str:
    """Names the running machine, the same in all its processes; empty where it cannot be told."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


@dataclass(slots=True)
class UncreditedBytes:
    """What all shipments of a segment have copied out of it and not told their sender; much of it is told at once."""

    much_bytes: int
    num_bytes: int = 0

    @property
    def is_much(self) -> bool:
        return self.num_bytes >= self.much_bytes


class StagingSegment:
    """The receiver's side: owns the memory until `close`.

    Raises Unavailable when there is no memory for it.
    """

    def __init__(self, num_bytes: int) -> None:
        token = secrets.token_bytes(TOKEN_BYTES)
        self.num_bytes = num_bytes
        self.uncredited = UncreditedBytes(num_bytes // CREDITS_PER_SEGMENT)
        self._fd = -1
        try:
            self._fd = os.memfd_create("kvferry-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._fd, num_bytes)
            os.pwrite(self._fd, token, 0)
            fcntl.fcntl(self._fd, _F_ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL)
            self._map = mmap.mmap(self._fd, num_bytes, prot=mmap.PROT_READ)
        except OSError as error:
            self._close_file()
            raise Unavailable(f"no shared memory of {num_bytes} bytes: {error.strerror}") from error
        self._view = memoryview(self._map)
        self.name = SegmentName(os.getpid(), self._fd, num_bytes, token)

    def payload(self, region: Region) -> memoryview:
        """Where a payload lies. Raises InvalidArgument for a region outside the slots, Unavailable after `close`."""
        if self._fd < 0:
            raise Unavailable("the link that the payload belongs to has ended")
        end = region.offset + region.num_bytes
        if region.offset < HEADER_BYTES or end > self.num_bytes:
            limits = f"{HEADER_BYTES} … {self.num_bytes}"
            raise InvalidArgument("staged.frames.staging_offset", f"bytes {region.offset} … {end}, {limits} allowed")
        return self._view[region.offset : end]

    def close(self) -> None:
        """Gives the memory back, once; views that somebody still holds keep it until they go."""
        if self._fd < 0:
            return
        self._close_file()
        self._view.release()
        with suppress(BufferError):
            self._map.close()

    def _close_file(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class StagingView:
    """The sender's side: slots of one size in the receiver's segment.

    The slot freed last is used first, so that a few of them stay in the processor's cache.

    Raises FailedPrecondition when the segment cannot be opened from here or is not the one that was named.
    """

    def __init__(self, name: SegmentName, slot_bytes: int) -> None:
        self.slot_bytes = -(-slot_bytes // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
        self.num_slots = (name.num_bytes - HEADER_BYTES) // self.slot_bytes
        if self.num_slots < 1:
            raise FailedPrecondition(f"the receiver's shared memory has no room for a frame of {slot_bytes} bytes")
        fd = -1
        try:
            fd = os.open(f"/proc/{name.pid}/fd/{name.fd}", os.O_RDWR | os.O_CLOEXEC)
            _check_segment(fd, name)
            self._map = mmap.mmap(fd, name.num_bytes)
        except OSError as error:
            raise FailedPrecondition(f"the receiver's shared memory cannot be opened: {error.strerror}") from error
        finally:
            if fd >= 0:
                os.close(fd)  # the mapping stays
        self._view = memoryview(self._map)
        self._free = list(reversed(range(self.num_slots)))
        self._is_closed = False

    @property
    def num_free_slots(self) -> int:
        return len(self._free)

    def reserve(self, num_bytes: int) -> Region:
        """A place for a payload, at most a slot long, in a free slot; the caller knows that there is one.

        Raises Unavailable after `close`.
        """
        if self._is_closed:
            raise Unavailable("the link to the receiver was lost")
        return Region(HEADER_BYTES + self._free.pop() * self.slot_bytes, num_bytes)

    def write(self, region: Region, payload: bytes | memoryview) -> None:
        """Copies a payload to its place. Raises Unavailable after `close`."""
        if self._is_closed:
            raise Unavailable("the link to the receiver was lost")
        self._view[region.offset : region.offset + region.num_bytes] = payload

    def free(self, region: Region) -> None:
        """The payload was taken, or is wanted no more."""
        self._free.append((region.offset - HEADER_BYTES) // self.slot_bytes)

    def close(self) -> None:
        """Unmaps the segment, once."""
        if self._is_closed:
            return
        self._is_closed = True
        self._view.release()
        self._map.close()


def _check_segment(fd: int, name: SegmentName) -> None:
    status = os.fstat(fd)
    if status.st_size != name.num_bytes or os.pread(fd, TOKEN_BYTES, 0) != name.token:
        raise FailedPrecondition("the receiver's shared memory is not the one that it named")
    if not fcntl.fcntl(fd, _F_GET_SEALS) & _SEAL_SHRINK:
        raise FailedPrecondition("the receiver's shared memory could shrink")
