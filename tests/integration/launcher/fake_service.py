"""A service as the launcher sees one: says that it is ready every now and then, and ends on SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from shared.bus.nats_bus import connect_nats
from shared.contracts.channels import SERVICE_STATUS
from shared.contracts.control import ServicePhase, ServiceStatus
from shared.runtime.service import refuse


async def main(name: str, *habits: str) -> None:
    if "fails" in habits:
        raise ValueError("the model /nowhere does not exist")
    if wrong := [habit for habit in habits if habit.startswith("wrong-if:") and Path(habit[9:]).exists()]:
        refuse(name, ValueError(f"{wrong[0][9:]} is wrong"))
    if late := [habit for habit in habits if habit.startswith("needs:") and not Path(habit[6:]).exists()]:
        raise RuntimeError(f"{late[0][6:]} is not there yet")
    if "chatty" in habits:
        line = "x" * 1023
        for _ in range(24 * 1024):  # 24 MiB
            print(line)
        print("that was much")
    if "has-a-child" in habits:
        subprocess.Popen(["sleep", "600"])
    stop = asyncio.Event()
    if "ignores-sigterm" in habits:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    for habit in [habit for habit in habits if habit.startswith("meets:")]:
        _, folder, count = habit.split(":")
        Path(folder).mkdir(exist_ok=True)
        (Path(folder) / name).touch()
        while len(list(Path(folder).iterdir())) < int(count) and not stop.is_set():
            await asyncio.sleep(0.02)
    bus = await connect_nats(os.environ["BATON_NATS_URL"], name=name)
    ready = ServiceStatus(service="worker", instance=name, phase=ServicePhase.READY, pid=os.getpid())
    while not stop.is_set():
        await bus.publish(SERVICE_STATUS, ready)
        try:
            await asyncio.wait_for(stop.wait(), 0.1)
        except TimeoutError:
            continue
    print("told to stop at", time.monotonic_ns())
    await bus.close()
    print("ended at", time.monotonic_ns())


asyncio.run(main(*sys.argv[1:]))
