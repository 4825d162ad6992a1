"""A worker is ready when it has proved itself, and obeys: self_tests, another role, the way out."""

from __future__ import annotations

import asyncio

import pytest

from services.worker.engines.port import EngineTokens, Identity
from services.worker.lifecycle.probing import Prober, failed
from services.worker.lifecycle.self_test import FINE, PAUSE_S, Finding, Kind, Outcome
from services.worker.lifecycle.self_test_handler import SELF_TESTS_AT_ONCE_MAX, SelfTestHandler
from services.worker.tiny_model.tiny_model import ensure_tiny_tokenizer
from shared.bus.port import AskRefused, Envelope
from shared.contracts.channels import CHANGE_ROLE, DRAIN, DRAINED, LOAD, RUN_SELF_TEST, SELF_TEST_PROMPT, SERVICE_STATUS
from shared.contracts.failures import Reason
from shared.contracts.fleet_orders import AskSelfTestPrompt, ChangeRole, DrainWorker, RunSelfTest, SelfTestPrompt
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.workers import Role, WorkerPhase
from shared.runtime.clock import SystemClock
from tests.support.fleet_builders import record
from tests.support.memory_bus import MemoryBus, MemoryHub
from tests.support.virtual_time import run_in_virtual_time
from tests.unit.worker.fakes import FakeEngine
from tests.unit.worker.simulated_workers import SOON_S_MAX, Forgetful, workers_on_one_bus

PROBING, READY, DRAINING = WorkerPhase.PROBING, WorkerPhase.READY, WorkerPhase.DRAINING
FAILED = Finding(Outcome.FAILED, "other tokens")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ensure_tiny_tokenizer(tmp_path_factory.mktemp("models"))


async def test_the_first_worker_is_ready_although_nobody_is_there(model):
    async with workers_on_one_bus(model) as workers:
        workers.start("p1", Role.PREFILL)
        await workers.until_ready("p1")

        assert workers.records["p1"].note == "nobody was there to prove itself with"
        phases = [phase for _id, _role, phase in workers.said]
        assert phases[-2:] == [PROBING, READY]


async def test_a_new_worker_proves_itself_with_each_kind_of_partner_and_is_ready(model):
    async with workers_on_one_bus(model) as workers:
        workers.start("p1", Role.PREFILL)
        workers.start("d1", Role.DECODE)
        await workers.until_ready("p1", "d1")
        asked = []
        tapped = [("self_test", SELF_TEST_PROMPT), ("try", RUN_SELF_TEST)]
        for name, channel in tapped:
            for worker_id in ("p1", "d1", "d2"):
                await workers.bus.subscribe(
                    channel, lambda ask, _e, name=name: asked.append((name, ask.worker_id)), worker_id=worker_id
                )

        workers.start("d2", Role.DECODE)
        await workers.until_ready("d2")

        assert workers.records["d2"].note == ""
        assert {("self_test", "p1"), ("self_test", "d1"), ("try", "p1"), ("try", "d1")} <= set(asked)
        assert asked.count(("self_test", "d2")) == 2


@pytest.mark.parametrize("role", [Role.PREFILL, Role.BOTH])
async def test_a_worker_without_prefix_caching_tests_what_it_can_and_is_ready(model, role):
    async with workers_on_one_bus(model) as workers:
        workers.start("d1", Role.DECODE)
        await workers.until_ready("d1")
        asked = []
        for channel in (SELF_TEST_PROMPT, RUN_SELF_TEST):
            for worker_id in ("d1", "p1"):
                await workers.bus.subscribe(
                    channel,
                    lambda ask, _e, channel=channel: asked.append((channel, ask.worker_id)),
                    worker_id=worker_id,
                )

        workers.start("p1", role, prefix_caching=False)
        await workers.until_ready("p1")
        assert asked == [(SELF_TEST_PROMPT, "d1")]
        assert workers.records["p1"].note == ""
        assert not workers.records["p1"].prefix_caching

        workers.start("d2", Role.DECODE)
        await workers.until_ready("d2")
        assert workers.records["d2"].note == ""
        assert (SELF_TEST_PROMPT, "p1") not in asked


