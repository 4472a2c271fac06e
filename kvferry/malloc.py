"""The C library's allocator, told to keep what messages of the size of a KV block are made of.

glibc gives memory above 128 KiB back to the kernel at every free and gets it again, zeroed page by page, with the next
allocation. A block passes through several such buffers on its way through gRPC: measured, keeping them makes shipping
three to five times faster.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
MMAP_THRESHOLD_BYTES = 32 << 20
"""Below it, memory comes from the heap; the largest value that glibc takes."""
KEPT_BYTES = 256 << 20
"""Free memory at the end of a heap that is not given back."""
GROWTH_BYTES = 16 << 20
"""By which a heap grows more than asked for."""


def keep_message_buffers() -> bool:
    """Called once by a process that ships blocks; does nothing, and returns False, without glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = {
        _M_MMAP_THRESHOLD: MMAP_THRESHOLD_BYTES,
        _M_TRIM_THRESHOLD: KEPT_BYTES,
        _M_TOP_PAD: GROWTH_BYTES,
    }
    return all([mallopt(name, value) == 1 for name, value in settings.items()])
