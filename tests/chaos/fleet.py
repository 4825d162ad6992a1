"""A fleet to be broken: every service a process of its own on a real NATS, each behind a line that can be troubled."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.faults import Cast, Part
from tests.chaos.nats_proxy import Line
from tests.nats_server import NatsServer, free_port
from tests.processes import ServiceProcess

SKEWED = Path(__file__).parent / "skewed"
SKEW_S_MAX = 300.0
SET_BY_S_MAX = 60.0
UPTIME_S_MAX = 1e6
LEASE_S = 8.0
DEADLINES = {
    "ROUTER_REQUEST_S_MAX": "25",
    "ROUTER_FIRST_FRAME_S_MAX": "6",
    "ROUTER_PREFILL_S_MAX": "8",
    "ROUTER_FRAME_GAP_S_MAX": "4",
    "ROUTER_LOG_REQUESTS": "false",
}
REQUEST_S_MAX = float(DEADLINES["ROUTER_REQUEST_S_MAX"])
PACE = {
    "WORKER_ENGINE": "simulated",
    "WORKER_SIM_TRANSFER": "tcp",
    "WORKER_SIM_DECODE_BASE_S": "0.02",
    "WORKER_SIM_PREFILL_TOKENS_PER_S": "6000",
    "WORKER_KV_LEASE_S": f"{LEASE_S:g}",
    "WORKER_KV_CACHE_BYTES": str(64 * 1024 * 1024),
}
"""Slow enough that faults hit streams, with a cache small enough that blocks come and go."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Who is there."""

    prefill: int = 3
    decode: int = 3
    both: int = 2
    routers: int = 2
    orchestrators: int = 2
    proxied_share: float = 1.0
    """Of the workers, how many have a line that can be troubled; of the others, all."""
    skewed_share: float = 0.5
    """Of the workers, how many have clocks of another machine."""
    seed: int = 1
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def roles(self) -> dict[str, str]:
        """Of each worker."""
        counts = {"prefill": self.prefill, "decode": self.decode, "both": self.both}
        return {f"{role}-{n}": role for role, count in counts.items() for n in range(1, count + 1)}


class Actor:
    """One process, life after life, with the same settings."""

    def __init__(self, service: str, name: str, folder: Path, settings: dict[str, str], line: Line | None) -> None:
        self.name = name
        self.line = line
        self.lives = 0
        self._service = service
        self._folder = folder
        self._settings = settings
        self._process: ServiceProcess | None = None
        self._is_expected = False

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.process.pid

    def start(self) -> None:
        """A new life."""
        self.lives += 1
        self._is_expected = False
        self._process = ServiceProcess(self._service, self._folder / f"{self.name}-{self.lives}.log", self._settings)

    def kill(self) -> None:
        """SIGKILL, by us."""
        self._is_expected = True
        if self._process is not None:
            self._process.kill()

    def signal(self, number: int) -> None:
        """SIGSTOP, SIGCONT, or SIGTERM, after which it may go."""
        self._is_expected |= number == signal.SIGTERM
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

    def __init__(self, size: Size, nats: NatsServer, folder: Path) -> None:
        self.size = size
        self.nats = nats
        self.folder = folder
        self.actors: dict[str, Actor] = {}
        self.routers: list[tuple[str, str]] = []
        """Names and addresses."""
        self.collector_url = ""

    def cast(self) -> Cast:
        """Who may be hit."""
        names = {
            Part.WORKER: tuple(self.size.roles),
            Part.ROUTER: tuple(name for name, _ in self.routers),
            Part.ORCHESTRATOR: tuple(name for name in self.actors if name.startswith("orchestrator")),
            Part.COLLECTOR: ("collector",),
            Part.NATS: ("nats",),
        }
        proxied = frozenset(name for name, actor in self.actors.items() if actor.line is not None)
        return Cast(names=names, roles=self.size.roles, proxied=proxied)

    async def add_all(self, lines: AsyncExitStack) -> None:
        """Start everybody."""
        chance = random.Random(self.size.seed)
        for worker_id, role in self.size.roles.items():
            skewed = chance.random() < self.size.skewed_share
            clock = clock_of(chance) if skewed else {}
            proxied = chance.random() < self.size.proxied_share
            own = {**PACE, "WORKER_WORKER_ID": worker_id, "WORKER_ROLE": role, **clock}
            await self.add("worker", worker_id, own, lines if proxied else None)
        for number in range(1, self.size.routers + 1):
            name, port = f"router-{number}", free_port()
            self.routers.append((name, f"http://127.0.0.1:{port}"))
            own = {**DEADLINES, "ROUTER_PORT": str(port), "ROUTER_INSTANCE": name, **clock_of(chance)}
            await self.add("router", name, own, lines)
        for number in range(1, self.size.orchestrators + 1):
            name = f"orchestrator-{number}"
            await self.add("orchestrator", name, {"ORCHESTRATOR_INSTANCE": name, **clock_of(chance)}, lines)
        port = free_port()
        self.collector_url = f"http://127.0.0.1:{port}"
        await self.add("collector", "collector", {"COLLECTOR_PORT": str(port)}, lines)

    async def add(self, service: str, name: str, settings: Mapping[str, str], lines: AsyncExitStack | None) -> Actor:
        """One more process, behind a line of its own if ``lines`` keeps it."""
        line = None if lines is None else await lines.enter_async_context(Line(self.nats.port, name))
        url = self.nats.url if line is None else line.url
        whole = {"BATON_NATS_URL": url, **settings, **self.size.settings}
        actor = self.actors[name] = Actor(service, name, self.folder, whole, line)
        actor.start()
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
        nats = lines.enter_context(NatsServer(folder))
        fleet = Fleet(size, nats, folder)
        lines.callback(fleet.end)
        await fleet.add_all(lines)
        yield fleet
        await asyncio.sleep(0)


def clock_of(chance: random.Random) -> dict[str, str]:
    """The clock of another machine: off, started at another time, and set while the process runs."""
    numbers = (
        chance.uniform(-SKEW_S_MAX, SKEW_S_MAX),
        chance.uniform(0.0, UPTIME_S_MAX),
        chance.uniform(5.0, 30.0),
        chance.uniform(-SET_BY_S_MAX, SET_BY_S_MAX),
    )
    return {"CHAOS_CLOCK": ",".join(f"{number:.3f}" for number in numbers), "PYTHONPATH": str(SKEWED)}
