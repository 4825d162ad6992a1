"""What `baton doctor` hears on the bus: it listens until everybody who should speak has, and asks a few questions."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import defaultdict
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import httpx

from services.launcher.doctor.facts import HeardLoad, HeardService, Nats, RouterAnswer, SystemFacts
from services.launcher.doctor.machine import side_by_side
from services.launcher.views.fleet import open_bus
from shared.bus.nats_errors import without_password
from shared.bus.nats_info import read_info
from shared.bus.port import AskTimedOut, Bus, BusError, Envelope, NoResponders
from shared.contracts.channels import DESCRIBE_FLEET, LOAD, SERVICE_STATUS, WORKER_RECORDS
from shared.contracts.control import ServiceStatus
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.load import LoadReport
from shared.contracts.workers import WORKER_RECORD_TTL_S, DescribeFleet, FleetState, WorkerPhase, WorkerRecord
from shared.runtime.clock import Clock, SystemClock
from shared.runtime.version import baton_version

T = TypeVar("T")

INFO_S_MAX = 3.0
ASK_S_MAX = 3.0
REGISTRY_S_MAX = 5.0
HTTP_S_MAX = 3.0
HEARD_S_MIN = 2.5
"""Services say every two seconds where they are."""
HEARD_S_MAX = 7.0
"""For who is late."""
LATE_S_MAX = 0.5
"""A clock that seems to be behind by more is listened to longer."""
LOOK_S = 0.1
ROUNDS = 5
"""Round trips to NATS of which the quickest counts."""
PROCESSES_MAX = 4096
TURNS_MAX = 8
ROUTERS_MAX = 64
ANYWHERE = ("0.0.0.0", "[::]")  # as a router tells where it listens
KEYLESS = (401, 403)


async def listen(nats_url: str, *, is_expected: bool, launcher_pid: int, clock: Clock | None = None) -> SystemFacts:
    """All that there is to hear of the system on ``nats_url``."""
    facts = SystemFacts(
        nats_url=without_password(nats_url),
        is_expected=is_expected,
        launcher_pid=launcher_pid,
        host=socket.gethostname(),
        baton=baton_version(),
    )
    try:
        info = await read_info(nats_url, INFO_S_MAX)
    except BusError as error:
        facts.failure = f"{str(error)[:1].upper()}{str(error)[1:]}."
        return facts
    facts.nats = Nats(
        version=info.version,
        max_payload=info.max_payload,
        jetstream=info.jetstream,
        auth_required=info.auth_required,
        tls_required=info.tls_required,
    )
    try:
        async with open_bus(nats_url) as bus:
            await hear(bus, facts, clock or SystemClock())
    except BusError as error:
        facts.failure = str(error)
    return facts


async def hear(bus: Bus, facts: SystemFacts, clock: Clock) -> None:
    """Fill ``facts``. Raises BusError."""
    ears = Ears(clock)
    await bus.subscribe(SERVICE_STATUS, ears.status)
    await bus.subscribe(LOAD, ears.load)
    began = clock.now()
    rtt_s = await round_trip_s(bus, clock)
    if facts.nats is not None:
        facts.nats = Nats(
            **{name: getattr(facts.nats, name) for name in facts.nats.__struct_fields__} | {"rtt_s": rtt_s}
        )
    found, unknown = await side_by_side({"registry": registry(bus), "fleet": fleet(bus)})
    facts.records = found.get("registry", [])
    facts.fleet = found.get("fleet")
    while (heard_s := clock.now() - began) < HEARD_S_MAX:
        if heard_s >= HEARD_S_MIN and ears.have_heard(facts.records):
            break
        await asyncio.sleep(LOOK_S)
    facts.heard_s = clock.now() - began
    facts.services, facts.loads = ears.services(), ears.reports()
    facts.routers, facts.unknown = await ask_routers(facts), unknown


class Ears:
    """What was heard. Bounded."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._services: dict[tuple[str, str], list[tuple[ServiceStatus, float]]] = defaultdict(list)
        self._pids: dict[tuple[str, str], list[tuple[str, int]]] = defaultdict(list)
        """Of each name, who spoke under it, in turns."""
        self._loads: dict[WorkerId, LoadReport] = {}
        self._epochs: dict[WorkerId, list[Epoch]] = defaultdict(list)

    def status(self, status: ServiceStatus, _envelope: Envelope) -> None:
        """A process said where it is."""
        key = status.service, status.instance
        if len(self._services) < PROCESSES_MAX or key in self._services:
            ahead_s = (status.at_ms - self._clock.wall_ms()) / 1000 if status.at_ms else 0.0
            self._services[key].append((status, ahead_s))
            turns_to(self._pids[key], (status.host, status.pid))

    def load(self, report: LoadReport, _envelope: Envelope) -> None:
        """A worker said how busy it is."""
        worker = report.worker_id
        if len(self._loads) < PROCESSES_MAX or worker in self._loads:
            turns_to(self._epochs[worker], report.epoch)
            known = self._loads.get(worker)
            if known is None or known.epoch <= report.epoch:
                self._loads[worker] = report

    def have_heard(self, records: list[WorkerRecord]) -> bool:
        """Whether everybody spoke who is needed or registered."""
        kinds = {service for service, _instance in self._services}
        speaking = {record.worker_id for record in records if record.phase is not WorkerPhase.STARTING}
        return (
            {"router", "orchestrator", "collector"} <= kinds and speaking <= self._loads.keys() and not self._doubtful()
        )

    def _doubtful(self) -> bool:
        """Whether more time could clear something up: a late message makes a clock look as if it were behind."""
        behind = any(max(ahead_s for _said, ahead_s in told) < -LATE_S_MAX for told in self._services.values())
        double = any(map(is_in_doubt, self._pids.values())) or any(map(is_in_doubt, self._epochs.values()))
        return behind or double

    def services(self) -> list[HeardService]:
        """The newest of each. A clock is as far ahead as in the message that was quickest here."""
        return [
            HeardService(
                status=told[-1][0],
                ahead_s=max(ahead_s for _status, ahead_s in told),
                is_double=is_double(self._pids[key]),
            )
            for key, told in sorted(self._services.items())
        ]

    def reports(self) -> list[HeardLoad]:
        """The newest of each worker."""
        return [
            HeardLoad(report=load, is_double=is_double(self._epochs[worker]))
            for worker, load in sorted(self._loads.items())
        ]


