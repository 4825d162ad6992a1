"""Workers test their KV exchange before they are ready, and obey orders to change their role or to drain."""

from __future__ import annotations

import asyncio

import pytest

from connector.messages import LeaseDigested
from services.worker.engines.port import CURRENT_LEG, EngineTokens, Identity
from services.worker.lifecycle.probing import PATIENCE_S, Prober, failed
from services.worker.lifecycle.self_test import (
    PASSED,
    PAUSE_S,
    PROMPTS_AT_ONCE_MAX,
    RUN_S_MAX,
    Outcome,
    PartnerKind,
    Result,
    SelfTestHandler,
    partners,
)
from services.worker.tiny_model import ensure_tiny_tokenizer
from shared.bus.port import AskRefused, Envelope
from shared.contracts.channels import CHANGE_ROLE, DRAIN, DRAINED, LOAD, RUN_SELF_TEST, SELF_TEST_PROMPT, SERVICE_STATUS
from shared.contracts.failures import Reason
from shared.contracts.fleet_orders import AskSelfTestPrompt, ChangeRole, DrainWorker, RunSelfTest, SelfTestPrompt
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import KvOffer, KvTransferReport
from shared.contracts.workers import Role, WorkerPhase
from shared.runtime.clock import SystemClock
from tests.support.fleet_builders import record
from tests.support.memory_bus import MemoryBus, MemoryHub
from tests.support.virtual_time import run_in_virtual_time
from tests.unit.worker.fakes import FakeEngine
from tests.unit.worker.simulated_workers import SOON_S_MAX, Forgetful, Overflowing, Overwriting, workers_on_one_bus

PROBING, READY, DRAINING = WorkerPhase.PROBING, WorkerPhase.READY, WorkerPhase.DRAINING
FAILED = Result(Outcome.FAILED, "other tokens")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ensure_tiny_tokenizer(tmp_path_factory.mktemp("models"))


async def test_a_worker_without_partners_is_ready(model):
    async with workers_on_one_bus(model) as workers:
        workers.start("p1", Role.PREFILL)
        await workers.until_ready("p1")

        assert workers.records["p1"].note == "no partner for a KV self-test at its start"
        phases = [phase for _id, _role, phase in workers.said]
        assert phases[-2:] == [PROBING, READY]


async def test_a_new_worker_tests_itself_with_each_kind_of_partner(model):
    async with workers_on_one_bus(model) as workers:
        workers.start("p1", Role.PREFILL)
        workers.start("d1", Role.DECODE)
        await workers.until_ready("p1", "d1")
        asked = []
        tapped = [("prompt", SELF_TEST_PROMPT), ("run", RUN_SELF_TEST)]
        for name, channel in tapped:
            for worker_id in ("p1", "d1", "d2"):
                await workers.bus.subscribe(
                    channel, lambda ask, _e, name=name: asked.append((name, ask.worker_id)), worker_id=worker_id
                )

        workers.start("d2", Role.DECODE)
        await workers.until_ready("d2")

        assert workers.records["d2"].note == ""
        assert {("prompt", "p1"), ("prompt", "d1"), ("run", "p1"), ("run", "d1")} <= set(asked)
        assert asked.count(("prompt", "d2")) == 2


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


async def test_a_partner_without_prefix_caching_still_tests_its_reads(model):
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


async def test_workers_that_start_together_all_become_ready(model):
    async with workers_on_one_bus(model) as workers:
        names = [f"w{number}" for number in range(8)]
        for number, name in enumerate(names):
            workers.start(name, (Role.PREFILL, Role.DECODE, Role.BOTH)[number % 3])

        await workers.until_ready(*names)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (Forgetful, "with the KV that was read log probabilities differ by up to 2.000"),
        (Overwriting, "the KV of group 0 that was read has other bytes than at its holder"),
        (Overflowing, "the KV of group 0 that was read has other bytes than at its holder"),
    ],
)
async def test_a_worker_with_different_kv_or_probabilities_stays_probing_with_a_reason(model, fault, text):
    async with workers_on_one_bus(model) as workers:
        workers.start("p1", Role.PREFILL)
        await workers.until_ready("p1")
        details = []
        await workers.bus.subscribe(SERVICE_STATUS, lambda told, _e: details.append(told.detail), instance="d1")

        workers.start("d1", Role.DECODE, wrap=fault)
        await workers.until(lambda: "d1" in workers.records and bool(workers.records["d1"].note))

        assert workers.phase("d1") is PROBING
        assert "p1" in workers.records["d1"].note
        assert text in workers.records["d1"].note
        async with asyncio.timeout(SOON_S_MAX):
            while not any("probing: KV self-test with p1" in detail for detail in details):
                await asyncio.sleep(0.01)
        assert ("d1", Role.DECODE, READY) not in workers.said


