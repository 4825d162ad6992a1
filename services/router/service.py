"""A router process: makes its objects, serves until it is asked to stop, and closes them in reverse order."""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
import socket
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry

from services.router.admission.admission import Admission
from services.router.admission.admission_queue import AdmissionQueue
from services.router.admission.bus_health import BusHealth
from services.router.admission.placing import Placing
from services.router.admission.policy import AdmissionPolicy
from services.router.admission.prefetches import Prefetches
from services.router.admission.queue_metrics import QueueMetrics
from services.router.admission.waker import Waker
from services.router.auth.authenticator import Authenticator
from services.router.auth.key_file import check_access
from services.router.batches.batches import Batches
from services.router.batches.line_server import LineServer
from services.router.decisions.decision_service import DecisionService
from services.router.feeds.default_mode import DefaultModeFeed
from services.router.feeds.fleet import FleetFeed
from services.router.feeds.kv import KvFeed
from services.router.feeds.reservations import ReservationFeed
from services.router.http.adapter_routes import OrderAdapters
from services.router.http.api import make_app
from services.router.http.edge import Edge
from services.router.http.weight_routes import OrderAboutWeights
from services.router.placement.fleet import Fleet
from services.router.placement.placement import PlacementPolicy
from services.router.placement.policy import RequestPolicy
from services.router.relay.accounting import Accounting
from services.router.relay.deadline_monitor import DeadlineMonitor
from services.router.relay.failure_policy import FailurePolicy, read_policy
from services.router.relay.relay import Relay
from services.router.relay.request_tasks import RequestTasks
from services.router.relay.retry import Retry
from services.router.relay.running_leg import LegServices
from services.router.relay.start_leg import LegLoads, LegStarter
from services.router.relay.suspects import Suspects
from services.router.relay.write_coalescer import WriteCoalescer
from services.router.request.context import ResponseHeaders
from services.router.responses.responses import Responses
from services.router.settings import Settings
from services.router.state.block_table import IS_COMPILED
from services.router.state.quarantine import Quarantine
from services.router.state.worker_speeds import WorkerSpeeds
from services.router.telemetry.metrics import CatchUp, CountMetrics, LiveMetrics, SpeedMetrics, health_of
from services.router.telemetry.request_log import RequestLog
from services.router.telemetry.request_metrics import RequestMetrics
from services.router.telemetry.tracing import Tracing
from services.router.tokenize.passed_trials import PassedTrials
from services.router.tokenize.prompts import Prompts
from services.router.tokenize.trials import Trials
from services.router.usage import Budgets, UsageLog
from shared.bus.leg_inbox import LegInbox
from shared.bus.port import Bus
from shared.contracts.control import ServicePhase, ServiceStatus
from shared.contracts.ids import RouterId
from shared.http.server import Server, make_server
from shared.runtime.clock import Clock
from shared.runtime.service import Service
from shared.runtime.settings import CommonSettings, SettingsError
from shared.runtime.waiting import Waits
from shared.telemetry import names
from shared.telemetry.prometheus import gauge

log = logging.getLogger("baton.router")

FIRST_WORKER_S_MAX = 10.0
"""How long a router without workers takes no connections from a port that it shares."""
READY_CHECK_S = 0.05
END_S = 2.0
"""The end of the time to stop, for requests that are ended with an error."""
SWITCH_S = 0.001
"""How long the event loop waits for a tokenizing thread to release the GIL."""


def check(settings: Settings) -> None:
    """Raises SettingsError for values that are well-formed but invalid, and for files that cannot be used."""
    check_access(settings)
    failure_policy(settings)
    try:
        RequestPolicy.from_settings(settings)
        AdmissionPolicy.from_settings(settings)
    except ValueError as error:
        raise SettingsError(f"{error}; correct it or unset it") from error


def failure_policy(settings: Settings) -> FailurePolicy:
    """The failure policy of the operator's file. Raises SettingsError."""
    path = settings.failure_policy
    try:
        return read_policy(tomllib.loads(Path(path).read_text(encoding="utf-8"))) if path else FailurePolicy()
    except (OSError, ValueError) as error:
        raise SettingsError(f"ROUTER_FAILURE_POLICY ({path}): {error}; correct it or unset it") from error


