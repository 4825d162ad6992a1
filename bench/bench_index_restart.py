"""A restarted router rebuilds its index from the fleet: ``python -m bench.bench_index_restart``.

Real NATS; 1,000 workers behind one connection, in their own process, answer with prepared snapshots, so the
measured time is the bus's and the router's. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

from services.router.feeds.kv import KvFeed
from services.router.state.prefix_index import IndexState, PrefixIndex
from shared.bus.nats_bus import connect_nats
from shared.bus.port import Bus, Envelope
from shared.contracts.channels import KV_SNAPSHOT
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_events import AskKvSnapshot, KvSnapshot
from tests.support.nats_server import NatsServer

WORKERS = 1000
SIZES = (100_000, 1_000_000, 10_000_000)
EXACT_S_MAX = 300.0
READY = b"ready\n"


async def bus_at(url: str, name: str) -> Bus:
    return await connect_nats(url, name=name, frame_budget_bytes=64 * 1024 * 1024)


async def answer_for_ever(url: str, entries: int) -> None:
    """The workers' process."""
    bus = await bus_at(url, "workers")
    chance = random.Random(4)
    held = {f"w{number}": chance.randbytes(8 * (entries // WORKERS)) for number in range(WORKERS)}

    async def answer(ask: AskKvSnapshot, _envelope: Envelope) -> KvSnapshot:
        return KvSnapshot(worker_id=ask.worker_id, epoch=Epoch(1), seq=1, hashes=held[ask.worker_id])

    await bus.answer(KV_SNAPSHOT, answer)
    await bus.flush(5.0)
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    await asyncio.Event().wait()


async def restart(url: str, entries: int) -> tuple[float, float]:
    """Seconds until all entries are exact, and CPU seconds of this process."""
    bus = await bus_at(url, "router")
    index = PrefixIndex()
    feed = KvFeed(bus, index)
    started, cpu = time.perf_counter(), time.process_time()
    await feed.open()
    following = asyncio.create_task(feed.follow())
    for number in range(WORKERS):
        feed.worker_joined(WorkerId(f"w{number}"), Epoch(1))
    async with asyncio.timeout(EXACT_S_MAX):
        while index.wanting():
            await asyncio.sleep(0.001)
    took = time.perf_counter() - started, time.process_time() - cpu
    assert sum(map(index.count, index.entries)) == entries
    assert {index.state(worker_id) for worker_id in index.entries} == {IndexState.EXACT}
    following.cancel()
    await bus.close()
    return took


async def measure(url: str, entries: int, repeat: int) -> None:
    command = [sys.executable, "-m", "bench.bench_index_restart", "--answer", url, str(entries)]
    workers = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert workers.stdout is not None
        assert await workers.stdout.readline() == READY
        times = sorted([await restart(url, entries) for _ in range(repeat)])
    finally:
        workers.kill()
        await workers.wait()
    wall_s, cpu_s = times[len(times) // 2]
    print(f"| {entries:,} | {8 * entries / 1e6:,.1f} | {wall_s:.2f} | {cpu_s:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--answer", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        asyncio.run(answer_for_ever(options.answer[0], int(options.answer[1])))
        return
    print(f"\nA router begins anew among {WORKERS:,} workers, over NATS; medians of {options.repeat}:\n")
    print("| entries | MB on the wire | until everything is exact, s | CPU of the router, s |\n|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder, NatsServer(Path(folder), has_buckets=True) as server:
        for entries in SIZES:
            asyncio.run(measure(server.url, entries, options.repeat))


if __name__ == "__main__":
    main()
