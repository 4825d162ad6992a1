"""A fleet for faults: every service is a process on a real NATS, each behind a proxy that can lose or delay
messages.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from services.worker.engines.simulated.core.groups import Kind
from shared.addresses import host_port
from tests.nightly.chaos.faults import STORE, Cast, Part
from tests.nightly.chaos.keys import KeysFile
from tests.nightly.chaos.nats_cluster import LOOPBACK, NatsCluster
from tests.nightly.chaos.nats_proxy import Line
from tests.nightly.chaos.oracle import ADAPTER, OTHER_MODEL, write_adapter
from tests.support.nats_server import free_port
from tests.support.processes import ServiceProcess
from tests.support.second_model import second_model

OTHER = "other"
PLANNER = {
    "ORCHESTRATOR_PLANNER": "act",
    "ORCHESTRATOR_PLANNER_TIME_SCALE": "0.1",
    "ORCHESTRATOR_PLANNER_MODELS": f'{{"{OTHER_MODEL}": {{"ttft_s": 0, "itl_s": 0}}}}',
}
"""The second model has too few workers for roles."""
STORE_SIZE = {"WORKER_STORE_MEMORY_BYTES": str(16 * 1024 * 1024), "WORKER_STORE_FILES_BYTES": str(64 * 1024 * 1024)}
SKEWED = Path(__file__).parent / "skewed"
SKEW_S_MAX, SET_BY_S_MAX = 300.0, 60.0
UPTIME_S_MAX = 1e6
LEASE_S = 8.0
DEADLINES = {
    "ROUTER_REQUEST_S_MAX": "25",
    "ROUTER_FIRST_FRAME_S_MAX": "6",
    "ROUTER_FRAME_GAP_S_MAX": "4",
    "ROUTER_LOG_REQUESTS": "false",
    "ROUTER_LEAVE_S": "2",  # Its clients look at /ready, as load balancers do.
    "ROUTER_FILES_BYTES_MAX": "10000000",
}
ROUTER_FILES_MAX = 512
"""A router's limit of file descriptors."""
REQUEST_S_MAX = float(DEADLINES["ROUTER_REQUEST_S_MAX"])
PACE = {
    "WORKER_ENGINE": "simulated",
    "WORKER_SIMULATED": "decode_base_s=0.02,prefill_tokens_per_s=20000,kv_bytes_per_token=2048",
    "WORKER_KV_LEASE_S": f"{LEASE_S:g}",
    "WORKER_KV_CACHE_BYTES": str(64 * 1024 * 1024),
}
"""Slow enough that faults hit streams, with a cache of 32,768 tokens: blocks come and go, and a large prompt fits."""