class Router:
    """All objects of one router, wired but not running."""

    def __init__(  # noqa: PLR0913  # wiring
        self,
        settings: Settings,
        bus: Bus,
        clock: Clock,
        tracing: Tracing,
        waits: Waits | None = None,
        *,
        failures: FailurePolicy | None = None,
        placement: PlacementPolicy | None = None,
        trials: Trials | None = None,
    ) -> None:
        """``failures`` and ``placement``: policies other than those of the settings. ``trials``: of tokenizers; None:
        nothing of them outlives the router.
        """
        self.router_id = router_id = RouterId(f"{settings.instance or 'router'}-{secrets.token_hex(4)}")
        self.settings = settings
        self.failures = failures or failure_policy(settings)
        self.clock = clock
        self.bus = bus
        self.waits = waits or Waits(clock.now)
        self.registry = CollectorRegistry()
        self.registry.register(CatchUp(self._catch_up))  # First: all others are read after it.
        self.fleet = fleet = Fleet(placement or PlacementPolicy.from_settings(settings))
        self.speeds = WorkerSpeeds(fleet.cluster)
        self.bus_health = BusHealth(bus, fleet.cluster, clock, wait_s_max=self.failures.bus_wait_s_max)
        self.inbox = LegInbox(bus, router_id, leg_buffer_bytes_max=settings.leg_buffer_bytes_max)
        self.policy = RequestPolicy.from_settings(settings)
        self.prompts = Prompts(settings, bus, clock, fleet, self.policy.shares, trials)
        self.queue = AdmissionQueue(
            Admission(AdmissionPolicy.from_settings(settings), fleet.place),
            clock,
            QueueMetrics(self.registry, settings.queue_max),
        )
        self.quarantine = Quarantine(settings.quarantine_s)
        self.reservations = ReservationFeed(router_id, bus, clock, fleet.cluster, self.quarantine)
        self.default_mode = DefaultModeFeed(bus)
        self.kv = KvFeed(bus, fleet.index)
        self.feed = self._make_feed()
        self.decisions = DecisionService(
            router_id,
            bus,
            clock,
            self.reservations.book.router_ids,
            self._catch_up,
            bytes_max=settings.decisions_bytes_max,
        )
        metrics = RequestMetrics(self.registry, tracing.counts)
        self.request_log = RequestLog(router_id, tracing, metrics, log_requests=settings.log_requests)
        self.usage = UsageLog(router_id, bus, clock, fleet.cluster, self._catch_up)
        self.budgets = Budgets(bus, clock, self.usage.unstored, self._catch_up)
        self.accounting = Accounting(self.request_log, self.decisions, self.usage)
        self.request_tasks = RequestTasks()
        self.prefetches = Prefetches(bus, clock, fleet.cluster, self.request_tasks.spawn)
        self.relay = self._make_relay(tracing)
        self.authenticator = Authenticator(settings, clock.now, self.budgets)
        self.responses = Responses(
            settings=settings, router_id=router_id, bus=bus, clock=clock, relay=self.relay, request_log=self.request_log
        )
        self.batches = self._make_batches()
        self.edge = self._make_edge()
        self.deadline_monitor = DeadlineMonitor(
            self.relay.in_flight,
            self.bus_health,
            self.edge.end_slow_uploads,
            self.edge.idle.end_late,
            clock,
            settings.stream_ping_s,
        )
        self._register_metrics()

    def _catch_up(self) -> None:
        """Account for all requests that have ended."""
        self.accounting.catch_up()

    def _make_feed(self) -> FleetFeed:
        return FleetFeed(
            bus=self.bus,
            clock=self.clock,
            fleet=self.fleet,
            inbox=self.inbox,
            speeds=self.speeds,
            fleet_changed=self.queue.reschedule,
            reservations=self.reservations,
            quarantine=self.quarantine,
            prompts=self.prompts,
            kv=self.kv,
            waits=self.waits,
        )

    def _make_edge(self) -> Edge:
        app = make_app(
            fleet=self.fleet,
            shares=self.policy.shares,
            decisions=self.decisions,
            registry=self.registry,
            bus=self.bus,
            clock=self.clock,
            waits=self.waits,
            responses=self.responses,
            batches=self.batches,
            order_adapters=OrderAdapters(self.bus, self.fleet.cluster, is_local=self.settings.is_local),
            order_weights=OrderAboutWeights(self.bus, is_local=self.settings.is_local),
        )
        return Edge(self.settings, self.clock, self.relay, self.responses, self.request_log, self.authenticator, app)

    def _make_batches(self) -> Batches:
        lines = LineServer(
            settings=self.settings,
            clock=self.clock,
            queue=self.queue,
            in_flight=self.relay.in_flight,
            totals=lambda: self.edge.upload_totals,
            authenticator=self.authenticator,
            serve=self.responses.serve,
        )
        return Batches(self.router_id, self.bus, self.clock, lines, self.settings.files_bytes_max)

    def _make_relay(self, tracing: Tracing) -> Relay:
        settings, now, cluster = self.settings, self.clock.now, self.fleet.cluster
        failures, response_headers = self.failures, ResponseHeaders()
        bus_health = self.bus_health
        waker = Waker(self.bus, self.fleet, now, wake_s_max=settings.wake_s_max)
        placing = Placing(self.fleet, self.queue, bus_health, now, waker=waker, prefetches=self.prefetches)
        legs = self._make_leg_services(tracing, response_headers)
        suspects = Suspects(self.quarantine, self.reservations, self.request_log, cluster, self.inbox, now)
        retry = Retry(
            now=now,
            policy=failures,
            placing=placing,
            cluster=cluster,
            bus_health=bus_health,
            inbox=self.inbox,
            prompts=self.prompts,
            request_log=self.request_log,
            suspects=suspects,
        )
        return Relay(
            settings=settings,
            now=now,
            inbox=self.inbox,
            cluster=cluster,
            policy=self.policy,
            failures=failures,
            default_mode=self.default_mode,
            prompts=self.prompts,
            queue=self.queue,
            placing=placing,
            legs=legs,
            retry=retry,
            suspects=suspects,
            decisions=self.decisions,
            prefetches=self.prefetches,
            accounting=self.accounting,
            budgets=self.budgets,
            tracing=tracing,
            response_headers=response_headers,
            tasks=self.request_tasks,
        )

    def _make_leg_services(self, tracing: Tracing, response_headers: ResponseHeaders) -> LegServices:
        now = self.clock.now
        return LegServices(
            settings=self.settings,
            attempts_max=self.failures.attempts_max,
            now=now,
            inbox=self.inbox,
            starter=LegStarter(
                self.router_id,
                now,
                guards_handoffs=self.failures.guards_handoffs,
                attempts_max=self.failures.attempts_max,
            ),
            loads=LegLoads(self.fleet.cluster, self.reservations, self.queue.reschedule, now),
            speeds=self.speeds,
            tracing=tracing,
            metrics=self.request_log.metrics,
            headers=response_headers.of,
            coalescer=WriteCoalescer(self.settings.write_wait_s_max),
            tasks=self.request_tasks,
        )

    def _register_metrics(self) -> None:
        book = self.reservations.book
        gauge(names.ROUTER_INDEX_COMPILED, self.registry).set(IS_COMPILED)
        gauge(names.ROUTER_PEERS, self.registry).set_function(lambda: book.others)
        self.registry.register(SpeedMetrics(self.speeds))
        self.registry.register(CountMetrics(names.ROUTER_RENDERED_PROMPTS, self.prompts.rendered.counts))
        self.registry.register(CountMetrics(names.ROUTER_PREFETCHES, self.prefetches.counts))
        self.registry.register(CountMetrics(names.ROUTER_RESPONSES, self.responses.counts))
        self.registry.register(CountMetrics(names.ROUTER_BATCH_LINES, self.batches.lines.counts))
        gauge(names.ROUTER_BATCHES, self.registry).set_function(lambda: len(self.batches.runner.runs))
        parity, orphans = self.prompts.parity.book, self.inbox.orphans
        self.registry.register(LiveMetrics(self.relay.in_flight, self.fleet, self.kv, parity, self.bus, orphans))

    async def open(self) -> None:
        """Subscribe to everything; all subscriptions are live when it returns."""
        await self.inbox.open()
        await self.decisions.open()
        await self.responses.open()
        await self.kv.open()
        await self.feed.open()
        await self.reservations.open()

    def start(self, tasks: asyncio.TaskGroup) -> None:
        for work, name in (
            (self.feed.follow_registry(), "follow-registry"),
            (self.feed.sweep(), "sweep-workers"),
            (self.default_mode.follow(), "follow-default-mode"),
            (self.reservations.follow(), "publish-reservations"),
            (self.kv.follow(), "follow-kv"),
            (self.prompts.follow(), "follow-tokenizers"),
            (self.prompts.parity.follow(), "probe-tokens"),
            (self.request_log.reports.follow(self.bus, self._catch_up), "report-finished"),
            (self.usage.report(), "report-usage"),
            (self.budgets.follow(), "follow-usage"),
            (self.deadline_monitor.run(), "monitor-deadlines"),
            (self.authenticator.follow(), "follow-keys"),
        ):
            tasks.create_task(work, name=name)
        if self.batches.enabled:
            self.batches.start(tasks)

    def add_status_fields(self, status: ServiceStatus) -> ServiceStatus:
        """The status with what this router knows of its workers, and what an operator must correct."""
        health = health_of(self.fleet.index, self.prompts.parity.book, self.prompts.failures())
        responses = f"responses are not kept: {self.responses.failure}" if self.responses.failure else ""
        warnings = filter(None, (self.authenticator.failure, self.budgets.failure, self.usage.failure, responses))
        return msgspec.structs.replace(status, router=health, warning="; ".join(warnings))

    async def close(self) -> None:
        """Cancel what still runs, report the last requests, stop listening."""
        await self.responses.close()
        await self.batches.runner.stop()
        self.queue.close()
        await self.inbox.close()
        await self.request_tasks.close()
        await self.decisions.close()
        self._catch_up()
        await self.request_log.reports.close(self.bus)
        await self.usage.close()
        self.prompts.close()


