"""A drained worker's prefixes are copied to other workers, unless the order says not to."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from shared.bus.nats_bus import connect_nats
from shared.bus.port import Bus, Envelope
from shared.contracts.channels import DRAIN, DRAINED, LOAD, WORKER_RECORDS
from shared.contracts.fleet_orders import DrainWorker, WorkerDrained
from shared.contracts.ids import WorkerId
from shared.contracts.load import LoadReport
from shared.contracts.workers import WorkerPhase
from tests.e2e.conftest import FAST, SPEEDS
from tests.support.nats_server import NatsServer, free_port
from tests.support.processes import service_process
from tests.support.prompts import VOCABULARY
from tests.support.system import EXACT, Metrics, until

pytestmark = pytest.mark.nats

MODEL = "baton-tiny"
BLOCK = 32
HISTORY_BLOCKS = 20
CONVERSATIONS = 6
START_S_MAX = 120.0
LEAVE_S_MAX = 60.0
WORKERS = ("w1", "w2", "w3")
NEVER = str(1_000_000)
"""More tokens than any prompt has."""


@dataclass
class Fleet:
    """Three workers that do everything, behind one router."""

    nats_url: str
    http: httpx.Client
    of_self_tests: int = 0
    """Blocks that workers hold before they are asked anything."""

    def ask(self, prompt: list[int]) -> tuple[str, int]:
        """The worker that served the prompt, and how many of its tokens were cached there."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "ignore_eos": True}
        answer = self.http.post("/v1/completions", json=body, headers={"x-baton-mode": "aggregated"})
        assert answer.status_code == 200, answer.text
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer.headers["x-baton-decode-worker"], cached

    def last_decision(self) -> str:
        """Why the last request was placed where it was."""
        newest = self.http.get("/baton/decisions", params={"limit": 1}).json()["decisions"][0]
        return self.http.get(f"/baton/decisions/{newest['decision_id']}").text

    def exact(self) -> dict[str, int]:
        """The workers whose blocks the router knows exactly, and how many these are."""
        try:
            answer = self.http.get("/metrics")
        except httpx.TransportError:
            return {}
        if not answer.is_success:  # It starts.
            return {}
        told = Metrics(answer.text)
        exact = [labels["worker_id"] for labels, is_so in told.each("baton_router_index_state", state=EXACT) if is_so]
        return {one: int(told.sum("baton_router_index_blocks", worker_id=one)) for one in exact}

    def until_known(self, workers: int, blocks: int) -> None:
        """Until the router knows so many workers, and so many blocks that they have."""
        promise = f"{blocks} blocks of {workers} workers are known"
        until(lambda: (len(self.exact()), sum(self.exact().values())) == (workers, blocks), promise, START_S_MAX)

    def until_proven(self) -> int:
        """Until all workers are ready: then their self-tests are over, too. Returns how many blocks these left."""
        blocks = asyncio.run(self._until_proven())
        self.until_known(len(WORKERS), blocks)
        return blocks

    async def _until_proven(self) -> int:
        bus = await connect_nats(self.nats_url, name="operator")
        try:
            async with asyncio.timeout(START_S_MAX):
                waiting = set(WORKERS)
                async for entry in (await bus.key_value_store(WORKER_RECORDS)).watch():
                    if entry is not None and entry.value is not None and entry.value.phase is WorkerPhase.READY:
                        waiting.discard(entry.key)
                    if not waiting:
                        return await blocks_of_all(bus)
            raise AssertionError("the registry is watched for ever")
        finally:
            await bus.close()

    def drain(self, worker_id: str, *, evacuate: bool) -> WorkerDrained:
        return asyncio.run(self._drain(WorkerId(worker_id), evacuate=evacuate))

    async def _drain(self, worker_id: WorkerId, *, evacuate: bool) -> WorkerDrained:
        bus = await connect_nats(self.nats_url, name="operator")
        try:
            drained: asyncio.Future[WorkerDrained] = asyncio.get_running_loop().create_future()
            await bus.subscribe(DRAINED, lambda told, _: drained.set_result(told), worker_id=worker_id)
            order = DrainWorker(worker_id=worker_id, evacuate=evacuate)
            taken = await bus.ask(DRAIN, order, timeout_s=LEAVE_S_MAX)
            assert not taken.refusal
            async with asyncio.timeout(LEAVE_S_MAX):
                return await drained
        finally:
            await bus.close()


