"""A router that counts its calls: ``python bench/profiled_router.py FILE``, with the ROUTER_* variables of a router.

SIGUSR1 begins to count the calls of its main thread, Python's and others; SIGUSR2 ends that and writes their number to FILE, and to
FILE.pstats for ``python -m pstats`` where they went.
"""

from __future__ import annotations

import cProfile
import signal
import sys
from pathlib import Path

from services.router.__main__ import main


def count_calls(path: Path) -> None:
    """Install both signal handlers."""
    profile = cProfile.Profile()

    def begin(_number: int, _frame: object) -> None:
        profile.clear()
        profile.enable()

    def end(_number: int, _frame: object) -> None:
        profile.disable()
        part = path.with_suffix(".part")
        part.write_text(str(sum(entry.callcount for entry in profile.getstats())))
        profile.dump_stats(path.with_suffix(".pstats"))
        part.rename(path)

    signal.signal(signal.SIGUSR1, begin)
    signal.signal(signal.SIGUSR2, end)


if __name__ == "__main__":
    count_calls(Path(sys.argv[1]))
    main()
