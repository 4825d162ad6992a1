"""Every service on one memory bus in virtual time, and a sender of fuzzed messages."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from opentelemetry.trace import NoOpTracer
from prometheus_client import generate_latest

from connector.messages import EngineCall, EngineNotification
from services.collector.access import Access
from services.collector.service import Collector
from services.launcher.system.scaling import OwnWorker, steps_for
from services.orchestrator.service import Orchestrator
from services.orchestrator.settings import Settings as OrchestratorSettings
from services.router.settings import Settings as RouterSettings
from services.worker.engines.port import CURRENT_LEG, EngineTokens
from services.worker.service import run_worker
from services.worker.settings import Settings as WorkerSettings
from shared.bus.frame_sender import LegFrames
from shared.bus.port import Envelope
from shared.bus.wire import pack
from shared.contracts.channels import PLACEHOLDER, SCALE, WORKER_RECORDS, Channel, Delivery
from shared.contracts.inference import StartLeg
from shared.contracts.planning import FleetScaled, ScaleFleet
from shared.contracts.workers import Role
from shared.runtime.service import EXIT_CONFIGURATION, Service, ServiceFacts, live
from shared.runtime.settings import CommonSettings
from shared.telemetry.prometheus import to_prometheus
from tests.nightly.fuzz.mutation import Ids
from tests.support.memory_bus import MemoryBus
from tests.support.virtual_time import LoopClock
from tests.unit.router.fake_worker import SSE, FakeWorker
from tests.unit.router.world import FakeConnection, World, open_world
from tests.unit.worker.fakes import FakeEngine
from tests.unit.worker.kv_exchange.fakes import FakeExchange

REAL, PLAYED = "w1", "w2"
"""A worker with a real shell around a fake engine, and one that a test plays: its legs stay open."""
OWN = [OwnWorker("w1", Role.BOTH), OwnWorker("w2", Role.DECODE)]
IN_FLIGHT = 3
"""Requests that are under way while strangers talk."""
STAY_S_MAX = 5.0
SETTLE_S = 120.0
"""Beyond what anybody remembers of workers and requests that are gone."""
LEGS_NAMED = 4


class ForgetfulExchange(FakeExchange):
    """A KV exchange that keeps nothing between calls."""

    async def call(self, call: EngineCall) -> EngineNotification:
        return EngineNotification(handshake=self.handshake) if call.describe else EngineNotification()


async def scaled(wish: ScaleFleet, _envelope: Envelope) -> FleetScaled:
    """What a launcher makes of it."""
    steps = steps_for(wish, OWN, workers_min=1, workers_max=3)
    return FleetScaled(change=steps.start - len(steps.stop), refusal=steps.refusal)


class Engine(FakeEngine):
    """Answers whatever can be read with two tokens, and remembers nothing."""

    async def app(self, scope, receive, send) -> None:
        body, result = (await receive())["body"], CURRENT_LEG.get().result
        try:
            json.loads(body)
        except (ValueError, RecursionError):
            await send({"type": "http.response.start", "status": 400, "headers": []})
            await send({"type": "http.response.body", "body": b"{}", "more_body": False})
            return
        kind = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": kind})
        result.prompt_tokens = 7
        for token in range(2):
            result.caught_up = True
            result.token_ids.append(token)
            result.completion_tokens += 1
            await send({"type": "http.response.body", "body": b"data: x\n\n", "more_body": True})
        result.finish_reason, result.is_over = "length", True
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def tokens(self, path: str, body: bytes) -> EngineTokens:
        return EngineTokens(tokens=[1] * 64, hashes=[7, 7])


def stall(_worker: FakeWorker, _start: StartLeg, frames: LegFrames) -> None:
    frames.head(200, SSE)
    frames.data(b"data: x\n\n")


class BusWorld:
    """Who listens, and the ids by which a stranger may speak of them."""

    def __init__(self, world: World, state_dir: Path) -> None:
        self.world = world
        self.hub = world.hub
        self.ended: list[str] = []
        """Lives that ended badly."""
        self.buses: list[MemoryBus] = [world.bus]
        self.collector = Collector(self._bus(), LoopClock(), Access("127.0.0.1", ""))
        self.in_flight: list[tuple[FakeConnection, asyncio.Task[None]]] = []
        self.played: FakeWorker | None = None
        self._common = CommonSettings(state_dir=str(state_dir))
        self._service: Service | None = None
        self._is_claimed = False
        """A stranger has written the real worker's record: if that says that another process is the worker since later, the
        real one stops for good, as it should.
        """

    def _bus(self) -> MemoryBus:
        bus = MemoryBus(self.hub)
        self.buses.append(bus)
        return bus

    async def open(self, tasks: asyncio.TaskGroup) -> None:
        """Everybody listens, and two workers can be placed."""
        await self.collector.listen()
        await self._bus().answer(SCALE, scaled)
        orchestrator = Orchestrator(self._bus(), LoopClock(), "o1", OrchestratorSettings())
        ready = asyncio.Event()
        tasks.create_task(orchestrator.run(asyncio.Event(), ready.set), name="orchestrator")
        tasks.create_task(self._keep_worker(), name="worker")
        await ready.wait()
        self.played = await self.world.worker(PLAYED, script=stall)
        while REAL not in self.world.router.fleet.cluster.workers:
            await asyncio.sleep(0.1)

    async def _keep_worker(self) -> None:
        """It may be told to leave; then it comes again, as its launcher would have it."""
        while True:
            facts = ServiceFacts(name="worker", instance=REAL)
            bus = MemoryBus(self.hub)
            self._service = service = Service(facts, bus, LoopClock(), NoOpTracer())
            engine = Engine()
            engine.exchange = ForgetfulExchange(REAL)

            async def start_engine(_settings, _common, _say, *, identity, engine=engine) -> Engine:
                engine.exchange.handshake = msgspec.structs.replace(engine.exchange.handshake, epoch=identity.epoch)
                return engine

            async def main(service: Service, start_engine=start_engine) -> None:
                settings = WorkerSettings(worker_id=REAL, model="m", engine="simulated")
                await run_worker(service, settings, self._common, start_engine)

            code = await live(service, main, drain_s_max=STAY_S_MAX)
            if code == EXIT_CONFIGURATION and self._is_claimed:
                self._is_claimed = False
            elif code or bus.failed.done():
                self.ended.append(f"worker: exit code {code}, {bus.failed}")
            await asyncio.sleep(0.01)

    def ids(self) -> Ids:
        """As they are now."""
        views = self.world.router.fleet.cluster.workers
        epochs = [view.record.epoch for worker_id, view in views.items() if worker_id in (REAL, PLAYED)]
        legs = [start.leg_id for start in self.played.started[-LEGS_NAMED:]] if self.played else []
        in_flight = self.world.router.relay.in_flight
        decisions = [context.decision.decision_id for context in in_flight if context.decision is not None]
        return {
            "worker_id": [REAL, REAL, PLAYED, "stranger"],
            "reader_id": [REAL, "stranger"],
            "source_id": [REAL, "stranger"],
            "router_id": [self.world.router.router_id, "r2"],
            "epoch": [*epochs, 1],
            "leg_id": [*legs, "leg-1"],
            "decision_id": [*decisions, "d-1"],
            "seq": [0, 1, 2, 3],
            "model": ["m"],
            "models": [["m"]],
            "service": ["router", "worker"],
            "instance": [REAL, "r1"],
            "role": ["both", "prefill", "decode", "store"],
        }

    def say(self, channel: Channel[Any], payload: bytes, tree: Mapping[str, Any]) -> int:
        """Put it where it belongs by its own ids, or where a stranger would; answers how many hear it."""
        values = {part: tree.get(part) for part in channel.parts}
        named = {part: str(value) if isinstance(value, str) and value else REAL for part, value in values.items()}
        subject = PLACEHOLDER.sub(lambda found: named[found[1]], channel.subject)
        if channel.delivery is Delivery.KEY_VALUE:
            bucket, _, key = subject.partition(".")
            self._is_claimed |= channel is WORKER_RECORDS and key == REAL
            self.hub.buckets[bucket].store(key, payload)
            return len(self.hub.buckets[bucket].watches)
        answer = asyncio.get_running_loop().create_future() if channel.delivery is Delivery.ASK else None
        return self.hub.deliver(subject, payload, {}, answer)

    def keep_in_flight(self) -> None:
        """There are always some, and a worker that has them."""
        if self.played is not None:
            self.hub.buckets["workers"].store(PLAYED, pack(self.played.record()))
        self.in_flight = [(client, task) for client, task in self.in_flight if not task.done()]
        while len(self.in_flight) < IN_FLIGHT:
            body = b'{"model":"m","prompt":"hello","stream":true,"baton":{"decode_worker":"%b"}}' % PLAYED.encode()
            self.in_flight.append(self.world.begin(body, x_baton_mode="aggregated"))
            if self.played is not None and len(self.played.started) > 1000:
                del self.played.started[:-LEGS_NAMED], self.played.headers[:], self.played.cancelled[:]
                self.played.frames.clear()

    async def show(self) -> None:
        """All that people and other systems look at is drawn."""
        generate_latest(self.world.router.registry)
        to_prometheus(self.collector.families())
        self.collector.page()

    async def settle(self) -> None:
        """Clients leave, and time passes until all that ends by itself has ended."""
        for client, _task in self.in_flight:
            client.leave()
        if self.in_flight:
            await asyncio.wait([task for _client, task in self.in_flight])
        self.in_flight.clear()
        await asyncio.sleep(SETTLE_S)

    def bugs(self) -> list[str]:
        """Of buses that ended, and of lives."""
        failed = [repr(bus.failed.exception()) for bus in self.buses if bus.failed.done()]
        return failed + self.ended

    async def leave(self) -> None:
        """The worker goes in order."""
        if self._service is not None:
            self._service.stopping.set()


@asynccontextmanager
async def everybody(state_dir: Path) -> AsyncIterator[BusWorld]:
    """All services, until the block ends."""
    async with open_world(RouterSettings(log_requests=False)) as world:
        here = BusWorld(world, state_dir)
        await here.open(world.tasks)
        yield here
