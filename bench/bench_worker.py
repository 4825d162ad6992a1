"""What serving through a worker adds to vLLM's own server: ``make bench-worker [ARGS="--quick"]``.

Both run the same engine with the same arguments: ``bench.plain_vllm`` behind HTTP, and a worker that gets its legs over NATS as from a router.
No router runs, and one server is idle while the other computes. The server's process has core 0 and EngineCore core 1. nats-server and the client
are on core 1 while the CPU of the server's process is measured, and on core 0 while EngineCore's and times are: what runs beside a process makes
its caches colder, and Baton has one process more there. CPU is user + system time minus the idle share. Beside each figure stands the time of
constant work on the server's core, taken just before. Each round starts all processes anew, and the servers take turns in changing order. A run in
which a request fails, or an answer has too few tokens, ends with status 1 and writes no figure.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import psutil
import uvloop

import shared.compiled
from bench.bench_peers import calibrate, ratio, shown
from bench.bench_router import OTHER_CORE, ROUTER_CORE, pin
from bench.kv_bench_page import commit, machine, table
from bench.peer_checks import RunFailed
from bench.worker_load import Answer, BusClient, Client, HttpClient, check, make_bodies, make_text
from shared.bus.nats_bus import connect_nats
from tests.support.nats_server import NatsServer, free_port
from tests.support.worker_processes import READY_S_MAX, start_worker, wait_ready

COMMAND = "make bench-worker"
OUT = Path("docs/benchmarks/worker.md")
SERVER_CORE, ENGINE_CORE = ROUTER_CORE, OTHER_CORE
ROUNDS_MIN = 5
IDLE_S = 2.0
STREAM_TOKENS = 128
AT_ONCE = (1, 16, 64)
SETTINGS = {"role": "both", "served_model_name": "baton-tiny", "cpu_cores": ENGINE_CORE}
QUIET = {"BATON_LOG_LEVEL": "warning"}
VLLM, BATON = "vLLM", "Baton"
CPU_CLOCK = 2
"""CPUCLOCK_SCHED of the kernel: user + system time in nanoseconds, of threads that have ended, too."""


def cpu_s(pid: int) -> float:
    """CPU seconds of a process since its start (``stat`` counts in steps of 10 ms)."""
    return time.clock_gettime((~pid << 3) | CPU_CLOCK)


@dataclass(frozen=True)
class Load:
    """The requests of one run."""

    tokens: int
    stream: bool
    at_once: int
    requests: int
    history_chars: int = 0
    """All prompts begin with the same text of so many characters, which the engine has cached."""

    @property
    def label(self) -> str:
        how = f"streams of {self.tokens} tokens" if self.stream else "answers of one token"
        history = f" to prompts with {self.history_chars // 1000} KB of known text" if self.history_chars else ""
        return f"{how}{history}, {self.at_once} at once"


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    label: str
    unit: str
    figure: Callable[[Taken], float]
    alone: str = ENGINE_CORE
    """The core on which neither nats-server nor the client runs."""


@dataclass(frozen=True)
class Taken:
    """What one run took."""

    load: Load
    server_s: float
    """CPU of the server's process; likewise of EngineCore."""
    engine_s: float
    answers: list[Answer]

    @property
    def units(self) -> int:
        """Tokens of streams, otherwise requests."""
        return len(self.answers) * (self.load.tokens if self.load.stream else 1)

    def first_ms(self) -> float:
        return statistics.median(answer.first_at - answer.begun_at for answer in self.answers) * 1e3

    def token_ms(self) -> float:
        """Between two tokens of a stream after the first; the median of the streams."""
        gaps = [(answer.ended_at - answer.first_at) / (self.load.tokens - 1) for answer in self.answers]
        return statistics.median(gaps) * 1e3

    def events(self) -> float:
        """Pieces of data for each token of a stream: below 1, several tokens came at once."""
        return sum(b"".join(answer.pieces).count(b'"text":') for answer in self.answers) / self.units


HISTORY_CHARS = 40_000
"""Ten thousand tokens."""
WARM_UP = (Load(1, False, 64, 192), Load(STREAM_TOKENS, True, 64, 64), Load(1, False, 1, 4, HISTORY_CHARS))


def make_loads(quick: bool) -> list[Load]:
    whole, streams = ((40, 160, 192), (2, 16, 64)) if quick else ((150, 480, 576), (10, 64, 128))
    return [
        *(Load(1, False, at_once, count) for at_once, count in zip(AT_ONCE, whole, strict=True)),
        *(Load(STREAM_TOKENS, True, at_once, count) for at_once, count in zip(AT_ONCE, streams, strict=True)),
        *(Load(1, False, at_once, whole[0], HISTORY_CHARS) for at_once in AT_ONCE[:2]),
    ]