async def test_a_faulty_partner_does_not_block_a_worker_if_another_works(model):
    async with workers_on_one_bus(model) as workers:
        faulty = []
        workers.start(
            "d1", Role.DECODE, wrap=lambda engine: faulty.append(Forgetful(engine, faulty=False)) or faulty[0]
        )
        workers.start("d2", Role.DECODE)
        await workers.until_ready("d1", "d2")
        faulty[0].faulty = True

        names = [f"p{number}" for number in range(4)]  # Some of them try the faulty one first.
        for name in names:
            workers.start(name, Role.PREFILL)

        await workers.until_ready(*names)


async def test_a_role_changes_without_a_restart(model):
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


async def test_a_role_whose_self_test_fails_is_not_taken(model):
    async with workers_on_one_bus(model) as workers:
        faulty = []
        workers.start(
            "p1", Role.PREFILL, wrap=lambda engine: faulty.append(Forgetful(engine, faulty=False)) or faulty[0]
        )
        workers.start("p2", Role.PREFILL)
        await workers.until_ready("p1", "p2")
        faulty[0].faulty = True

        order = ChangeRole(worker_id=WorkerId("p2"), role=Role.DECODE)
        told = await workers.bus.ask(CHANGE_ROLE, order, timeout_s=SOON_S_MAX)

        assert told.role is Role.PREFILL
        assert "p1" in told.failure
        assert workers.records["p2"].role is Role.PREFILL
        assert workers.phase("p2") is READY


@pytest.mark.parametrize(
    ("role", "text"), [(Role.PREFILL, ""), (Role.STORE, "a store has no engine, and an engine is no store")]
)
async def test_an_order_for_its_own_or_an_impossible_role_changes_nothing(model, role, text):
    async with workers_on_one_bus(model) as workers:
        workers.start("p1", Role.PREFILL)
        await workers.until_ready("p1")
        before = list(workers.said)

        order = ChangeRole(worker_id=WorkerId("p1"), role=role)
        told = await workers.bus.ask(CHANGE_ROLE, order, timeout_s=SOON_S_MAX)

        assert (told.failure, told.before, told.role) == (text, Role.PREFILL, Role.PREFILL)
        assert workers.said == before


async def test_a_drained_worker_reports_and_exits_with_0(model):
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


async def test_a_second_order_to_drain_is_refused(model):
    async with workers_on_one_bus(model) as workers:
        workers.start("p1", Role.PREFILL)
        await workers.until_ready("p1")
        order = DrainWorker(worker_id=WorkerId("p1"))

        async with asyncio.TaskGroup() as both:
            asks = [both.create_task(workers.bus.ask(DRAIN, order, timeout_s=SOON_S_MAX)) for _ in range(2)]

        assert sorted(ask.result().refusal for ask in asks) == ["", "it drains already"]


class FakePeers:
    """Peers whose records the test writes."""

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
    """Each partner has a result."""

    def __init__(self, **results: Result) -> None:
        self.results = results
        self.tried: list[tuple[float, str]] = []

    async def try_with(self, partner) -> Result:
        self.tried.append((asyncio.get_running_loop().time(), partner.worker_id))
        return self.results[partner.worker_id]


class HalfOpen(SelfTests):
    """Some partners answer only after all time limits."""

    def __init__(self, *silent: str, **results: Result) -> None:
        super().__init__(**results)
        self._silent = silent

    async def try_with(self, partner) -> Result:
        result = await super().try_with(partner)
        if partner.worker_id in self._silent:
            await asyncio.sleep(RUN_S_MAX)
            return Result(Outcome.INCONCLUSIVE, "it does not read this worker's KV")
        return result