def tune_garbage_collection() -> None:
    """Never scan the objects of start-up again. (``services/__init__.py`` makes collections rare.)"""
    gc.collect()
    gc.freeze()


async def first_worker(router: Router, service: Service) -> bool:
    """Wait until a request can be placed, at most ``FIRST_WORKER_S_MAX``: after that clients get errors rather than
    nothing. False when the router is to stop.
    """
    deadline = service.clock.now() + FIRST_WORKER_S_MAX
    await until(lambda: router.fleet.ready(service.clock.now()) or service.clock.now() >= deadline, service)
    return not service.stopping.is_set()


async def until(promise: Callable[[], bool], service: Service) -> None:
    """Wait until the promise holds or the router is to stop."""
    while not (promise() or service.stopping.is_set()):  # noqa: ASYNC110  # Either may change at any time.
        await asyncio.sleep(READY_CHECK_S)


async def serve(
    service: Service,
    settings: Settings,
    common: CommonSettings,
    listener: socket.socket,
    shared: socket.socket | None = None,
) -> None:
    """Run a router with these settings until the service stops."""
    tracing = Tracing(service.spans, service.clock)
    trials = Trials(PassedTrials.in_cache(common.cache_dir))
    router = Router(settings, service.bus, service.clock, tracing, service.waits, trials=trials)
    await run(router, service, listener, shared)


