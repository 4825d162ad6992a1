"""What a handoff costs and adds on real engines, beside vLLM's own servers; a part of the page of ``bench.bench_router``.

Two engines behind Baton's workers and router, and two behind vLLM's own server with its NixlConnector, where the load client stands for
a P/D proxy that takes no time. It asks the prefill engine for one token and then the decode engine for the answer, with vLLM's transfer of
the KV or without, when the decode engine computes the prompt again. The three ways take turns, in an order that rotates.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from bench.bench_router import LATENCY_TOKENS, NATS_THREADS, NONE_MOVED, ROUTER, System, load, send, wait_for
from bench.bench_worker import cpu_s
from bench.handoffs import HandoffTap, Moved
from bench.kv_bench_page import table, with_interval
from bench.load_client import OFFER, PREFILL
from bench.peer_checks import RunFailed, check_answers
from tests.support.nats_server import NatsServer, free_port
from tests.support.system import Metrics

READY_S_MAX = 300.0
ROUNDS, QUICK_ROUNDS = 5, 2
IDLE_S = 3.0
SETTLE_S, SETTLE_S_MAX, SETTLED_SHARE = 0.2, 30.0, 0.15
"""Between two runs: until all processes together use less than this share of a core."""
ROLES = ("prefill", "decode")
ENGINE, SERVER = "EngineCore", "server"
PROCESSES = ("router", "nats-server", *(f"{role} {kind}" for kind in (SERVER, ENGINE) for role in ROLES))
BATON, ASKED, VLLM = "Baton", "vLLM, both asked", "vLLM's connector"
HANDOFFS, BYTES = "vllm:nixl_xfer_time_seconds_count", "vllm:nixl_bytes_transferred_sum"


@dataclass(frozen=True)
class Load:
    label: str
    options: dict[str, Any]
    """Of the load client."""


@dataclass(frozen=True)
class Way:
    """A way to have requests served by a prefill and a decode engine."""

    name: str
    pids: Mapping[str, int]
    """By ``PROCESSES``."""
    run: Callable[..., tuple[dict[str, Any], Moved]]
    """Of the load client's options; raises RunFailed."""
    idle: dict[str, float] = field(default_factory=dict)
    """CPU seconds in a second of each process while idle."""

    def cpu_s(self) -> dict[str, float]:
        return {name: cpu_s(pid) for name, pid in self.pids.items()}


@dataclass(frozen=True)
class Taken:
    """What one run took."""

    cpu_ms: dict[str, float]
    """By process, for a request."""
    latency_ms: dict[str, float]
    moved: Moved

    def servers_ms(self) -> float:
        return sum(self.cpu_ms[f"{role} {SERVER}"] for role in ROLES)


