"""What a worker publishes: KV events, held blocks, load, its record, its tokenizer."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import reduce
from operator import xor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.engines.port import EngineLoad
from services.worker.kv_events import EventTranslation, HeldBlocks
from services.worker.load_reports import LoadPublisher
from services.worker.prompt_handlers import BODY_BYTES_MAX, PROMPTS_MAX, TOKENS_S_MAX, TokenizerHandler
from shared.bus.port import Envelope
from shared.contracts.channels import KV_EVENTS, KV_SNAPSHOT, LOAD, TOKENIZER, TOKENS, WORKER_RECORDS
from shared.contracts.control import AskTokenizer, AskTokens, ProbePrompt
from shared.contracts.ids import Epoch
from shared.contracts.kv_events import (
    MEMORIES,
    AskKvSnapshot,
    KvEvent,
    KvEventKind,
    KvTier,
    block_hash64,
    digest_xor,
    pack_hashes,
    unpack_hashes,
)
from shared.contracts.kv_exchange import KvExchangeState
from shared.contracts.workers import Role, WorkerPhase
from tests.support.memory_bus import MemoryBus, MemoryHub
from tests.support.virtual_time import run_in_virtual_time
from tests.unit.worker.fakes import WAIT_S_MAX, WORKER, FakeEngine, running_worker

blocks = st.integers(0, 12)
engine_steps = st.lists(
    st.tuples(
        st.sampled_from(["stored", "removed"]), st.lists(blocks, min_size=1, max_size=4), st.sampled_from(MEMORIES)
    )
    | st.just(("cleared", [], KvTier.DEVICE))
)
wire_events = st.lists(
    st.builds(
        lambda kind, hashes, tier: KvEvent(kind=kind, hashes=pack_hashes(hashes), tier=tier),
        st.sampled_from(list(KvEventKind)),
        st.lists(st.integers(0, 20), max_size=5),
        st.sampled_from(KvTier),
    )
)


def full(block: int) -> bytes:
    return block.to_bytes(8, "big") + bytes(24)


@given(engine_steps)
def test_held_blocks_are_those_with_at_least_one_copy(steps):
    translation, held = EventTranslation(), HeldBlocks()
    copies: dict[KvTier, Counter[int]] = {tier: Counter() for tier in KvTier}
    for kind, names, tier in steps:
        there = copies[tier]
        if kind == "cleared":
            for each in copies.values():
                each.clear()
            events = [translation.cleared()]
        elif kind == "stored":
            there.update(names)
            events = translation.stored(map(full, names), None, tier)
        else:
            gone = [name for name in names if there[name] > 0 and not there.subtract([name])]
            events = translation.removed(map(full, gone), tier)
        held.apply(events)

    for tier in KvTier:
        assert set(unpack_hashes(held.packed(tier))) == {block for block, count in copies[tier].items() if count > 0}


@pytest.mark.parametrize(
    "full_groups", [[True, False], [False, True, False], [True, True, False], [False], [True, True]]
)
@given(data=st.data())
def test_full_attention_and_boundaries_are_held_by_all_their_groups(full_groups, data):
    translation, held = EventTranslation(full_groups), HeldBlocks()
    copies = [Counter[int]() for _ in full_groups]
    changes = st.tuples(
        st.integers(0, len(full_groups) - 1), st.booleans(), st.lists(st.integers(0, 5), min_size=1, max_size=4)
    )
    for group, are_stored, names in data.draw(st.lists(changes, max_size=25)):
        if are_stored:
            copies[group].update(names)
            held.apply(translation.stored(map(full, names), None, group=group))
        else:
            gone = [name for name in names if copies[group][name] > 0 and not copies[group].subtract([name])]
            held.apply(translation.removed(map(full, gone), group=group))

        others = [one for one, is_full in enumerate(full_groups) if not is_full] or range(len(full_groups))
        for tier, groups in (
            (KvTier.DEVICE, [one for one, is_full in enumerate(full_groups) if is_full]),
            (KvTier.BOUNDARY, others),
        ):
            everywhere = {block for block in range(6) if groups and all(copies[one][block] > 0 for one in groups)}
            assert set(unpack_hashes(held.packed(tier))) == everywhere


@given(wire_events)
def test_the_digest_is_the_digest_of_the_snapshot(events):
    held = HeldBlocks()
    for event in events:
        held.apply([event])

    snapshot = [unpack_hashes(held.packed(tier)) for tier in KvTier]
    digest = held.digest()
    xors = [reduce(xor, hashes, 0) for hashes in snapshot]
    assert (digest.count, digest.xor, digest.seq) == (sum(map(len, snapshot)), digest_xor(xors), len(events))


def test_a_block_that_moves_to_another_tier_changes_the_digest():
    device, host = HeldBlocks(), HeldBlocks()

    device.apply([KvEvent(kind=KvEventKind.STORED, hashes=pack_hashes([1 << 63 | 1]))])
    host.apply([KvEvent(kind=KvEventKind.STORED, hashes=pack_hashes([1 << 63 | 1]), tier=KvTier.HOST)])

    assert (device.digest().xor, host.digest().xor) == (1 << 63 | 1, 1 << 21 | 1 << 20)


@given(wire_events)
def test_batching_of_events_does_not_change_the_result(events):
    one, many = HeldBlocks(), HeldBlocks()

    one.apply(events)
    for event in events:
        many.apply([event])

    for tier in KvTier:
        assert set(unpack_hashes(one.packed(tier))) == set(unpack_hashes(many.packed(tier)))
    assert one.digest().xor == many.digest().xor


def test_batches_are_numbered_from_one():
    held = HeldBlocks()

    assert [held.apply([]), held.apply([])] == [1, 2]


def test_a_stored_run_names_the_block_before_it():
    [event] = EventTranslation().stored([full(2), full(3)], full(1))

    assert event == KvEvent(kind=KvEventKind.STORED, hashes=pack_hashes([2, 3]), parent=block_hash64(full(1)))


def test_removing_one_of_two_copies_makes_no_event():
    translation = EventTranslation()
    translation.stored([full(1)], None)
    translation.stored([full(1)], None)

    assert not translation.removed([full(1)])
    [event] = translation.removed([full(1)])
    assert unpack_hashes(event.hashes) == (1,)


def stored(*hashes: int) -> KvEvent:
    return KvEvent(kind=KvEventKind.STORED, hashes=pack_hashes(hashes))


def removed(*hashes: int) -> KvEvent:
    return KvEvent(kind=KvEventKind.REMOVED, hashes=pack_hashes(hashes))


async def collected(worker, channel, enough) -> list:
    """The messages of a channel until ``enough(messages)``."""
    messages: list = []
    done = asyncio.Event()

    def take(message, _envelope) -> None:
        messages.append(message)
        if enough(messages):
            done.set()

    subscription = await worker.bus.subscribe(channel, take)
    async with asyncio.timeout(WAIT_S_MAX):
        await done.wait()
    await subscription.close()
    return messages


async def test_kv_events_are_numbered_from_one_and_the_snapshot_follows():
    async with running_worker() as worker:
        watching = asyncio.create_task(
            collected(worker, KV_EVENTS, lambda batches: sum(len(batch.events) for batch in batches) == 3)
        )
        await asyncio.sleep(0)
        for event in (stored(1, 2, 3), removed(2), stored(4)):
            worker.engine.events.put_nowait([event])

        batches = await watching
        ask = AskKvSnapshot(worker_id=WORKER, epoch=batches[0].epoch)
        snapshot = await worker.bus.ask(KV_SNAPSHOT, ask, timeout_s=WAIT_S_MAX)

        assert [batch.seq for batch in batches] == list(range(1, len(batches) + 1))
        assert snapshot.seq == batches[-1].seq
        assert sorted(unpack_hashes(snapshot.hashes)) == [1, 3, 4]


@pytest.mark.slow
async def test_the_load_report_carries_the_engines_numbers_and_the_digest():
    async with running_worker() as worker:
        worker.engine.events.put_nowait([stored(5, 9)])
        worker.engine.now = EngineLoad(running=3, kv_tokens_used=4, received_bytes_total=12)

        reports = await collected(worker, LOAD, lambda reports: reports[-1].running == 3)

        report = reports[-1]
        assert (report.kv_tokens_used, report.kv_tokens_total, report.received_bytes_total) == (4, 320, 12)
        assert (report.digest.count, report.digest.xor) == (2, 5 ^ 9)
        assert report.phase is WorkerPhase.READY


async def test_a_change_is_reported_sooner_than_the_period():
    async with running_worker() as worker:
        worker.engine.may_run.clear()
        await worker.leg()

        reports = await collected(worker, LOAD, lambda reports: reports[-1].legs == 1)

        assert reports[-1].legs == 1


class Exchange:
    """Of a worker; it says what the test tells it."""

    def __init__(self) -> None:
        self.state = KvExchangeState()
        self.unanswered_s = 0.0
        self.told: list = []

    def on_changed(self, listener) -> None:
        self.told.append(listener)


async def test_the_load_report_includes_the_exchange_ledger():
    bus, engine, exchange = MemoryBus(MemoryHub()), FakeEngine(), Exchange()
    without = LoadPublisher(bus, WORKER, Epoch(1), Role.PREFILL, held=HeldBlocks(), engine=engine)
    load = LoadPublisher(bus, WORKER, Epoch(1), Role.PREFILL, held=HeldBlocks(), engine=engine, exchange=exchange)
    reports: asyncio.Queue = asyncio.Queue()
    await bus.subscribe(LOAD, lambda report, _envelope: reports.put_nowait(report))

    await without.report(WorkerPhase.READY, 0)
    exchange.state = KvExchangeState(leases=2, pinned_blocks=9, read_bytes_total=4096, read_seconds_total=0.5)
    exchange.unanswered_s = 45.0
    await load.report(WorkerPhase.READY, 0)

    async with asyncio.timeout(WAIT_S_MAX):
        before, after = await reports.get(), await reports.get()
    assert before.exchange is None
    assert after.exchange == exchange.state
    assert (after.received_bytes_total, after.received_seconds_total) == (4096, 0.5)
    assert (before.engine_silent_s, after.engine_silent_s) == (0.0, 45.0)
    assert exchange.told == [load.changed]
    await bus.close()


async def test_an_idle_engine_reports_pinned_blocks_as_used():
    bus, engine, exchange = MemoryBus(MemoryHub()), FakeEngine(), Exchange()
    load = LoadPublisher(bus, WORKER, Epoch(1), Role.PREFILL, held=HeldBlocks(), engine=engine, exchange=exchange)
    reports: asyncio.Queue = asyncio.Queue()
    await bus.subscribe(LOAD, lambda report, _envelope: reports.put_nowait(report))

    exchange.state = KvExchangeState(pinned_blocks=9, blocks=100)
    for running in (1, 0):
        engine.now = EngineLoad(running=running, kv_tokens_used=100)
        await load.report(WorkerPhase.READY, 0)

    async with asyncio.timeout(WAIT_S_MAX):
        assert [(await reports.get()).kv_tokens_used for _running in (1, 0)] == [100, 29]
    await bus.close()


async def test_the_record_has_the_engines_facts_and_is_removed_at_the_end():
    async with running_worker() as worker:
        records = await worker.bus.key_value_store(WORKER_RECORDS)
        found = (await records.get(WORKER)).value

        worker.service.stopping.set()
        await worker.exit

        assert (found.phase, found.engine, found.models, found.kv_tokens) == (WorkerPhase.READY, "fake", ["m"], 320)
        gone = await records.get(WORKER)
        assert gone is None or gone.value is None


async def test_a_registry_without_data_gets_the_record_back_on_reconnect():
    async with running_worker() as worker:
        records = await worker.bus.key_value_store(WORKER_RECORDS)
        await records.delete(WORKER)

        worker.service.bus.lose()
        worker.service.bus.restore()

        async with asyncio.timeout(WAIT_S_MAX):
            async for change in records.watch():
                if change and change.value:
                    break
        assert change.value.phase is WorkerPhase.READY


async def test_a_router_gets_the_engines_tokenizer():
    async with running_worker() as worker:
        asset = await worker.bus.ask(TOKENIZER, AskTokenizer(worker_id=WORKER), timeout_s=WAIT_S_MAX)

        assert asset.tokenizer_json == b"{}"
        assert asset.chat_template == "{{ x }}"
        assert asset.special_tokens == {"bos_token": "<s>"}


def asked_tokens(*bodies: str) -> AskTokens:
    prompts = [ProbePrompt(path="/v1/completions", body=body.encode()) for body in bodies]
    return AskTokens(worker_id=WORKER, prompts=prompts)


async def test_a_router_gets_the_engines_tokens_of_a_request():
    async with running_worker() as worker:
        found = await worker.bus.ask(TOKENS, asked_tokens('{"tokens": 70}', '{"refusal": "no"}'), timeout_s=WAIT_S_MAX)

        first, second = found.prompts
        assert (len(first.tokens), unpack_hashes(first.hashes), first.refusal) == (70, (7, 7), "")
        assert second.refusal == "no"


async def test_probes_are_bounded_in_number_size_and_time():
    async with running_worker() as worker:
        too_large = '{"x": "' + "x" * BODY_BYTES_MAX + '"}'
        asked = asked_tokens(too_large, "not json", *["{}"] * PROMPTS_MAX)

        found = await worker.bus.ask(TOKENS, asked, timeout_s=WAIT_S_MAX)

        refusals = [prompt.refusal for prompt in found.prompts]
        assert len(refusals) == PROMPTS_MAX + 2
        assert str(BODY_BYTES_MAX) in refusals[0]
        assert "JSONDecodeError" in refusals[1]
        assert refusals[2:PROMPTS_MAX] == [""] * (PROMPTS_MAX - 2)
        assert all(str(PROMPTS_MAX) in refusal for refusal in refusals[PROMPTS_MAX:])


def test_a_probe_that_hangs_times_out():
    async def scenario() -> list[str]:
        handler = TokenizerHandler(FakeEngine(), WORKER, Epoch(1), MemoryBus(MemoryHub()))
        found = await handler.tokens(asked_tokens('{"hangs": true}', '{"hangs": true}'), Envelope({}, 0))
        return [prompt.refusal for prompt in found.prompts]

    assert run_in_virtual_time(scenario()) == [f"not done within {TOKENS_S_MAX:g} s"] * 2