def rows_of(load: Load) -> list[Row]:
    unit = "token" if load.stream else "request"
    rows = [
        Row("CPU of the server", f"µs/{unit}", lambda taken: taken.server_s / taken.units * 1e6, SERVER_CORE),
        Row("CPU of EngineCore", f"µs/{unit}", lambda taken: taken.engine_s / taken.units * 1e6),
        Row("time to first token" if load.stream else "latency", "ms p50", Taken.first_ms),
    ]
    if load.stream:
        rows.append(Row("time per output token", "ms p50", Taken.token_ms))
        rows.append(Row("events per token", "", Taken.events))
    return rows


class Server:
    """One server process and its EngineCore."""

    def __init__(self, name: str, pid: int, client: Client) -> None:
        self.name = name
        self.client = client
        self._pid = pid
        children = psutil.Process(pid).children(recursive=True)
        self._engine = max(children, key=lambda child: child.memory_info().rss).pid
        self._idle = (0.0, 0.0)
        """CPU seconds in a second of both processes while idle."""

    def pin(self) -> None:
        pin(self._pid, SERVER_CORE)
        pin(self._engine, ENGINE_CORE)

    def cpu_s(self) -> tuple[float, float]:
        return cpu_s(self._pid), cpu_s(self._engine)

    async def measure_idle(self) -> None:
        server_s, engine_s = self.cpu_s()
        await asyncio.sleep(IDLE_S)
        now_server_s, now_engine_s = self.cpu_s()
        self._idle = (now_server_s - server_s) / IDLE_S, (now_engine_s - engine_s) / IDLE_S

    async def measure(self, load: Load, seed: str) -> Taken:
        """One run. Raises RunFailed."""
        history = make_text(load.history_chars)
        bodies = make_bodies(load.requests, tokens=load.tokens, stream=load.stream, seed=seed, history=history)
        (server_s, engine_s), begun_at = self.cpu_s(), time.perf_counter()
        answers = await self.client.run(bodies, load.at_once)
        (server_till_s, engine_till_s), took_s = self.cpu_s(), time.perf_counter() - begun_at
        check(answers, load.requests, tokens=load.tokens, stream=load.stream)
        server_idle_s, engine_idle_s = (idle * took_s for idle in self._idle)
        return Taken(load, server_till_s - server_s - server_idle_s, engine_till_s - engine_s - engine_idle_s, answers)


@dataclass
class Fleet:
    """Both servers, and what serves them."""

    servers: dict[str, Server]
    nats_pid: int

    def leave_alone(self, core: str) -> None:
        """nats-server and this process run on the other core from now on."""
        other = ENGINE_CORE if core == SERVER_CORE else SERVER_CORE
        pin(self.nats_pid, other)
        os.sched_setaffinity(0, {int(other)})


@asynccontextmanager
async def both_running() -> AsyncIterator[Fleet]:
    """vLLM's server and a worker, both idle."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nats = stack.enter_context(NatsServer(folder, has_buckets=True))
        port = free_port()
        plain = start_plain(folder / "vllm.log", port)
        stack.callback(plain.wait)
        stack.callback(plain.terminate)
        worker = start_worker(nats.url, "w1", folder, environ=QUIET, **SETTINGS)
        stack.callback(worker.kill)
        await wait_ready(nats.url, [worker])
        await listening(plain, port, folder / "vllm.log")
        bus = await connect_nats(nats.url, name="bench")
        stack.push_async_callback(bus.close)
        assert worker.record is not None
        over_bus = BusClient(bus, worker.record)
        await over_bus.open()
        servers = {VLLM: Server(VLLM, plain.pid, HttpClient(port)), BATON: Server(BATON, worker.process.pid, over_bus)}
        for server in servers.values():
            server.pin()
        fleet = Fleet(servers, nats.pid)
        cores = os.sched_getaffinity(0)
        try:
            yield fleet
        finally:
            os.sched_setaffinity(0, cores)  # the servers of the next round inherit it


def start_plain(log: Path, port: int) -> subprocess.Popen[bytes]:
    environ = {**os.environ, **QUIET, **{f"WORKER_{name.upper()}": value for name, value in SETTINGS.items()}}
    with log.open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "bench.plain_vllm", f"--port={port}"], env=environ, stdout=out, stderr=out
        )


async def listening(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Until vLLM's server accepts connections. Raises RunFailed."""
    until = time.monotonic() + READY_S_MAX
    while time.monotonic() < until and process.poll() is None:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.2)
        else:
            writer.close()
            return
    raise RunFailed(f"vLLM's server did not start: {log.read_text()[-2000:]}")


