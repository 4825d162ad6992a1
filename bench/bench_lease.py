"""Cost of leases in the engine's scheduler thread: ``python -m bench.bench_lease``.

* lease: the blocks of one prompt looked up by hash and pinned, and released again.
* step: what is noted while one step is scheduled, ``computed`` and ``advance``, with prompts that are followed.

Over vLLM's own block pool, without an engine. CPU time of lease requests, wall time of steps; medians of many rounds.
"""

from __future__ import annotations

import statistics
import time

from tests.unit.connector.holding import Holding, Step, chain, lease_request, release

ROUNDS = 30
STEPS = 2000


def ask_us(blocks: int) -> tuple[float, float]:
    """Of one request, and of the release of its grant."""
    holding = Holding(blocks=2 * blocks + 16)
    holding.hold(chain(blocks))
    asking, releasing = [], []
    for number in range(ROUNDS):
        request, unwanted = lease_request(chain(blocks), f"ask-{number}"), release(f"ask-{number}")
        begin = time.thread_time()
        holding.holder.lease(request)
        between = time.thread_time()
        holding.holder.release(unwanted)
        asking.append(between - begin)
        releasing.append(time.thread_time() - between)
    assert holding.free == holding.free_at_first
    return statistics.median(asking) * 1e6, statistics.median(releasing) * 1e6


def step_us(named: int, followings: int) -> tuple[float, float, float]:
    """Of scheduled, computed and advance, with steps that fill some blocks, and prompts that do not come."""
    holding = Holding(blocks=named + 16)
    blocks = holding.run(chain(named, "filled"))
    for number in range(followings):
        holding.holder.lease(lease_request(chain(100, f"prompt {number}"), f"ask-{number}", follow_s=100.0))
    turns: list[list[float]] = [[], [], []]
    for _ in range(STEPS):
        decode = Step()
        for times, work in zip(turns, (_scheduled, _computed, _advance), strict=True):
            begin = time.perf_counter()
            work(holding, decode, blocks)
            times.append(time.perf_counter() - begin)
    scheduled, computed, advance = (statistics.median(times) * 1e6 for times in turns)
    return scheduled, computed, advance


def _scheduled(holding, decode, blocks) -> None:
    holding.holder.begin_step()
    for block in blocks:
        holding.pool._insert_block_hash(block.block_hash, block, None)
    holding.holder.scheduled(decode)


def _computed(holding, decode, _blocks) -> None:
    holding.holder.computed(decode)


def _advance(holding, _decode, _blocks) -> None:
    holding.holder.advance()


def main() -> None:
    print("| one lease | µs | µs per block | its release, µs |\n|---|---|---|---|")
    for blocks in (50, 500, 5000):
        asked, released = ask_us(blocks)
        print(f"| {blocks} blocks | {asked:.0f} | {asked / blocks:.2f} | {released:.0f} |")
    print("\n| one step | scheduled, µs | computed, µs | advance, µs |\n|---|---|---|---|")
    for named, followings in ((0, 0), (8, 0), (64, 0), (0, 1), (0, 64)):
        scheduled, computed, advance = step_us(named, followings)
        print(f"| {named} blocks filled, {followings} followed | {scheduled:.1f} | {computed:.1f} | {advance:.1f} |")


if __name__ == "__main__":
    main()