@pytest.mark.parametrize(
    ("silent", "took_s", "outcomes"),
    [
        ((), 0.0, [Outcome.PASSED]),
        (("first",), PATIENCE_S, [Outcome.PASSED]),
        (("first", "second"), 2 * PATIENCE_S, [Outcome.PASSED]),
        (("first", "second", "third"), RUN_S_MAX + 2 * PATIENCE_S, [Outcome.INCONCLUSIVE] * 3),
    ],
)
def test_the_next_partner_is_asked_beside_one_that_does_not_answer(silent, took_s, outcomes):
    names = ["d1", "d2", "d3", "d4"]
    fleet = [record(name, READY, 1, Role.DECODE) for name in names]
    preferred = [it.worker_id for it in partners(WorkerId("p1"), fleet, PartnerKind.DECODE, lends=True)]
    ranks = dict(zip(("first", "second", "third"), preferred, strict=False))

    async def run() -> tuple[float, list[Result]]:
        self_tests = HalfOpen(*(ranks[one] for one in silent), **dict.fromkeys(names, PASSED))
        began = asyncio.get_running_loop().time()
        results = await Prober(WorkerId("p1"), FakePeers(*fleet), self_tests).test([PartnerKind.DECODE])
        return asyncio.get_running_loop().time() - began, [it.result for it in results[PartnerKind.DECODE]]

    seconds, results = run_in_virtual_time(run())

    assert seconds == pytest.approx(took_s)
    assert [it.outcome for it in results] == outcomes


async def ignore(_words: str) -> None:
    pass


def test_failed_rounds_are_repeated_with_growing_pauses():
    async def run() -> tuple[list[float], list[str], str]:
        self_tests, said = SelfTests(d1=FAILED), []

        async def say(text: str) -> None:
            said.append(text)
            if len(said) == 4:
                self_tests.results["d1"] = PASSED

        note = await Prober(WorkerId("me"), FakePeers(record("d1")), self_tests).until_passed(say)
        return sorted({at for at, _who in self_tests.tried}), said, note

    times, said, note = run_in_virtual_time(run())

    assert times == [PAUSE_S * pause for pause in (0, 1, 3, 7, 15)]
    assert said == ["KV self-test with d1: other tokens"] * 4
    assert note == ""


def test_a_new_partner_ends_the_pause_a_renewed_record_does_not():
    async def run() -> list[tuple[float, str]]:
        peers, self_tests = FakePeers(record("d1")), SelfTests(d1=FAILED, d2=PASSED)
        prober = Prober(WorkerId("me"), peers, self_tests)
        peers.now(record("d1"))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(prober.until_passed(ignore))
            await asyncio.sleep(PAUSE_S / 4)
            peers.now(record("d1", models=("m", "n")))
            await asyncio.sleep(PAUSE_S / 4)
            peers.now(record("d1"), record("d2"))
        return [(at, who) for at, who in self_tests.tried if who == "d2" or at > 0.0]

    tried = run_in_virtual_time(run())

    assert {at for at, _who in tried} == {PAUSE_S / 2}
    assert tried[-1][1] == "d2"


def test_no_worker_is_ready_before_the_registry_was_read():
    async def run() -> tuple[list[str], bool]:
        peers, said = FakePeers(), []
        peers.read.clear()

        async def say(text: str) -> None:
            said.append(text)
            peers.read.set()

        await Prober(WorkerId("me"), peers, SelfTests()).until_passed(say)
        return said

    assert run_in_virtual_time(run()) == ["the registry cannot be read, so partners for a KV self-test are unknown"]


def test_kinds_of_partner_are_tried_side_by_side():
    async def run() -> tuple[dict, list]:
        fleet = FakePeers(record("p1", role=Role.PREFILL), record("d1", role=Role.DECODE))
        self_tests = SelfTests(p1=PASSED, d1=Result(Outcome.INCONCLUSIVE, "no answer"))
        return await Prober(WorkerId("me"), fleet, self_tests).test(PartnerKind), self_tests.tried

    found, tried = run_in_virtual_time(run())

    assert {at for at, _who in tried} == {0.0}
    assert not failed(found)


class Talker(FakeEngine):
    """Every text has more tokens than a self-test prompt. Offers what it has computed."""

    @property
    def app(self):
        async def call(scope, receive, send) -> None:
            await FakeEngine.app(self, scope, receive, send)
            leg = CURRENT_LEG.get()
            offer = KvOffer(
                worker_id=WorkerId("w1"),
                epoch=Epoch(1),
                lease_id=leg.input.order.offer_id,
                groups=[],
                last_hash=b"",
                until_s=0.0,
            )
            leg.result.transfer_report = KvTransferReport(offer=offer)

        return call

    async def tokens(self, path: str, body: bytes) -> EngineTokens:
        return EngineTokens(tokens=list(range(self.facts.max_model_len)))


