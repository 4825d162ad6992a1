"""What `baton doctor` learns over NATS: it listens until every expected process has reported, and queries a few."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from services.launcher.bus_client import open_bus
from services.launcher.doctor.findings import HeardLoad, HeardService, Nats, RouterReply, SystemFacts
from services.launcher.doctor.machine import run_probes
from shared.addresses import host_port, servers_of
from shared.bus.nats_client import without_password
from shared.bus.port import AskTimedOut, Bus, BusDown, BusError, Envelope, NoResponders
from shared.contracts.channels import DESCRIBE_FLEET, LOAD, SERVICE_STATUS, WORKER_RECORDS
from shared.contracts.control import ServiceStatus
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.load import LoadReport
from shared.contracts.workers import WITHOUT_ENGINE, DescribeFleet, FleetState, WorkerRecord
from shared.runtime.clock import Clock, SystemClock
from shared.runtime.service import baton_version

PORT = 4222
LINE_BYTES_MAX = 256 * 1024
GREETING = b"INFO "


async def read_info(url: str, within_s: float) -> Nats:
    """What the first server that answers says of itself. Raises BusDown with the reasons if none does."""
    reasons = []
    for server in servers_of(url):
        try:
            return await _info_of(server, within_s)
        except BusDown as error:
            reasons.append(str(error))
    raise BusDown("; ".join(reasons) or f"{url} is not a NATS address")


async def _info_of(url: str, within_s: float) -> Nats:
    """Connect, read INFO and disconnect. Raises BusDown."""
    try:
        address = urlsplit(url)
        host, port = address.hostname or "127.0.0.1", address.port or PORT
    except ValueError as error:
        raise BusDown(f"{url} is not a NATS address: {error}") from error
    try:
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_connection(host, port, limit=LINE_BYTES_MAX)
            try:
                line = await reader.readline()
            finally:
                writer.close()
    except ConnectionRefusedError as error:
        raise BusDown(f"nothing listens at {host_port(host, port)}") from error
    except (TimeoutError, OSError, ValueError) as error:
        why = getattr(error, "strerror", "") or str(error) or f"not within {within_s:g} s"
        raise BusDown(f"nothing answers at {host_port(host, port)}: {why}") from error
    if not line.startswith(GREETING):
        raise BusDown(f"the server at {host_port(host, port)} is not a nats-server")
    try:
        return msgspec.json.decode(line.removeprefix(GREETING), type=Nats)
    except msgspec.MsgspecError as error:
        raise BusDown(f"the server at {host_port(host, port)} is not a nats-server: {error}") from error


T = TypeVar("T")

INFO_S_MAX = 3.0
ASK_S_MAX = 3.0
REGISTRY_S_MAX = 5.0
HTTP_S_MAX = 3.0
HEARD_S_MIN = 2.5
"""Services publish their status every two seconds, so listening takes a little longer."""
HEARD_S_MAX = 7.0
"""Late reports are waited for until then."""
LATE_S_MAX = 0.5
"""A clock that seems further behind than this is observed for longer."""
POLL_S = 0.1
ROUNDS = 5
"""Round trips to NATS; the quickest counts."""
PROCESSES_MAX = 4096
SENDERS_MAX = 8
ROUTERS_MAX = 64
ANYWHERE = ("0.0.0.0", "[::]")  # Addresses that a router publishes when it listens on all interfaces.
KEYLESS = (401, 403)


async def listen(nats_url: str, *, is_expected: bool, launcher_pid: int, clock: Clock | None = None) -> SystemFacts:
    """Facts about the system on ``nats_url``."""
    facts = SystemFacts(
        nats_url=without_password(nats_url),
        is_expected=is_expected,
        launcher_pid=launcher_pid,
        host=socket.gethostname(),
        baton=baton_version(),
    )
    try:
        facts.nats = await read_info(nats_url, INFO_S_MAX)
    except BusError as error:
        facts.failure = f"{str(error)[:1].upper()}{str(error)[1:]}."
        return facts
    try:
        async with open_bus(nats_url) as bus:
            await hear(bus, facts, clock or SystemClock())
    except BusError as error:
        facts.failure = str(error)
    return facts


async def hear(bus: Bus, facts: SystemFacts, clock: Clock) -> None:
    """Fill ``facts``. Raises BusError."""
    listener = Listener(clock)
    await bus.subscribe(SERVICE_STATUS, listener.status)
    await bus.subscribe(LOAD, listener.load)
    began = clock.now()
    rtt_s = await round_trip_s(bus, clock)
    if facts.nats is not None:
        facts.nats = msgspec.structs.replace(facts.nats, rtt_s=rtt_s)
    found, unknown = await run_probes({"registry": registry(bus), "fleet": fleet(bus)})
    facts.records = found.get("registry", [])
    facts.fleet = found.get("fleet")
    while (heard_s := clock.now() - began) < HEARD_S_MAX:
        if heard_s >= HEARD_S_MIN and listener.is_complete(facts.records):
            break
        await asyncio.sleep(POLL_S)
    facts.heard_s = clock.now() - began
    facts.services, facts.loads = listener.services(), listener.reports()
    facts.routers, facts.unknown = await query_routers(facts), unknown


class Listener:
    """Collects statuses and load reports. Bounded."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._services: dict[tuple[str, str], list[tuple[ServiceStatus, float]]] = defaultdict(list)
        self._pids: dict[tuple[str, str], list[tuple[str, int]]] = defaultdict(list)
        """The processes that published under each name, in the order of their messages."""
        self._loads: dict[WorkerId, LoadReport] = {}
        self._epochs: dict[WorkerId, list[Epoch]] = defaultdict(list)

    def status(self, status: ServiceStatus, _envelope: Envelope) -> None:
        key = status.service, status.instance
        if len(self._services) < PROCESSES_MAX or key in self._services:
            ahead_s = (status.at_ms - self._clock.wall_ms()) / 1000 if status.at_ms else 0.0
            self._services[key].append((status, ahead_s))
            note_sender(self._pids[key], (status.host, status.pid))

    def load(self, report: LoadReport, _envelope: Envelope) -> None:
        worker = report.worker_id
        if len(self._loads) < PROCESSES_MAX or worker in self._loads:
            note_sender(self._epochs[worker], report.epoch)
            known = self._loads.get(worker)
            if known is None or known.epoch <= report.epoch:
                self._loads[worker] = report

    def is_complete(self, records: list[WorkerRecord]) -> bool:
        """Whether all required services and all registered workers have reported."""
        kinds = {service for service, _instance in self._services}
        expected = {record.worker_id for record in records if record.phase not in WITHOUT_ENGINE}
        return (
            {"router", "orchestrator", "collector"} <= kinds
            and expected <= self._loads.keys()
            and not self._needs_more()
        )

    def _needs_more(self) -> bool:
        """Whether more messages could resolve a doubt: a late message makes a clock look as if it were behind."""
        behind = any(max(ahead_s for _status, ahead_s in heard) < -LATE_S_MAX for heard in self._services.values())
        double = any(map(may_be_duplicate, self._pids.values())) or any(map(may_be_duplicate, self._epochs.values()))
        return behind or double

    def services(self) -> list[HeardService]:
        """The newest status of each. The fastest message gives the best estimate of a clock's offset."""
        return [
            HeardService(
                status=heard[-1][0],
                ahead_s=max(ahead_s for _status, ahead_s in heard),
                is_duplicate=is_duplicate(self._pids[key]),
            )
            for key, heard in sorted(self._services.items())
        ]

    def reports(self) -> list[HeardLoad]:
        """The newest report of each worker."""
        return [
            HeardLoad(report=load, is_duplicate=is_duplicate(self._epochs[worker]))
            for worker, load in sorted(self._loads.items())
        ]


