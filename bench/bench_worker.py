"""What serving through a worker adds to vLLM's own server: ``make bench-worker [ARGS="--quick"]``.

Both run the same engine with the same arguments: ``bench.plain_vllm`` behind HTTP, and a worker that gets its legs over NATS as from a router.
No router runs, and one server is idle while the other computes. The server's process has core 0 and EngineCore core 1. nats-server and the client
are on core 1 while the CPU of the server's process is measured, and on core 0 while EngineCore's and times are: what runs beside a process makes
its caches colder, and Baton has one process more there. CPU is user + system time minus the idle share. Beside each figure stands the time of
constant work on the server's core, taken just before. Each round starts all processes anew, and the servers take turns in changing order. A run in
which a request fails, or an answer has too few tokens, ends with status 1 and writes no figure.

``--gpu``: both engines on one NVIDIA GPU, with the model of ``bench.bench_kv_gpu``. All processes have cores of their own.
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
from collections.abc import AsyncIterator, Callable, Collection, Sequence
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
from services.launcher.system.machine import nvidia_smi
from shared.bus.nats_bus import connect_nats
from tests.support.nats_server import NatsServer, free_port
from tests.support.worker_processes import READY_S_MAX, start_worker, wait_ready

COMMAND = "make bench-worker"
OUT, GPU_OUT = Path("docs/benchmarks/worker.md"), Path("docs/benchmarks/worker-gpu.md")
SERVER_CORE, ENGINE_CORE = ROUTER_CORE, OTHER_CORE
ROUNDS_MIN = 5
IDLE_S = 2.0
STREAM_TOKENS = 128
AT_ONCE = (1, 16, 64)
SETTINGS = {"role": "both", "served_model_name": "baton-tiny"}
GPU_ARGS = "--load-format dummy --gpu-memory-utilization 0.2"
"""Two engines share the GPU."""
QUIET = {"BATON_LOG_LEVEL": "warning"}
VLLM, BATON = "vLLM", "Baton"
CPU_CLOCK = 2
"""CPUCLOCK_SCHED of the kernel: user + system time in nanoseconds, of threads that have ended, too."""


def cpu_s(pid: int) -> float:
    """CPU seconds of a process since its start (``stat`` counts in steps of 10 ms)."""
    return time.clock_gettime((~pid << 3) | CPU_CLOCK)


@dataclass(frozen=True)
class Place:
    """Where both servers run, and with which engine."""

    settings: dict[str, str]
    cores: dict[str, set[int]]
    """Of the server's process and of EngineCore."""
    others: set[int] = field(default_factory=set)
    """Of nats-server and this process. Empty: those of one of the two, see above."""
    engine: str = "`baton-tiny`, vLLM on a CPU"


CPU = Place({**SETTINGS, "cpu_cores": ENGINE_CORE}, {core: {int(core)} for core in (SERVER_CORE, ENGINE_CORE)})


def gpu_place(folder: Path, engine_args: str) -> Place:
    """On a machine with 8 cores or more: 2 for the server's process, 4 for EngineCore and the rest for others."""
    from bench.bench_kv_gpu import KV_BYTES, make_model  # Imports torch.

    name = nvidia_smi("--query-gpu=name", "--format=csv,noheader").partition("\n")[0]
    cores = sorted(os.sched_getaffinity(0))
    if not name or len(cores) < 8:
        raise SystemExit("--gpu needs an NVIDIA GPU and 8 cores; without it engines run on a CPU.")
    args = f"{GPU_ARGS} {engine_args}".strip()
    engine = {
        "model": str(make_model(folder)),
        "max_model_len": "16384",
        "kv_cache_bytes": str(KV_BYTES),
        "engine_args": args,
    }
    own = {SERVER_CORE: set(cores[:2]), ENGINE_CORE: set(cores[2:6])}
    said = f"a Llama of three billion parameters, vLLM on one {name} with `{args}`"
    return Place({**SETTINGS, **engine}, own, set(cores[6:]), said)


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

    def pin(self, place: Place) -> None:
        pin(self._pid, *place.cores[SERVER_CORE])
        pin(self._engine, *place.cores[ENGINE_CORE])

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
    place: Place

    def leave_alone(self, cores: Collection[str]) -> None:
        """nats-server and this process run elsewhere from now on."""
        others = self.place.others or self.place.cores[ENGINE_CORE if SERVER_CORE in cores else SERVER_CORE]
        pin(self.nats_pid, *others)
        os.sched_setaffinity(0, others)