async def not_measured(_source: WorkerId, _epoch: Epoch) -> None:
    """Reads of a ``Talker`` have no speed."""


async def settled(_source: WorkerId, _s_max: float) -> None:
    """A ``Talker`` connects to nobody."""


async def nothing_digested(_lease_id: str) -> LeaseDigested:
    return LeaseDigested(digest_id="")


async def answering(hub: MemoryHub) -> FakeEngine:
    engine = Talker()
    me = Identity(WorkerId("w1"), Epoch(1))
    await SelfTestHandler(MemoryBus(hub), SystemClock(), engine, me, settled, not_measured, nothing_digested).open()
    return engine


async def test_prompts_computed_for_partners_are_bounded():
    hub = MemoryHub()
    engine = await answering(hub)
    engine.may_run.clear()
    bus, ask = MemoryBus(hub), AskSelfTestPrompt(worker_id=WorkerId("w1"), reader_id=WorkerId("r1"))
    asks = [
        asyncio.ensure_future(bus.ask(SELF_TEST_PROMPT, ask, timeout_s=SOON_S_MAX)) for _ in range(PROMPTS_AT_ONCE_MAX)
    ]
    async with asyncio.timeout(SOON_S_MAX):
        while len(engine.bodies) < PROMPTS_AT_ONCE_MAX:
            await asyncio.sleep(0)

    with pytest.raises(AskRefused) as refused:
        await bus.ask(SELF_TEST_PROMPT, ask, timeout_s=SOON_S_MAX)

    engine.may_run.set()
    assert refused.value.failure.reason is Reason.WORKER_BUSY
    assert len(await asyncio.gather(*asks)) == PROMPTS_AT_ONCE_MAX


async def test_a_worker_reads_for_a_self_test_once_its_engine_has_connected():
    hub, may_read, order = MemoryHub(), asyncio.Event(), []

    async def wait_to_connect(source: WorkerId, _s_max: float) -> None:
        order.append(source)
        await may_read.wait()

    async def give(_ask: AskSelfTestPrompt, _envelope: Envelope) -> SelfTestPrompt:
        order.append("prompt")
        return SelfTestPrompt(worker_id=WorkerId("s1"), epoch=Epoch(2), tokens=[1])

    bus, me = MemoryBus(hub), Identity(WorkerId("w1"), Epoch(1))
    handler = SelfTestHandler(
        MemoryBus(hub), SystemClock(), Talker(), me, wait_to_connect, not_measured, nothing_digested
    )
    await handler.open()
    await bus.answer(SELF_TEST_PROMPT, give, worker_id="s1")
    ask = RunSelfTest(worker_id=WorkerId("w1"), source_id=WorkerId("s1"), source_epoch=Epoch(1))

    tests = [
        asyncio.ensure_future(handler.try_with(record("s1"))),
        asyncio.ensure_future(bus.ask(RUN_SELF_TEST, ask, timeout_s=SOON_S_MAX)),
    ]
    async with asyncio.timeout(SOON_S_MAX):
        while len(order) < 2:
            await asyncio.sleep(0)
        assert order == ["s1", "s1"]
        may_read.set()
        await asyncio.wait(tests)

    assert order[2:] == ["prompt", "prompt"]


async def test_a_source_that_sends_no_prompt_fails_the_test():
    hub = MemoryHub()
    await answering(hub)
    ask = RunSelfTest(worker_id=WorkerId("w1"), source_id=WorkerId("nobody"), source_epoch=Epoch(1))

    tried = await MemoryBus(hub).ask(RUN_SELF_TEST, ask, timeout_s=SOON_S_MAX)

    assert "it sent no prompt" in tried.failure


async def test_a_restarted_source_makes_the_test_inconclusive():
    hub = MemoryHub()
    await answering(hub)

    async def give(_ask: AskSelfTestPrompt, _envelope: Envelope) -> SelfTestPrompt:
        return SelfTestPrompt(worker_id=WorkerId("s1"), epoch=Epoch(2), tokens=[1])

    await MemoryBus(hub).answer(SELF_TEST_PROMPT, give, worker_id="s1")
    ask = RunSelfTest(worker_id=WorkerId("w1"), source_id=WorkerId("s1"), source_epoch=Epoch(1))

    with pytest.raises(AskRefused, match="restarted"):
        await MemoryBus(hub).ask(RUN_SELF_TEST, ask, timeout_s=SOON_S_MAX)
