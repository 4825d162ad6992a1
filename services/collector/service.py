"""The metrics collector: subscribes to reports, adds them up, serves and pushes the metrics, feeds the console."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from services.collector.access import Access, guarded
from services.collector.app import LIMITS, CollectorEdge, ConsoleContext, add_console, make_app
from services.collector.console.feed import Feed, WatcherLimits
from services.collector.console.orders import OrderHandler
from services.collector.console.state import ConsoleState, Moment
from services.collector.console.views import Page
from services.collector.disaggregation_report import ReportBuilder
from services.collector.metrics.exposition import BOUNDS, families, usage_families, vllm_families
from services.collector.metrics.fleet_metrics import STALE_S_MAX, FleetMetrics
from services.collector.settings import Settings
from services.collector.usage_ledger import LedgerStore
from shared.bus.port import Bus, Envelope, watch_store
from shared.contracts.channels import (
    ADAPTER_ORDERED,
    BATCHES,
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
from shared.contracts.control import DefaultMode, ServicePhase, ServiceStatus
from shared.contracts.fleet_orders import AdapterOrdered, WorkerDrained
from shared.contracts.inference import RequestsFinished
from shared.contracts.load import LoadReport
from shared.contracts.planning import AskDisaggregationReport, DisaggregationReport, PlanDecision
from shared.contracts.usage import UsageMonth
from shared.contracts.workers import FleetState, WorkerLost
from shared.http.origin import AllowedPages, OriginPolicy
from shared.http.server import make_server
from shared.loopback import is_loopback
from shared.runtime.clock import Clock
from shared.runtime.service import Service, baton_version
from shared.telemetry.prometheus import Family, to_prometheus
from shared.text.fleet_text import adapter_ordered

if TYPE_CHECKING:
    from shared.telemetry.setup import MetricsPush

log = logging.getLogger(__name__)

WATCHERS = WatcherLimits()

PUSH_S = 5.0
"""Seconds between two pushes of OTLP metrics."""


class Collector:
    """Everything that one collector knows. Bus handlers update it; the HTTP routes read it."""

    def __init__(self, bus: Bus, clock: Clock, access: Access, watchers: WatcherLimits = WATCHERS) -> None:
        self._bus = bus
        self._clock = clock
        self._metrics = FleetMetrics(BOUNDS, clock.now())
        self._report = ReportBuilder(STALE_S_MAX)
        self._console = ConsoleState(self._metrics, clock.now())
        about = {"version": baton_version(), "orders_allowed": access.possible, "key_needed": access.key_needed}
        self.feed = Feed(self.page, about, watchers)
        self.ledger = LedgerStore(bus, self._on_usage)
        orders = OrderHandler(bus, self._note_order)
        self.console_context = ConsoleContext(bus, self.feed, self._console.recent, orders, access)

    async def listen(self) -> None:
        """Subscribe to every report, and reply to requests for the disaggregation report."""
        await self._bus.subscribe(LOAD, self._on_load)
        await self._bus.subscribe(REQUESTS_FINISHED, self._on_requests_finished)
        await self._bus.subscribe(FLEET_STATE, self._on_fleet_state)
        await self._bus.subscribe(WORKER_LOST, self._on_worker_lost)
        await self._bus.subscribe(DRAINED, self._on_worker_drained)
        await self._bus.subscribe(SERVICE_STATUS, self._on_service_status)
        await self._bus.subscribe(PLAN, self._on_plan)
        await self._bus.subscribe(ADAPTER_ORDERED, self._on_adapter_ordered)
        await self._bus.answer(DISAGGREGATION_REPORT, self._on_report_asked)
        await self.ledger.listen()
        self._bus.on_disconnect(self.feed.wake)
        self._bus.on_reconnect(self.feed.wake)

    def add_status_fields(self, status: ServiceStatus) -> ServiceStatus:
        """The status with what an operator must correct."""
        return msgspec.structs.replace(status, warning=self.ledger.warning)

    def families(self) -> list[Family]:
        """All metrics of Baton's own at this moment."""
        now = self._clock.now()
        self._metrics.expire(now)
        used = usage_families(self._console.usage.largest(self._month()))
        return [*families(self._metrics, self._bus.counts, now), *used]

    def prometheus(self, accept: str) -> tuple[bytes, str]:
        """The page for Prometheus, and its content type. Metrics under vLLM's names are here alone: OTLP's names have
        no colon.
        """
        unix_s = self._clock.wall_ms() / 1000
        return to_prometheus([*self.families(), *vllm_families(self._metrics, self._clock.now(), unix_s)], accept)

    def page(self) -> Page:
        self._console.month = self._month()
        return self._console.page(self._moment(), connected=self._bus.connected)

    async def follow_mode(self) -> None:
        """Watch the default mode in the key-value store; never returns."""
        async for entry in watch_store(self._bus, DEFAULT_MODE):
            value = entry.value if entry is not None else None
            if entry is not None or not self._console.default_mode:
                self._console.default_mode = (value or DefaultMode()).mode
                self.feed.wake()

    def _month(self) -> str:
        return datetime.fromtimestamp(self._clock.wall_ms() / 1000, UTC).strftime("%Y-%m")

    def _moment(self) -> Moment:
        return Moment(self._clock.now(), self._clock.wall_ms() / 1000)

    def _on_load(self, load: LoadReport, _envelope: Envelope) -> None:
        now = self._clock.now()
        self._metrics.load_reported(load, now)
        self._report.load_reported(load, now)
        self.feed.wake()

    def _on_requests_finished(self, message: RequestsFinished, _envelope: Envelope) -> None:
        moment = self._moment()
        for request in message.requests:
            self._metrics.request_finished(request, moment.now)
            self._report.request_finished(request, moment.now)
        self._console.requests_finished(message.requests, moment)
        self.feed.wake()

    def _on_fleet_state(self, fleet: FleetState, _envelope: Envelope) -> None:
        moment = self._moment()
        self._metrics.fleet.update(fleet, moment.now)
        self._console.fleet_updated(moment)
        self.feed.wake()

    def _on_worker_lost(self, lost: WorkerLost, _envelope: Envelope) -> None:
        self._metrics.fleet.lost(lost)
        self._console.events.worker_lost(lost, self._moment().at)
        self.feed.wake()

    def _on_worker_drained(self, drained: WorkerDrained, _envelope: Envelope) -> None:
        self._console.events.worker_drained(drained, self._moment().at)
        self.feed.wake()

    def _on_service_status(self, status: ServiceStatus, _envelope: Envelope) -> None:
        moment = self._moment()
        self._metrics.service_status(status, moment.now)
        self._console.events.service_status(status, moment.at)
        self._console.tick(moment)
        self.feed.wake()

    def _on_usage(self, name: str, entry: UsageMonth | None) -> None:
        self._console.usage.heard(name, entry)
        self.feed.wake()

    async def follow_batches(self) -> None:
        """Watch the batches of all tenants until cancelled."""
        async for entry in watch_store(self._bus, BATCHES):
            if entry is not None:
                self._console.batches.heard(entry.key, entry.value)
                self.feed.wake()

    def _on_plan(self, decision: PlanDecision, _envelope: Envelope) -> None:
        moment = self._moment()
        self._metrics.plans.update(decision, moment.now)
        self._console.events.planned(decision, moment.at)
        self.feed.wake()

    def _on_adapter_ordered(self, done: AdapterOrdered, _envelope: Envelope) -> None:
        failed = bool(done.refusal) or any(change.failure for change in done.changes)
        by = f"{done.order.by or 'an operator'}{', again on a worker that started' if done.automatic else ''}"
        self._note_order(done.order.name, f"{adapter_ordered(done)} (by {by})", not failed)

    def _note_order(self, subject: str, text: str, succeeded: bool) -> None:
        self._console.events.order_given(subject, text, self._moment().at, succeeded=succeeded)
        self.feed.wake()

    async def _on_report_asked(self, ask: AskDisaggregationReport, _envelope: Envelope) -> DisaggregationReport:
        now = self._clock.now()
        self._metrics.expire(now)
        return self._report.build(ask.model, now, self._metrics.fleet.step_tokens)