def cpu_loads(*, quick: bool) -> list[Load]:
    part = 2 if quick else 1
    return [
        Load(
            f"{tokens:,} tokens, {connections} connection{'s' if connections > 1 else ''}",
            {"prompt_tokens": tokens, "connections": connections, "requests": requests // part, "max_tokens": 16},
        )
        for tokens, connections, requests in ((100, 1, 80), (100, 16, 320), (2000, 1, 16))
    ]


def latency_loads(*, quick: bool) -> list[Load]:
    return [
        Load(
            f"{rate}",
            {"rate": rate, "seconds": seconds / 2 if quick else seconds, "prompt_tokens": 100, "connections": 64}
            | {"max_tokens": LATENCY_TOKENS, "warm_up": 0.5},
        )
        for rate, seconds in ((10, 3.0), (50, 2.0))
    ]


def measure(*, quick: bool) -> list[str]:
    """The part of the page. Raises RunFailed."""
    costs, latencies = cpu_loads(quick=quick), latency_loads(quick=quick)
    taken: dict[tuple[str, str], list[Taken]] = {}
    with ways_running() as ways:
        for way in ways:
            for one in costs:
                run_of(way, one, "warm-up")
        measure_idle(ways)
        for number in range(QUICK_ROUNDS if quick else ROUNDS):
            for one in (*costs, *latencies):
                for place in range(len(ways)):
                    way = ways[(number + place) % len(ways)]
                    found = run_of(way, one, str(number))
                    taken.setdefault((one.label, way.name), []).append(found)
                    print(
                        f"{one.label}: {way.name}: {sum(found.cpu_ms.values()):.2f} ms, {found.servers_ms():.2f} of"
                        f" servers, latency {found.latency_ms['p50']:.1f} ms",
                        file=sys.stderr,
                    )
    return lines([one.label for one in costs], [one.label for one in latencies], taken)


def run_of(way: Way, one: Load, seed: str) -> Taken:
    """When all is quiet. Raises RunFailed."""
    until_quiet(way)
    before, begun_at = way.cpu_s(), time.monotonic()
    # The ways of vLLM share engines, whose caches must not have each other's prompts.
    result, moved = way.run(**one.options, seed=f"{one.label} {way.name == VLLM} {seed}", core=cores())
    after, took_s = way.cpu_s(), time.monotonic() - begun_at
    used = {name: after[name] - before[name] - way.idle.get(name, 0.0) * took_s for name in after}
    return Taken({name: each / result["sent"] * 1e3 for name, each in used.items()}, result["latency_ms"], moved)


def until_quiet(way: Way) -> None:
    """vLLM's connector keeps a prefill engine stepping for a while after a handoff. Raises RunFailed."""
    until = time.monotonic() + SETTLE_S_MAX
    while time.monotonic() < until:
        before = sum(way.cpu_s().values())
        time.sleep(SETTLE_S)
        if sum(way.cpu_s().values()) - before < SETTLE_S * SETTLED_SHARE:
            return
    raise RunFailed(f"{way.name}: its processes were not idle within {SETTLE_S_MAX} s")


def measure_idle(ways: Sequence[Way]) -> None:
    for way in ways:
        until_quiet(way)
    before = [way.cpu_s() for way in ways]
    time.sleep(IDLE_S)
    for way, begun in zip(ways, before, strict=True):
        way.idle.update({name: (now - begun[name]) / IDLE_S for name, now in way.cpu_s().items()})


def cores() -> str:
    return ",".join(map(str, sorted(os.sched_getaffinity(0))))


class Engines(System):
    """Real engines: a prefill engine on the first core and a decode engine on the last; all else where there is time."""

    def start_engine(self, role: str, *command: str, **variables: str) -> int:
        core = str((min if role == ROLES[0] else max)(os.sched_getaffinity(0)))
        return self.start(
            cores(), "-m", *command, WORKER_ENGINE="vllm", WORKER_SIMULATED="", WORKER_CPU_CORES=core, **variables
        )

    def start_workers(self) -> None:
        for role in ROLES:
            self.worker_pids[role] = self.start_engine(
                role, "services.worker", WORKER_ROLE=role, WORKER_WORKER_ID=f"{role}-0"
            )

    def start_router(self) -> None:
        variables = {"ROUTER_PORT": str(self.port), "ROUTER_LOG_REQUESTS": "false"}
        self.router_pid = self.start(cores(), *ROUTER, **variables)


@contextlib.contextmanager
def ways_running() -> Iterator[list[Way]]:
    """All engines start at once."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nats = stack.enter_context(NatsServer(folder, has_buckets=True, env=NATS_THREADS))
        tap = stack.enter_context(HandoffTap(nats.url, os.sched_getaffinity(0)))
        baton = Engines(folder, nats.url, handoffs=tap)
        stack.callback(baton.stop)
        baton.start_workers()
        ports = {role: free_port() for role in ROLES}
        servers = {
            role: baton.start_engine(
                role, "bench.plain_vllm", f"--port={port}", WORKER_CONNECTOR="upstream", WORKER_ROLE="both"
            )
            for role, port in ports.items()
        }
        baton.start_router()
        for port in ports.values():
            wait_for(f"http://127.0.0.1:{port}/health", s_max=READY_S_MAX)
        wait_for(f"http://127.0.0.1:{baton.port}/metrics", exact=len(ROLES), s_max=READY_S_MAX)
        baton.await_answers()
        own = {"router": baton.router_pid, "nats-server": nats.pid}
        asking = partial(ask_both, ports)
        yield [
            Way(BATON, own | processes_of(baton.worker_pids), partial(send, baton)),
            Way(ASKED, processes_of(servers), partial(asking, PREFILL)),
            Way(VLLM, processes_of(servers), partial(asking, OFFER)),
        ]


def processes_of(servers: Mapping[str, int]) -> dict[str, int]:
    """The processes of engines, by the servers of their roles."""
    found: dict[str, int] = {}
    for role, pid in servers.items():
        found[f"{role} {SERVER}"] = pid
        children = psutil.Process(pid).children(recursive=True)
        found[f"{role} {ENGINE}"] = next(one.pid for one in children if ENGINE in " ".join(one.cmdline()))
    return found


def ask_both(ports: Mapping[str, int], first_leg: str, **options: Any) -> tuple[dict[str, Any], Moved]:
    """Run the load client at vLLM's servers. With an offer each request must move KV. Raises RunFailed."""
    before = counted(ports["decode"])
    result = load(ports["prefill"], then_port=ports["decode"], first_leg=first_leg, **options)
    check_answers(result, options.get("requests", 0))
    handoffs, moved = (now - begun for now, begun in zip(counted(ports["decode"]), before, strict=True))
    expected = result["sent"] if first_leg == OFFER else 0
    if handoffs != expected or (moved > 0) != (expected > 0):
        raise RunFailed(f"vLLM's connector counted {handoffs:.0f} handoffs of {moved:.0f} bytes, not {expected}")
    return result, Moved(result["sent"], int(handoffs), int(moved))


def counted(port: int) -> tuple[float, float]:
    """Handoffs that an engine has read, and their bytes."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        metrics = Metrics(answer.read().decode())
    return metrics.sum(HANDOFFS), metrics.sum(BYTES)


# ---- the page


def lines(costs: Sequence[str], rates: Sequence[str], taken: Mapping[tuple[str, str], list[Taken]]) -> list[str]:
    ways = (ASKED, VLLM, BATON)
    return [
        "## One handoff on real engines, beside vLLM's own servers",
        "",
        "1P+1D, `baton-tiny`, vLLM on a CPU: both prefill engines on one core and both decode engines on the other; all other",
        f"processes on both. *{ASKED}*: two of vLLM's own servers; the client asks the prefill engine for one token and then",
        "the decode engine for the answer. No KV moves: the decode engine computes the prompt again.",
        f"*{VLLM}*: the same servers, and the client passes on the offer of their NixlConnector, as a P/D proxy that takes no",
        "time. *Baton*: router, nats-server and two workers, whose processes are the servers here. The ways take turns. Medians",
        f"of {len(taken[costs[0], BATON])} rounds; differences are between runs of one round, with the sign test's interval (at 5 rounds the least and",
        "the greatest: 94 %).",
        "",
        "CPU, ms per request, answers of 16 tokens; of each process, user + system time minus its idle share:",
        "",
        *table(
            f"prompt | served by | {' | '.join(PROCESSES)} | together | handoffs",
            [cost_row(load, way, taken[load, way]) for load in costs for way in ways],
        ),
        "What Baton's processes take more than vLLM's servers, ms per request:",
        "",
        *table(
            f"prompt | beside | {' | '.join(f'{role} {kind}' for kind in (SERVER, ENGINE) for role in ROLES)} | both servers",
            [more_row(load, taken[load, BATON], way, taken[load, way]) for load in costs for way in ways[:2]],
        ),
        f"Latency of 100 tokens and answers of {LATENCY_TOKENS}, Poisson arrivals; the second token needs the KV. Two cores do not",
        "serve 200 requests/s. Baton's differences are those of the same round:",
        "",
        *table(
            f"requests/s | {' | '.join(f'{way}, ms p50 / p99' for way in ways)} | "
            + " | ".join(f"over {way}, {part}" for way in ways[:2] for part in ("p50", "p99"))
            + " | handoffs",
            [latency_row(rate, {way: taken[rate, way] for way in ways}) for rate in rates],
        ),
    ]


def cost_row(load: str, way: str, runs: Sequence[Taken]) -> list[object]:
    cells = [f"{median(one.cpu_ms[name] for one in runs):.2f}" if name in runs[0].cpu_ms else "" for name in PROCESSES]
    together = median(sum(one.cpu_ms.values()) for one in runs)
    return [load, way, *cells, f"{together:.2f}", sum((one.moved for one in runs), NONE_MOVED).said]


def more_row(load: str, own: Sequence[Taken], way: str, others: Sequence[Taken]) -> list[object]:
    pairs = list(zip(own, others, strict=True))
    names = [f"{role} {kind}" for kind in (SERVER, ENGINE) for role in ROLES]
    cells = [with_interval([one.cpu_ms[name] - other.cpu_ms[name] for one, other in pairs], "+.2f") for name in names]
    return [load, way, *cells, with_interval([one.servers_ms() - other.servers_ms() for one, other in pairs], "+.2f")]


def latency_row(rate: str, by_way: Mapping[str, Sequence[Taken]]) -> list[object]:
    parts = ("p50", "p99")
    cells = [
        " / ".join(f"{median(one.latency_ms[part] for one in runs):.1f}" for part in parts) for runs in by_way.values()
    ]
    added = [
        with_interval(
            [
                one.latency_ms[part] - other.latency_ms[part]
                for one, other in zip(by_way[BATON], by_way[way], strict=True)
            ],
            "+.1f",
        )
        for way in (ASKED, VLLM)
        for part in parts
    ]
    return [rate, *cells, *added, sum((one.moved for one in by_way[BATON]), NONE_MOVED).said]