async def test_the_only_partner_has_no_prefix_caching_and_still_tests_what_it_reads(model):
    async with workers_on_one_bus(model) as workers:
        workers.start("p1", Role.PREFILL, prefix_caching=False)
        await workers.until_ready("p1")
        asked = []
        await workers.bus.subscribe(RUN_SELF_TEST, lambda ask, _e: asked.append(ask.source_id), worker_id="p1")

        workers.start("d1", Role.DECODE)
        await workers.until_ready("d1")

        assert asked == ["d1"]
        assert workers.records["d1"].note == ""


async def test_two_workers_without_prefix_caching_have_nothing_to_test(model):
    async with workers_on_one_bus(model) as workers:
        workers.start("p1", Role.PREFILL, prefix_caching=False)
        workers.start("d1", Role.DECODE, prefix_caching=False)
        await workers.until_ready("p1", "d1")


async def test_many_that_start_at_the_same_moment_all_come_up(model):
    async with workers_on_one_bus(model) as workers:
        names = [f"w{number}" for number in range(8)]
        for number, name in enumerate(names):
            workers.start(name, (Role.PREFILL, Role.DECODE, Role.BOTH)[number % 3])

        await workers.until_ready(*names)


async def test_a_worker_whose_engine_answers_otherwise_gets_no_traffic_and_says_why(model):
    async with workers_on_one_bus(model) as workers:
        workers.start("p1", Role.PREFILL)
        await workers.until_ready("p1")
        details = []
        await workers.bus.subscribe(SERVICE_STATUS, lambda told, _e: details.append(told.detail), instance="d1")

        workers.start("d1", Role.DECODE, wrap=Forgetful)
        await workers.until(lambda: "d1" in workers.records and bool(workers.records["d1"].note))

        assert workers.phase("d1") is PROBING
        assert "p1" in workers.records["d1"].note
        assert "the answer is" in workers.records["d1"].note
        async with asyncio.timeout(SOON_S_MAX):
            while not any("probing: p1" in detail for detail in details):
                await asyncio.sleep(0.01)
        assert ("d1", Role.DECODE, READY) not in workers.said


async def test_an_ill_partner_does_not_keep_a_worker_out_when_another_one_is_well(model):
    async with workers_on_one_bus(model) as workers:
        ill = []
        workers.start("d1", Role.DECODE, wrap=lambda engine: ill.append(Forgetful(engine, forgets=False)) or ill[0])
        workers.start("d2", Role.DECODE)
        await workers.until_ready("d1", "d2")
        ill[0].forgets = True

        names = [f"p{number}" for number in range(4)]  # Of which some try the ill one first.
        for name in names:
            workers.start(name, Role.PREFILL)

        await workers.until_ready(*names)


async def test_a_worker_takes_on_another_role_without_a_restart(model):
    async with workers_on_one_bus(model) as workers:
        workers.start("p1", Role.PREFILL)
        workers.start("p2", Role.PREFILL)
        await workers.until_ready("p1", "p2")
        roles = []
        await workers.bus.subscribe(LOAD, lambda told, _e: roles.append(told.role), worker_id="p2")

        order = ChangeRole(worker_id=WorkerId("p2"), role=Role.DECODE)
        told = await workers.bus.ask(CHANGE_ROLE, order, timeout_s=SOON_S_MAX)

        assert (told.failure, told.before, told.role) == ("", Role.PREFILL, Role.DECODE)
        assert told.seconds > 0.0
        await workers.until(lambda: workers.records["p2"].role is Role.DECODE)
        assert workers.phase("p2") is READY
        async with asyncio.timeout(SOON_S_MAX):
            while Role.DECODE not in roles:
                await asyncio.sleep(0.01)


async def test_a_role_that_cannot_be_verified_is_not_taken_on(model):
    async with workers_on_one_bus(model) as workers:
        ill = []
        workers.start("p1", Role.PREFILL, wrap=lambda engine: ill.append(Forgetful(engine, forgets=False)) or ill[0])
        workers.start("p2", Role.PREFILL)
        await workers.until_ready("p1", "p2")
        ill[0].forgets = True

        order = ChangeRole(worker_id=WorkerId("p2"), role=Role.DECODE)
        told = await workers.bus.ask(CHANGE_ROLE, order, timeout_s=SOON_S_MAX)

        assert told.role is Role.PREFILL
        assert "p1" in told.failure
        assert workers.records["p2"].role is Role.PREFILL
        assert workers.phase("p2") is READY


