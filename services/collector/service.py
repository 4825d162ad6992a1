"""The metrics collector's shell: hears what others report, keeps the ledger, shows it and pushes it.

What it hears wakes the console too.
"""

from __future__ import annotations

import asyncio
import logging
import time

from services.collector.console.actions import Actions
from services.collector.console.feed import Feed
from services.collector.console.routes import ConsoleHandlers, add_console
from services.collector.console.state import Console, Moment
from services.collector.console.views import Page
from services.collector.http.access import Access
from services.collector.http.app import make_app
from services.collector.http.server import HttpServer
from services.collector.metrics.exposition import BOUNDS, families
from services.collector.metrics.fleet_metrics import STALE_S_MAX, Ledger
from services.collector.report.report import Judge
from services.collector.settings import Settings
from shared.bus.port import Bus, BusError, Envelope
from shared.contracts.channels import (
    DEFAULT_MODE,
    DISAGGREGATION_REPORT,
    DRAINED,
    FLEET_STATE,
    LOAD,
    PLAN,
    REQUESTS_FINISHED,
    SERVICE_STATUS,
    WORKER_LOST,
)
from shared.contracts.control import ServicePhase, ServiceStatus
from shared.contracts.disaggregation_report import AskDisaggregationReport, DisaggregationReport
from shared.contracts.fleet_orders import WorkerDrained
from shared.contracts.inference import RequestsFinished
from shared.contracts.load import LoadReport
from shared.contracts.planning import PlanDecision
from shared.contracts.routing import DefaultMode
from shared.contracts.workers import FleetState, WorkerLost
from shared.runtime.clock import Clock
from shared.runtime.service import Service
from shared.runtime.version import baton_version
from shared.telemetry.families import Family, to_prometheus
from shared.telemetry.setup import MetricsPush

log = logging.getLogger(__name__)

MODE_RETRY_S = 2.0
"""After the kept value of the usual mode could not be had."""


class Collector:
    """The ledger with its ears on the bus, and the console beside it."""

    def __init__(self, bus: Bus, clock: Clock, access: Access, console_clients_max: int) -> None:
        self._bus = bus
        self._clock = clock
        self._ledger = Ledger(BOUNDS, clock.now())
        self._judge = Judge(STALE_S_MAX)
        self._console = Console(self._ledger, clock.now())
        about = {"version": baton_version(), "actions": access.possible, "key_needed": access.key_needed}
        self.feed = Feed(self.page, about, console_clients_max)
        self.desk = ConsoleHandlers(bus, self.feed, self._console.recent, Actions(bus, self._acted), access)

    async def listen(self) -> None:
        """Hear everything from now on, and judge when asked."""
        await self._bus.subscribe(LOAD, self._load_reported)
        await self._bus.subscribe(REQUESTS_FINISHED, self._requests_finished)
        await self._bus.subscribe(FLEET_STATE, self._fleet_told)
        await self._bus.subscribe(WORKER_LOST, self._worker_lost)
        await self._bus.subscribe(DRAINED, self._worker_drained)
        await self._bus.subscribe(SERVICE_STATUS, self._service_told)
        await self._bus.subscribe(PLAN, self._planned)
        await self._bus.answer(DISAGGREGATION_REPORT, self._judged)
        self._bus.on_disconnect(self.feed.wake)
        self._bus.on_reconnect(self.feed.wake)

    def families(self) -> list[Family]:
        """What there is to show now."""
        now = self._clock.now()
        self._ledger.expire(now)
        return families(self._ledger, self._bus.counts, now)

    def page(self) -> Page:
        """What the console shows now."""
        return self._console.page(self._moment(), connected=self._bus.connected)

    async def follow_mode(self) -> None:
        """Which mode is usual, for ever."""
        while True:
            try:
                kept = await self._bus.key_value_store(DEFAULT_MODE, ttl_s=None)
                async for entry in kept.watch():
                    told = entry.value if entry is not None else None
                    if entry is not None or not self._console.mode:
                        self._console.mode = (told or DefaultMode()).mode
                        self.feed.wake()
            except BusError as error:
                log.debug("what mode is usual is not known: %s", error)
            await asyncio.sleep(MODE_RETRY_S)

    def _moment(self) -> Moment:
        """Now, on both clocks."""
        return Moment(self._clock.now(), self._clock.wall_ms() / 1000)

    def _load_reported(self, load: LoadReport, _envelope: Envelope) -> None:
        now = self._clock.now()
        self._ledger.load_reported(load, now)
        self._judge.load_reported(load, now)
        self.feed.wake()

    def _requests_finished(self, message: RequestsFinished, _envelope: Envelope) -> None:
        moment = self._moment()
        for request in message.requests:
            self._ledger.request_finished(request, moment.now)
            self._judge.request_finished(request, moment.now)
        self._console.requests_finished(message.requests, moment)
        self.feed.wake()

    def _fleet_told(self, fleet: FleetState, _envelope: Envelope) -> None:
        moment = self._moment()
        self._ledger.fleet.told(fleet, moment.now)
        self._console.fleet_told(moment)
        self.feed.wake()

    def _worker_lost(self, lost: WorkerLost, _envelope: Envelope) -> None:
        self._ledger.fleet.lost(lost)
        self._console.happened.worker_lost(lost, self._moment().at)
        self.feed.wake()

    def _worker_drained(self, told: WorkerDrained, _envelope: Envelope) -> None:
        self._console.happened.worker_drained(told, self._moment().at)
        self.feed.wake()

    def _service_told(self, status: ServiceStatus, _envelope: Envelope) -> None:
        moment = self._moment()
        self._ledger.service_told(status, moment.now)
        self._console.happened.service_told(status, moment.at)
        self._console.passed(moment)
        self.feed.wake()

    def _planned(self, decision: PlanDecision, _envelope: Envelope) -> None:
        moment = self._moment()
        self._ledger.plans.told(decision, moment.now)
        self._console.happened.planned(decision, moment.at)
        self.feed.wake()

    def _acted(self, subject: str, words: str, well: bool) -> None:
        self._console.happened.acted(subject, words, self._moment().at, well=well)
        self.feed.wake()

    async def _judged(self, ask: AskDisaggregationReport, _envelope: Envelope) -> DisaggregationReport:
        now = self._clock.now()
        self._ledger.expire(now)
        return self._judge.verdict(ask.model, now, self._ledger.fleet.step_tokens)


async def run_collector(service: Service, settings: Settings, otlp_endpoint: str) -> None:
    """Serve until the service stops."""
    access = Access(settings.host, settings.admin_key_file)
    collector = Collector(service.bus, service.clock, access, settings.console_clients_max)
    await collector.listen()
    app = make_app(lambda: to_prometheus(collector.families()), lambda: service.bus.connected)
    add_console(app, collector.desk)
    server = HttpServer(app, settings.host, settings.port)
    serving = service.tasks.create_task(server.serve(), name="serve-http")
    service.tasks.create_task(collector.feed.follow(), name="tell-console")
    service.tasks.create_task(collector.follow_mode(), name="follow-mode")
    await server.listening()
    if otlp_endpoint:
        push = MetricsPush("collector", service.facts.instance, otlp_endpoint=otlp_endpoint, started_ns=time.time_ns())
        service.tasks.create_task(_push(collector, push, settings.push_s), name="push-metrics")
    service.set_phase(ServicePhase.READY)
    await service.stopping.wait()
    service.set_phase(ServicePhase.DRAINING)
    collector.feed.close()
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
