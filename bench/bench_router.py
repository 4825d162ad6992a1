"""Cost of the router: ``python -m bench.bench_router [--quick] [--out docs/benchmarks/router.md]``.

A real nats-server, a real router alone on the first core, nearly instant simulated workers and the load client
on the second. The router's CPU seconds (user and system, from /proc) per request and per relayed event do not depend on
the workers' or the client's speed; latencies are compared with the same engine directly behind uvicorn. Prompts are prose
that no engine has, and a run in which the KV of a request did not move ends with status 1 and writes no page.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.handoffs import HandoffTap, Moved, check_moved, moved
from bench.kv_bench_page import Measured, commit, measuring, with_interval
from bench.kv_bench_page import page as page_of
from bench.peer_checks import RunFailed, check_answers
from tests.support.nats_server import NatsServer, free_port

ROUTER_CORE, OTHER_CORE = "0", "1"
READY_S_MAX = 120.0
IDLE_S, IDLE_WINDOWS, IDLE_WINDOWS_MAX = 1.5, 3, 12
FALLEN_SHARE = 0.8
"""A smaller fall is noise."""
LOG_SHOWN_CHARS = 3000
SHORT_TOKENS, LONG_TOKENS = 100, 8000
CHECKOUT = Path(__file__).resolve().parents[1]
FAST = {
    "WORKER_ENGINE": "simulated",
    "WORKER_LEGS_MAX": "4096",
    "WORKER_SIMULATED": "instant,prefill_tokens_per_s=2000000,prefill_base_s=0.00002,decode_base_s=0.00002,transfer=auto",
}
"""Nearly instant: the speed of an engine that takes no time at all cannot be learned."""
COMMAND = "make bench-router"
OUT = Path("docs/benchmarks/router.md")
ROUNDS = 6
"""The fewest with which the sign test gives a 95 % interval."""
ROUTER = ("-m", "services.router")
STREAM_TOKENS = 256
NATS_THREADS = {"GOMAXPROCS": "1"}
"""As ``baton up`` starts nats-server on two cores."""
LATENCY_TOKENS = 2
"""The decode engine needs the KV for the second token; the first one comes with it."""
CACHED_PROMPTS = 8
"""In turn: after the first turn both engines have them."""
WARM_UP_REQUESTS = 200
NONE_MOVED = Moved(0, 0, 0)


class System:
    """Processes of one run; the router's CPU time."""

    def __init__(
        self, directory: Path, nats_url: str, checkout: Path = CHECKOUT, handoffs: HandoffTap | None = None
    ) -> None:
        """``checkout``: of the router and its workers, with its ``.venv``. ``handoffs``: what hears of Baton's."""
        self._directory = directory
        self._checkout = checkout
        self.nats_url = nats_url
        self.handoffs = handoffs
        self._environ = {**os.environ, **FAST, "BATON_NATS_URL": nats_url, "BATON_LOG_LEVEL": "warning"}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: dict[int, Path] = {}
        self.port = free_port()
        self.router_pid = 0
        self.nats_pid = 0
        """0: no NATS is used."""
        self.worker_pids: dict[str, int] = {}
        self.idle_cpu = 0.0
        """CPU seconds per second of an idle router."""

    def start(self, core: str, *command: str, **variables: str) -> int:
        """Start the checkout's Python with these arguments."""
        python = sys.executable if self._checkout == CHECKOUT else str(self._checkout / ".venv/bin/python")
        return self.launch(core, [python, *command], **variables)

    def launch(self, core: str, command: list[str], **variables: str) -> int:
        log = (self._directory / f"{len(self._processes)}.log").open("wb")
        process = subprocess.Popen(
            ["taskset", "-c", core, *command],
            env={**self._environ, "PYTHONPATH": str(self._checkout), **variables},
            cwd=self._checkout,
            stderr=log,
            stdout=log,
        )
        self._processes.append(process)
        self._logs[process.pid] = Path(log.name)
        return process.pid

    def router_log(self) -> str:
        """The end of what the router has logged."""
        return self._logs[self.router_pid].read_text()[-LOG_SHOWN_CHARS:]

    def start_fleet(self, pairs: int, router: Sequence[str] = ROUTER) -> None:
        for number in range(pairs):
            for role in ("prefill", "decode"):
                name = f"{role}-{number}"
                self.worker_pids[name] = self.start(
                    OTHER_CORE, "-m", "services.worker", WORKER_ROLE=role, WORKER_WORKER_ID=name
                )
        self.router_pid = self.start(ROUTER_CORE, *router, ROUTER_PORT=str(self.port), ROUTER_LOG_REQUESTS="false")
        wait_for(f"http://127.0.0.1:{self.port}/ready")
        wait_for(f"http://127.0.0.1:{self.port}/metrics", exact=2 * pairs)
        self.await_answers()

    def await_answers(self) -> None:
        """Until the router has found its engines, and has reported the requests that tried that."""
        sent = await_answers(self.port)
        if self.handoffs is not None:
            self.handoffs.reported(0, sent)

    def cpu_s(self) -> float:
        """CPU of all live threads of the router."""
        return cpu_s_of(self.router_pid)

    def worked_s(self, before: float, begun_at: float) -> float:
        """CPU since then, when ``cpu_s`` was ``before``, without the idle share. Raises RunFailed."""
        used_s, idle_s = self.cpu_s() - before, self.idle_cpu * (time.monotonic() - begun_at)
        if used_s <= idle_s:
            raise RunFailed(f"the router used {used_s:.3f} s of CPU, and would use {idle_s:.3f} s while idle")
        return used_s - idle_s

    def rss_mb(self) -> float:
        return rss_bytes_of(self.router_pid) / 1024 / 1024

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


