"""Speed of KV transfers between two processes: ``python -m bench.bench_nixl_read``.

*Plain* is one NIXL read of all pieces, their descriptors made beforehand: the limit. *Transfers* is the same bytes from
a step's order to the report of the last part, as an engine sees it. A block is 32 KB in each of 16 layers; in *runs*
the blocks lie side by side on both sides, as a prompt's usually do, *scattered* no two do. Medians, in turns.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from connector.layout.routes import block_bytes_of, routes_to, spans_of
from connector.messages import Orders, Peer, Read, Results
from connector.transfer.agent import Spans, TransferState
from connector.transfer.nixl_agent import NixlAgent
from connector.worker.copier import Copier
from connector.worker.transfer_thread import TransferThread
from tests.support.kv_engines import RankMemory, ReadingRank, Shape
from tests.support.kv_holders import Holder, start_holder

ROUNDS = 25
MB = 1_000_000
SIZES_MB = (1, 4, 16, 64, 256)
SHAPE = Shape(layers=16, block_size=32, content=64, kv_heads=4, blocks=1024)
POLL_S = 0.000_05


class Bench:
    """A holder in its own process and a reader here: one agent with plain reads, one behind TransferThread."""

    def __init__(self, shape: Shape) -> None:
        self.holder: Holder = start_holder(shape)
        self.reading = ReadingRank(RankMemory(shape, 0))
        self.reading.memory.fill()  # so that every page is there before anything is measured
        self.plain = NixlAgent(f"plain-{os.getpid()}-{time.monotonic_ns()}", split_bytes=sys.maxsize)
        self.own = self.reading.own(self.plain)
        connecting = self.plain.connect(self.holder.handshake.ranks[0].agent)
        while (name := connecting.name()) is None:
            time.sleep(POLL_S)
        self.name = name
        agent = NixlAgent(f"transfers-{os.getpid()}-{time.monotonic_ns()}")
        own = self.reading.own(agent)
        self.transfers = TransferThread(lambda: Copier(agent, own, time.monotonic))
        self.transfers.submit(Orders(connect=[Peer(handshake=self.holder.handshake, clock_ahead_s=0.0)]))
        assert not next(self.results()).connected[0].failure

    def results(self) -> Iterator[Results]:
        while True:
            if results := self.transfers.take_results(wait_s=1.0):
                yield results

    def plain_s(self, remote: list[int], local: list[int]) -> float:
        there, here = spans_of(routes_to(self.own.reader, self.holder.handshake)[0], remote, local)
        return self.timed(there, here)

    def timed(self, there: Spans, here: Spans) -> float:
        began = time.perf_counter()
        handle = self.plain.read(self.name, there, here, device="cpu", remote_device="cpu")
        while self.plain.state(handle) is TransferState.RUNNING:
            time.sleep(POLL_S)
        took_s = time.perf_counter() - began
        assert self.plain.state(handle) is TransferState.DONE
        self.plain.release(handle)
        return took_s

    def transfers_s(self, remote: list[int], local: list[int]) -> float:
        began = time.perf_counter()
        read = Read(1, ("holder", 1), remote, local, time.monotonic() + 60.0)
        self.transfers.submit(Orders(reads=[read]))
        arrived = 0
        for results in self.results():
            assert not [part.failure for part in results.parts if part.failure]
            arrived += sum(part.count for part in results.parts)
            if arrived == len(remote):
                break
        return time.perf_counter() - began

    def close(self) -> None:
        self.transfers.close()
        self.plain.close()
        self.holder.close()


@contextmanager
def bench(shape: Shape) -> Iterator[Bench]:
    one = Bench(shape)
    try:
        yield one
    finally:
        one.close()


def blocks_of(size_bytes: int, *, scattered: bool, seed: int) -> list[int]:
    count = max(1, size_bytes // block_bytes_of(RankMemory(Shape(**(vars(SHAPE) | {"blocks": 1})), 0).described()))
    return random.Random(seed).sample(range(0, SHAPE.blocks, 2), count) if scattered else list(range(count))


def main() -> None:
    print("| MB | blocks | plain GB/s | transfers GB/s | ratio | plain ms | transfers ms |")
    print("|---:|---|---:|---:|---:|---:|---:|")
    with bench(SHAPE) as one:
        for size_mb in SIZES_MB:
            for scattered in (False, True):
                remote = blocks_of(size_mb * MB, scattered=scattered, seed=1)
                local = blocks_of(size_mb * MB, scattered=scattered, seed=2)
                pairs = [(one.plain_s(remote, local), one.transfers_s(remote, local)) for _ in range(ROUNDS + 1)][1:]
                plain_s, transfers_s = (median(times) for times in zip(*pairs, strict=True))
                size = len(remote) * block_bytes_of(one.own.memory)
                print(
                    f"| {size / MB:.1f} | {'scattered' if scattered else 'runs'} | {size / plain_s / 1e9:.2f}"
                    f" | {size / transfers_s / 1e9:.2f} | {plain_s / transfers_s:.2f}"
                    f" | {plain_s * 1e3:.2f} | {transfers_s * 1e3:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
