"""A router without clients, on a bus connection of its own: its index is compared with the engines' caches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx

from services.router.service import Router
from services.router.state.prefix_index import IndexState
from shared.bus.nats_bus import connect_nats
from shared.bus.port import Bus, BusError, Envelope
from shared.contracts.channels import DESCRIBE_FLEET, KV_SNAPSHOT, LOAD
from shared.contracts.ids import WorkerId
from shared.contracts.kv_events import AskKvSnapshot, KvTier, unpack_hashes
from shared.contracts.load import LoadReport
from shared.contracts.workers import DescribeFleet, WorkerPhase
from tests.integration.router.told_workers import running_router
from tests.nightly.chaos.faults import STORE, Fault, Part
from tests.nightly.chaos.fleet import OTHER, Fleet
from tests.support.system import EXACT, Metrics

CHECK_S = 0.2
ASK_S_MAX = 15.0
FIXED = frozenset({OTHER, STORE})
"""Groups of workers whose roles nobody changes."""
IDLE = ("legs", "running", "waiting", "waiting_tokens", "kv_tokens_used")
"""Of a load report: all zero where nothing is asked for."""
ALSO_IDLE = ("leases", "pinned_blocks", "reads")
"""Of the exchange's part of it."""


class Witness:
    """What is promised of a fleet that is left in peace."""

    def __init__(self, fleet: Fleet, bus: Bus, router: Router) -> None:
        self.bus = bus
        """With an operator's rights."""
        self._fleet = fleet
        self._router = router
        self._loads: dict[str, LoadReport] = {}
        self._http = httpx.AsyncClient(timeout=5.0, trust_env=False)

    async def open(self) -> None:
        """Hear all load reports from now on."""
        await self.bus.subscribe(LOAD, self._load_reported)

    async def close(self) -> None:
        await self._http.aclose()

    def ready(self) -> set[str]:
        """Workers that may be given requests now, and stores, whose present life is the one that is known."""
        cluster, silent_s_max = self._router.fleet.cluster, self._router.fleet.policy.silent_s_max
        now, actors = self._router.clock.now(), self._fleet.actors
        views = cluster.workers.values()
        fit = [view.record for view in views if view.fit(now, silent_s_max) or (view.ready and not view.serves)]
        return {str(one.worker_id) for one in fit if one.worker_id in actors and actors[one.worker_id].pid == one.pid}

    async def spares(self, fault: Fault) -> bool:
        """Whether this must not happen now, because too few would be left of its kind."""
        if fault.part is Part.WORKER:
            roles = self._roles()
            if roles.get(fault.target) == STORE:
                return False
            peers = {name for name, role in roles.items() if role == roles.get(fault.target)}
            return not peers or 2 * len(self.ready() & peers - {fault.target}) < len(peers)
        if fault.part is Part.ROUTER:
            others = [url for name, url in self._fleet.routers if name != fault.target]
            return not all([await self._is_whole(url) for url in others])
        return False

    def _roles(self) -> dict[str, str]:
        """Of each worker now, after what operators and the planner have changed."""
        known = {str(name): view.record.role.value for name, view in self._router.fleet.cluster.workers.items()}
        return {name: role if role in FIXED else known.get(name, role) for name, role in self._fleet.size.roles.items()}

    async def _is_whole(self, url: str) -> bool:
        metrics = await self._metrics(url)
        exact = 0.0 if metrics is None else metrics.sum("baton_router_index_state", state=EXACT)
        return 2 * exact > len(self._fleet.size.roles)

    def busiest(self) -> str:
        """The worker that serves the most legs just now."""
        return max(self._loads, key=lambda worker_id: self._loads[worker_id].legs)

    async def complaints(self) -> list[str]:
        """Everything that is not as it should be when nothing goes on."""
        found = await self.incomplete()
        for worker_id in sorted(self._fleet.size.roles):
            found += self._not_idle(worker_id)
            found += await self._untrue(WorkerId(worker_id))
        for name, url in self._fleet.routers:
            found += await self._not_at_rest(name, url)
        return found

    async def incomplete(self) -> list[str]:
        """What a fleet lacks that may be at work: workers that are ready, routers that know all of them, a leader."""
        expected = set(self._fleet.size.roles)
        found = [f"{worker_id} is not ready" for worker_id in sorted(expected - self.ready())]
        for name, url in self._fleet.routers:
            metrics = await self._metrics(url)
            exact = 0.0 if metrics is None else metrics.sum("baton_router_index_state", state=EXACT)
            if exact != len(expected):
                found.append(f"{name}: {exact:g} of {len(expected)} indexes are exact")
        return found + await self._leader_complaints(expected)

    async def settled(self, s_max: float) -> list[str]:
        """Wait until there is nothing to complain of; what is left after ``s_max`` seconds."""
        return await self.until(self.complaints, s_max)

    async def until(self, check: Callable[[], object], s_max: float) -> list[str]:
        """Ask ``check``, a coroutine function, for complaints until it has none."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + s_max
        while True:
            found: list[str] = await check()  # type: ignore[misc]
            if not found or clock() > deadline:
                return found
            await asyncio.sleep(CHECK_S)

    def _load_reported(self, load: LoadReport, _envelope: Envelope) -> None:
        self._loads[load.worker_id] = load

    def _not_idle(self, worker_id: str) -> list[str]:
        load = self._loads.get(worker_id)
        if load is None:
            return [f"{worker_id} was never heard"]
        of_copies = {"kv_tokens_used"} if self._fleet.size.roles[worker_id] == STORE else set()
        idle = [name for name in IDLE if name not in of_copies]
        found = [f"{worker_id}: {name} is {value}" for name in idle if (value := getattr(load, name))]
        if load.exchange is not None:
            state = load.exchange
            found += [f"{worker_id}: {name} is {value}" for name in ALSO_IDLE if (value := getattr(state, name))]
        return found

    async def _untrue(self, worker_id: WorkerId) -> list[str]:
        """Whether the index says of this worker what the worker says of itself, block by block."""
        index = self._router.fleet.index
        if worker_id not in index.entries or index.state(worker_id) is not IndexState.EXACT:
            return [f"{worker_id}: the witness's index is not exact"]
        try:
            ask = AskKvSnapshot(worker_id=worker_id, epoch=index.entries[worker_id].epoch)
            truth = await self.bus.ask(KV_SNAPSHOT, ask, timeout_s=ASK_S_MAX)
        except BusError as error:
            return [f"{worker_id}: no snapshot, {error}"]
        slot = index.slot(worker_id)
        held = (truth.hashes, truth.host_hashes, truth.disk_hashes, truth.object_hashes, truth.boundary_hashes)
        return [
            f"{worker_id}: the index and the {tier} cache differ"
            for number, (tier, hashes) in enumerate(zip(KvTier, held, strict=True))
            if set(unpack_hashes(index.table.blocks(slot, number))) != set(unpack_hashes(hashes))
        ]

    async def _not_at_rest(self, name: str, url: str) -> list[str]:
        """A router's own view: of as many blocks as the witness knows; nothing under way."""
        metrics = await self._metrics(url)
        if metrics is None:
            return [f"{name} does not answer"]
        found = []
        for labels, blocks in metrics.each("baton_router_index_blocks"):
            truth = self._router.fleet.index.count(WorkerId(labels["worker_id"]))
            if blocks != truth:
                found.append(f"{name}: knows {blocks:g} blocks of {labels['worker_id']}, which has {truth}")
        for gauge in ("baton_router_requests_in_flight", "baton_router_requests_waiting"):
            if value := metrics.sum(gauge):
                found.append(f"{name}: {gauge} is {value:g}")
        return found

    async def _metrics(self, url: str) -> Metrics | None:
        try:
            return Metrics((await self._http.get(f"{url}/metrics")).raise_for_status().text)
        except httpx.HTTPError:
            return None

    async def _leader_complaints(self, expected: set[str]) -> list[str]:
        try:
            state = await self.bus.ask(DESCRIBE_FLEET, DescribeFleet(), timeout_s=ASK_S_MAX)
        except BusError as error:
            return [f"nobody leads: {error}"]
        ready = {worker.record.worker_id for worker in state.workers if worker.phase is WorkerPhase.READY}
        return [f"{state.leader} does not call {worker_id} ready" for worker_id in sorted(expected - ready)]


@asynccontextmanager
async def witness_of(fleet: Fleet) -> AsyncIterator[Witness]:
    """A witness with connections of its own."""
    own, router_bus = [await connect_nats(fleet.nats.url, name=name) for name in ("witness", "witness-router")]
    try:
        async with running_router(router_bus) as router:
            witness = Witness(fleet, own, router)
            await witness.open()
            try:
                yield witness
            finally:
                await witness.close()
    finally:
        await own.close()
        await router_bus.close()