def measure_idle(systems: Sequence[System]) -> None:
    """Of all their routers at once: the least of some windows, as many as it takes until none uses less and less. A router
    that answers may still load its tokenizers, on a busy machine for long.
    """
    windows: list[list[float]] = []
    while len(windows) < IDLE_WINDOWS or (is_falling(windows) and len(windows) < IDLE_WINDOWS_MAX):
        before = [system.cpu_s() for system in systems]
        time.sleep(IDLE_S)
        windows.append([system.cpu_s() - begun for system, begun in zip(systems, before, strict=True)])
    for system, used_s in zip(systems, zip(*windows, strict=True), strict=True):
        system.idle_cpu = min(used_s) / IDLE_S


def is_falling(windows: Sequence[Sequence[float]]) -> bool:
    """Whether one of them used less in the last window than in each before."""
    return any(last < FALLEN_SHARE * min(before) for *before, last in zip(*windows, strict=True))


def cpu_s_of(pid: int) -> float:
    """CPU of all live threads of a process, exact to the nanosecond (``stat`` counts in steps of 10 ms)."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def rss_bytes_of(pid: int) -> int:
    """Resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def wait_for(url: str, *, exact: int = 0, s_max: float = READY_S_MAX) -> None:
    """Wait until the URL answers and, for /metrics, reports the expected number of exact index entries."""
    deadline = time.monotonic() + s_max
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as answer:
            lines = answer.read().decode().splitlines()
            if sum('state="exact"' in line and line.endswith("} 1.0") for line in lines) >= exact:
                return
        time.sleep(0.1)
    raise RuntimeError(f"{url} was not ready within {s_max} s")


def await_answers(port: int) -> int:
    """Until the router has found its engines; returns how many requests tried that."""
    deadline, sent = time.monotonic() + READY_S_MAX, 0
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            wait_for(f"http://127.0.0.1:{port}/health")
            sent += 1
            if not load(port, requests=1, seed="first answer")["errors"]:
                return sent
        time.sleep(0.2)
    raise RunFailed(f"the router on port {port} served no request within {READY_S_MAX} s")


def load(port: int, *, core: str = OTHER_CORE, **options: Any) -> dict[str, Any]:
    """Run the load client once, on this core."""
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not True]
    arguments += [f"--{name}" for name, value in options.items() if value is True]
    client = ["taskset", "-c", core, sys.executable, "-m", "bench.load_client", f"--port={port}", *arguments]
    return json.loads(subprocess.run(client, check=True, capture_output=True).stdout)


