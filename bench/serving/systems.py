"""What serves the loads of ``make bench-serving``: each system as its users start it, on all cores or GPUs of this machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import httpx
import psutil

from bench.bench_footprint import name_of
from bench.bench_worker import cpu_s
from bench.peer_checks import RunFailed
from bench.peer_routers import PEERS, Peer
from services.launcher.system.devices import engines_for
from services.launcher.system.machine import describe_machine
from services.router.telemetry.request_log import REPORT_S
from tests.outside.suite import end_tree
from tests.outside.suites.vllm_sources import sources
from tests.support.nats_server import free_port
from tests.support.system import Metrics, System

if TYPE_CHECKING:
    from bench.seeds.engines import Engines  # Imports torch.

READY_S_MAX = 480.0
POLL_S = 0.2
PROXY = Path("tests/v1/kv_connector/nixl_integration/toy_proxy_server.py")
"""vLLM's own for its NixlConnector, of its source distribution."""
ENGINE, SERVER, ROUTER, REST = "engines", "servers", "router", "other services"
GROUPS = (ENGINE, SERVER, ROUTER, REST)
LOG_SHOWN_CHARS = 3000


@dataclass(frozen=True)
class Counts:
    """What engines have counted since their start."""

    computed_tokens: float
    """Of prompts; the others were cached or handed over."""
    handoffs: float
    """Requests whose KV was read from another engine (vLLM's connector counts the reads of its engines)."""
    handoff_bytes: float

    def since(self, before: Counts) -> Counts:
        return Counts(
            self.computed_tokens - before.computed_tokens,
            self.handoffs - before.handoffs,
            self.handoff_bytes - before.handoff_bytes,
        )


@dataclass(frozen=True)
class Contender:
    """A system that runs, as clients see it."""

    name: str
    url: str
    model: str
    counts: Callable[[], Counts]
    processes: Mapping[str, list[psutil.Process]]
    """By what they are, such as ``router``."""
    headers: dict[str, str] = field(default_factory=dict)
    hands_over: bool = False
    """A run without a handoff means nothing."""

    def cpu_s(self) -> dict[tuple[str, int], float]:
        """CPU seconds of each process since its start; without those that have ended, as a worker's trials do."""
        found: dict[tuple[str, int], float] = {}
        for what, those in self.processes.items():
            for one in those:
                with contextlib.suppress(OSError):
                    found[what, one.pid] = cpu_s(one.pid)
        return found

    def used_s(self, before: Mapping[tuple[str, int], float]) -> dict[str, float]:
        """CPU seconds since ``cpu_s`` said ``before``, by what the processes are."""
        used = dict.fromkeys(self.processes, 0.0)
        for (what, pid), now_s in self.cpu_s().items():
            used[what] += now_s - before.get((what, pid), now_s)
        return used