@pytest.mark.parametrize(
    ("role", "words"), [(Role.PREFILL, ""), (Role.STORE, "a store has no engine, and an engine is no store")]
)
async def test_a_role_that_it_has_or_cannot_have_changes_nothing(model, role, words):
    async with workers_on_one_bus(model) as workers:
        workers.start("p1", Role.PREFILL)
        await workers.until_ready("p1")
        before = list(workers.said)

        order = ChangeRole(worker_id=WorkerId("p1"), role=role)
        told = await workers.bus.ask(CHANGE_ROLE, order, timeout_s=SOON_S_MAX)

        assert (told.failure, told.before, told.role) == (words, Role.PREFILL, Role.PREFILL)
        assert workers.said == before


async def test_a_worker_that_is_told_to_leave_says_how_it_left_and_ends_well(model):
    async with workers_on_one_bus(model) as workers:
        workers.start("p1", Role.PREFILL)
        workers.start("p2", Role.PREFILL)
        await workers.until_ready("p1", "p2")
        left = asyncio.get_running_loop().create_future()
        await workers.bus.subscribe(DRAINED, lambda told, _e: left.set_result(told), worker_id="p2")

        order = DrainWorker(worker_id=WorkerId("p2"), deadline_s=1.0)
        taken = await workers.bus.ask(DRAIN, order, timeout_s=SOON_S_MAX)
        async with asyncio.timeout(SOON_S_MAX):
            told, code = await left, await workers.exits["p2"]

        assert (taken.refusal, code) == ("", 0)
        assert (told.ordered, told.legs, told.legs_cut, told.prefixes_left) == (True, 0, 0, 0)
        assert ("p2", Role.PREFILL, DRAINING) in workers.said
        await workers.until(lambda: "p2" not in workers.records)


async def test_a_second_order_to_leave_is_refused(model):
    async with workers_on_one_bus(model) as workers:
        workers.start("p1", Role.PREFILL)
        await workers.until_ready("p1")
        order = DrainWorker(worker_id=WorkerId("p1"))

        async with asyncio.TaskGroup() as both:
            asks = [both.create_task(workers.bus.ask(DRAIN, order, timeout_s=SOON_S_MAX)) for _ in range(2)]

        assert sorted(ask.result().refusal for ask in asks) == ["", "it is leaving already"]


class Neighbours:
    """Records that the test writes."""

    def __init__(self, *records) -> None:
        self.records = list(records)
        self.listeners = []
        self.read = asyncio.Event()
        self.read.set()

    def on_records(self, listener) -> None:
        self.listeners.append(listener)

    async def all_read(self) -> None:
        await self.read.wait()

    def now(self, *records) -> None:
        self.records = list(records)
        for listener in self.listeners:
            listener()


class SelfTests:
    """Ends each self_test as the test has said."""

    def __init__(self, **findings: Finding) -> None:
        self.findings = findings
        self.tried: list[tuple[float, str]] = []

    async def try_with(self, partner) -> Finding:
        self.tried.append((asyncio.get_running_loop().time(), partner.worker_id))
        return self.findings[partner.worker_id]


async def ignore(_words: str) -> None:
    pass


def test_who_fails_tries_again_with_pauses_that_grow_until_it_passes():
    async def story() -> tuple[list[float], list[str], str]:
        self_tests, said = SelfTests(d1=FAILED), []

        async def say(words: str) -> None:
            said.append(words)
            if len(said) == 4:
                self_tests.findings["d1"] = FINE

        note = await Prober(WorkerId("me"), Neighbours(record("d1")), self_tests).until_proven(say)
        return sorted({at for at, _who in self_tests.tried}), said, note

    times, said, note = run_in_virtual_time(story())

    assert times == [PAUSE_S * pause for pause in (0, 1, 3, 7, 15)]
    assert said == ["d1: other tokens"] * 4
    assert note == ""


