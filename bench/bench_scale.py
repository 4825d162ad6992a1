"""Routers among 1,000 workers that hold 10 million blocks: ``python -m bench.bench_scale [--quick] [--out FILE]``.

Real NATS and real routers on the first core; ``bench.scale_fleet`` plays the workers on the second. Measures the CPU of
a placement, memory, the CPU that load reports and KV events cost a router, and what four routers that share a port do
together. A run whose routers do not know the whole fleet exactly, or lose a message or a request, gives no figure.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Self, TypeVar

from bench.bench_peers import calibrate, get
from bench.bench_router import CHECKOUT, OTHER_CORE, ROUTER_CORE, cpu_s_of, load, pin, rss_bytes_of
from bench.index_load import Load
from bench.kv_bench_page import Measured, commit, measuring, page, table
from bench.load_client import make_parser, make_requests
from bench.peer_checks import RunFailed, check_answers, check_decisions
from bench.scale_fleet import (
    BLOCK_TOKENS,
    CHURN_BATCHES,
    COMPLETION_TOKENS,
    HOT_PROMPTS,
    QUIET_REPORTS_PER_S,
    REPORTS_PER_S,
)
from services.worker.engines.simulated.core.groups import Kind
from tests.support.nats_server import NatsServer, free_port

T = TypeVar("T")
Rates = dict[str, float]
"""Messages a second."""

PROMPT_BLOCKS = 512
ROUTERS = 4
TOKENS_PER_S = 2000
"""That each worker computes, and evicts as many."""
BATCHES_PER_S = 10.0
"""Steps of a worker that store or remove blocks. One batch of KV events each."""
EXACT_S_MAX = 120.0
SETTLE_S = 2.0
PROMPT_TOKENS, PROMPTS = 1000, 512
"""Of the client, which sends them in turn."""
SENT = {"prompt_tokens": PROMPT_TOKENS, "prompts": PROMPTS, "max_tokens": COMPLETION_TOKENS}
CONNECTIONS = 64
"""Of the client, for each router."""
DECISIONS_LISTED = 100
REQUESTS_PER_S = 400
"""While what the fleet's messages cost is measured."""
TRIES = 3
"""Of a measurement during which the fleet has to send what it should."""
LIMITED = ("reports", "batches", "blocks", "removed")
"""Messages whose rate is checked."""
FORGET_S = 10.0
"""After that the first router has forgotten the others."""
REPORTED = re.compile(r"^(\w+)(\{[^}]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    entries: int = 10_000_000
    workers: int = 1000
    few_workers: int = 100
    placements: int = 1500
    share_s: float = 6.0
    requests: int = 1500
    """For each router, in a run."""
    rounds: int = 3
    sent_share_min: float = 0.97
    """Of the messages that a rate means, so many must be sent."""
    groups: Kind = "full"
    """Layers of the workers' model: state, or full attention alone."""


QUICK = Size(placements=500, share_s=4.0, requests=1000, rounds=1)
TINY = Size(
    entries=20_480, workers=8, few_workers=4, placements=20, share_s=1.0, requests=100, rounds=1, sent_share_min=0.0
)
"""For a test that every part runs."""


class Child:
    """A process that takes orders as lines of JSON and answers each with a line."""

    def __init__(self, core: str, *command: str, **variables: str) -> None:
        self.process = subprocess.Popen(
            ["taskset", "-c", core, sys.executable, "-m", *command],
            env={**os.environ, "PYTHONPATH": str(CHECKOUT), "BATON_LOG_LEVEL": "warning", **variables},
            cwd=CHECKOUT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, what: str, **given: Any) -> dict[str, Any]:
        """Order something. Raises RunFailed."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"what": what, **given}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RunFailed(f"process {self.process.pid} has ended")
        result: dict[str, Any] = json.loads(line)
        if "failed" in result:
            raise RunFailed(result["failed"])
        return result

    def stop(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()
        self.process.wait()


class System:
    """NATS, the played fleet and routers."""

    def __init__(self, size: Size, roles: str, workers: int) -> None:
        self.size, self.roles, self.workers = size, roles, workers
        self.entries = 0
        self.rate: dict[str, float] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self.nats = self._stack.enter_context(NatsServer(folder, has_buckets=True))
        pin(self.nats.pid, OTHER_CORE)
        options = [
            "--roles",
            self.roles,
            "--groups",
            self.size.groups,
            "--entries",
            str(self.size.entries),
            "--workers",
            str(self.workers),
        ]
        self.fleet = self._child(OTHER_CORE, "bench.scale_fleet", self.nats.url, *options)
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stack.close()

    def _child(self, core: str, *command: str, **variables: str) -> Child:
        child = Child(core, *command, **variables)
        self._stack.callback(child.stop)
        return child

    def router(self, program: str = "services.router", shared_port: int = 0, core: str = ROUTER_CORE) -> Router:
        """Start a router."""
        port = free_port()
        variables = {
            "BATON_NATS_URL": self.nats.url,
            "ROUTER_PORT": str(port),
            "ROUTER_SHARED_PORT": str(shared_port),
            "ROUTER_LOG_REQUESTS": "false",
        }
        return Router(self._child(core, program, **variables), port)

    def order(self, what: str, **given: Any) -> None:
        """Have the fleet do something that changes what it holds."""
        self.entries = self.fleet.ask(what, **{"with": given}).get("entries", self.entries)

    def report(self, reports: float = 0.0, batches: float = 0.0) -> dict[str, Any]:
        """Set how often workers send. Blocks are stored at the stated rate. Returns what was sent until now."""
        blocks = TOKENS_PER_S / BLOCK_TOKENS if batches else 0.0
        self.rate = {"reports": reports, "batches": batches, "blocks": blocks}
        return self.fleet.ask("rate", **{"with": self.rate})

    def await_known(self, router: Router, entries: int | None = None) -> None:
        """Until a timed router knows the fleet. Raises RunFailed."""
        deadline = time.monotonic() + EXACT_S_MAX
        expected = self.entries if entries is None else entries
        while not (said := router.child.ask("known", workers=self.workers, entries=expected))["known"]:
            if time.monotonic() > deadline:
                raise RunFailed(said["why"])
            time.sleep(0.2)

    def await_exact(self, router: Router) -> None:
        """Until a plain router knows the fleet. Raises RunFailed."""
        deadline = time.monotonic() + EXACT_S_MAX
        while True:
            with contextlib.suppress(OSError):
                said = router.metrics()
                if said.exact == self.workers and said.agreeing == self.workers and said.blocks >= self.entries:
                    return
            if time.monotonic() > deadline:
                raise RunFailed("a router does not know the fleet")
            time.sleep(0.5)

    def while_sending(self, rate: tuple[float, float], settle_s: float, measure: Callable[[], T]) -> tuple[T, Rates]:
        """What ``measure`` returns while the fleet sends at this rate, and the messages a second. It measures again when
        the fleet could send less: for some seconds a busy machine is too slow. Raises RunFailed.
        """
        for left in reversed(range(TRIES)):
            self.report(*rate)
            time.sleep(settle_s)
            before = self.fleet.ask("counts")
            measured = measure()
            rates = self.rates_since(before)
            fewer = self.fewer_sent(rates)
            if not fewer:
                return measured, rates
            print(f"{fewer}: {'measured again' if left else 'given up'}", file=sys.stderr)
        raise RunFailed(f"{fewer}, {TRIES} times: this machine is too busy to play {self.workers} workers")

    def rates_since(self, before: dict[str, Any]) -> Rates:
        """Messages a second."""
        now = self.fleet.ask("counts")
        took_s = now["at"] - before["at"]
        return {name: (now[name] - before[name]) / took_s for name in (*LIMITED, "records")}

    def fewer_sent(self, rates: Rates) -> str:
        """What was sent less often than it should be; empty: nothing."""
        self.rate["removed"] = self.rate["blocks"]  # As many are evicted.
        wanted = {name: self.workers * self.rate[name] * self.size.sent_share_min for name in LIMITED}
        return ", ".join(
            f"{rates[name]:.0f} {name} a second were sent, fewer than {wanted[name]:.0f}"
            for name in LIMITED
            if rates[name] < wanted[name]
        )


@dataclass(frozen=True)
class Said:
    """Of a router's metrics."""

    exact: int
    agreeing: int
    """Workers whose tokens are like the router's."""
    blocks: int
    lost: int
    """Messages dropped or unreadable."""
    snapshots: int
    served: int
    """Requests that got 200."""


@dataclass
class Router:
    """A router's process."""

    child: Child
    port: int

    @property
    def pid(self) -> int:
        return self.child.process.pid

    def cpu_s(self) -> float:
        return cpu_s_of(self.pid)

    def metrics(self) -> Said:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            text = answer.read().decode()

        def total(name: str, label: str = "") -> int:
            every = REPORTED.findall(text)
            return int(sum(float(value) for one, labels, value in every if one == name and label in labels))

        return Said(
            exact=total("baton_router_index_state", 'state="exact"'),
            agreeing=total("baton_router_token_parity", 'state="agrees"'),
            blocks=total("baton_router_index_blocks"),
            lost=total("baton_bus_dropped_messages_total") + total("baton_bus_bad_messages_total"),
            snapshots=total("baton_router_snapshots_total"),
            served=total("baton_router_requests_total", 'status="200"'),
        )


# ---- placement


@dataclass
class Placed:
    """A row of the table of placements, in microseconds of CPU."""

    workers: int
    roles: str
    kind: str
    sending: str
    took: list[float] = field(default_factory=list)
    same: list[float] = field(default_factory=list)
    blocks: int = 0

    def cells(self) -> list[object]:
        p50, p99 = percentile(self.took, 50), percentile(self.took, 99)
        same = percentile(self.same, 50), percentile(self.same, 99)
        kind = {"one": "one worker", "many": "a quarter of the workers"}[self.kind]
        roles = {"both": "do both", "apart": "prefill and decode"}[self.roles]
        return [self.workers, roles, kind, self.sending, f"{p50:.0f}", f"{p99:.0f}", f"{same[0]:.0f}", f"{same[1]:.0f}"]


def percentile(values: list[float], share: int) -> float:
    return sorted(values)[len(values) * share // 100]


SENDING = {"quiet": (QUIET_REPORTS_PER_S, 0.0), "busy": (REPORTS_PER_S, BATCHES_PER_S)}


def measure_placement(size: Size, roles: str, workers: int) -> list[Placed]:
    """Of one fleet. Raises RunFailed."""
    rows = []
    with System(size, roles, workers) as system:
        router = system.router("bench.scale_router")
        system.report(QUIET_REPORTS_PER_S)
        for order, given in (("join", {"count": workers}), ("fill", {}), ("fill_hot", {})):
            system.order(order, **given)
        system.await_known(router)
        for sending, rate in SENDING.items():
            settle_s = SETTLE_S + (CHURN_BATCHES / BATCHES_PER_S if sending == "busy" else 0.0)

            def measured(sending: str = sending) -> list[Placed]:
                return [placed(system, router, kind, sending) for kind in ("one", "many")]

            rows += system.while_sending(rate, settle_s, measured)[0]
    return rows


def placed(system: System, router: Router, kind: str, sending: str) -> Placed:
    """Placements of one kind. Raises RunFailed."""
    size, workers = system.size, system.workers
    of = Load(size.entries, workers=workers, blocks=PROMPT_BLOCKS)._asdict()
    asked: dict[str, Any] = {"load": of, "entries": size.entries, "count": size.placements, "kind": kind}
    said = router.child.ask("measure", **asked)
    row = Placed(workers, system.roles, kind, sending, said["took_us"], said["same_us"], said["blocks"])
    if row.blocks < size.entries * 0.99:
        raise RunFailed(f"the index has {row.blocks:,} different blocks, not {size.entries:,}")
    print(row.cells(), file=sys.stderr)
    return row


# ---- memory, reports and events


@dataclass
class Share:
    """CPU of a router while the fleet sends something."""

    what: str
    cores: float
    """CPU seconds a second."""
    rates: dict[str, float]


@dataclass
class Upkeep:
    """What the fleet costs a router without any request."""

    bytes_per_worker: float
    bytes_per_entry: float
    rss_mb: float
    shares: list[Share]

    def of(self, what: str) -> Share:
        return next(share for share in self.shares if share.what == what)


NOTHING, REPORTS, EVENTS, TOGETHER = "neither", "load reports", "KV events", "both"
PHASES = {
    NOTHING: (0.0, 0.0),
    REPORTS: (REPORTS_PER_S, 0.0),
    EVENTS: (QUIET_REPORTS_PER_S, BATCHES_PER_S),
    TOGETHER: (REPORTS_PER_S, BATCHES_PER_S),
}


def measure_upkeep(size: Size) -> Upkeep:
    """Of one router. Raises RunFailed."""
    with System(size, "both", size.workers) as system:
        router = system.router("bench.scale_router")
        few = system.workers = max(1, size.workers // 10)
        rss = {}
        for count in (few, size.workers):
            system.report(QUIET_REPORTS_PER_S)
            system.order("join", count=count)
            system.workers = count
            system.await_known(router)
            time.sleep(SETTLE_S)
            rss[count] = rss_bytes_of(router.pid)
        system.order("fill")
        system.await_known(router)
        time.sleep(SETTLE_S)
        full = rss_bytes_of(router.pid)
        system.report(*PHASES[TOGETHER])
        time.sleep(CHURN_BATCHES / BATCHES_PER_S + SETTLE_S)  # Until as many blocks are removed as are stored.
        before = router.metrics()
        shares: list[Share] = []
        for _ in range(size.rounds):
            for what, rate in PHASES.items():
                shares.append(share_of(system, router, what, rate))
        after = router.metrics()
        if after.lost or after.snapshots != before.snapshots:
            raise RunFailed(
                f"{after.lost} messages were lost, {after.snapshots - before.snapshots} snapshots asked for"
            )
        system.await_known(router, size.entries)
        middle = [
            Share(
                what,
                median(share.cores for share in shares if share.what == what),
                next(share.rates for share in shares if share.what == what),
            )
            for what in PHASES
        ]
        return Upkeep(
            (rss[size.workers] - rss[few]) / (size.workers - few),
            (full - rss[size.workers]) / system.entries,
            full / 1e6,
            middle,
        )


def share_of(system: System, router: Router, what: str, rate: tuple[float, float]) -> Share:
    """CPU while the fleet sends at this rate. Raises RunFailed."""

    def cores() -> float:
        cpu_s, begun = router.cpu_s(), time.monotonic()
        time.sleep(system.size.share_s)
        return (router.cpu_s() - cpu_s) / (time.monotonic() - begun)

    share = Share(what, *system.while_sending(rate, 0.2, cores))
    print(f"{what}: {share.cores:.1%} of a core, {share.rates}", file=sys.stderr)
    return share


# ---- four routers


@dataclass
class Served:
    """Runs of the load client. CPU is per request, in microseconds, without what a router uses without requests."""

    what: str
    routers: int
    """That serve; the others only hear of it."""
    each_us: list[list[float]] = field(default_factory=list)
    """Of each router that serves, per request of its own."""
    heard_us: list[float] = field(default_factory=list)
    """Of a router that only hears of the requests of others, per request."""
    spread: list[list[int]] = field(default_factory=list)
    """Requests of each router."""
    loops_ms: list[float] = field(default_factory=list)

    def own_us(self) -> list[float]:
        """Of each run: the mean of all requests."""
        both = zip(self.each_us, self.spread, strict=True)
        return [sum(cost * count for cost, count in zip(*run, strict=True)) / sum(run[1]) for run in both]

    def share(self) -> float:
        """The largest share of the requests that a router had, median of the runs."""
        return median(max(each) / sum(each) for each in self.spread)


def measure_routers(size: Size) -> tuple[list[Served], list[float]]:
    """One router; then four, of which one serves, and which all serve; then one again. Also what the fleet's messages cost
    the first one while it serves. Raises RunFailed.
    """
    results = [Served("alone", 1), Served("serves beside three others", 1), Served("all serve", ROUTERS)]
    shared_port = free_port()
    with System(size, "apart", size.workers) as system:
        system.report(QUIET_REPORTS_PER_S)
        system.order("join", count=size.workers)
        system.order("fill")
        client = make_parser().parse_args(["--port=0", f"--prompt-tokens={PROMPT_TOKENS}", f"--prompts={PROMPTS}"])
        bodies = [request.partition(b"\r\n\r\n")[2].decode() for request in islice(make_requests(client), PROMPTS)]
        system.order("fill_prompts", bodies=bodies)
        routers = [system.router(shared_port=shared_port)]
        system.await_exact(routers[0])
        serve_rounds(system, routers, shared_port, results[0])
        shares = share_beside_requests(system, routers[0])
        # On the first core these would evict from its caches what the one that serves needs.
        routers += [system.router(shared_port=shared_port, core=OTHER_CORE) for _ in range(ROUTERS - 1)]
        for router in routers:
            system.await_exact(router)
        serve_rounds(system, routers, routers[0].port, results[1])
        for router in routers:
            pin(router.pid, ROUTER_CORE)
        serve_rounds(system, routers, shared_port, results[2])
        for router in routers[1:]:
            router.child.stop()
        time.sleep(FORGET_S)
        serve_rounds(system, routers[:1], shared_port, results[0])
    return results, shares


def share_beside_requests(system: System, router: Router) -> list[float]:
    """CPU a second that the fleet's messages cost a router more while it serves requests, of each round. Raises RunFailed."""

    def cores() -> float:
        seconds, client = system.size.share_s, {"connections": CONNECTIONS, "rate": REQUESTS_PER_S, "warm_up": 0.5}
        cpu_s, begun = router.cpu_s(), time.monotonic()
        result = load(router.port, **SENT, seconds=seconds, **client)
        used = (router.cpu_s() - cpu_s) / (time.monotonic() - begun)
        check_answers(result)
        return used

    found = []
    for _ in range(system.size.rounds):
        quiet, _rates = system.while_sending((QUIET_REPORTS_PER_S, 0.0), SETTLE_S, cores)
        busy, _rates = system.while_sending(PHASES[TOGETHER], CHURN_BATCHES / BATCHES_PER_S + SETTLE_S, cores)
        found.append(busy - quiet)
        print(
            f"beside {REQUESTS_PER_S} requests/s: {found[-1]:.1%} of a core for the fleet's messages", file=sys.stderr
        )
    system.report(QUIET_REPORTS_PER_S)
    return found


def serve_rounds(system: System, routers: list[Router], port: int, to: Served) -> None:
    """Several runs of the load client. Raises RunFailed."""
    run_client(system, port, to)  # Fills the routers' caches of prompts.
    for _ in range(system.size.rounds):
        serve_round(system, routers, port, to)


def run_client(system: System, port: int, to: Served) -> dict[str, Any]:
    """The client's prompts are always those that workers hold."""
    return load(port, connections=CONNECTIONS * to.routers, requests=system.size.requests * to.routers, **SENT)


def serve_round(system: System, routers: list[Router], port: int, to: Served) -> None:
    """One run of the load client. Raises RunFailed."""
    requests, serving = system.size.requests * to.routers, routers[: to.routers]
    idle_s = max(1.0, system.size.share_s / 2)
    before = [router.cpu_s() for router in routers]
    time.sleep(idle_s)
    idle = [(router.cpu_s() - cpu_s) / idle_s for router, cpu_s in zip(routers, before, strict=True)]
    said = [router.metrics() for router in serving]
    legs = system.fleet.ask("counts")
    loop_ms = calibrate()
    before, begun = [router.cpu_s() for router in routers], time.monotonic()
    result = run_client(system, port, to)
    took_s = time.monotonic() - begun
    cpu_s = [router.cpu_s() - cpu - share * took_s for router, cpu, share in zip(routers, before, idle, strict=True)]
    check_answers(result, requests)
    served = [router.metrics().served - one.served for router, one in zip(serving, said, strict=True)]
    after = system.fleet.ask("counts")
    if sum(served) != requests:
        raise RunFailed(f"the routers counted {served} requests, not {requests}")
    if any(after[name] - legs[name] != requests for name in ("prefill_legs", "decode_legs")):
        raise RunFailed(f"the workers served {after} legs, before {legs}")
    for router, count in zip(serving, served, strict=True):
        decisions = get(f"http://127.0.0.1:{router.port}/baton/decisions?limit={DECISIONS_LISTED}")["decisions"]
        check_decisions(decisions, min(DECISIONS_LISTED, count), next_turns=True)
    to.each_us.append([cpu / max(1, count) * 1e6 for cpu, count in zip(cpu_s, served, strict=False)])
    if len(routers) > len(serving):
        to.heard_us.append(sum(cpu_s[to.routers :]) / (len(routers) - to.routers) / requests * 1e6)
    to.spread.append(served)
    to.loops_ms.append(loop_ms)
    print(f"{to.what}: {served} requests, {to.each_us[-1]} µs each, heard {to.heard_us[-1:]}", file=sys.stderr)


def relative(alone: Served, beside: Served, shared: Served) -> dict[str, float]:
    """Throughput of four routers, each on a core of its own, relative to one.

    A core has what the fleet's messages leave, the same with one router and with four. With others, a router pays for a
    request that it serves, and for hearing of each request that the three others serve meanwhile. The router with the
    largest share of the connections is full first, and bounds them all. ``all_serve`` is the same by the row in which all
    serve: there each hears the others, but all of them share a core and its caches.
    """
    alone_us, own_us, heard_us = median(alone.own_us()), median(beside.own_us()), median(beside.heard_us)
    cost, all_serve = alone_us / (own_us + (ROUTERS - 1) * heard_us), alone_us / median(shared.own_us())
    return {
        "alone_us": alone_us,
        "own_us": own_us,
        "heard_us": heard_us,
        "cost": cost,
        "even": ROUTERS * cost,
        "uneven": cost / shared.share(),
        "all_serve": all_serve,
        "all_serve_uneven": all_serve / shared.share(),
    }


# ---- the page


HEAD = [
    "# Scale: 1,000 workers, 10 million blocks",
    "",
    "`make bench-scale` (`python -m bench.bench_scale`). Real NATS, and real routers on core 0. One process on core 1 plays 1,000 workers: it",
    "registers them, renews their records, and sends their load reports and KV events, spread over milliseconds. Figures are CPU, which a busy",
    "machine raises, too: constant work was timed beside them.",
]
PARTS = ("placement", "upkeep", "routers")


def placement_lines(placed: list[Placed]) -> list[str]:
    blocks = min(row.blocks for row in placed)
    return [
        "## Placement",
        "",
        f"CPU of the router's thread for one placement of a {PROMPT_BLOCKS}-block prompt, look-up in the index and fleet table included;",
        f"{len(placed[0].took):,} placements each, on the event loop of a router that serves. The index has at least {blocks:,} different",
        f"blocks, each at one worker; of {HOT_PROMPTS} further prompts each of a quarter of the workers holds the beginning. Quiet: each worker",
        f"reports {QUIET_REPORTS_PER_S:g} time a second; busy: {REPORTS_PER_S:g} times, and its KV events arrive. `sum(range(20_000))`, the same work, was done in turns with",
        "the placements. The aim is a p99 of 300 µs.",
        "",
        *table(
            "workers | that | prompt held by | fleet | p50, µs | p99, µs | same work p50, µs | p99, µs",
            [row.cells() for row in placed],
        ),
    ]


def upkeep_lines(upkeep: Upkeep) -> list[str]:
    idle = upkeep.of(NOTHING)
    rows: list[list[object]] = []
    for share in upkeep.shares:
        rates = share.rates
        own = share.cores - idle.cores
        quiet = " and a report a second of each worker" if share.what == EVENTS else ""
        rows.append(
            [
                f"{share.what}{quiet}",
                *(f"{rates[name]:,.0f}" for name in ("reports", "batches", "blocks")),
                f"{share.cores:.1%}",
                f"{own:.1%}" if share is not idle else "",
            ]
        )
    return [
        "## Memory",
        "",
        *table(
            "RSS of a router | bytes",
            [
                ["per (block, worker) entry", f"{upkeep.bytes_per_entry:.1f}"],
                ["per worker, without its blocks", f"{upkeep.bytes_per_worker:,.0f}"],
                ["all", f"{upkeep.rss_mb:,.0f} MB"],
            ],
        ),
        "## Load reports and KV events",
        "",
        f"A worker reports at most {REPORTS_PER_S:g} times a second, which busy ones do. Each computes {TOKENS_PER_S:,} new tokens a second, that is",
        f"{TOKENS_PER_S / BLOCK_TOKENS:g} blocks of {BLOCK_TOKENS} tokens, and evicts as many, in {BATCHES_PER_S:g} batches of KV events a second. Records are renewed in all",
        f"rows ({idle.rates['records']:.0f} a second). Digests in the reports prove that no event was lost. The aim is 20 % for both.",
        "",
        *table("sent | reports/s | batches/s | blocks/s | router's CPU | more than with neither", rows),
    ]


def routers_lines(size: Size, served: list[Served], shares: list[float]) -> list[str]:
    alone, beside, shared = served
    said = relative(alone, beside, shared)
    left = 1.0 - median(shares)
    rows: list[list[object]] = []
    for of in served:
        own = of.own_us()
        rows.append(
            [
                of.what,
                f"{median(own):.0f} ({min(own):.0f} to {max(own):.0f})",
                ", ".join(f"{cost:.0f}" for cost in of.each_us[-1]),
                f"{median(of.heard_us):.0f}" if of.heard_us else "",
                ", ".join(map(str, of.spread[-1])),
                f"{of.share():.1%}",
                f"{median(of.loops_ms):.1f}",
            ]
        )
    return [
        "## Routers that share a port",
        "",
        f"Requests of a prefill and a decode leg, with {PROMPT_TOKENS:,} tokens of prompt that played workers hold, so that no KV moves; {CONNECTIONS} connections and {size.requests:,} requests for each router that serves; medians of",
        f"the runs with the least and the greatest. The workers report {QUIET_REPORTS_PER_S:g} time a second meanwhile; what a router uses without requests is",
        "taken off. Every request got its tokens and was a prefill and a decode leg; the newest decisions of each router were exact, and the",
        "workers had the cached tokens that they predicted. The router that serves alone or beside others is on core 0, the others on core 1;",
        "when all serve, all are on core 0.",
        "",
        *table(
            "a router | CPU per own request, µs | of each, last run | per request of another, µs | requests of each, last run"
            " | largest share | `sum(range(1000000))`, ms",
            rows,
        ),
        f"While it serves {REQUESTS_PER_S} requests/s, the reports and events of the whole busy fleet cost a router {median(shares):.1%} of a core ({min(shares):.1%} to {max(shares):.1%}) more than",
        f"{QUIET_REPORTS_PER_S:g} report a second of each worker: it is awake for many of the messages anyway. Each router pays that regardless of requests, so that",
        f"{left:.1%} of its core are left for them: alone {left / said['alone_us'] * 1e6:,.0f} a second.",
        "",
        f"Beside three others a request costs {said['own_us']:.0f} + 3 x {said['heard_us']:.0f} µs instead of {said['alone_us']:.0f}, because reservations are sent and heard: a router has {said['cost']:.2f} of the",
        f"throughput that it has alone. Four on four cores have {ROUTERS} x {said['cost']:.2f} = {said['even']:.2f} times the throughput of one where connections are spread evenly; as the",
        f"kernel spread {CONNECTIONS * ROUTERS} of them, the router with {shared.share():.1%} is full first: {said['cost']:.2f} / {shared.share():.3f} = {said['uneven']:.2f}. By the row in which all serve, which includes what",
        f"they hear of each other and that they share a core and its caches, the same is {said['all_serve']:.2f} / {shared.share():.3f} = {said['all_serve_uneven']:.2f}. The aim is 3.5.",
        "A router cannot have more than it has alone: a share above 1.00 is the machine's noise and counts as 1.00.",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short runs")
    parser.add_argument("--groups", choices=("full", "state"), default="full", help="layers of the workers' model")
    parser.add_argument("--only", choices=PARTS, help="measure one part; the page keeps the others")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/scale.md"))
    options = parser.parse_args()
    size = replace(QUICK if options.quick else Size(), groups=options.groups)
    parts = {name: measured(name, size) for name in PARTS if options.only in (None, name)}
    text = page(HEAD, parts, PARTS, options.out.read_text() if options.out.exists() else "")
    print(text)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text)


def measured(part: str, size: Size) -> Measured:
    """A part of the page. Raises RunFailed."""
    with measuring() as of:
        if part == "placement":
            fleets = [(roles, workers) for workers in (size.few_workers, size.workers) for roles in ("both", "apart")]
            of.lines = placement_lines([row for fleet in fleets for row in measure_placement(size, *fleet)])
        elif part == "upkeep":
            of.lines = upkeep_lines(measure_upkeep(size))
        else:
            of.lines = routers_lines(size, *measure_routers(size))
    quick = "; short runs" if size.rounds == QUICK.rounds else ""
    quick += "; a model with states" if size.groups == "state" else ""
    of.said = f"Commit {commit()}{quick}. {of.said}"
    return of


if __name__ == "__main__":
    main()
