"""Cost of the router: ``python -m bench.bench_router [--quick] [--out docs/benchmarks/router.md]``.

A real nats-server, a real router alone on the first core, nearly instant simulated workers and the load client
on the second. The router's CPU seconds (user and system, from /proc) per request and per relayed event do not depend on
the workers' or the client's speed; latencies are compared with the same engine directly behind uvicorn.
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
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from bench.kv_bench_page import commit, machine, with_interval
from bench.peer_checks import RunFailed, check_answers
from tests.support.nats_server import NatsServer, free_port

ROUTER_CORE, OTHER_CORE = "0", "1"
READY_S_MAX = 60.0
IDLE_S, IDLE_WINDOWS = 1.5, 3
LOG_SHOWN_CHARS = 3000
SHORT_BYTES, LONG_BYTES = 200, 32_768
CHECKOUT = Path(__file__).resolve().parents[1]
FAST = {
    "WORKER_ENGINE": "simulated",
    "WORKER_LEGS_MAX": "4096",
    "WORKER_SIMULATED": "instant,prefill_tokens_per_s=2000000,prefill_base_s=0.00002,decode_base_s=0.00002,transfer=auto",
}
"""Nearly instant: the speed of an engine that takes no time at all cannot be learned."""
COMMAND = "make bench-router"
OTHERS = "## Beside other routers"
"""The part of the page that tells of ``bench.bench_peers``; it is kept."""
ROUNDS = 6
"""The fewest with which the sign test gives a 95 % interval."""
ROUTER = ("-m", "services.router")


class System:
    """Processes of one run; the router's CPU time."""

    def __init__(self, directory: Path, nats_url: str, checkout: Path = CHECKOUT) -> None:
        """``checkout``: of the router and its workers, with its ``.venv``."""
        self._directory = directory
        self._checkout = checkout
        self.nats_url = nats_url
        self._environ = {**os.environ, **FAST, "BATON_NATS_URL": nats_url, "BATON_LOG_LEVEL": "warning"}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: dict[int, Path] = {}
        self.port = free_port()
        self.router_pid = 0
        self.nats_pid = 0
        """0: no NATS is used."""
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
                self.start(OTHER_CORE, "-m", "services.worker", WORKER_ROLE=role, WORKER_WORKER_ID=f"{role}-{number}")
        self.router_pid = self.start(ROUTER_CORE, *router, ROUTER_PORT=str(self.port), ROUTER_LOG_REQUESTS="false")
        wait_for(f"http://127.0.0.1:{self.port}/ready")
        wait_for(f"http://127.0.0.1:{self.port}/metrics", exact=2 * pairs)
        self.measure_idle()

    def measure_idle(self) -> None:
        """The least of some windows: a router that answers may still load its tokenizers."""
        used_s = []
        for _ in range(IDLE_WINDOWS):
            before = self.cpu_s()
            time.sleep(IDLE_S)
            used_s.append(self.cpu_s() - before)
        self.idle_cpu = min(used_s) / IDLE_S

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


def cpu_s_of(pid: int) -> float:
    """CPU of all live threads of a process, exact to the nanosecond (``stat`` counts in steps of 10 ms)."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def rss_bytes_of(pid: int) -> int:
    """Resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def wait_for(url: str, *, exact: int = 0) -> None:
    """Wait until the URL answers and, for /metrics, reports the expected number of exact index entries."""
    deadline = time.monotonic() + READY_S_MAX
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=2) as answer:
            lines = answer.read().decode().splitlines()
            if sum('state="exact"' in line and line.endswith("} 1.0") for line in lines) >= exact:
                return
        time.sleep(0.1)
    raise RuntimeError(f"{url} was not ready within {READY_S_MAX} s")


def load(port: int, **options: Any) -> dict[str, Any]:
    """Run the load client once."""
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not True]
    arguments += [f"--{name}" for name, value in options.items() if value is True]
    client = ["taskset", "-c", OTHER_CORE, sys.executable, "-m", "bench.load_client", f"--port={port}", *arguments]
    return json.loads(subprocess.run(client, check=True, capture_output=True).stdout)


def cost(system: System, **options: Any) -> dict[str, Any]:
    """A closed-loop run, with the router's CPU time minus its idle share. Raises RunFailed."""
    before, begun_at = system.cpu_s(), time.monotonic()
    result = load(system.port, **options)
    check_answers(result)
    result["cpu_s"] = system.worked_s(before, begun_at)
    return result


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
    """``router``: what the checkout's Python runs."""
    with tempfile.TemporaryDirectory() as scratch, NatsServer(Path(scratch), has_buckets=True) as nats:
        pin(nats.pid, OTHER_CORE)
        system = System(Path(scratch), nats.url, checkout)
        system.nats_pid = nats.pid
        try:
            system.start_fleet(pairs, router)
            yield system
        finally:
            system.stop()


def measure_requests(pairs: int, seconds: float) -> list[str]:
    rows = []
    with running(pairs) as system:
        print(f"{pairs}P+{pairs}D: idle CPU {system.idle_cpu:.1%}", file=sys.stderr)
        for name, size in (("short", SHORT_BYTES), ("8k tokens", LONG_BYTES)):
            result = cost(system, connections=64, seconds=seconds, prompt_bytes=size)
            per_thousand = result["cpu_s"] / result["ended"] * 1000
            row = f"| {pairs}P+{pairs}D | {name} | {result['requests_per_s']:.0f} | {per_thousand:.3f} | {result['latency_ms']['p50']:.1f} / {result['latency_ms']['p99']:.1f} | {system.rss_mb():.0f} |"
            rows.append(show(row))
    return rows


