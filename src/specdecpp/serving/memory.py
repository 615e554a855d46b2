"""Memory that was let go goes back to the system.

glibc keeps what is freed for what is asked for next, and the larger the blocks it has seen freed, the larger are those that it
takes from its heaps (mallopt(3), M_MMAP_THRESHOLD). A server whose many requests have ended so holds the memory of their caches
until it ends, unless it asks for it to be given back (malloc_trim(3)).
"""

import ctypes
from collections.abc import Callable
from contextlib import suppress
from functools import cache


def give_back() -> None:
    """Give freed memory back to the system, where the C library can; some milliseconds."""
    _trim()(0)


@cache
def _trim() -> Callable[[int], int]:
    with suppress(OSError, TypeError, AttributeError):  # another C library, or one that ctypes does not find
        return ctypes.CDLL(None).malloc_trim
    return lambda pad: 0