async def run(router: Router, service: Service, listener: socket.socket, shared: socket.socket | None = None) -> None:
    """Open, serve until the service stops, finish running requests, close. The router is ready when it has read the
    worker registry, and joins its shared port when it can place requests.
    """
    await router.open()
    service.extend_status(router.add_status_fields)
    service.extend_status(router.edge.add_status_fields)
    router.start(service.tasks)
    server = make_server(router.edge)
    serving = service.tasks.create_task(server.serve(sockets=[listener]), name="serve-http")
    await server.listening.wait()
    tune_garbage_collection()
    sys.setswitchinterval(SWITCH_S)
    await until(lambda: router.fleet.cluster.is_whole, service)
    if not service.stopping.is_set():
        service.set_phase(ServicePhase.READY)
    if shared is not None and await first_worker(router, service):
        await server.listen_too(shared)
    await service.stopping.wait()
    await leave(router, service, server, serving)


async def leave(router: Router, service: Service, server: Server, serving: asyncio.Task[None]) -> None:
    """Stop: first only for load balancers, then take no more requests, then end those that run for too long."""
    service.set_phase(ServicePhase.DRAINING, f"{len(router.relay.in_flight)} requests")
    settings, begun_at = router.settings, service.clock.now()
    router.edge.leaving = True
    await asyncio.sleep(settings.leaves_s)
    router.queue.close()
    # uvicorn closes the listener and idle connections, and waits for running requests.
    server.stop()
    ending = asyncio.gather(serving, router.responses.drain(), router.batches.runner.stop())
    ends_at = begun_at + max(settings.drain_s_max / 2, settings.drain_s_max - END_S)
    try:
        async with asyncio.timeout(max(0.0, ends_at - service.clock.now())):
            await asyncio.shield(ending)
    except TimeoutError:
        router.deadline_monitor.end_all()
        await ending
    await router.close()