def turns_to(turns: list[T], speaker: T) -> None:
    """Somebody speaks under a name: the one who did last, or another."""
    if turns[-1:] != [speaker] and len(turns) < TURNS_MAX:
        turns.append(speaker)


def is_double(turns: Sequence[object]) -> bool:
    """Whether somebody spoke again after another had: who has ended, and was started anew, does not."""
    return len(turns) > len(set(turns))


def is_in_doubt(turns: Sequence[object]) -> bool:
    """Whether two have spoken, and it may still turn out that both live."""
    return len(turns) > 1 and not is_double(turns)


async def round_trip_s(bus: Bus, clock: Clock) -> float:
    """To NATS and back."""
    times = []
    for _ in range(ROUNDS):
        asked_at = clock.now()
        await bus.flush(ASK_S_MAX)
        times.append(clock.now() - asked_at)
    return min(times)


async def registry(bus: Bus) -> list[WorkerRecord]:
    """Who is registered. Raises ValueError with the words for why nobody knows."""
    try:
        async with asyncio.timeout(REGISTRY_S_MAX):
            kept = await (await bus.key_value_store(WORKER_RECORDS, ttl_s=WORKER_RECORD_TTL_S)).all()
    except BusError as error:
        raise ValueError(str(error)) from error
    return sorted((one.value for one in kept if one.value is not None), key=lambda record: record.worker_id)


async def fleet(bus: Bus) -> FleetState | None:
    """As the leading orchestrator sees it; None when nobody answers."""
    try:
        return await bus.ask(DESCRIBE_FLEET, DescribeFleet(), timeout_s=ASK_S_MAX)
    except (NoResponders, AskTimedOut):
        return None
    except BusError as error:
        raise ValueError(str(error)) from error


async def ask_routers(facts: SystemFacts) -> list[RouterAnswer]:
    """Each over HTTP, side by side, as a stranger would."""
    urls = sorted({one.status.url for one in facts.services if one.status.service == "router" and one.status.url})
    if not urls:
        return []
    here = {one.status.url: one.status.host in {"", facts.host} for one in facts.services}
    hosts = {one.status.url: one.status.host for one in facts.services}
    async with httpx.AsyncClient(timeout=HTTP_S_MAX, trust_env=False) as client:
        asking: list[Coroutine[Any, Any, RouterAnswer]] = [
            ask_router(client, url, url if here[url] else reachable(url, hosts[url])) for url in urls[:ROUTERS_MAX]
        ]
        return list(await asyncio.gather(*asking))


def reachable(url: str, host: str) -> str:
    """A router that listens on every address is reached by its machine's name."""
    for anywhere in ANYWHERE:
        url = url.replace(anywhere, host)
    return url


async def ask_router(client: httpx.AsyncClient, told: str, url: str) -> RouterAnswer:
    """Whether it is ready, and whether it lets anybody in."""
    try:
        ready = await client.get(f"{url}/ready")
        models = await client.get(f"{url}/v1/models")
    except httpx.HTTPError as error:
        return RouterAnswer(url=told, failure=str(error) or type(error).__name__)
    detail = ""
    with contextlib.suppress(ValueError, AttributeError):
        detail = str(ready.json().get("reason", ""))
    asks = None if models.status_code not in {200, *KEYLESS} else models.status_code in KEYLESS
    return RouterAnswer(url=told, ready=ready.status_code == 200, detail=detail, asks_for_key=asks)
