"""Cost of leases in the engine's scheduler thread: ``python -m bench.bench_lease``.

* lease: the blocks of one prompt looked up by hash and pinned, and released again.
* step: ``scheduled``, ``computed`` and ``advance`` around one step of decoding requests, with prompts that are followed.

Over vLLM's own block pool, without an engine. CPU time of lease requests, wall time of steps; medians of many rounds.
"""

from __future__ import annotations

import statistics
import time

from tests.unit.connector.holding import BLOCK_TOKENS, Holding, chain, lease_request, release, step

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


def step_us(requests: int, followings: int) -> tuple[float, float, float]:
    """Of scheduled, computed and advance, with requests that decode a token each, and prompts that do not come."""
    holding = Holding(blocks=16 * requests + 16)
    prompt = [(f"r{number}", range(1 + 16 * number, 17 + 16 * number), 0, 1) for number in range(requests)]
    holding.holder.scheduled(first := step(new=prompt))
    holding.holder.computed(first)
    for number in range(followings):
        holding.holder.lease(lease_request(chain(100, f"prompt {number}"), f"ask-{number}", follow_s=100.0))
    turns: list[list[float]] = [[], [], []]
    for number in range(STEPS):
        at = 1 + number % (15 * BLOCK_TOKENS)
        decode = step(known=[(f"r{one}", (), at, 1) for one in range(requests)])
        for times, work in zip(turns, (_scheduled, _computed, _advance), strict=True):
            begin = time.perf_counter()
            work(holding, decode)
            times.append(time.perf_counter() - begin)
    scheduled, computed, advance = (statistics.median(times) * 1e6 for times in turns)
    return scheduled, computed, advance


def _scheduled(holding, decode) -> None:
    holding.holder.scheduled(decode)


def _computed(holding, decode) -> None:
    holding.holder.computed(decode)


def _advance(holding, _decode) -> None:
    holding.holder.advance()


def main() -> None:
    print("| one lease | µs | µs per block | its release, µs |\n|---|---|---|---|")
    for blocks in (50, 500, 5000):
        asked, released = ask_us(blocks)
        print(f"| {blocks} blocks | {asked:.0f} | {asked / blocks:.2f} | {released:.0f} |")
    print("\n| one step | scheduled, µs | computed, µs | advance, µs |\n|---|---|---|---|")
    for requests, followings in ((1, 0), (8, 0), (64, 0), (256, 0), (8, 1), (8, 64)):
        scheduled, computed, advance = step_us(requests, followings)
        print(f"| {requests} decode, {followings} followed | {scheduled:.1f} | {computed:.1f} | {advance:.1f} |")


if __name__ == "__main__":
    main()