class Fleet(Protocol):
    """Engines that run together, behind one system or several that take turns."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def running(self, on: Engines) -> contextlib.AbstractContextManager[list[Contender]]:
        """Started and answering, until the block ends. Raises RunFailed."""
        ...


# ---- vLLM's own servers, with and without a router or proxy


class Servers:
    """vLLM's servers, and what stands before them."""

    def __init__(self, on: Engines, folder: Path, stack: ExitStack) -> None:
        self._on = on
        self._folder = folder
        self._stack = stack
        self._running: dict[int, tuple[subprocess.Popen[bytes], Path]] = {}
        """By port."""
        self._engines: list[int] = []

    def launch(self, command: list[str], port: int, **environ: str) -> None:
        """Raises OSError."""
        log = self._folder / f"{port}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(command, env={**os.environ, **environ}, stdout=out, stderr=out)
        self._stack.callback(end_tree, process)
        self._running[port] = process, log

    def start_engine(self, number: int, of: int, **settings: str) -> int:
        """The port of one of ``of`` servers that share the machine; ``settings``: more of a worker's."""
        port, on = free_port(), self._on
        kv_bytes = str(int(on.settings["kv_cache_bytes"]) * 2 // of)
        all_settings = {**on.settings_of("both"), "kv_cache_bytes": kv_bytes, **settings}
        if on.gpus:
            gpus = on.gpus[:2] if of == 1 else (on.gpus[number % len(on.gpus)],)
            all_settings["tensor_parallel_size"] = str(len(gpus))
            place = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        else:
            all_settings["cpu_cores"] = f"{number + 1}/{of}"
            place = {}
        variables = {f"WORKER_{name.upper()}": value for name, value in all_settings.items()}
        self.launch([sys.executable, "-m", "bench.plain_vllm", f"--port={port}"], port, **place, **variables)
        self._engines.append(port)
        return port

    def wait(self, port: int, path: str = "/health") -> str:
        """Until it answers; its URL. Raises RunFailed."""
        process, log = self._running[port]
        until, url = time.monotonic() + READY_S_MAX, f"http://127.0.0.1:{port}"
        while time.monotonic() < until and process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}{path}", trust_env=False).is_success:
                    return url
            time.sleep(POLL_S)
        raise RunFailed(f"{process.args!r} did not start: {log.read_text(errors='replace')[-LOG_SHOWN_CHARS:]}")

    def contender(self, name: str, port: int, *, hands_over: bool = False) -> Contender:
        """``port``: the router's, or the only engine's."""
        processes: dict[str, list[psutil.Process]] = {ENGINE: [], SERVER: []}
        for engine in self._engines:
            server = psutil.Process(self._running[engine][0].pid)
            processes[SERVER].append(server)
            processes[ENGINE] += [one for one in server.children(recursive=True) if is_engine(one)]
        if port not in self._engines:
            root = psutil.Process(self._running[port][0].pid)
            processes[ROUTER] = [root, *root.children(recursive=True)]
        model = self._on.settings["served_model_name"]
        return Contender(name, f"http://127.0.0.1:{port}", model, self._counts, processes, hands_over=hands_over)

    def _counts(self) -> Counts:
        urls = (f"http://127.0.0.1:{port}/metrics" for port in self._engines)
        found = [Metrics(httpx.get(url, trust_env=False).raise_for_status().text) for url in urls]
        return Counts(
            sum(one.sum("vllm:prompt_tokens_by_source_total", source="local_compute") for one in found),
            sum(one.sum("vllm:nixl_xfer_time_seconds_count") for one in found),
            sum(one.sum("vllm:nixl_bytes_transferred_sum") for one in found),
        )


def is_engine(process: psutil.Process) -> bool:
    """Python's resource tracker is a child, too."""
    return "resource_tracker" not in " ".join(process.cmdline())


@contextmanager
def servers(on: Engines) -> Iterator[Servers]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        yield Servers(on, folder, stack)


class OneEngine:
    """One engine with the whole machine."""

    names = ("vllm serve",)

    @contextmanager
    def running(self, on: Engines) -> Iterator[list[Contender]]:
        with servers(on) as those:
            port = those.start_engine(0, 1)
            those.wait(port)
            yield [those.contender(self.names[0], port)]


class TwoRouted:
    """Two engines that do both, behind the routers of other projects."""

    names = tuple(peer.name for peer in PEERS)

    @contextmanager
    def running(self, on: Engines) -> Iterator[list[Contender]]:
        with servers(on) as those:
            engines = [those.start_engine(number, 2) for number in range(2)]
            for engine in engines:
                those.wait(engine)
            yield [self._routed(those, peer, engines) for peer in PEERS]

    @staticmethod
    def _routed(those: Servers, peer: Peer, engines: list[int]) -> Contender:
        port = free_port()
        those.launch(peer.whole_command(port, free_port(), engines), port)
        those.wait(port)
        return those.contender(peer.name, port)