def test_a_new_partner_ends_the_pause_and_a_renewed_record_does_not():
    async def story() -> list[tuple[float, str]]:
        neighbours, self_tests = Neighbours(record("d1")), SelfTests(d1=FAILED, d2=FINE)
        prober = Prober(WorkerId("me"), neighbours, self_tests)
        neighbours.now(record("d1"))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(prober.until_proven(ignore))
            await asyncio.sleep(PAUSE_S / 4)
            neighbours.now(record("d1", models=("m", "n")))
            await asyncio.sleep(PAUSE_S / 4)
            neighbours.now(record("d1"), record("d2"))
        return [(at, who) for at, who in self_tests.tried if who == "d2" or at > 0.0]

    tried = run_in_virtual_time(story())

    assert {at for at, _who in tried} == {PAUSE_S / 2}
    assert tried[-1][1] == "d2"


def test_while_the_registry_cannot_be_read_nobody_is_ready():
    async def story() -> tuple[list[str], bool]:
        neighbours, said = Neighbours(), []
        neighbours.read.clear()

        async def say(words: str) -> None:
            said.append(words)
            neighbours.read.set()

        await Prober(WorkerId("me"), neighbours, SelfTests()).until_proven(say)
        return said

    assert run_in_virtual_time(story()) == ["the registry does not say who else is there"]


def test_partners_of_several_kinds_are_tried_side_by_side():
    async def story() -> tuple[dict, list]:
        fleet = Neighbours(record("p1", role=Role.PREFILL), record("d1", role=Role.DECODE))
        self_tests = SelfTests(p1=FINE, d1=Finding(Outcome.UNANSWERED, "no answer"))
        return await Prober(WorkerId("me"), fleet, self_tests).prove(Kind), self_tests.tried

    found, tried = run_in_virtual_time(story())

    assert {at for at, _who in tried} == {0.0}
    assert not failed(found)


class Talker(FakeEngine):
    """Every text has more tokens than a self_test."""

    async def tokens(self, path: str, body: bytes) -> EngineTokens:
        return EngineTokens(tokens=list(range(self.facts.max_model_len)))


async def answering(hub: MemoryHub) -> FakeEngine:
    engine = Talker()
    await SelfTestHandler(MemoryBus(hub), SystemClock(), engine, Identity(WorkerId("w1"), Epoch(1))).open()
    return engine


async def test_an_engine_computes_so_many_canaries_and_no_more_at_a_time():
    hub = MemoryHub()
    engine = await answering(hub)
    engine.gate.clear()
    bus, ask = MemoryBus(hub), AskSelfTestPrompt(worker_id=WorkerId("w1"), reader_id=WorkerId("r1"))
    asks = [
        asyncio.ensure_future(bus.ask(SELF_TEST_PROMPT, ask, timeout_s=SOON_S_MAX))
        for _ in range(SELF_TESTS_AT_ONCE_MAX)
    ]
    async with asyncio.timeout(SOON_S_MAX):
        while len(engine.bodies) < SELF_TESTS_AT_ONCE_MAX:
            await asyncio.sleep(0)

    with pytest.raises(AskRefused) as refused:
        await bus.ask(SELF_TEST_PROMPT, ask, timeout_s=SOON_S_MAX)

    engine.gate.set()
    assert refused.value.failure.reason is Reason.WORKER_BUSY
    assert len(await asyncio.gather(*asks)) == SELF_TESTS_AT_ONCE_MAX


async def test_a_source_that_gives_no_canary_cannot_be_read():
    hub = MemoryHub()
    await answering(hub)
    ask = RunSelfTest(worker_id=WorkerId("w1"), source_id=WorkerId("nobody"), source_epoch=Epoch(1))

    tried = await MemoryBus(hub).ask(RUN_SELF_TEST, ask, timeout_s=SOON_S_MAX)

    assert "it gave no self_test" in tried.failure


async def test_another_life_of_the_source_proves_nothing():
    hub = MemoryHub()
    await answering(hub)

    async def give(_ask: AskSelfTestPrompt, _envelope: Envelope) -> SelfTestPrompt:
        return SelfTestPrompt(worker_id=WorkerId("s1"), epoch=Epoch(2), tokens=[1], answer=[2])

    await MemoryBus(hub).answer(SELF_TEST_PROMPT, give, worker_id="s1")
    ask = RunSelfTest(worker_id=WorkerId("w1"), source_id=WorkerId("s1"), source_epoch=Epoch(1))

    with pytest.raises(AskRefused, match="another life"):
        await MemoryBus(hub).ask(RUN_SELF_TEST, ask, timeout_s=SOON_S_MAX)
