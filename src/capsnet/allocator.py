"""Keeping freed memory in the process, so that the next step need not ask the system for it."""

import ctypes
import sys

# Names of the options in glibc's malloc.h.
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_MAX = -4


def keep_memory() -> bool:
    """Tells the C library to keep the memory that tensors free; returns whether it does.

    By default glibc maps every large tensor anew and gives it back afterwards, and the system
    fills each of its pages with zeros when it is first touched: as much work as a training step's
    arithmetic. Call this once, before the first large tensor. The process then holds on to the
    most that it ever used. Without glibc (macOS, Windows, musl) nothing changes.

    >>> keep_memory() in (True, False)
    True
    """
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    accepted = [
        library.mallopt(_MMAP_MAX, 0),  # large blocks come from the heap as well,
        library.mallopt(_TRIM_THRESHOLD, 2**31 - 1),  # whose free end is never given back,
        library.mallopt(_TOP_PAD, 2**26),  # and which grows by 64 MiB at a time
    ]
    return all(answer == 1 for answer in accepted)