class VllmApart:
    """A prefill and a decode engine with vLLM's connector, behind vLLM's own proxy."""

    names = ("vLLM's P/D proxy",)

    @contextmanager
    def running(self, on: Engines) -> Iterator[list[Contender]]:
        with servers(on) as those:
            prefill, decode = (those.start_engine(number, 2, connector="upstream") for number in range(2))
            for engine in (prefill, decode):
                those.wait(engine)
            port = free_port()
            proxy = [sys.executable, str(sources(fetched()) / PROXY), "--port", str(port)]
            for role, engine in (("prefiller", prefill), ("decoder", decode)):
                proxy += [f"--{role}-host", "127.0.0.1", f"--{role}-port", str(engine)]
            those.launch(proxy, port)
            those.wait(port, "/healthcheck")
            yield [those.contender(self.names[0], port, hands_over=True)]


def fetched() -> Path:
    folder = Path(".outside/vllm-sources").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# ---- Baton


NO_HEADERS: Mapping[str, str] = {}
DISAGGREGATE = {"x-baton-mode": "disaggregated"}


class Baton:
    """``baton up``, whole: NATS with TLS and keys, orchestrator, collector, router and workers."""

    def __init__(self, name: str, *fleet: str, headers: Mapping[str, str] = NO_HEADERS) -> None:
        """``fleet``: options of ``baton up``."""
        self.names = (name,)
        self._fleet = fleet
        self._headers = headers

    @contextmanager
    def running(self, on: Engines) -> Iterator[list[Contender]]:
        settings, workers = on.settings, self._workers()
        kv_cache = f"{(int(settings['kv_cache_bytes']) * 2 // workers) >> 20}M"
        arguments = ["--model", settings["model"], "--alias", settings["served_model_name"], "--kv-cache", kv_cache]
        if args := settings.get("engine_args"):
            arguments += ["--engine-args", args]
        environ = {"WORKER_MAX_MODEL_LEN": settings["max_model_len"]}
        with tempfile.TemporaryDirectory() as folder:
            try:
                with System(Path(folder), *self._fleet, *arguments, env=environ) as system:
                    system.wait_ready(READY_S_MAX)
                    system.until_exact(workers)
                    yield [
                        Contender(
                            self.names[0],
                            system.endpoint,
                            settings["served_model_name"],
                            lambda: counts_of(system),
                            processes_of(system),
                            headers=dict(self._headers),
                            hands_over=self._headers == DISAGGREGATE,
                        )
                    ]
            except AssertionError as failed:
                raise RunFailed(str(failed)) from failed

    def _workers(self) -> int:
        """How many there will be."""
        numbers = self._fleet[1::2]
        return engines_for(describe_machine(), 1) if numbers == ("auto",) else sum(map(int, numbers))


def processes_of(system: System) -> dict[str, list[psutil.Process]]:
    """By what they are; those of workers together."""
    found: dict[str, list[psutil.Process]] = {}
    for process in system.processes():
        name = name_of(process)
        if "EngineCore" in name:
            name = ENGINE
        elif "-m services.worker" in " ".join(process.cmdline()):
            name = SERVER
        found.setdefault(name, []).append(process)
    return found


def counts_of(system: System) -> Counts:
    time.sleep(2 * REPORT_S)  # Until then routers report the last handoffs.
    metrics = system.settled_metrics()
    return Counts(
        metrics.sum("baton_worker_prompt_tokens_total", source="computed"),
        metrics.sum("baton_fleet_handoffs_total"),
        metrics.sum("baton_worker_kv_received_bytes_total"),
    )


TWO, APART, AUTO = "Baton --both 2", "Baton 1P1D", "Baton --both auto"
ENGINES_OF_BOTH = Baton(TWO, "--both", "2")
ENGINES_APART = Baton(APART, "--prefill", "1", "--decode", "1", headers=DISAGGREGATE)
FLEETS: tuple[Fleet, ...] = (
    OneEngine(),
    TwoRouted(),
    VllmApart(),
    ENGINES_OF_BOTH,
    ENGINES_APART,
    Baton(AUTO, "--both", "auto"),
)
NAMES = tuple(name for fleet in FLEETS for name in fleet.names)
DISAGGREGATED = (*VllmApart.names, APART)
"""All requests are handed over."""
