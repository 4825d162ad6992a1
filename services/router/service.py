"""A router process, put together: feeds, relay, HTTP; and taken apart again in reverse when it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
import socket
import sys

from services.router.admission.admission import Admission
from services.router.admission.admission_queue import AdmissionQueue
from services.router.auth.authenticator import Authenticator
from services.router.http.api import make_app
from services.router.http.edge import Edge
from services.router.http.server import make_server
from services.router.placement.decision_service import DecisionService
from services.router.placement.placement import PlacementPolicy
from services.router.relay.deadline_monitor import DeadlineMonitor
from services.router.relay.parts import Parts
from services.router.relay.relay import Relay
from services.router.settings import Settings, admission_policy, failure_policy, terms_of
from services.router.state.bus_health import BusHealth
from services.router.state.default_mode import DefaultModeFeed
from services.router.state.fleet import Fleet
from services.router.state.fleet_feed import FleetFeed
from services.router.state.kv_feed import KvFeed
from services.router.state.native_block_table import IS_COMPILED
from services.router.state.reservation_feed import ReservationFeed
from services.router.state.speed_feed import Measures
from services.router.telemetry.health import teller
from services.router.telemetry.prediction_metrics import LearnedMetrics
from services.router.telemetry.queue_metrics import QueueMetrics
from services.router.telemetry.request_log import Ledger, LiveMetrics
from services.router.telemetry.tracing import Tracing
from services.router.tokenize.prompts import Prompts
from shared.bus.leg_inbox import LegInbox
from shared.bus.port import Bus
from shared.contracts.control import ServicePhase
from shared.contracts.ids import RouterId
from shared.runtime.clock import Clock
from shared.runtime.service import Service
from shared.telemetry import names
from shared.telemetry.prometheus import gauge

log = logging.getLogger("baton.router")

FIRST_WORKER_S_MAX = 10.0
"""A router that shares its port takes none of its connections for so long, if it knows no worker."""
FIRST_WORKER_LOOK_S = 0.05
TURN_S_MAX = 0.001
"""How long the event loop waits for a thread that tokenizes to let go of the interpreter."""
YOUNG_OBJECTS_MAX = 50_000
"""New objects between two searches for cycles."""


class Router:
    """All parts of one router, wired but not running."""

    def __init__(self, settings: Settings, bus: Bus, clock: Clock, tracing: Tracing) -> None:
        router_id = RouterId(f"{settings.instance or 'router'}-{secrets.token_hex(4)}")
        policy = PlacementPolicy(
            silent_s_max=settings.silent_s_max,
            stream_tokens_min=settings.stream_tokens_min,
            fetch_tokens_min=settings.fetch_tokens_min,
        )
        fleet = Fleet(policy)
        reservations = ReservationFeed(router_id, bus, clock, fleet.cluster)
        ledger = Ledger(router_id, tracing, log_requests=settings.log_requests)
        self.parts = parts = Parts(
            router_id=router_id,
            settings=settings,
            clock=clock,
            bus=bus,
            fleet=fleet,
            terms=terms_of(settings),
            room=AdmissionQueue(
                Admission(admission_policy(settings), fleet.place),
                clock,
                QueueMetrics(ledger.registry, settings.queue_max),
            ),
            measures=Measures(fleet.cluster),
            inbox=LegInbox(bus, router_id, leg_buffer_bytes_max=settings.leg_buffer_bytes_max),
            prompts=Prompts(settings, bus, clock, fleet),
            ledger=ledger,
            decisions=DecisionService(
                router_id,
                bus,
                clock,
                reservations.book.router_ids,
                count_max=settings.decisions_max,
                bytes_max=settings.decisions_bytes_max,
            ),
            tracing=tracing,
            reservations=reservations,
            bus_health=BusHealth(bus, fleet.cluster, clock),
            failures=failure_policy(settings),
            usual=DefaultModeFeed(bus),
        )
        self.kv = KvFeed(bus, fleet.index)
        self.feed = FleetFeed(parts, self.kv)
        self.relay = Relay(parts)
        self.gate = Authenticator(settings, clock.now)
        self.edge = Edge(settings, clock, self.relay, parts.ledger, self.gate)
        self.edge.app = make_app(parts)
        self.deadline_monitor = DeadlineMonitor(self.relay.flights, self.edge, clock)
        gauge(names.ROUTER_INDEX_COMPILED, parts.ledger.registry).set(IS_COMPILED)
        others = gauge(names.ROUTER_OTHERS, parts.ledger.registry)
        others.set_function(lambda: parts.reservations.book.others)
        parts.ledger.registry.register(LearnedMetrics(parts.measures))
        parity, orphans = parts.prompts.parity.book, parts.inbox.orphans
        parts.ledger.registry.register(LiveMetrics(self.relay.flights, fleet, self.kv, parity, bus, orphans))

    async def open(self) -> None:
        """Subscribe to everything; live when it returns."""
        await self.parts.inbox.open()
        await self.parts.decisions.open()
        await self.kv.open()
        await self.feed.open()
        await self.parts.reservations.open()

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Begin everything that goes on beside requests."""
        for work, name in (
            (self.feed.follow_registry(), "follow-registry"),
            (self.feed.sweep(), "sweep-workers"),
            (self.parts.usual.follow(), "follow-usual-mode"),
            (self.parts.reservations.follow(), "tell-reservations"),
            (self.kv.follow(), "follow-kv"),
            (self.parts.prompts.follow(), "follow-tokenizers"),
            (self.parts.prompts.parity.follow(), "probe-tokens"),
            (self.parts.ledger.report(self.parts.bus), "report-finished"),
            (self.deadline_monitor.walk(), "watch-requests"),
            (self.gate.follow(), "follow-keys"),
        ):
            tasks.create_task(work, name=name)

    async def close(self) -> None:
        """Cancel what still runs, tell the last, stop listening."""
        self.parts.room.close()
        await self.parts.inbox.close()
        await self.parts.decisions.close()
        await self.parts.ledger.report_now(self.parts.bus)
        self.parts.prompts.close()