@dataclass(frozen=True, kw_only=True)
class Size:
    prefill: int = 3
    decode: int = 3
    both: int = 2
    other: int = 0
    """Workers of a second model, for prefill and decode."""
    stores: int = 0
    adapter: bool = False
    """Whether the first model's workers have a LoRA adapter."""
    keys: bool = False
    """Whether clients need API keys."""
    planner: bool = False
    """Whether orchestrators change roles by themselves, and soon."""
    routers: int = 2
    orchestrators: int = 2
    proxied_share: float = 1.0
    """Of the workers, how many have a line that can be troubled; of the others, all."""
    skewed_share: float = 0.5
    """Of the workers, how many have clocks of another machine."""
    groups: Kind = "full"
    """What the layers of the models are."""
    nats_nodes: int = 1
    host: str = LOOPBACK
    """The address of everybody."""
    seed: int = 1
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def roles(self) -> dict[str, str]:
        """Of each worker, as it begins; of those of the second model, ``other``."""
        counts = {
            "prefill": self.prefill,
            "decode": self.decode,
            "both": self.both,
            OTHER: self.other,
            STORE: self.stores,
        }
        return {f"{role}-{n}": role for role, count in counts.items() for n in range(1, count + 1)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Skew:
    """How the clocks of a process differ from ours, in seconds."""

    wall_s: float
    uptime_s: float
    """Of the monotonic clock: two machines were not started together."""
    set_after_s: float
    """From the beginning of each life until the wall clock is set, as a time service does it."""
    set_by_s: float

    def settings(self, life: int) -> dict[str, str]:
        """For the so-manieth life: the clock was set in each one before."""
        numbers = (self.wall_s + self.set_by_s * (life - 1), self.uptime_s, self.set_after_s, self.set_by_s)
        return {"CHAOS_CLOCK": ",".join(f"{number:.3f}" for number in numbers), "PYTHONPATH": str(SKEWED)}


def skew_of(chance: random.Random) -> Skew:
    """The clock of some other machine."""
    return Skew(
        wall_s=chance.uniform(-SKEW_S_MAX, SKEW_S_MAX),
        uptime_s=chance.uniform(0.0, UPTIME_S_MAX),
        set_after_s=chance.uniform(1.0, 20.0),
        set_by_s=chance.uniform(-SET_BY_S_MAX, SET_BY_S_MAX),
    )


class Actor:
    """One process, life after life, with the same settings."""

    def __init__(self, service: str, name: str, folder: Path, settings: dict[str, str], line: Line | None) -> None:
        self.name = name
        self.line = line
        self.lives = 0
        self.skew: Skew | None = None
        self._service = service
        self._folder = folder
        self._settings = settings
        self._process: ServiceProcess | None = None
        self._is_expected = False

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.process.pid

    def start(self, skew: Skew | None = None) -> None:
        """A new life; in the first one it is given its clock."""
        self.skew = self.skew or skew
        self.lives += 1
        self._is_expected = False
        settings = self._settings | (self.skew.settings(self.lives) if self.skew is not None else {})
        log = self._folder / f"{self.name}-{self.lives}.log"
        files_max = ROUTER_FILES_MAX if self._service == "router" else 0
        self._process = ServiceProcess(self._service, log, settings, files_max)

    def kill(self) -> None:
        """SIGKILL, by us."""
        self._is_expected = True
        if self._process is not None:
            self._process.kill()

    def expect_end(self) -> None:
        """It is told to leave."""
        self._is_expected = True

    def ended(self, s_max: float) -> int | None:
        """The exit code, once it has ended; None if it has not after ``s_max`` seconds."""
        assert self._process is not None
        try:
            return self._process.process.wait(s_max)
        except subprocess.TimeoutExpired:
            return None

    def signal(self, number: int) -> None:
        """SIGSTOP or SIGCONT."""
        os.kill(self.pid, number)

    def died(self) -> str:
        """What it said last, if it has ended by itself, which nothing may make a process do."""
        if self._process is None or self._is_expected or self._process.process.poll() is None:
            return ""
        log = self._process.log.read_text(errors="replace")[-2000:]
        return f"{self.name} ended by itself with {self._process.process.returncode}:\n{log}"

    def said(self) -> str:
        """The ends of the logs of all its lives."""
        logs = (self._folder / f"{self.name}-{life}.log" for life in range(1, self.lives + 1))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)


