"""The clock that members' silence is measured by: it goes on while the machine sleeps.

`time.monotonic` stands still during sleep on Linux and macOS, so that a device would not know
after a night that it was away.
"""

from __future__ import annotations

import sys
import time


def steady_s() -> float:
    """Give seconds since some start, sleep included; no change of the wall clock moves it."""
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    if sys.platform == "darwin":
        # clock_gettime(3) there: CLOCK_MONOTONIC "will continue to increment while asleep".
        return time.clock_gettime(time.CLOCK_MONOTONIC)
    return time.monotonic()  # Windows: GetTickCount64 counts sleep