@dataclass
class Figures:
    """Of one row and one server, one of each per round."""

    values: list[float] = field(default_factory=list)
    loops_ms: list[float] = field(default_factory=list)


Measured = dict[tuple[str, str], dict[str, Figures]]
"""By load and row, then by server."""


async def measure(loads: Sequence[Load], rounds: int) -> Measured:
    """Raises RunFailed."""
    measured: Measured = {}
    for number in range(rounds):
        async with both_running() as fleet:
            for server in fleet.servers.values():
                for load in WARM_UP:
                    await server.measure(load, f"warm-up {number}")
                await server.measure_idle()
            for place, load in enumerate(loads):
                first, second = (VLLM, BATON) if (number + place) % 2 else (BATON, VLLM)
                for alone, names in ((SERVER_CORE, (first, second)), (ENGINE_CORE, (second, first))):
                    fleet.leave_alone(alone)
                    for name in names:
                        loop_ms = calibrate()
                        try:
                            taken = await fleet.servers[name].measure(load, f"turn {number}.{alone}")
                        except RunFailed as failed:
                            raise RunFailed(f"{name}, {load.label}: {failed}") from failed
                        note(taken, name, alone, loop_ms, measured)
    return measured


def note(taken: Taken, name: str, alone: str, loop_ms: float, measured: Measured) -> None:
    """Add the figures for which this core must be left alone."""
    said = []
    for row in rows_of(taken.load):
        if row.alone == alone:
            figures = measured.setdefault((taken.load.label, row.label), {}).setdefault(name, Figures())
            figures.values.append(row.figure(taken))
            figures.loops_ms.append(loop_ms)
            said.append(f"{row.label} {figures.values[-1]:.2f} {row.unit}")
    print(f"{taken.load.label}: {name}: {', '.join(said)}", file=sys.stderr)


def page(loads: Sequence[Load], measured: Measured, rounds: int, command: str) -> str:
    lines = []
    for load in loads:
        for row in rows_of(load):
            of = measured[load.label, row.label]
            cells = [f"{shown(of[name].values)} @ {statistics.median(of[name].loops_ms):.1f}" for name in (BATON, VLLM)]
            label = f"{row.label}, {row.unit}" if row.unit else row.label
            lines.append([load.label, label, *cells, ratio(of[BATON].values, of[VLLM].values)])
    form = "compiled with mypyc" if shared.compiled.IN_USE else "not compiled"
    return "\n".join(
        [
            "# What serving through a worker adds to vLLM's own server",
            "",
            f"`{command}`, commit {commit()}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, on {machine()}; load average {os.getloadavg()[1]:.1f}",
            f"(5 minutes, the benchmark included), kernel {platform.release()}; the modules that Baton compiles were {form}.",
            "",
            "`/v1/completions` with distinct prompts of 64 tokens, some behind text that both have seen, `baton-tiny`, vLLM on a CPU. Both servers run the same engine with the same",
            "arguments, in processes of their own. vLLM: its OpenAI server behind HTTP, access log off, without KV connector and KV events. Baton: a worker",
            "with its KV connector, KV events and load reports; its legs come over NATS, as a router sends them, and no router runs. The server's",
            "process has one core and EngineCore the other. nats-server and the client are on EngineCore's while the CPU of the server's process is",
            "measured, and on the server's while EngineCore's and times are: what runs beside a process makes its caches colder. The servers take",
            "turns, one computes while the other is idle, and their idle shares are taken off.",
            "",
            f"Medians of {rounds} rounds with the least and the greatest, and after @ the CPU milliseconds of constant work on the server's core before each",
            "run (median). Ratios are medians of the rounds' ratios, with the sign test's interval (at 5 rounds the least and the greatest: 94 %).",
            "Time per output token: from a stream's first token to its end, by tokens. Events per token: below 1, tokens were joined because the server was",
            "behind its engine.",
            "",
            *table("load | figure | Baton | vLLM | Baton / vLLM", lines),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer requests, one round; its figures are not precise")
    parser.add_argument("--rounds", type=int, default=ROUNDS_MIN)
    parser.add_argument("--only", default="", help="only loads whose label contains this; writes no page")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    loads = [load for load in make_loads(arguments.quick) if arguments.only in load.label]
    rounds = 1 if arguments.quick else max(ROUNDS_MIN, arguments.rounds)
    try:
        measured = uvloop.run(measure(loads, rounds))
    except RunFailed as failed:
        sys.exit(f"no figures: {failed}")
    text = page(loads, measured, rounds, f"{COMMAND} ARGS=--quick" if arguments.quick else COMMAND)
    if not arguments.only:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
