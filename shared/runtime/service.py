"""The life of every service process: connect to NATS, publish its status, serve, drain on a signal, exit."""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import NoReturn

import uvloop
from opentelemetry.trace import NoOpTracer, Tracer

from shared.bus.nats_bus import connect_nats
from shared.bus.port import Bus, BusError, BusRefused
from shared.contracts.channels import SERVICE_STATUS
from shared.contracts.control import ServicePhase, ServiceStatus
from shared.deadline import unless
from shared.runtime.clock import Clock, SystemClock
from shared.runtime.heartbeat import Heartbeat, heartbeat_of
from shared.runtime.process_watch import ProcessWatch
from shared.runtime.settings import CommonSettings
from shared.runtime.state_folder import DiskWatch
from shared.runtime.waiting import Waits, waiting_page
from shared.telemetry.log import setup_logging
from shared.telemetry.tracing import SpanSink

log = logging.getLogger("baton.service")

CONNECT_S_MAX = 5.0
"""Time limit for one attempt; their number is not limited."""
STATUS_PERIOD_S = 2.0
TELEMETRY_S_MAX = 2.0

EXIT_FAILED = 1
EXIT_CONFIGURATION = 78
"""EX_CONFIG of sysexits.h: a restart is useless until an operator corrects the configuration."""

DETAIL_CHARS_MAX, REFUSAL_CHARS_MAX = 200, 600
"""Length of the last status: why the process failed, and what an operator must correct."""


class DrainTooSlow(Exception):
    """The service did not finish its work within its drain deadline."""


class WrongConfiguration(Exception):
    """The process cannot do its work until an operator corrects its configuration; the text says how."""


class _Finished(Exception):
    """The main function returned; cancels the background tasks."""


@dataclass(frozen=True, kw_only=True)
class LastResorts:
    """After these times the process exits whatever its tasks and threads do; seconds."""

    cancel_s_max: float = 5.0
    """Time for cancelled tasks to end."""
    ending_s_max: float = 15.0
    """Time from the end of the main function to the end of the process: background tasks, last status, bus and
    telemetry."""


@dataclass(frozen=True, kw_only=True)
class ServiceFacts:
    """Constant while the process lives."""

    name: str
    """router, orchestrator, collector or worker."""
    instance: str
    url: str = ""
    drain_s_max: float = 30.0
    last_resorts: LastResorts = LastResorts()


