"""Clocks of another machine, for a process that finds this folder on its PYTHONPATH: Python runs it before all else.

``CHAOS_CLOCK`` is four numbers of seconds: how far the wall clock is off, how far the monotonic one is (two machines
were not started together), and after how long the wall clock is set, and by how much, as a time service does it.
"""

import os
import time

_wall_s, _monotonic_s, _set_after_s, _set_by_s = map(float, os.environ.get("CHAOS_CLOCK", "0,0,0,0").split(","))
_time_ns, _monotonic_ns = time.time_ns, time.monotonic_ns
_began_ns = _monotonic_ns()
_SECOND_NS = 1_000_000_000


def _wall_ns() -> int:
    is_set = _monotonic_ns() - _began_ns > _set_after_s * _SECOND_NS
    return _time_ns() + int((_wall_s + (_set_by_s if is_set else 0.0)) * _SECOND_NS)


def _uptime_ns() -> int:
    return _monotonic_ns() + int(_monotonic_s * _SECOND_NS)


if "CHAOS_CLOCK" in os.environ:
    time.time_ns = _wall_ns
    time.time = lambda: _wall_ns() / _SECOND_NS
    time.monotonic_ns = _uptime_ns
    time.monotonic = lambda: _uptime_ns() / _SECOND_NS
