"""Workers start, leave and change roles under traffic, and no request fails."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from shared.bus.nats_bus import connect_nats
from shared.bus.port import Bus, Envelope, KeyValueStore
from shared.contracts.channels import RUN_SELF_TEST, SELF_TEST_PROMPT, SERVICE_STATUS, WORKER_RECORDS
from shared.contracts.fleet_orders import AskSelfTestPrompt, RunSelfTest, SelfTestPrompt, SelfTestResult
from shared.contracts.ids import WorkerId
from shared.contracts.workers import WORKER_RECORD_TTL_S, Role, WorkerPhase, WorkerRecord
from tests.e2e.conftest import START_S_MAX
from tests.support.nats_server import NatsServer
from tests.support.processes import service_process
from tests.support.system import STOP_S_MAX, Launched, System, baton, until

pytestmark = pytest.mark.nats

SLOW = {"WORKER_SIMULATED": "decode_base_s=0.01,decode_per_sequence_s=0.002"}
"""A worker that decodes nothing is the cheaper one, whatever a slow moment has made of its predicted transit."""
TOKENS = 40
CLIENTS = 6
"""Each asks one request after the other."""
ENOUGH = 3 * CLIENTS


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("lifecycle")
    with System(folder, "--open", "--engine", "simulated", "--prefill", "2", "--decode", "1", env=SLOW) as system:
        system.wait_ready(START_S_MAX).until_exact(3)
        yield system


@dataclass
class Traffic:
    """Streams that go on until the block ends; each one is right or not."""

    endpoint: str
    served_by: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator[None]:
        with ThreadPoolExecutor(CLIENTS) as clients:
            asking = [clients.submit(self._ask_on, number) for number in range(CLIENTS)]
            try:
                yield
            finally:
                self.stopping.set()
        for one in asking:
            one.result()

    def until_more(self, count: int = ENOUGH) -> None:
        wanted = len(self.served_by) + count
        until(lambda: len(self.served_by) >= wanted, f"{count} more answers")

    def until_served_by(self, worker_id: str) -> None:
        until(lambda: worker_id in self.served_by[-ENOUGH:], f"{worker_id} answers")

    def _ask_on(self, number: int) -> None:
        with httpx.Client(base_url=self.endpoint, timeout=60.0, trust_env=False) as http:
            for turn in range(100_000):
                if self.stopping.is_set():
                    return
                self._ask(http, f"Runner {number} runs round {turn}. " * 10)

    def _ask(self, http: httpx.Client, prompt: str) -> None:
        body = {"model": "baton-tiny", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            *events, last = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
        reasons = [json.loads(event)["choices"][0]["finish_reason"] for event in events]
        if answer.status_code != 200 or last != "[DONE]" or len(events) < TOKENS or reasons[-1] != "length":
            self.wrong.append(f"{answer.status_code} {len(events)} events, {last}")
        self.served_by.append(answer.headers.get("x-baton-decode-worker", ""))


@contextmanager
def traffic(system: System) -> Iterator[Traffic]:
    """At the end, no client has noticed anything."""
    streams = Traffic(system.endpoint)
    with streams.running():
        streams.until_more()
        yield streams
        streams.until_more()
    assert streams.wrong == []


def order(system: System, *arguments: str) -> dict[str, Any]:
    code, out, err = baton(*arguments, "--json", "--state-dir", str(system.folder))
    assert code == 0, err
    return json.loads(out)


def phases(system: System) -> dict[str, str]:
    return {name: worker["phase"] for name, worker in system.fleet().items()}


def test_a_worker_joins_and_drains_under_traffic_without_losing_requests(system: System):
    with traffic(system) as streams:
        terminal = Launched(system.folder, "--join", "--decode", "1")
        with terminal:
            terminal.wait_said("joined nats", START_S_MAX)
            ready_at = time.monotonic()
            streams.until_served_by("decode-2")
            print(f"decode-2 answered {time.monotonic() - ready_at:.2f} s after it was said to be ready")
            streams.until_more()

            told = order(system, "drain", "decode-2", "--deadline", "0")
            until(lambda: "decode-2" not in streams.served_by[-ENOUGH:], "nothing is placed there any more")

            assert told["ordered"] is True
            print(f"drained in {told['seconds']:.2f} s, {told.get('legs', 0)} legs cut")
            assert terminal.process is not None
            assert terminal.process.wait(STOP_S_MAX) == 0, "a launcher whose workers have all left has no more to do"
        assert "decode-2 drained in" in terminal.said()
    until(lambda: phases(system).get("decode-2", "gone") == "gone", "the fleet knows")


def test_role_changes_under_traffic_fail_no_request(system: System):
    with traffic(system) as streams:
        there = order(system, "role", "prefill-2", "decode")
        streams.until_served_by("prefill-2")
        streams.until_more()
        back = order(system, "role", "prefill-2", "prefill")
        until(lambda: "prefill-2" not in streams.served_by[-ENOUGH:], "it answers nobody any more")

    print(
        f"there {there['seconds']:.3f} s with {there.get('legs', 0)} legs, back {back['seconds']:.3f} s with "
        f"{back.get('legs', 0)}"
    )
    assert (there["before"], there["role"]) == ("prefill", "decode")
    assert (back["before"], back["role"]) == ("decode", "prefill")
    assert system.fleet()["prefill-2"]["record"]["role"] == "prefill"


def test_a_drained_worker_is_not_started_again_and_the_rest_goes_on(system: System):
    with traffic(system):
        code, out, _err = baton("drain", "prefill-2", "--state-dir", str(system.folder))
        assert code == 0
        assert "prefill-2 drained in" in out
        until(lambda: not system.pids("services.worker", "prefill-2"), "its process has ended")

    assert not system.pids("services.worker", "prefill-2")
    assert "Restarting it" not in system.said()


def test_an_order_to_an_unknown_worker_gives_one_sentence(system: System):
    code, out, err = baton("drain", "nobody", "--state-dir", str(system.folder))

    assert code == 1
    assert "No worker with the id nobody is running. Running workers: decode-1" in out + err
    assert "Traceback" not in err


def test_a_role_that_was_changed_outlives_the_process(system: System):
    order(system, "role", "prefill-1", "both")
    before = system.fleet()["prefill-1"]["record"]
    os.kill(before["pid"], signal.SIGKILL)

    def next_life() -> dict[str, Any]:
        worker = system.fleet().get("prefill-1", {"phase": "gone"})
        is_next = worker["phase"] == "ready" and worker["record"]["epoch"] > before["epoch"]
        return worker["record"] if is_next else {}

    after = until(next_life, "prefill-1 is ready again", START_S_MAX)
    assert (before["role"], after["role"]) == ("both", "both")
    assert "as ordered before the restart" in after["note"]


def test_a_worker_whose_kv_self_test_fails_is_not_ready(tmp_path: Path):
    with NatsServer(tmp_path, has_buckets=True) as nats:
        common = {"BATON_NATS_URL": nats.url, "WORKER_ENGINE": "simulated"}
        with service_process("worker", tmp_path, **common, WORKER_WORKER_ID="p1", WORKER_ROLE="prefill") as well:
            with asyncio.Runner() as runner:
                liar = runner.run(Liar.like("p1", nats.url))
                with service_process("worker", tmp_path, **common, WORKER_WORKER_ID="d1", WORKER_ROLE="decode") as new:
                    details = runner.run(liar.keeps_out("d1"))
                    runner.run(liar.leaves_and_lets_in("d1"))
                    assert new.stop() == 0
            assert well.stop() == 0

    said = [detail for detail in details if detail.startswith("starting probing: ")]
    assert any("with liar: it cannot read this worker's KV: not held" in detail for detail in said), details


class Liar:
    """A decode worker of the same fingerprint that reports that it cannot read any other worker's KV."""

    def __init__(self, bus: Bus, registry: KeyValueStore[WorkerRecord], record: WorkerRecord) -> None:
        self._bus = bus
        self._registry = registry
        self._record = record
        self._renewing = asyncio.create_task(self._renew())
        self._details: list[str] = []

    @classmethod
    async def like(cls, other: str, url: str) -> Liar:
        bus = await connect_nats(url, name="liar", connect_s_max=START_S_MAX)
        registry = await bus.key_value_store(WORKER_RECORDS)
        known = await record_of(registry, other, lambda record: record.phase is WorkerPhase.READY)
        return cls(bus, registry, msgspec.structs.replace(known, worker_id=WorkerId("liar"), role=Role.DECODE))

    async def keeps_out(self, worker_id: str) -> list[str]:
        """Until that worker says that this one speaks against it; answers what its process says."""
        await self._bus.answer(SELF_TEST_PROMPT, self._give, worker_id=self._record.worker_id)
        await self._bus.answer(RUN_SELF_TEST, self._cannot_read, worker_id=self._record.worker_id)
        await self._bus.subscribe(
            SERVICE_STATUS, lambda told, _e: self._details.append(f"{told.phase} {told.detail}"), instance=worker_id
        )
        kept_out = await record_of(self._registry, worker_id, lambda record: "liar" in record.note)
        assert kept_out.phase is WorkerPhase.PROBING
        async with asyncio.timeout(START_S_MAX):
            while not any("liar" in detail for detail in self._details):
                await asyncio.sleep(0.05)
        return self._details

    async def leaves_and_lets_in(self, worker_id: str) -> None:
        self._renewing.cancel()
        await asyncio.wait([self._renewing])
        await self._registry.delete("liar")
        await record_of(self._registry, worker_id, lambda record: record.phase is WorkerPhase.READY)
        await self._bus.close()

    async def _give(self, ask: AskSelfTestPrompt, _envelope: Envelope) -> SelfTestPrompt:
        tokens = random.choices(range(10, 1000), k=2 * self._record.hashing.block_size + 5)
        return SelfTestPrompt(worker_id=ask.worker_id, epoch=self._record.epoch, tokens=tokens)

    async def _cannot_read(self, ask: RunSelfTest, _envelope: Envelope) -> SelfTestResult:
        return SelfTestResult(worker_id=ask.worker_id, epoch=self._record.epoch, failure="not held")

    async def _renew(self) -> None:
        while True:
            await self._registry.put(self._record)
            await asyncio.sleep(WORKER_RECORD_TTL_S / 3)


async def record_of(
    registry: KeyValueStore[WorkerRecord], worker_id: str, holds: Callable[[WorkerRecord], bool]
) -> WorkerRecord:
    async with asyncio.timeout(START_S_MAX):
        async for entry in registry.watch():
            if entry is not None and entry.key == worker_id and entry.value is not None and holds(entry.value):
                return entry.value
    raise AssertionError("the registry is watched for ever")
