"""Streamed handoffs between two hosts over a bus that is far away: what of its delay a request sees.

Two network namespaces with a cable between them. A relay in front of nats-server delays what workers send and receive;
the benchmark itself stands beside the server.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import median

import httpx

from bench.bench_kv_handoff import STREAMED, D, Handoff, P, hand_off
from bench.handoffs import Handoffs
from bench.kv_bench_fleet import BenchFleet, Prompts
from bench.kv_bench_page import ms, table, with_interval
from tests.support.delaying_relay import DelayingRelay, delaying_relay
from tests.support.kv_driver import driving
from tests.support.kv_tap import Tap
from tests.support.nats_server import NatsServer
from tests.support.network_hosts import ADDRESSES, two_hosts, typing_on
from tests.support.worker_processes import start_worker, wait_ready

DELAYS_S = (0.0, 0.000_2, 0.001, 0.005)
"""Added to each way between a worker and the server, so twice to a message from one worker to another."""
PROMPT_TOKENS = 2048
WARM_UPS = 5
OVER_TCP = {"UCX_TLS": "tcp,self"}
"""Both namespaces are one machine, whose shared memory UCX would use."""
OWN_FILES = 'mkdir -p "$TMPDIR" && mount -t tmpfs tmpfs "$TMPDIR" && exec "$@"'
"""Another host does not see this one's sockets. ``ip netns exec`` has made a namespace of mounts."""
Found = dict[float, list[Handoff]]


@asynccontextmanager
async def distant_fleet(workers: Mapping[str, Mapping[str, str]]) -> AsyncIterator[tuple[BenchFleet, DelayingRelay]]:
    """Two workers with their WORKER_* settings, each on a host and on a core of its own."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hosts = stack.enter_context(two_hosts(folder, OVER_TCP))
        stack.enter_context(typing_on(hosts[0]))
        nats = stack.enter_context(NatsServer(folder, host=ADDRESSES[0], has_buckets=True))
        relay = stack.enter_context(delaying_relay(ADDRESSES[0], (nats.host, nats.port)))
        url, running = "nats://{}:{}".format(*relay.address), {}
        stack.callback(lambda: [worker.kill() for worker in running.values()])
        for core, ((name, settings), host) in enumerate(zip(workers.items(), hosts, strict=True)):
            through = [*host.arguments(""), "sh", "-c", OWN_FILES, "sh"]
            environ = {**OVER_TCP, "TMPDIR": str(host.folder / "tmp")}
            own = {"cpu_cores": str(core), **settings}
            running[name] = start_worker(url, name, folder, environ=environ, through=through, **own)
        await wait_ready(nats.url, list(running.values()))
        tap = await stack.enter_async_context(Tap(nats.url))
        driver = await stack.enter_async_context(driving(tap))
        http = await stack.enter_async_context(httpx.AsyncClient())
        await tap.until(lambda: running.keys() <= tap.loads.keys(), "all workers are heard")
        yield BenchFleet(folder, nats, running, driver, http, Handoffs()), relay


async def measure(fleet: BenchFleet, relay: DelayingRelay, times: int) -> Found:
    """Every delay, in turn."""
    prompts, found = Prompts(5), Found()
    for _time in range(WARM_UPS):
        await _one(fleet, prompts)
    for _time in range(times):
        for delay_s in DELAYS_S:
            relay.set_delay(delay_s)
            found.setdefault(delay_s, []).append(await _one(fleet, prompts))
    relay.set_delay(0.0)
    return found


async def _one(fleet: BenchFleet, prompts: Prompts) -> Handoff:
    handoff = await hand_off(fleet, prompts.new(PROMPT_TOKENS), STREAMED)
    await fleet.tap.until_settled(P, D)
    return handoff


def lines(found: Found, chunk: int, bytes_per_token: int) -> list[str]:
    """The part of the page."""
    base = found[DELAYS_S[0]]
    size = chunk * bytes_per_token / 2**20
    return [
        "## Streamed handoffs where the bus is far away",
        "",
        f"Two network namespaces, NIXL over TCP between them. A relay adds the delay to each way between a worker and nats-server, so twice to a message from one worker to another. {len(base)} prompts of {PROMPT_TOKENS} tokens for each delay, in turn; the last of {PROMPT_TOKENS // chunk} chunks has {size:.0f} MiB of KV. From the end of the prefill leg, as its router hears of it, which takes one delay: medians, with 95 % intervals.",
        "",
        *table(
            "delay of each way ms | TTFT ms | exposed until the first token ms | until the last blocks are there ms | until the second token ms | tokens computed again",
            [row(delay_s, handoffs) for delay_s, handoffs in found.items()],
        ),
    ]


def row(delay_s: float, handoffs: list[Handoff]) -> list[object]:
    there = [next(iter(one.stages.values())) for one in handoffs if one.stages]
    return [
        f"{delay_s * 1e3:g}",
        with_interval([one.ttft_s for one in handoffs], ".1f", 1e3),
        with_interval([one.exposed_s for one in handoffs], ".1f", 1e3),
        with_interval(there, ".1f", 1e3) if there else ms(float("nan")),
        with_interval([one.second_s for one in handoffs], ".1f", 1e3),
        f"{median(one.recomputed for one in handoffs):.0f}",
    ]
