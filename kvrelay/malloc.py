"""glibc's malloc told to keep what it has: KV frames are large, and page faults cost more than copying them.

By default a buffer above 128 KiB is mapped anew, and given back when it is freed: each gRPC message of KV then faults
all its pages in again, on both sides. Knows nothing of who allocates.
"""

import ctypes
import sys

KEPT = {"M_MMAP_THRESHOLD": 32 * 1024 * 1024, "M_TRIM_THRESHOLD": 256 * 1024 * 1024, "M_TOP_PAD": 64 * 1024 * 1024}
"""What mallopt is told, in bytes. 32 MiB is the highest threshold that it takes (half of HEAP_MAX_SIZE)."""
_NUMBERS = {"M_TRIM_THRESHOLD": -1, "M_TOP_PAD": -2, "M_MMAP_THRESHOLD": -3}


def keep_large_buffers() -> bool:
    """For the whole process, from now on; to be called first thing. False where there is no glibc, or it refuses."""
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    taken = [mallopt(_NUMBERS[name], value) == 1 for name, value in KEPT.items()]
    return all(taken)