def measure_streams(seconds: float) -> list[str]:
    rows = []
    with running(1) as system:
        for streams in (16, 64, 256):
            tokens = 256
            result = cost(system, connections=streams, seconds=seconds, stream=True, max_tokens=tokens)
            events = result["ended"] * (tokens + 1)
            row = f"| {streams} | {result['events_per_s']:.0f} | {result['cpu_s'] / events * 1e5:.2f} | {result['first_event_ms'].get('p50', 0):.1f} |"
            rows.append(show(row))
    return rows


def measure_latency(seconds: float, rounds: int) -> list[str]:
    """Direct and routed runs with the same arrivals take turns, so that their differences are paired by round."""
    rows = []
    with running(1) as system:
        direct = free_port()
        system.start(OTHER_CORE, "-m", "bench.direct_engine", f"--port={direct}")
        wait_for(f"http://127.0.0.1:{direct}/health")
        for rate, name, size in (
            (50, "short", SHORT_BYTES),
            (200, "short", SHORT_BYTES),
            (10, "8k tokens", LONG_BYTES),
        ):
            found: dict[int, list[dict[str, float]]] = {direct: [], system.port: []}
            for number in range(rounds):
                options = {
                    "connections": 64,
                    "rate": rate,
                    "seconds": seconds,
                    "prompt_bytes": size,
                    "seed": number + 1,
                }
                for port in (direct, system.port)[:: -1 if number % 2 else 1]:
                    result = load(port, max_tokens=1, **options)
                    check_answers(result)
                    found[port].append(result["latency_ms"])
            rows.append(
                show(latency_row(f"{rate} | {name}", found[direct], found[system.port], floor(system.nats_url, rate)))
            )
    return rows


def latency_row(
    name: str, alone: list[dict[str, float]], routed: list[dict[str, float]], bare: dict[str, float]
) -> str:
    """Medians of the rounds, and of their differences with intervals."""
    cells = [
        " / ".join(f"{median(one[part] for one in each):.2f}" for part in ("p50", "p99")) for each in (alone, routed)
    ]
    for part in ("p50", "p99"):
        cells.append(with_interval([one[part] - other[part] for one, other in zip(routed, alone, strict=True)], ".2f"))
    return f"| {name} | {' | '.join(cells)} | {2 * bare['p50']:.2f} |"


def show(row: str) -> str:
    print(row, file=sys.stderr)
    return row


def page(command: str, requests: list[str], streams: list[str], latency: list[str], rounds: int) -> str:
    return "\n".join(
        [
            "# Cost of the router",
            "",
            f"`{command}`, commit {commit()}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, on {machine()}.",
            "The router alone on core 0; nats-server, nearly instant simulated workers and the load client on core 1.",
            "Every request is disaggregated: a prefill leg on one worker, a decode leg on another. With 2P+2D the prompt",
            "is tokenized and its prefix looked up block by block; with one prefill worker there is no choice.",
            "CPU is user + system time of the router's process minus its idle share (about 1 %). Throughput is bounded",
            "by the core that workers, NATS and client share: CPU seconds are the figure to compare.",
            "",
            "## Requests, not streamed, 16 tokens, 64 connections",
            "",
            "| fleet | prompt | requests/s | router CPU s per 1,000 requests | latency p50 / p99 ms | router RSS MB |",
            "|---|---|---|---|---|---|",
            *requests,
            "",
            "## Streams of 256 tokens, short prompts, 1P+1D",
            "",
            "| streams | events/s | router CPU s per 100,000 events | time to first event p50 ms |",
            "|---|---|---|---|",
            *streams,
            "",
            "## Latency, Poisson arrivals, one token, 1P+1D against one engine behind uvicorn",
            "",
            "Added latency includes everything that disaggregation needs: the router, four NATS hops and the second engine.",
            "The last column is a lower bound: two round trips over this nats-server with raw sockets on both ends.",
            "",
            f"Medians of {rounds} rounds; differences are between runs of one round, with the same arrivals (sign test: with 6 rounds or",
            "more, 95 % intervals).",
            "",
            "| requests/s | prompt | direct p50 / p99 ms | through Baton p50 / p99 ms | added p50 ms | added p99 ms | two raw round trips p50 ms |",
            "|---|---|---|---|---|---|---|",
            *latency,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short runs")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/router.md"))
    arguments = parser.parse_args()
    seconds = 2.0 if arguments.quick else 8.0
    requests = measure_requests(1, seconds) + measure_requests(2, seconds)
    rounds = 2 if arguments.quick else ROUNDS
    command = f"{COMMAND} ARGS=--quick" if arguments.quick else COMMAND
    text = page(command, requests, measure_streams(seconds), measure_latency(seconds / 2, rounds), rounds)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    _before, heading, others = (arguments.out.read_text() if arguments.out.exists() else "").partition(OTHERS)
    arguments.out.write_text(f"{text}\n{heading}{others}" if heading else text)
    print(text)


if __name__ == "__main__":
    main()
