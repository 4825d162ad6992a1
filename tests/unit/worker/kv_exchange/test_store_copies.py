"""Copies of hot prefixes to a store while a worker serves."""

from __future__ import annotations

import math
from contextlib import AsyncExitStack

import msgspec

from connector.messages import Chain, EngineCall, EngineNotification
from services.worker.kv_exchange.prefix_copy import CopyTargets, StoreCopies, copy_targets
from services.worker.settings import Settings
from shared.contracts.kv_exchange import pack_full_hashes
from shared.contracts.workers import Role
from tests.support.fleet_builders import record
from tests.support.memory_bus import MemoryHub
from tests.unit.connector.holding import chain
from tests.unit.worker.kv_exchange.fakes import OneWorker, exchanging
from tests.unit.worker.lifecycle.staying_workers import Stayer

USES_MIN = 2
SETTINGS = Settings(kv_copy_uses_min=USES_MIN)


class Copier:
    """A worker that serves, and the stores beside it."""

    def __init__(self, hub: MemoryHub, stack: AsyncExitStack) -> None:
        self._hub = hub
        self._stack = stack
        self.me = OneWorker(hub, "me")
        self.chains: list[list[bytes]] = []
        self.evicting: list[list[bytes]] = []
        self.lost = 0
        """Blocks that the engine has evicted without a word."""
        self.me.engine.answer = self._answer
        self.copies = StoreCopies(self.me.bus, self.me.exchange, lambda: record("me"), SETTINGS)

    def _answer(self, call: EngineCall) -> EngineNotification:
        if not call.chains_max:
            return EngineNotification()
        assert call.chains_for_store
        (evicting, self.evicting), (lost, self.lost) = (self.evicting, []), (self.lost, 0)
        told = [Chain(hashes=pack_full_hashes(one), is_evicting=True) for one in evicting]
        told += [Chain(hashes=pack_full_hashes(one), uses=USES_MIN) for one in self.chains]
        return EngineNotification(chains=told, lost_blocks=lost)

    @property
    def counted(self) -> tuple[int, int]:
        """Blocks copied and lost, as the load report says."""
        state = self.me.exchange.state
        return state.copied_blocks_total, state.lost_blocks_total

    @property
    def questions(self) -> list[EngineCall]:
        """How the engine was asked for its hot prefixes."""
        return [call for call in self.me.engine.calls if call.chains_max]

    async def joins(self, name: str, role: Role = Role.STORE) -> Stayer:
        return await self._stack.enter_async_context(exchanging(Stayer(self._hub, name, role)))


async def serving(stack: AsyncExitStack, *stores: str) -> tuple[Copier, list[Stayer]]:
    copier = Copier(MemoryHub(), stack)
    joined = [await copier.joins(store) for store in stores]
    await stack.enter_async_context(exchanging(copier.me))
    await copier.me.exchange.peers.all_read()
    return copier, joined


async def test_hot_prefixes_are_copied_once():
    async with AsyncExitStack() as stack:
        copier, (store,) = await serving(stack, "store")
        copier.chains = [chain(4, "1"), chain(4, "2")]

        first = await copier.copies.copy_round()
        again = await copier.copies.copy_round()

    assert (first.prefixes, first.blocks) == (2, 8)
    assert (again.prefixes, again.blocks) == (0, 0)
    assert store.held == {*chain(4, "1"), *chain(4, "2")}
    assert len(store.fetches) == 2


async def test_each_round_asks_for_chains_used_since_the_last_one():
    async with AsyncExitStack() as stack:
        copier, _stores = await serving(stack, "store")
        await copier.copies.copy_round()
        await copier.copies.copy_round()

    first, second = copier.questions
    assert (first.chains_uses_min, first.chains_idle_s_max) == (USES_MIN, math.inf)
    assert 0.0 <= second.chains_idle_s_max < 60.0


async def test_the_next_turn_moves_only_new_blocks_to_the_same_store():
    conversation = chain(12)
    async with AsyncExitStack() as stack:
        copier, stores = await serving(stack, "s1", "s2", "s3")
        copier.chains = [conversation[:8]]
        await copier.copies.copy_round()
        copier.chains = [conversation]
        done = await copier.copies.copy_round()

    assert done.blocks == 4
    assert [len(store.held) for store in stores].count(12) == 1
    assert sum(len(store.held) for store in stores) == 12