async def run_collector(service: Service, settings: Settings, listener: socket.socket, otlp_endpoint: str) -> None:
    """Serve until the service stops."""
    access = Access(settings.host, settings.admin_key_file, settings.published_host)
    collector = Collector(service.bus, service.clock, access)
    await collector.listen()
    edge = _make_edge(service, settings, collector, access)
    server = make_server(edge)
    serving = service.tasks.create_task(server.serve(sockets=[listener]), name="serve-http")
    service.tasks.create_task(edge.end_late(), name="end-late-clients")
    service.tasks.create_task(collector.feed.follow(), name="feed-console")
    service.tasks.create_task(collector.follow_mode(), name="follow-mode")
    service.tasks.create_task(collector.ledger.follow(), name="follow-usage")
    service.tasks.create_task(collector.follow_batches(), name="follow-batches")
    service.extend_status(collector.add_status_fields)
    service.extend_status(edge.add_status_fields)
    await server.listening.wait()
    if otlp_endpoint:
        # The SDK costs 0.15 s of start-up, so only a collector that pushes imports it.
        from shared.telemetry.setup import MetricsPush

        push = MetricsPush(
            "collector",
            service.facts.instance,
            otlp_endpoint=otlp_endpoint,
            started_ns=time.time_ns(),
            version=baton_version(),
        )
        service.tasks.create_task(_push(collector, push), name="push-metrics")
    service.set_phase(ServicePhase.READY)
    await service.stopping.wait()
    service.set_phase(ServicePhase.DRAINING)
    collector.feed.close()
    server.stop()
    await serving


def _make_edge(service: Service, settings: Settings, collector: Collector, access: Access) -> CollectorEdge:
    app = make_app(collector.prometheus, lambda: service.bus.connected)
    add_console(app, collector.console_context)
    origins = OriginPolicy(
        "COLLECTOR_ALLOWED_HOSTS",
        AllowedPages(settings.allowed_hosts),
        checks_host=is_loopback(settings.host) and not access.key_needed,
    )
    return CollectorEdge(guarded(app, access), service.clock.now, LIMITS, AllowedPages(""), origins)


async def _push(collector: Collector, push: MetricsPush) -> None:
    accepted = True
    try:
        while True:
            await asyncio.sleep(PUSH_S)
            before, accepted = accepted, await asyncio.to_thread(push.push, collector.families(), time.time_ns())
            if before and not accepted:
                log.warning("the OTLP receiver does not accept metrics; the collector keeps trying")
    finally:
        push.close()