@asynccontextmanager
async def both_running(place: Place) -> AsyncIterator[Fleet]:
    """vLLM's server and a worker, both idle."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nats = stack.enter_context(NatsServer(folder, has_buckets=True))
        port = free_port()
        plain = start_plain(folder / "vllm.log", port, place)
        stack.callback(plain.wait)
        stack.callback(plain.terminate)
        worker = start_worker(nats.url, "w1", folder, environ=QUIET, **place.settings)
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
            server.pin(place)
        fleet = Fleet(servers, nats.pid, place)
        cores = os.sched_getaffinity(0)
        try:
            yield fleet
        finally:
            os.sched_setaffinity(0, cores)  # the servers of the next round inherit it


def start_plain(log: Path, port: int, place: Place) -> subprocess.Popen[bytes]:
    environ = {**os.environ, **QUIET, **{f"WORKER_{name.upper()}": value for name, value in place.settings.items()}}
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


async def measure(loads: Sequence[Load], rounds: int, place: Place) -> Measured:
    """Raises RunFailed."""
    measured: Measured = {}
    for number in range(rounds):
        async with both_running(place) as fleet:
            for server in fleet.servers.values():
                for load in WARM_UP:
                    await server.measure(load, f"warm-up {number}")
                await server.measure_idle()
            for turn, load in enumerate(loads):
                first, second = (VLLM, BATON) if (number + turn) % 2 else (BATON, VLLM)
                runs = [((SERVER_CORE,), (first, second)), ((ENGINE_CORE,), (second, first))]
                for alone, names in [((SERVER_CORE, ENGINE_CORE), (first, second))] if place.others else runs:
                    fleet.leave_alone(alone)
                    for name in names:
                        loop_ms = calibrate()
                        try:
                            taken = await fleet.servers[name].measure(load, f"turn {number}.{alone[0]}")
                        except RunFailed as failed:
                            raise RunFailed(f"{name}, {load.label}: {failed}") from failed
                        note(taken, name, alone, loop_ms, measured)
    return measured


def note(taken: Taken, name: str, alone: Collection[str], loop_ms: float, measured: Measured) -> None:
    """Add the figures for which these cores must be left alone."""
    said = []
    for row in rows_of(taken.load):
        if row.alone in alone:
            figures = measured.setdefault((taken.load.label, row.label), {}).setdefault(name, Figures())
            figures.values.append(row.figure(taken))
            figures.loops_ms.append(loop_ms)
            said.append(f"{row.label} {figures.values[-1]:.2f} {row.unit}")
    print(f"{taken.load.label}: {name}: {', '.join(said)}", file=sys.stderr)


CORES = [
    "process has one core and EngineCore the other. nats-server and the client are on EngineCore's while the CPU of the server's process is",
    "measured, and on the server's while EngineCore's and times are: what runs beside a process makes its caches colder. The servers take",
    "turns, one computes while the other is idle, and their idle shares are taken off.",
]
GPU_CORES = [
    "process has two cores, EngineCore four, nats-server and the client the rest. The servers take turns, one computes while the other is idle,",
    "and their idle shares are taken off.",
]


def page(loads: Sequence[Load], measured: Measured, rounds: int, command: str, place: Place) -> str:
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
            f"`/v1/completions` with distinct prompts of 64 tokens, some after text that both have seen, {place.engine}. Both servers run the same engine with the same",
            "arguments, in processes of their own. vLLM: its OpenAI server behind HTTP, access log off, without KV connector and KV events. Baton: a worker",
            "with its KV connector, KV events and load reports; its legs come over NATS, as a router sends them, and no router runs. The server's",
            *(GPU_CORES if place.others else CORES),
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
    parser.add_argument("--gpu", action="store_true", help="both engines on one NVIDIA GPU")
    parser.add_argument(
        "--engine-args", default="", help="with --gpu: more arguments of `vllm serve`, for both engines"
    )
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    loads = [load for load in make_loads(arguments.quick) if arguments.only in load.label]
    rounds = 1 if arguments.quick else max(ROUNDS_MIN, arguments.rounds)
    said = " ".join([*["--gpu"] * arguments.gpu, *["--quick"] * arguments.quick])
    with tempfile.TemporaryDirectory() as folder:
        place = gpu_place(Path(folder), arguments.engine_args) if arguments.gpu else CPU
        try:
            measured = uvloop.run(measure(loads, rounds, place))
        except RunFailed as failed:
            sys.exit(f"no figures: {failed}")
    text = page(loads, measured, rounds, f'{COMMAND} ARGS="{said}"' if said else COMMAND, place)
    if not arguments.only:
        out = arguments.out or (GPU_OUT if arguments.gpu else OUT)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