class Service:
    """Passed to the main function. ``tasks`` are cancelled when it returns; SIGTERM and SIGINT set ``stopping``."""

    def __init__(
        self,
        facts: ServiceFacts,
        bus: Bus,
        clock: Clock,
        tracer: Tracer,
        *,
        stopping: asyncio.Event | None = None,
        spans: SpanSink | None = None,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        self.facts = facts
        self.bus = bus
        self.clock = clock
        self.tracer = tracer
        self.spans = spans
        """Receives the spans of finished requests; None if this process does not trace."""
        self.tasks = asyncio.TaskGroup()
        self.stopping = stopping or asyncio.Event()
        self.phase = ServicePhase.STARTING
        self.waits = Waits(clock.now)
        self._status_fields: list[Callable[[ServiceStatus], ServiceStatus]] = []
        self._heartbeat = heartbeat or Heartbeat()
        self._detail = ""
        self._changed = asyncio.Event()

    def set_phase(self, phase: ServicePhase, detail: str = "") -> None:
        """Log and publish the phase; the status is repeated every ``STATUS_PERIOD_S``. While the service is ready or
        drains, its supervisor may expect that the event loop runs.
        """
        if (phase, detail) != (self.phase, self._detail):
            log.info("%s%s", phase.value, f": {detail}" if detail else "")
        self.phase = phase
        self._detail = detail
        self._changed.set()
        if phase in {ServicePhase.READY, ServicePhase.DRAINING}:
            self._heartbeat.begin()
        else:
            self._heartbeat.pause()

    def extend_status(self, add_fields: Callable[[ServiceStatus], ServiceStatus]) -> None:
        """From now on ``add_fields`` completes each status before it is published."""
        self._status_fields.append(add_fields)

    async def announce(self) -> None:
        """Publish the status on each change and every ``STATUS_PERIOD_S``, until cancelled."""
        while True:
            self._changed.clear()
            await self.publish_status()
            try:
                async with asyncio.timeout(STATUS_PERIOD_S):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def publish_status(self) -> None:
        """Publish the status once; skipped while NATS is down."""
        status = ServiceStatus(
            service=self.facts.name,
            instance=self.facts.instance,
            phase=self.phase,
            detail=self._detail or self.waits.text,
            pid=os.getpid(),
            url=self.facts.url,
            version=baton_version(),
            host=socket.gethostname(),
            at_ms=self.clock.wall_ms(),
        )
        for add_fields in self._status_fields:
            status = add_fields(status)
        try:
            await self.bus.publish(SERVICE_STATUS, status)
        except BusError as error:
            log.debug("status not published: %s", error)


Main = Callable[[Service], Awaitable[None]]


def run_service(  # noqa: PLR0913  # the whole life of a process
    name: str,
    instance: str,
    common: CommonSettings,
    main: Main,
    *,
    url: str = "",
    drain_s_max: float = 30.0,
    listener: socket.socket | None = None,
    last_resorts: LastResorts = LastResorts(),
) -> NoReturn:
    """Run ``main`` in a service process and exit: 0 after a clean drain, ``EXIT_CONFIGURATION`` if NATS rejects the
    process's credentials or ``main`` raises WrongConfiguration, 1 otherwise. A second signal exits at once. Until there
    is a connection to NATS, HTTP requests to ``listener`` get 503. SIGQUIT writes the stack of each thread to stderr.
    """
    faulthandler.register(signal.SIGQUIT)
    heartbeat = heartbeat_of(os.environ)
    heartbeat.pause()  # Until it is ready.
    setup_logging(name, instance, level=common.log_level, log_format=common.log_format)
    facts = ServiceFacts(name=name, instance=instance, url=url, drain_s_max=drain_s_max, last_resorts=last_resorts)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(_run(facts, common, main, listener, heartbeat))
        _leave_after(last_resorts.cancel_s_max, code)  # Closing the runner waits for every task that is left.
    sys.exit(code)


@contextmanager
def _tracing(facts: ServiceFacts, common: CommonSettings) -> Iterator[tuple[Tracer, SpanSink | None]]:
    endpoint = common.otlp_endpoint
    if not endpoint:
        yield NoOpTracer(), None
        return
    # The SDK costs 7 MB and 0.1 s of start-up, so only processes that trace import it.
    from shared.telemetry.setup import setup

    telemetry = setup(
        facts.name,
        facts.instance,
        otlp_endpoint=endpoint,
        trace_sample_ratio=common.trace_sample_ratio,
        version=baton_version(),
    )
    try:
        yield telemetry.tracer, telemetry.sink
    finally:
        telemetry.shutdown(TELEMETRY_S_MAX)


def refuse(name: str, error: Exception) -> NoReturn:
    """Exit because of a wrong setting, which the message names."""
    sys.stderr.write(f"{name}: {error}\n")
    sys.exit(EXIT_CONFIGURATION)


async def _run(
    facts: ServiceFacts, common: CommonSettings, main: Main, listener: socket.socket | None, heartbeat: Heartbeat
) -> int:
    stopping, clock = asyncio.Event(), SystemClock()
    _on_signals(stopping, facts.drain_s_max + facts.last_resorts.cancel_s_max)
    with _tracing(facts, common) as (tracer, spans):
        try:
            bus = await _connect(facts, common, stopping, Waits(clock.now), listener)
        except BusRefused as error:
            log.error("%s", error)  # noqa: TRY400  # The message is for the operator; the stack adds nothing.
            return EXIT_CONFIGURATION
        if bus is None:
            return 0
        service = Service(facts, bus, clock, tracer, stopping=stopping, spans=spans, heartbeat=heartbeat)
        service.extend_status(DiskWatch(common.state_dir).add_to)
        watch = ProcessWatch()
        service.extend_status(watch.add_to)
        return await live(
            service,
            _ending_in_time(_watched(main, watch), facts.last_resorts.ending_s_max),
            drain_s_max=facts.drain_s_max,
        )


async def _connect(
    facts: ServiceFacts, common: CommonSettings, stopping: asyncio.Event, waits: Waits, listener: socket.socket | None
) -> Bus | None:
    """The bus, as soon as NATS responds; None if a signal arrives first. Raises BusRefused."""

    async def attempt() -> Bus:
        return await connect_nats(
            common.nats_url,
            name=f"{facts.name}-{facts.instance}",
            connect_s_max=CONNECT_S_MAX,
            access=common.nats_access(facts.name),
        )

    async with waiting_page(listener, waits):
        return await unless(stopping, waits.until("NATS", attempt), grace_s=facts.last_resorts.cancel_s_max)


def _watched(main: Main, watch: ProcessWatch) -> Main:
    async def run(service: Service) -> None:
        service.tasks.create_task(watch.follow_loop(), name="watch-loop")
        await main(service)

    return run


def _ending_in_time(main: Main, ending_s_max: float) -> Main:
    """Background tasks that ignore their cancellation cannot keep the process alive after ``main``."""

    async def run(service: Service) -> None:
        try:
            await main(service)
        finally:
            _leave_after(ending_s_max, EXIT_FAILED)

    return run


async def live(service: Service, main: Main, *, drain_s_max: float) -> int:
    """Run ``main``, publish the last status and close the bus. Returns the exit code."""
    code = 0
    try:
        await _serve(service, main, drain_s_max)
        service.set_phase(ServicePhase.STOPPED)
    except* Exception as errors:
        first, chars_max = errors.exceptions[0], DETAIL_CHARS_MAX
        code = EXIT_FAILED
        for error in errors.exceptions:
            if isinstance(error, WrongConfiguration):
                log.error("the process ends: %s", error)  # noqa: TRY400  # for the operator; the stack adds nothing
                first, chars_max, code = error, REFUSAL_CHARS_MAX, EXIT_CONFIGURATION
            elif isinstance(error, BusRefused):  # Started again, the process reads the key that is in its file now.
                log.error("the process ends: %s", error)  # noqa: TRY400  # for the operator; the stack adds nothing
                first, chars_max = error, REFUSAL_CHARS_MAX
            else:
                log.exception("the process ends: %s", error, exc_info=error)
        service.set_phase(ServicePhase.FAILED, _first_line(first, chars_max))
    await service.publish_status()
    await service.bus.close()
    return code


async def _serve(service: Service, main: Main, drain_s_max: float) -> None:
    try:
        async with service.tasks as tasks:
            tasks.create_task(service.announce(), name="announce-status")
            tasks.create_task(_watch_bus(service.bus), name="watch-bus")
            tasks.create_task(_watch_drain(service.stopping, drain_s_max), name="watch-drain")
            await main(service)
            raise _Finished
    except* _Finished:
        pass


async def _watch_bus(bus: Bus) -> None:
    await asyncio.shield(bus.failed)


async def _watch_drain(stopping: asyncio.Event, drain_s_max: float) -> None:
    await stopping.wait()
    await asyncio.sleep(drain_s_max)
    raise DrainTooSlow(f"not drained within {drain_s_max:g} s")


def _leave_after(seconds: float, code: int) -> None:
    """Exit after ``seconds`` even if a task ignores its cancellation or a third party's thread never ends."""
    last_resort = threading.Timer(seconds, os._exit, (code,))
    last_resort.daemon = True
    last_resort.start()


def _on_signals(stopping: asyncio.Event, leave_s_max: float) -> None:
    def on_signal(number: int) -> None:
        if stopping.is_set():
            log.warning("%s again: leaving at once", signal.Signals(number).name)
            os._exit(EXIT_FAILED)
        log.info("%s: stopping", signal.Signals(number).name)
        stopping.set()
        _leave_after(leave_s_max, EXIT_FAILED)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)


def _first_line(error: BaseException, chars_max: int = DETAIL_CHARS_MAX) -> str:
    """All lines in one where the first only introduces a list."""
    lines = (str(error) or type(error).__name__).splitlines()
    return (" ".join(map(str.strip, lines)) if lines[0].rstrip().endswith(":") else lines[0])[:chars_max]


DISTRIBUTION = "baton-serve"


@cache
def baton_version() -> str:
    """The version of the installed package; empty if it is not installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return ""
