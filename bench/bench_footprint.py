"""Resources of an idle system: ``python -m bench.bench_footprint``.

Starts ``baton up`` with one prefill and one decode worker of vLLM, waits until it is ready, and prints a Markdown table:
seconds from the start of each process until it is ready, RSS, and CPU over ``IDLE_S`` idle seconds.
"""

from __future__ import annotations

import re
import tempfile
import time
from pathlib import Path

import psutil

from tests.support.system import System

READY_S_MAX = 300.0
SETTLE_S, IDLE_S = 5.0, 20.0
SAID = re.compile(r"^\s*([\d.]+) s\s+(\S+)\s+(starting|ready)\b", re.MULTILINE)


def name_of(process: psutil.Process) -> str:
    """The row that a process belongs to."""
    line = " ".join(process.cmdline())
    if found := re.search(r"-m services\.(\w+)", line):
        worker = process.environ().get("WORKER_WORKER_ID")
        return str(worker) if found[1] == "worker" and worker else found[1]
    if "EngineCore" in line:
        parent = process.parent()
        return f"{name_of(parent)}: vLLM's EngineCore" if parent else line
    if "resource_tracker" in line:
        return "Python's resource trackers"
    return "nats" if "nats-server" in line else "launcher's guard"


def started_up(said: str) -> dict[str, float]:
    """Seconds from a process's start until it is ready."""
    begun: dict[str, float] = {}
    ready: dict[str, float] = {}
    for seconds, name, phase in SAID.findall(said):
        begun.setdefault(name, float(seconds))
        if phase == "ready":
            ready.setdefault(name, float(seconds) - begun[name])
    return ready


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, System(Path(folder)) as system:
        system.wait_ready(READY_S_MAX)
        time.sleep(SETTLE_S)
        processes = system.processes()
        before = {process.pid: cpu_s(process) for process in processes}
        time.sleep(IDLE_S)
        ready = started_up(system.said())
        print("| process | ready after s | RSS MB | idle CPU, % of a core |\n|---|---|---|---|")
        for process in sorted(processes, key=name_of):
            name = name_of(process)
            idle = (cpu_s(process) - before[process.pid]) / IDLE_S
            after = f"{ready[name]:.1f}" if name in ready else ""
            print(f"| {name} | {after} | {process.memory_info().rss / 1e6:.0f} | {idle:.1%} |")
        print(f"\nEverything ready after {max(float(seconds) for seconds, *_ in SAID.findall(system.said())):.1f} s.")


if __name__ == "__main__":
    main()