class Fleet:
    """All actors by name, and NATS."""

    def __init__(self, size: Size, nats: NatsCluster, folder: Path) -> None:
        self.size = size
        self.nats = nats
        self.folder = folder
        self.actors: dict[str, Actor] = {}
        self.routers: list[tuple[str, str]] = []
        """Names and addresses."""
        self.collector_url = ""
        self.keys = KeysFile(folder / "keys.toml") if size.keys else None

    def cast(self) -> Cast:
        """Who may be hit."""
        names = {
            Part.WORKER: tuple(self.size.roles),
            Part.ROUTER: tuple(name for name, _ in self.routers),
            Part.ORCHESTRATOR: tuple(name for name in self.actors if name.startswith("orchestrator")),
            Part.COLLECTOR: ("collector",),
            Part.NATS: ("nats",),
            Part.KEY: ("revocable",) if self.keys is not None else (),
            Part.NODE: tuple(self.nats.nodes) if len(self.nats.nodes) > 1 else (),
        }
        proxied = frozenset(name for name, actor in self.actors.items() if actor.line is not None)
        return Cast(names=names, roles=self.size.roles, proxied=proxied)

    async def add_all(self, lines: AsyncExitStack) -> None:
        """Start everybody."""
        chance, host = random.Random(self.size.seed), self.size.host
        of_roles = await asyncio.to_thread(self._of_roles)
        for worker_id, role in self.size.roles.items():
            skew = skew_of(chance) if chance.random() < self.size.skewed_share else None
            proxied = chance.random() < self.size.proxied_share
            own = {**PACE, "WORKER_WORKER_ID": worker_id, "WORKER_ROLE": role, "WORKER_KV_HOST": host}
            own["WORKER_SIMULATED"] += f",groups={self.size.groups}"
            own |= of_roles.get(role, {})
            (await self.add("worker", worker_id, own, lines if proxied else None)).start(skew)
        access = {} if self.keys is None else {"ROUTER_KEYS_FILE": str(self.keys.path), "ROUTER_METRICS": "open"}
        for number in range(1, self.size.routers + 1):
            name, port = f"router-{number}", free_port()
            self.routers.append((name, f"http://{host_port(host, port)}"))
            own = {**DEADLINES, **access, "ROUTER_HOST": host, "ROUTER_PORT": str(port), "ROUTER_INSTANCE": name}
            (await self.add("router", name, own, lines)).start(skew_of(chance))
        for number in range(1, self.size.orchestrators + 1):
            name = f"orchestrator-{number}"
            own = {"ORCHESTRATOR_INSTANCE": name, **(PLANNER if self.size.planner else {})}
            (await self.add("orchestrator", name, own, lines)).start(skew_of(chance))
        port = free_port()
        self.collector_url = f"http://{host_port(host, port)}"
        await self.add("collector", "collector", {"COLLECTOR_HOST": host, "COLLECTOR_PORT": str(port)}, lines)
        self.actors["collector"].start()

    def _of_roles(self) -> dict[str, dict[str, str]]:
        """Settings of the workers of some roles, whose files are written here."""
        own: dict[str, dict[str, str]] = {STORE: STORE_SIZE}
        own_folder = Path(tempfile.mkdtemp(prefix="models-", dir=self.folder))
        if self.size.other:
            model = second_model(own_folder)
            own[OTHER] = {"WORKER_ROLE": "both", "WORKER_MODEL": model, "WORKER_SERVED_MODEL_NAME": OTHER_MODEL}
        if self.size.adapter:
            adapters = write_adapter(own_folder).parent
            loaded = {"WORKER_LORA_DIR": str(adapters), "WORKER_LORA_ADAPTERS": f"{ADAPTER}={ADAPTER}"}
            own |= dict.fromkeys(("prefill", "decode", "both"), loaded)
        return own

    async def add(self, service: str, name: str, settings: Mapping[str, str], lines: AsyncExitStack | None) -> Actor:
        """One more process, not started, behind a line of its own if ``lines`` keeps it."""
        line = None if lines is None else await lines.enter_async_context(Line(self.nats.addresses, name))
        url = self.nats.url if line is None else line.url
        state = str(self.folder / "state" / name)
        whole = {"BATON_NATS_URL": url, "BATON_STATE_DIR": state, **settings, **self.size.settings}
        actor = self.actors[name] = Actor(service, name, self.folder, whole, line)
        return actor

    def deaths(self) -> list[str]:
        """Processes that ended by themselves."""
        return [death for actor in self.actors.values() if (death := actor.died())]

    def end(self) -> None:
        """Nobody is left."""
        for actor in self.actors.values():
            actor.kill()


@asynccontextmanager
async def running_fleet(size: Size, folder: Path) -> AsyncIterator[Fleet]:
    """All processes have been started; whether they are ready, the witness sees. What they said is in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as lines:
        nats = lines.enter_context(NatsCluster(folder, nodes=size.nats_nodes, host=size.host))
        fleet = Fleet(size, nats, folder)
        lines.callback(fleet.end)
        await fleet.add_all(lines)
        yield fleet
        await asyncio.sleep(0)