def send(system: System, *, moves: bool = True, **options: Any) -> tuple[dict[str, Any], Moved]:
    """Run the load client once at Baton's router. ``moves``: each request must move KV. Raises RunFailed."""
    assert system.handoffs is not None
    since = system.handoffs.seen
    result = load(system.port, **options)
    check_answers(result, options.get("requests", 0))
    finished = system.handoffs.reported(since, result["sent"])
    return result, check_moved(finished, result["sent"]) if moves else moved(finished)


def cost(system: System, **options: Any) -> tuple[dict[str, Any], Moved]:
    """``send`` with the router's CPU time minus its idle share. Raises RunFailed."""
    before, begun_at = system.cpu_s(), time.monotonic()
    result, handoffs = send(system, **options)
    result["cpu_s"] = system.worked_s(before, begun_at)
    return result, handoffs


def pin(pid: int, *cores: str | int) -> None:
    """Pin all threads of a process to these cores."""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), set(map(int, cores)))


def floor(url: str, rate: int) -> dict[str, float]:
    """A bare NATS round trip between the two cores, at this rate."""
    pinger = ["taskset", "-c", ROUTER_CORE, sys.executable, "-m", "bench.nats_floor"]
    command = [*pinger, f"--url={url}", f"--rate={rate}", f"--echo-core={OTHER_CORE}"]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


@contextlib.contextmanager
def running(pairs: int, checkout: Path = CHECKOUT, router: Sequence[str] = ROUTER) -> Iterator[System]:
    """``started``, with what its router uses while idle."""
    with started(pairs, checkout, router) as system:
        measure_idle([system])
        yield system


@contextlib.contextmanager
def started(pairs: int, checkout: Path = CHECKOUT, router: Sequence[str] = ROUTER) -> Iterator[System]:
    """``router``: what the checkout's Python runs."""
    with (
        tempfile.TemporaryDirectory() as scratch,
        NatsServer(Path(scratch), has_buckets=True, env=NATS_THREADS) as nats,
        HandoffTap(nats.url, {int(OTHER_CORE)}) as handoffs,
    ):
        pin(nats.pid, OTHER_CORE)
        system = System(Path(scratch), nats.url, checkout, handoffs)
        system.nats_pid = nats.pid
        try:
            system.start_fleet(pairs, router)
            yield system
        finally:
            system.stop()


@dataclass(frozen=True)
class Prompts:
    """The requests of one row."""

    tokens: int
    connections: int
    """Fewer for long prompts, of which the engines' caches hold few."""
    requests: int
    cached: bool = False
    """Prompts that both engines have cached, so that no KV moves."""

    @property
    def label(self) -> str:
        return f"{self.tokens:,} tokens{', KV cached on both engines' if self.cached else ''}"

    @property
    def options(self) -> dict[str, Any]:
        options = {"connections": self.connections, "requests": self.requests, "prompt_tokens": self.tokens}
        return options | ({"prompts": CACHED_PROMPTS} if self.cached else {})


