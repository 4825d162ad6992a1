"""Cost of one relayed frame in the router: ``python -m bench.bench_streams``.

* unpack: msgpack only.
* dispatch: unpack, look the legs up, append, wake one reader task per leg, and the readers' turn.
* nats: the same, with batches from another process through a real nats-server; all CPU of the router's process.

Batches of N frames stand for N streams of one worker, one token each.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import uvloop

from shared.bus.leg_inbox import LegInbox
from shared.bus.nats_bus import connect_nats
from shared.bus.wire import pack, unpacker
from shared.contracts.channels import FRAMES, START_LEG
from shared.contracts.inference import Frame, FrameBatch, FrameKind
from tests.support.builders import start_leg
from tests.support.memory_bus import MemoryBus, MemoryHub
from tests.support.nats_server import NatsServer

TOKEN = b'data: {"id":"cmpl-8f3b2c1d","object":"text_completion","created":1700000000,"model":"baton-tiny","choices":[{"index":0,"text":" token","logprobs":null,"finish_reason":null}]}\n\n'
FRAMES_PER_RUN = 64_000
LEG_BUFFER_BYTES_MAX = 1 << 40


def batch(legs: int, seq: int) -> FrameBatch:
    frames = [
        Frame(leg_id=f"{i:032x}", seq=seq, kind=FrameKind.DATA, data=TOKEN, token_ids=[1234 + i]) for i in range(legs)
    ]
    return FrameBatch(router_id="r1", worker_id="w1", epoch=1, frames=frames)


def unpack_us(legs: int) -> float:
    payload = pack(batch(legs, 0))
    unpack = unpacker(FrameBatch)
    rounds = FRAMES_PER_RUN // legs
    begin = time.process_time()
    for _ in range(rounds):
        unpack(payload)
    return (time.process_time() - begin) / (rounds * legs) * 1e6


async def _readers(inbox: LegInbox, legs: int, frames_each: int) -> list[asyncio.Task[None]]:
    async def read(number: int) -> None:
        leg = await inbox.start(start_leg(f"{number:032x}"))
        left = frames_each
        while left:
            left -= len(await leg.frames())

    readers = [asyncio.ensure_future(read(number)) for number in range(legs)]
    while len(inbox._legs) < legs:
        await asyncio.sleep(0)
    return readers


async def dispatch_us(legs: int) -> float:
    bus = MemoryBus(MemoryHub())
    inbox = LegInbox(bus, "r1", leg_buffer_bytes_max=LEG_BUFFER_BYTES_MAX)
    await inbox.open()
    await bus.subscribe(START_LEG, lambda _leg, _envelope: None)
    rounds = FRAMES_PER_RUN // legs
    readers = await _readers(inbox, legs, rounds)
    payloads = [pack(batch(legs, seq)) for seq in range(rounds)]
    begin = time.process_time()
    for payload in payloads:
        bus.hub.deliver("frames.r1.w1", payload, {})
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.gather(*readers)
    spent = time.process_time() - begin
    await bus.close()
    return spent / (rounds * legs) * 1e6


async def nats_us(legs: int, url: str) -> float:
    bus = await connect_nats(url, name="bench-router")
    inbox = LegInbox(bus, "r1", leg_buffer_bytes_max=LEG_BUFFER_BYTES_MAX)
    await inbox.open()
    listening = await bus.subscribe(START_LEG, lambda _leg, _envelope: None)
    rounds = FRAMES_PER_RUN // legs
    readers = await _readers(inbox, legs, rounds)
    worker = await asyncio.create_subprocess_exec(sys.executable, "-m", "bench.bench_streams", url, str(legs))
    begin = time.process_time()
    await asyncio.gather(*readers)
    spent = time.process_time() - begin
    await worker.wait()
    await listening.close()
    await bus.close()
    return spent / (rounds * legs) * 1e6


async def send(url: str, legs: int) -> None:
    """The worker's process: one batch per millisecond, as a fast engine would."""
    bus = await connect_nats(url, name="bench-worker")
    for seq in range(FRAMES_PER_RUN // legs):
        await bus.publish(FRAMES, batch(legs, seq), key="r1")
        await asyncio.sleep(0.001 if legs > 1 else 0)
    await bus.close()


def main() -> None:
    if len(sys.argv) == 3:
        uvloop.run(send(sys.argv[1], int(sys.argv[2])))
        return
    print("router CPU, microseconds per frame")
    print(f"{'frames per batch':>16} {'unpack':>8} {'dispatch':>9} {'nats':>8}")
    with tempfile.TemporaryDirectory() as directory, NatsServer(Path(directory), has_buckets=True) as server:
        for legs in (1, 16, 64):
            row = (unpack_us(legs), uvloop.run(dispatch_us(legs)), uvloop.run(nats_us(legs, server.url)))
            print(f"{legs:>16} {row[0]:>8.2f} {row[1]:>9.2f} {row[2]:>8.2f}")


if __name__ == "__main__":
    try:
        main()
    except subprocess.SubprocessError as error:
        sys.exit(str(error))