@pytest.fixture
def fleet(tmp_path: Path, nats_server: NatsServer) -> Iterator[Fleet]:
    with ExitStack() as stack:
        port, common = free_port(), {"BATON_NATS_URL": nats_server.url, **FAST}
        # On a busy machine the worker that has a prefix may look a little slower than another one. A router would then
        # have that one fetch the prefix, and usage would report no cached token.
        settings = {"ROUTER_PORT": str(port), "ROUTER_FETCH_TOKENS_MIN": NEVER}
        stack.enter_context(service_process("router", tmp_path, **common, **settings))
        for worker_id in WORKERS:
            # Computing a history takes 0.3 s: more than a busy machine's delay to a worker, for which a router would
            # compute it elsewhere.
            slow = {"WORKER_SIMULATED": f"{SPEEDS},prefill_tokens_per_s=2000"}
            settings = {"WORKER_ENGINE": "simulated", "WORKER_WORKER_ID": worker_id}
            stack.enter_context(service_process("worker", tmp_path, **{**common, **settings, **slow}))
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0, trust_env=False)
        fleet = Fleet(nats_server.url, stack.enter_context(client))
        fleet.of_self_tests = fleet.until_proven()
        yield fleet


async def blocks_of_all(bus: Bus) -> int:
    """How many blocks the workers hold, by what they say from now on."""
    told: dict[str, int] = {}
    complete = asyncio.Event()

    def hear(load: LoadReport, _envelope: Envelope) -> None:
        if load.digest is not None:
            told[load.worker_id] = load.digest.count
        if len(told) == len(WORKERS):
            complete.set()

    await bus.subscribe(LOAD, hear)
    await complete.wait()
    return sum(told.values())


def history(seed: int) -> list[int]:
    return random.Random(seed).choices(VOCABULARY, k=HISTORY_BLOCKS * BLOCK)


def question(seed: int) -> list[int]:
    return random.Random(1000 + seed).choices(VOCABULARY, k=BLOCK)


def test_evacuated_prefixes_are_found_on_the_remaining_workers(fleet: Fleet):
    homes: dict[str, list[int]] = {}
    for seed in range(CONVERSATIONS):
        worker_id, cached = fleet.ask(history(seed))
        assert cached == 0
        homes.setdefault(worker_id, []).append(seed)
        fleet.until_known(3, fleet.of_self_tests + (seed + 1) * HISTORY_BLOCKS)
    leaving, conversations = max(homes.items(), key=lambda home: len(home[1]))
    stayed = sum(blocks for worker_id, blocks in fleet.exact().items() if worker_id != leaving)

    drained = fleet.drain(leaving, evacuate=True)

    moved = len(conversations) * HISTORY_BLOCKS
    assert drained.prefixes >= len(conversations)
    assert (drained.prefixes_left, drained.legs, drained.legs_cut) == (0, 0, 0)
    assert drained.blocks >= moved
    assert drained.bytes > 0
    assert 0.0 < drained.evacuation_s <= drained.seconds
    fleet.until_known(2, stayed + drained.blocks)
    new_homes = {}
    for seed in conversations:
        worker_id, cached = fleet.ask(history(seed) + question(seed))
        new_homes[seed] = worker_id
        assert cached == HISTORY_BLOCKS * BLOCK, fleet.last_decision()
    assert leaving not in new_homes.values()

    seed, stubborn = next(iter(new_homes.items()))
    left = fleet.drain(stubborn, evacuate=False)

    assert (left.prefixes, left.blocks, left.bytes) == (0, 0, 0)
    until(lambda: len(fleet.exact()) == 1, "that one is gone, too", START_S_MAX)
    assert fleet.ask(history(seed) + question(seed))[1] == 0