def leave_garbage_alone() -> None:
    """Frames are made and dropped by the hundred thousand, without cycles: look for those seldom, and never among what
    start-up made.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS_MAX, 20, 50)


async def first_worker(router: Router, service: Service) -> bool:
    """Wait until a request could be placed; but clients shall not wait for ever to be told that none can. False when
    the router shall stop.
    """
    deadline = service.clock.now() + FIRST_WORKER_S_MAX
    while not router.parts.fleet.ready(service.clock.now()) and service.clock.now() < deadline:
        if service.stopping.is_set():
            break
        await asyncio.sleep(FIRST_WORKER_LOOK_S)
    return not service.stopping.is_set()


async def serve(
    service: Service, settings: Settings, listener: socket.socket, shared: socket.socket | None = None
) -> None:
    """A router with these settings, from its first moment to its last."""
    tracing = Tracing(service.spans, service.clock, slow_s=settings.trace_slow_s)
    await live(Router(settings, service.bus, service.clock, tracing), service, listener, shared)


async def live(router: Router, service: Service, listener: socket.socket, shared: socket.socket | None = None) -> None:
    """Open, serve until told to stop, finish what runs, leave. Connections to the port that it shares come when it can
    place their requests.
    """
    await router.open()
    service.router_health = teller(router.parts.fleet.index, router.parts.prompts.parity.book)
    router.start(service.tasks)
    server = make_server(router.edge, router.parts.settings)
    serving = service.tasks.create_task(server.serve(sockets=[listener]), name="serve-http")
    await server.listening.wait()
    leave_garbage_alone()
    sys.setswitchinterval(TURN_S_MAX)
    service.set_phase(ServicePhase.READY)
    if shared is not None and await first_worker(router, service):
        await server.listen_too(shared)
    await service.stopping.wait()
    service.set_phase(ServicePhase.DRAINING, f"{len(router.relay.flights)} requests")
    router.parts.room.close()
    # uvicorn closes the listener and idle connections, and lets requests that run end.
    server.should_exit = True
    await serving
    await router.close()
