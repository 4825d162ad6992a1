"""A router that also times its placements: ``python -m bench.scale_router``, with the ROUTER_* variables of a router.

A line of JSON on stdin orders a measurement, a line on stdout has its result. Placements run on the router's event loop,
which takes load reports and KV events between two of them, as it does between two requests.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from typing import Any

from bench.index_load import Load, unpacked
from bench.scale_fleet import BLOCK_TOKENS, HOT_PROMPTS, QUIET_REPORTS_PER_S, hot_blocks, hot_chain
from services.router.placement.placement import Placement, PlacementRequest
from services.router.service import Router, run
from services.router.settings import Settings
from services.router.state.prefix_index import IndexState
from services.router.state.worker_view import Sent
from services.router.telemetry.tracing import Tracing
from services.router.tokenize.parity import Parity
from services.worker.tiny_model import TINY_MODEL
from shared.contracts.ids import WorkerId
from shared.contracts.workers import Role
from shared.http.server import listen
from shared.runtime.service import Service, run_service
from shared.runtime.settings import load, load_common

SAME_WORK = 20_000
PAUSE_S = 0.002
"""Between two placements."""
HEARD_S_MAX = 1.0 / QUIET_REPORTS_PER_S + 0.5
TAIL_TOKENS = 5
"""Of a prompt, after its last whole block."""
CHAINS_SAMPLED = 256


class WrongState(Exception):
    """The router does not know what the measurement is about."""


def check_fleet(router: Router, workers: int, entries: int) -> None:
    """All workers are known, ready and heard lately, and their blocks are known exactly. Raises WrongState."""
    cluster, index, now = router.fleet.cluster, router.fleet.index, router.clock.now()
    views = cluster.workers.values()
    fit = sum(view.fit(now, HEARD_S_MAX) for view in views)
    states = Counter(index.state(worker_id) for worker_id in cluster.workers)
    held = sum(map(index.count, cluster.workers))
    parity = Counter(router.prompts.parity.book.parity(worker_id) for worker_id in cluster.workers)
    if (
        len(views) != workers
        or fit != workers
        or states != {IndexState.EXACT: workers}
        or held < entries
        or parity != {Parity.AGREES: workers}
    ):
        raise WrongState(
            f"{len(views)} workers, {fit} fit, {dict(states)}, {held:,} of {entries:,} entries, tokens: {dict(parity)}"
        )


def prompts(router: Router, of: Load, kind: str) -> list[tuple[bytes, int]]:
    """Packed hashes of prompts that the index holds as the fleet says, and the most blocks at one worker. Raises WrongState."""
    made = []
    if kind == "one":
        for number in of.sample(CHAINS_SAMPLED):
            made.append((of.chain(number), {f"w{number % of.workers}": of.blocks}))
    else:
        for number in range(HOT_PROMPTS):
            held = {f"w{worker}": hot_blocks(number, worker, of.blocks) for worker in range(of.workers)}
            made.append((hot_chain(number, of.blocks), {name: count for name, count in held.items() if count}))
    for packed, expected in made:
        found = router.fleet.index.match(unpacked(packed))
        if found != {WorkerId(name): count for name, count in expected.items()}:
            raise WrongState(f"a prompt is held by {len(found)} workers, not as by the {len(expected)} expected")
    return [(packed, max(expected.values(), default=0)) for packed, expected in made]


def timed_us(router: Router, packed: bytes, held: int, free: int) -> float:
    """Microseconds of this thread's CPU to place a request, which then begins and ends. Raises WrongState."""
    now, hashes = router.clock.now(), unpacked(packed)  # Made for each request, as a prompt's hashes are.
    tokens = len(hashes) * BLOCK_TOKENS + TAIL_TOKENS
    request = PlacementRequest(model=TINY_MODEL, prompt_tokens=tokens, hashes=hashes)
    began_s = time.thread_time()
    placement = router.fleet.place(request, now)
    took_us = (time.thread_time() - began_s) * 1e6
    if not isinstance(placement, Placement) or placement.considered != free:
        raise WrongState(f"{placement}")
    if held > len(request.hashes) // 2 and not placement.cached_tokens + placement.fetched_tokens:
        raise WrongState("a placement made no use of the prefix that workers hold")
    for view in {placement.prefill or placement.decode, placement.decode}:
        sent = Sent(now, placement.uncached_tokens, placement.context_tokens)
        router.fleet.cluster.leg_started(view.record.worker_id, sent)
        router.fleet.cluster.leg_ended(view.record.worker_id, sent, placement.context_tokens, 1, sent.tokens)
    return took_us


async def measure(router: Router, command: dict[str, Any]) -> dict[str, Any]:
    """Times ``count`` placements, with constant work in turns. Raises WrongState."""
    of, count = Load(**command["load"]), command["count"]
    check_fleet(router, of.workers, command["entries"])
    held = prompts(router, of, command["kind"])
    took_us, same_us = [], []
    for number in range(count):
        await asyncio.sleep(PAUSE_S)
        took_us.append(timed_us(router, *held[number % len(held)], of.workers))
        began_s = time.thread_time()
        sum(range(SAME_WORK))
        same_us.append((time.thread_time() - began_s) * 1e6)
    check_fleet(router, of.workers, command["entries"])
    prefilling = sum(view.record.role is not Role.DECODE for view in router.fleet.cluster.workers.values())
    return {"took_us": took_us, "same_us": same_us, "blocks": router.fleet.index.table.size(), "prefilling": prefilling}


async def known(router: Router, command: dict[str, Any]) -> dict[str, Any]:
    """Whether the router's state is as expected by now."""
    try:
        check_fleet(router, command["workers"], command["entries"])
    except WrongState as wrong:
        return {"known": False, "why": str(wrong)}
    return {"known": True}


async def obey(router: Router) -> None:
    """Follow orders until stdin ends."""
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        command = json.loads(line)
        try:
            result = await (measure if command["what"] == "measure" else known)(router, command)
        except WrongState as wrong:
            result = {"failed": str(wrong)}
        print(json.dumps(result), flush=True)


async def serve(service: Service, settings: Settings, listener: Any) -> None:
    """As ``services.router.service.serve`` does."""
    tracing = Tracing(service.spans, service.clock)
    router = Router(settings, service.bus, service.clock, tracing, service.waits)
    service.tasks.create_task(obey(router), name="obey")
    await run(router, service, listener)


def main() -> None:
    common, settings = load_common(), load(Settings, "ROUTER_")
    listener = listen(settings.host, settings.port)
    run_service(
        "router",
        "router-timed",
        common,
        lambda service: serve(service, settings, listener),
        url=f"http://127.0.0.1:{settings.port}",
        listener=listener,
    )


if __name__ == "__main__":
    main()