def prompts_of(quick: bool) -> list[Prompts]:
    """About eight seconds each on a processor of 2022, or two."""
    part = 4 if quick else 1
    return [
        Prompts(SHORT_TOKENS, 64, 4800 // part, cached=True),
        Prompts(SHORT_TOKENS, 64, 4800 // part),
        Prompts(500, 64, 2400 // part),
        Prompts(2000, 64, 800 // part),
        Prompts(LONG_TOKENS, 16, 240 // part),
        Prompts(30_000, 4, 64 // part),
    ]


def measure_requests(pairs: int, *, quick: bool) -> list[str]:
    rows = []
    with running(pairs) as system:
        print(f"{pairs}P+{pairs}D: idle CPU {system.idle_cpu:.1%}", file=sys.stderr)
        warm_up(system)
        for number, prompts in enumerate(prompts_of(quick)):
            if prompts.cached:
                send(system, moves=False, seed=number, **prompts.options)
            result, found = cost(system, moves=not prompts.cached, seed=number, **prompts.options)
            per_request = result["cpu_s"] / result["ended"] * 1e3
            row = (
                f"| {pairs}P+{pairs}D | {prompts.label} | {prompts.connections} | {result['requests_per_s']:.0f}"
                f" | {per_request:.3f} | {result['latency_ms']['p50']:.1f} / {result['latency_ms']['p99']:.1f}"
                f" | {found.said} | {system.rss_mb():.0f} |"
            )
            rows.append(show(row))
    return rows


def warm_up(system: System) -> None:
    send(system, seed="warm-up", connections=16, requests=WARM_UP_REQUESTS, prompt_tokens=SHORT_TOKENS)


def measure_streams(*, quick: bool) -> list[str]:
    rows = []
    with running(1) as system:
        warm_up(system)
        for streams in (16, 64, 256):
            options = {"connections": streams, "requests": max(2 * streams, 256 if quick else 1024), "seed": streams}
            result, found = cost(system, stream=True, max_tokens=STREAM_TOKENS, prompt_tokens=SHORT_TOKENS, **options)
            events = result["ended"] * (STREAM_TOKENS + 1)
            rows.append(
                show(
                    f"| {streams} | {result['events_per_s']:.0f} | {result['cpu_s'] / events * 1e5:.2f}"
                    f" | {result['first_event_ms'].get('p50', 0):.1f} | {found.said} |"
                )
            )
    return rows


def measure_latency(seconds: float, rounds: int) -> list[str]:
    """Direct and routed runs with the same arrivals take turns, so that their differences are paired by round."""
    rows = []
    with running(1) as system:
        direct = free_port()
        system.start(OTHER_CORE, "-m", "bench.direct_engine", f"--port={direct}")
        wait_for(f"http://127.0.0.1:{direct}/health")
        warm_up(system)
        for rate, tokens in ((50, SHORT_TOKENS), (200, SHORT_TOKENS), (50, 500), (10, LONG_TOKENS)):
            alone, routed, handoffs = [], [], []
            for number in range(rounds):
                options = {
                    "connections": 64,
                    "rate": rate,
                    "seconds": seconds,
                    "prompt_tokens": tokens,
                    "seed": f"{rate} {tokens} {number}",
                    "max_tokens": LATENCY_TOKENS,
                }
                for is_direct in (False, True) if number % 2 else (True, False):
                    if is_direct:
                        result = load(direct, **options)
                        check_answers(result)
                        alone.append(result["latency_ms"])
                    else:
                        result, found = send(system, **options)
                        routed.append(result["latency_ms"])
                        handoffs.append(found)
            name = f"{rate} | {tokens:,} tokens"
            rows.append(show(latency_row(name, alone, routed, floor(system.nats_url, rate), handoffs)))
    return rows


def latency_row(
    name: str,
    alone: list[dict[str, float]],
    routed: list[dict[str, float]],
    bare: dict[str, float],
    handoffs: list[Moved],
) -> str:
    """Medians of the rounds, and of their differences with intervals."""
    cells = [
        " / ".join(f"{median(one[part] for one in each):.2f}" for part in ("p50", "p99")) for each in (alone, routed)
    ]
    for part in ("p50", "p99"):
        cells.append(with_interval([one[part] - other[part] for one, other in zip(routed, alone, strict=True)], ".2f"))
    return f"| {name} | {' | '.join(cells)} | {2 * bare['p50']:.2f} | {sum(handoffs, NONE_MOVED).said} |"


def show(row: str) -> str:
    print(row, file=sys.stderr)
    return row


def requests_part(_page: Path, *, quick: bool) -> list[str]:
    return [
        "## Requests, not streamed, 16 tokens",
        "",
        "Throughput is bounded by the core that workers, NATS and client share: CPU is the figure to compare.",
        "",
        "| fleet | prompt | connections | requests/s | router CPU ms per request | latency p50 / p99 ms | handoffs | router RSS MB |",
        "|---|---|---|---|---|---|---|---|",
        *measure_requests(1, quick=quick),
        *measure_requests(2, quick=quick),
    ]


def streams_part(_page: Path, *, quick: bool) -> list[str]:
    return [
        f"## Streams of {STREAM_TOKENS} tokens, prompts of {SHORT_TOKENS} tokens, 1P+1D",
        "",
        "| streams | events/s | router CPU s per 100,000 events | time to first event p50 ms | handoffs |",
        "|---|---|---|---|---|",
        *measure_streams(quick=quick),
    ]


def latency_part(_page: Path, *, quick: bool) -> list[str]:
    rounds = 2 if quick else ROUNDS
    return [
        f"## Latency, Poisson arrivals, {LATENCY_TOKENS} tokens, 1P+1D against one engine behind uvicorn",
        "",
        "Added latency includes everything that disaggregation needs: the router, four NATS hops, the second engine and its",
        "read of the KV, without which there is no second token. The last but one column is a lower bound: two round trips",
        "over this nats-server with raw sockets on both ends.",
        "",
        f"Medians of {rounds} rounds; differences are between runs of one round, with the same arrivals (sign test: with 6 rounds or",
        "more, 95 % intervals).",
        "",
        "| requests/s | prompt | direct p50 / p99 ms | through Baton p50 / p99 ms | added p50 ms | added p99 ms | two raw round trips p50 ms | handoffs |",
        "|---|---|---|---|---|---|---|---|",
        *measure_latency(1.0 if quick else 4.0, rounds),
    ]


def handoff_part(page: Path, *, quick: bool) -> list[str]:
    from bench import handoff_cost  # It runs this module's fleets.

    return handoff_cost.measure(page, quick=quick)


def engines_part(_page: Path, *, quick: bool) -> list[str]:
    from bench import engine_handoffs  # It runs this module's client and router, and imports psutil's processes.

    return engine_handoffs.measure(quick=quick)


PARTS: dict[str, Callable[..., list[str]]] = {
    "requests": requests_part,
    "handoff": handoff_part,
    "engines": engines_part,
    "streams": streams_part,
    "latency": latency_part,
}
ORDER = (*PARTS, "peers", "notes")
"""The parts of the page: ``bench.bench_peers`` measures the peers; the notes are written by hand."""
HEAD = [
    "# Cost of the router",
    "",
    f"`{COMMAND}`; one part: `ARGS='--only handoff'`; short form: `ARGS=--quick`; beside other routers: `PEERS=1`.",
    "The router alone on core 0; nats-server, nearly instant simulated workers and the load client on core 1. Every request",
    "is disaggregated: a prefill leg on one worker, a decode leg on another. Prompts are prose that no engine has, unless a",
    "row says that their KV is cached. *Handoffs* are the requests that moved KV from their prefill to their decode worker,",
    "as the router reports of each, and the bytes, of which a simulated engine counts 4,096 for a token. A run in which one",
    "of the others moved none ends without figures. CPU is user + system time of a process minus its idle share.",
]


def write_part(name: str, lines: list[str], said: str, made_by: str, path: Path) -> None:
    """Put a part into the page; the others stay. ``made_by``: command and commit, told before the page was written."""
    measured = Measured(lines=lines, said=f"{said}\n{made_by}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page_of(HEAD, {name: measured}, ORDER, path.read_text() if path.exists() else ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short runs")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    parser.add_argument("--out", type=Path, default=OUT, help="the page")
    arguments = parser.parse_args()
    if unknown := set(arguments.only.split(",")) - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    made_by = f"`{COMMAND}{' ARGS=--quick' if arguments.quick else ''}`, commit {commit()}"
    for name in arguments.only.split(","):
        try:
            with measuring() as measured:
                lines = PARTS[name](arguments.out, quick=arguments.quick)
        except RunFailed as failed:
            sys.exit(f"no figures: {failed}")
        write_part(name, lines, measured.said, made_by, arguments.out)
    print(arguments.out.read_text())


if __name__ == "__main__":
    main()
