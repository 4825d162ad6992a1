"""Ends the system's processes when the launcher dies without doing so (SIGKILL, out of memory).

A separate process in its own session. The launcher writes ``+group`` for each process group it starts and
``-group`` when one has ended. When the pipe closes, the remaining groups get SIGTERM, and later SIGKILL.
Runs as a plain script without site-packages, so that it is small and starts quickly.
"""

import os
import signal
import sys
import time

GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL."""
POLL_S = 0.1


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    send(groups, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while groups and time.monotonic() < deadline:
        time.sleep(POLL_S)
        groups = send(groups, 0)
    send(groups, signal.SIGKILL)


def send(groups: set[int], number: int) -> set[int]:
    """Signal every group; returns those that still exist."""
    alive = set()
    for group in groups:
        try:
            os.killpg(group, number)
            alive.add(group)
        except (ProcessLookupError, PermissionError):
            continue
    return alive


if __name__ == "__main__":
    main()