async def test_two_workers_with_the_same_prefix_choose_the_same_store():
    async with AsyncExitStack() as stack:
        copier, stores = await serving(stack, "s1", "s2", "s3")
        copier.chains = [chain(4, str(number)) for number in range(12)]
        await copier.copies.copy_round()
        before = [len(store.held) for store in stores]
        other = StoreCopies(copier.me.bus, copier.me.exchange, lambda: record("me"), SETTINGS)
        done = await other.copy_round()

    assert done.blocks == 0
    assert [len(store.held) for store in stores] == before
    assert min(before) > 0, "each store has some"


async def test_without_a_store_the_engine_is_not_asked():
    async with AsyncExitStack() as stack:
        copier, _ = await serving(stack)
        await copier.joins("another", Role.BOTH)
        copier.chains = [chain(4)]
        done = await copier.copies.copy_round()

    assert not copier.questions
    assert done.prefixes == 0


async def test_a_new_store_gets_earlier_chains_too():
    async with AsyncExitStack() as stack:
        copier, (first,) = await serving(stack, "s1")
        copier.chains = [chain(4)]
        await copier.copies.copy_round()
        first.exchange.refuse_fetches()
        second = await copier.joins("s2")
        await copier.me.engine.told("peers", 2)
        await copier.copies.copy_round()

    assert second.held == set(chain(4))
    assert copier.questions[-1].chains_idle_s_max == math.inf


async def test_a_chain_that_did_not_fit_is_copied_after_its_next_use():
    async with AsyncExitStack() as stack:
        copier, (store,) = await serving(stack, "store")
        copier.chains = [chain(4)]
        store.takes = lambda _wanted: 1
        await copier.copies.copy_round()
        store.takes = lambda wanted: wanted
        done = await copier.copies.copy_round()

    assert (done.prefixes, done.blocks) == (1, 3)


async def test_what_the_engine_evicts_next_is_copied_though_used_once():
    async with AsyncExitStack() as stack:
        copier, (store,) = await serving(stack, "store")
        copier.evicting = [chain(4, "1")]
        await copier.copies.copy_round()
        store.held.clear()
        copier.evicting = [chain(4, "1")]
        done = await copier.copies.copy_round()

    assert done.blocks == 4, "the store may have evicted it since"
    assert store.held == set(chain(4, "1"))
    assert copier.counted == (8, 0)


async def test_what_was_not_copied_in_time_is_counted():
    async with AsyncExitStack() as stack:
        copier, (store,) = await serving(stack, "store")
        copier.evicting, copier.lost = [chain(4)], 5
        store.takes = lambda _wanted: 1
        await copier.copies.copy_round()
        copier.chains = [chain(4, "used twice, and still there")]
        store.takes = lambda _wanted: 0
        await copier.copies.copy_round()

    assert copier.counted == (1, 5 + 3)


async def test_a_copy_pins_a_tenth_of_the_engine_at_a_time():
    most = record("me").kv_tokens // record("me").hashing.block_size // 10
    long = chain(2 * most + 1)
    async with AsyncExitStack() as stack:
        copier, (store,) = await serving(stack, "store")
        copier.evicting = [long]
        await copier.copies.copy_round()
        copier.evicting = [[*long, *chain(1, "next turn")]]
        await copier.copies.copy_round()

    ends = [len(fetch.hashes) // len(long[0]) for fetch in store.fetches]
    assert ends == [most, 2 * most, 2 * most + 1, 2 * most + 2]
    assert copier.counted == (2 * most + 2, 0)


def test_a_store_of_this_host_is_preferred():
    stores = [msgspec.structs.replace(record(name), role=Role.STORE) for name in ("s1", "s2")]
    for near in (0, 1):
        hosts = [one if at == near else msgspec.structs.replace(one, host="other") for at, one in enumerate(stores)]
        targets = CopyTargets(copy_targets(record("me"), hosts))
        chosen = {targets.ranked(chain(4, str(number)))[0] for number in range(8)}
        assert chosen == {hosts[near].worker_id}