def note_sender(senders: list[T], sender: T) -> None:
    """Append the sender of a message under one name, unless it also sent the previous one."""
    if senders[-1:] != [sender] and len(senders) < SENDERS_MAX:
        senders.append(sender)


def is_duplicate(senders: Sequence[object]) -> bool:
    """Whether a sender published again after another one. A process that was replaced does not."""
    return len(senders) > len(set(senders))


def may_be_duplicate(senders: Sequence[object]) -> bool:
    """Whether two senders were seen, and both may still be alive."""
    return len(senders) > 1 and not is_duplicate(senders)


async def round_trip_s(bus: Bus, clock: Clock) -> float:
    """Shortest round trip to NATS, seconds."""
    times = []
    for _ in range(ROUNDS):
        requested_at = clock.now()
        await bus.flush(ASK_S_MAX)
        times.append(clock.now() - requested_at)
    return min(times)


async def registry(bus: Bus) -> list[WorkerRecord]:
    """All worker records. Raises ValueError with the reason when the registry cannot be read."""
    try:
        async with asyncio.timeout(REGISTRY_S_MAX):
            entries = await (await bus.key_value_store(WORKER_RECORDS)).all()
    except BusError as error:
        raise ValueError(str(error)) from error
    return sorted((one.value for one in entries if one.value is not None), key=lambda record: record.worker_id)


async def fleet(bus: Bus) -> FleetState | None:
    """From the leading orchestrator; None when none responds."""
    try:
        return await bus.ask(DESCRIBE_FLEET, DescribeFleet(), timeout_s=ASK_S_MAX)
    except (NoResponders, AskTimedOut):
        return None
    except BusError as error:
        raise ValueError(str(error)) from error


async def query_routers(facts: SystemFacts) -> list[RouterReply]:
    """Query all routers over HTTP in parallel, without credentials."""
    urls = sorted({one.status.url for one in facts.services if one.status.service == "router" and one.status.url})
    if not urls:
        return []
    here = {one.status.url: one.status.host in {"", facts.host} for one in facts.services}
    hosts = {one.status.url: one.status.host for one in facts.services}
    async with httpx.AsyncClient(timeout=HTTP_S_MAX, trust_env=False) as client:
        asking: list[Coroutine[Any, Any, RouterReply]] = [
            query_router(client, url, url if here[url] else reachable(url, hosts[url])) for url in urls[:ROUTERS_MAX]
        ]
        return list(await asyncio.gather(*asking))


def reachable(url: str, host: str) -> str:
    """The URL with the machine's name in place of a wildcard address."""
    for anywhere in ANYWHERE:
        url = url.replace(anywhere, host)
    return url


async def query_router(client: httpx.AsyncClient, published: str, url: str) -> RouterReply:
    """Whether it is ready, and whether it requires API keys."""
    try:
        ready = await client.get(f"{url}/ready")
        models = await client.get(f"{url}/v1/models")
    except httpx.HTTPError as error:
        return RouterReply(url=published, failure=str(error) or type(error).__name__)
    detail = ""
    with contextlib.suppress(ValueError, AttributeError):
        detail = str(ready.json().get("reason", ""))
    asks = None if models.status_code not in {200, *KEYLESS} else models.status_code in KEYLESS
    return RouterReply(url=published, ready=ready.status_code == 200, detail=detail, requires_key=asks)
