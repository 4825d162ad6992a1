"""Cost of telemetry in a router: ``python -m bench.bench_telemetry [--rounds 40] [--out docs/benchmarks/telemetry.md]``.

Three routers before one fleet of nearly instant simulated workers: one without telemetry; one with an
OTLP receiver and default settings, scraped by Prometheus; and one that traces every request. They serve
in turn, in short rounds in changing order, so that other load affects them alike. It counts the
CPU time of each router's threads, exporters included, in nanoseconds from the kernel's scheduler.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import random
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import uvloop

from bench import load_client
from bench.bench_router import OTHER_CORE, ROUTER, ROUTER_CORE, System, pin, show, wait_for
from tests.support.nats_server import NatsServer, free_port
from tests.support.otlp_receiver import OtlpReceiver

OUT = Path("docs/benchmarks/telemetry.md")
COMMAND = "make bench-telemetry"
SCRAPE_S = 5.0
"""As in observability/prometheus/prometheus.yaml."""
OPENMETRICS = "application/openmetrics-text;version=1.0.0"
OFF, DEFAULT, ALL = "off", "default", "every request traced"
SEED = 7
RESAMPLES = 4000
ALL_EVERY = 4
"""Every so many rounds the router that traces everything has its turn."""
COMMON: dict[str, Any] = vars(load_client.make_parser().parse_args(["--port=0"])) | {"connections": 32, "warm_up": 0.05}
KINDS: dict[str, dict[str, Any]] = {
    "short requests, 16 tokens": {},
    "streams of 128 tokens": {"connections": 16, "stream": True, "max_tokens": 128},
}


@dataclass
class Router:
    """One of the three."""

    port: int
    pid: int
    us: dict[str, list[float]] = field(default_factory=dict)
    """CPU microseconds per request, of each round, by kind of request."""
    runs: Iterator[int] = field(default_factory=count)

    def cpu_ns(self) -> int:
        """CPU of all live threads."""
        threads = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads)

    def round(self, kind: str, seconds: float) -> None:
        """Serve for a while. Idle CPU is not subtracted: it is the same for all."""
        before = self.cpu_ns()
        asked = argparse.Namespace(
            **COMMON | KINDS[kind] | {"port": self.port, "seconds": seconds, "seed": f"{self.port} {next(self.runs)}"}
        )
        result = uvloop.run(load_client.run(asked))
        assert not result["errors"], result["first_error"]
        self.us.setdefault(kind, []).append((self.cpu_ns() - before) / 1e3 / result["sent"])


@contextlib.contextmanager
def three_routers(receiver: OtlpReceiver) -> Iterator[dict[str, Router]]:
    """On one core, before one fleet."""
    with tempfile.TemporaryDirectory() as scratch, NatsServer(Path(scratch), has_buckets=True) as nats:
        pin(nats.pid, OTHER_CORE)
        pin(os.getpid(), OTHER_CORE)
        system = System(Path(scratch), nats.url)
        try:
            system.start_fleet(1)
            routers = {OFF: Router(system.port, system.router_pid)}
            for name, ratio in ((DEFAULT, ""), (ALL, "1")):
                port = free_port()
                tracing = {"BATON_OTLP_ENDPOINT": receiver.endpoint, "BATON_TRACE_SAMPLE_RATIO": ratio}
                of_router = {"ROUTER_PORT": str(port), "ROUTER_LOG_REQUESTS": "false"}
                pid = system.start(ROUTER_CORE, *ROUTER, **of_router, **tracing)
                wait_for(f"http://127.0.0.1:{port}/metrics", exact=2)
                routers[name] = Router(port, pid)
            yield routers
        finally:
            system.stop()


@contextlib.contextmanager
def scraped(port: int) -> Iterator[None]:
    """As a Prometheus does."""
    over = threading.Event()

    def scrape() -> None:
        asked = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers={"accept": OPENMETRICS})
        while not over.wait(SCRAPE_S):
            with urllib.request.urlopen(asked, timeout=SCRAPE_S) as answer:
                answer.read()

    scraping = threading.Thread(target=scrape)
    scraping.start()
    try:
        yield
    finally:
        over.set()
        scraping.join()


def measure(rounds: int, seconds: float) -> tuple[dict[str, Router], int]:
    """The routers with all their rounds, and the number of spans received."""
    dice = random.Random(SEED)
    with OtlpReceiver() as receiver, three_routers(receiver) as routers, scraped(routers[DEFAULT].port):
        for kind in KINDS:
            for router in routers.values():  # Warm, and not counted.
                router.round(kind, seconds)
                router.us[kind].clear()
            for number in range(rounds):
                names = [OFF, DEFAULT] if number % ALL_EVERY else [OFF, DEFAULT, ALL]
                for name in dice.sample(names, len(names)):
                    routers[name].round(kind, seconds)
        time.sleep(2.0)
        return routers, len(receiver.spans)


def more(base: list[float], other: list[float]) -> tuple[float, float, float]:
    """Relative difference of medians, with its 95 % bootstrap interval over paired rounds."""
    dice, pairs = random.Random(SEED), list(zip(base, other, strict=True))

    def share(drawn: list[tuple[float, float]]) -> float:
        return statistics.median(two for _, two in drawn) / statistics.median(one for one, _ in drawn) - 1.0

    resampled = sorted(share(dice.choices(pairs, k=len(pairs))) for _ in range(RESAMPLES))
    return share(pairs), resampled[int(0.025 * RESAMPLES)], resampled[int(0.975 * RESAMPLES)]


def table(routers: dict[str, Router]) -> list[str]:
    """A row for each kind and router."""
    rows = []
    for kind in KINDS:
        base = routers[OFF].us[kind]
        for name, router in routers.items():
            share, least, most = more(base if name != ALL else base[::ALL_EVERY], router.us[kind])
            against = "" if name == OFF else f"{share:+.1%} ({least:+.1%} to {most:+.1%})"
            rows.append(show(f"| {kind} | {name} | {statistics.median(router.us[kind]):.1f} | {against} |"))
    return rows


def page(rows: list[str], rounds: int, seconds: float) -> str:
    """The page in docs."""
    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in cpus if "model name" in line), "?")
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return "\n".join(
        [
            "# Cost of telemetry in a router",
            "",
            f"`{COMMAND}`, {when}, on {os.cpu_count()} x {model}, Python {platform.python_version()}.",
            "Three routers before one fleet (1P+1D) of nearly instant simulated workers, in turns, in rounds of",
            f"{seconds:g} s in changing order, {rounds} of off and default each. CPU is the time of all threads of the router's process,",
            "exporters included. *Off*: no OTLP receiver, no scraping. *Default*: an OTLP receiver is configured and",
            "Prometheus scrapes every 5 s; 1 % of the requests are traced, plus slow, failed and resumed ones.",
            "Intervals: 95 %, bootstrap over paired rounds.",
            "",
            "| requests | telemetry | router CPU µs per request | against off |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    routers, spans = measure(arguments.rounds, arguments.seconds)
    text = page(table(routers), arguments.rounds, arguments.seconds)
    print(f"{text}\n{spans} spans came")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(text)


if __name__ == "__main__":
    main()
