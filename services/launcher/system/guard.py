"""Ends the system's processes when the launcher vanishes without having done it (SIGKILL, out of memory).

A process of its own, in a session of its own: the launcher writes ``+group`` for each process group it starts and
``-group`` when one has ended. When the pipe closes, the groups that are left get SIGTERM, and SIGKILL soon after.
Runs as a plain script without site-packages, so that it is small and starts at once.
"""

import os
import signal
import sys
import time

GRACE_S = 5.0
"""Between SIGTERM and SIGKILL."""
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
    """Signal every group; answers those that still exist."""
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
