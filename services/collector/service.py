"""The metrics collector's shell: hears what others report, keeps the ledger, shows it and pushes it."""

from __future__ import annotations

import asyncio
import logging
import time

from services.collector.core.ledger import STALE_S_MAX, Ledger
from services.collector.core.verdict import Judge
from services.collector.exposition import BOUNDS, families
from services.collector.http import HttpServer, make_app
from services.collector.settings import Settings
from shared.bus.port import Bus, Envelope
from shared.contracts.channels import FLEET_STATE, LOAD, PLAN, REQUESTS_FINISHED, SERVICE_STATUS, VERDICT, WORKER_LOST
from shared.contracts.control import ServicePhase, ServiceStatus
from shared.contracts.inference import RequestsFinished
from shared.contracts.load import LoadReport
from shared.contracts.planning import PlanDecision
from shared.contracts.verdict import AskVerdict, Verdict
from shared.contracts.workers import FleetState, WorkerLost
from shared.runtime.clock import Clock
from shared.runtime.service import Service
from shared.telemetry.families import Family, to_prometheus
from shared.telemetry.setup import MetricsPush

log = logging.getLogger(__name__)


class Collector:
    """The ledger with its ears on the bus."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._ledger = Ledger(BOUNDS, clock.now())
        self._judge = Judge(STALE_S_MAX)

    async def listen(self) -> None:
        """Hear everything from now on, and judge when asked."""
        await self._bus.subscribe(LOAD, self._load_reported)
        await self._bus.subscribe(REQUESTS_FINISHED, self._requests_finished)
        await self._bus.subscribe(FLEET_STATE, self._fleet_told)
        await self._bus.subscribe(WORKER_LOST, self._worker_lost)
        await self._bus.subscribe(SERVICE_STATUS, self._service_told)
        await self._bus.subscribe(PLAN, self._planned)
        await self._bus.answer(VERDICT, self._judged)

    def families(self) -> list[Family]:
        """What there is to show now."""
        now = self._clock.now()
        self._ledger.expire(now)
        return families(self._ledger, self._bus.counts, now)

    def _load_reported(self, load: LoadReport, _envelope: Envelope) -> None:
        now = self._clock.now()
        self._ledger.load_reported(load, now)
        self._judge.load_reported(load, now)

    def _requests_finished(self, message: RequestsFinished, _envelope: Envelope) -> None:
        now = self._clock.now()
        for request in message.requests:
            self._ledger.request_finished(request, now)
            self._judge.request_finished(request, now)

    def _fleet_told(self, fleet: FleetState, _envelope: Envelope) -> None:
        self._ledger.fleet.told(fleet, self._clock.now())

    def _worker_lost(self, lost: WorkerLost, _envelope: Envelope) -> None:
        self._ledger.fleet.lost(lost)

    def _service_told(self, status: ServiceStatus, _envelope: Envelope) -> None:
        self._ledger.service_told(status, self._clock.now())

    def _planned(self, decision: PlanDecision, _envelope: Envelope) -> None:
        self._ledger.plans.told(decision, self._clock.now())

    async def _judged(self, ask: AskVerdict, _envelope: Envelope) -> Verdict:
        now = self._clock.now()
        self._ledger.expire(now)
        return self._judge.verdict(ask.model, now, self._ledger.fleet.step_tokens)


async def run_collector(service: Service, settings: Settings, otlp_endpoint: str) -> None:
    """Serve until the service stops."""
    collector = Collector(service.bus, service.clock)
    await collector.listen()
    app = make_app(lambda: to_prometheus(collector.families()), lambda: service.bus.connected)
    server = HttpServer(app, settings.host, settings.port)
    serving = service.tasks.create_task(server.serve(), name="serve-http")
    await server.listening()
    if otlp_endpoint:
        push = MetricsPush("collector", service.facts.instance, otlp_endpoint=otlp_endpoint, started_ns=time.time_ns())
        service.tasks.create_task(_push(collector, push, settings.push_s), name="push-metrics")
    service.set_phase(ServicePhase.READY)
    await service.stopping.wait()
    service.set_phase(ServicePhase.DRAINING)
    server.should_exit = True
    await serving


async def _push(collector: Collector, push: MetricsPush, period_s: float) -> None:
    taken = True
    try:
        while True:
            await asyncio.sleep(period_s)
            before, taken = taken, await asyncio.to_thread(push.push, collector.families(), time.time_ns())
            if before and not taken:
                log.warning("the OTLP receiver does not take metrics; trying on")
    finally:
        push.close()
