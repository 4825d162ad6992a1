"""Other workers fetch the hot prefixes of one that drains."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from connector.messages import Chain, EngineNotification
from services.worker.kv_exchange.prefix_copy import CopyTotals
from services.worker.lifecycle.drain import CHAINS_AT_ONCE_MAX, evacuate
from shared.contracts.kv_exchange import pack_full_hashes
from shared.contracts.workers import WorkerPhase
from shared.runtime.clock import SystemClock
from tests.support.fleet_builders import record
from tests.support.memory_bus import MemoryHub
from tests.support.virtual_time import LoopClock, run_in_virtual_time
from tests.unit.connector.holding import chain
from tests.unit.worker.kv_exchange.fakes import OneWorker, exchanging
from tests.unit.worker.lifecycle.staying_workers import BLOCK_BYTES, Stayer

S_MAX = 10.0


class Drain:
    """A worker that leaves, and those beside it."""

    def __init__(self, hub: MemoryHub, stack: AsyncExitStack, chains: list[list[bytes]]) -> None:
        self._hub = hub
        self._stack = stack
        self.me = OneWorker(hub, "leaving")
        told = [Chain(hashes=pack_full_hashes(hashes)) for hashes in chains]
        self.me.engine.answer = lambda call: EngineNotification(chains=told[: call.chains_max])

    async def beside(self, *names: str) -> list[Stayer]:
        stayers = [await self._stack.enter_async_context(exchanging(Stayer(self._hub, name))) for name in names]
        await self._stack.enter_async_context(exchanging(self.me))
        return stayers

    async def leave(self, clock=None) -> CopyTotals:
        me = record("leaving", WorkerPhase.DRAINING)
        return await evacuate(self.me.bus, clock or SystemClock(), self.me.exchange, me, s_max=S_MAX)


async def leaving(stack: AsyncExitStack, chains: list[list[bytes]], *names: str) -> tuple[Drain, list[Stayer]]:
    one = Drain(MemoryHub(), stack, chains)
    return one, await one.beside(*names)


async def test_every_hot_prefix_is_copied_and_counted():
    chains = [chain(4, str(number)) for number in range(10)]
    async with AsyncExitStack() as stack:
        worker, stayers = await leaving(stack, chains, "a", "b")
        done = await worker.leave()

    for hashes in chains:
        assert any(set(hashes) <= stayer.held for stayer in stayers)
    assert (done.prefixes, done.prefixes_left, done.blocks, done.bytes) == (10, 0, 40, 40 * BLOCK_BYTES)
    assert all(len(stayer.held) == 20 for stayer in stayers), "evenly"
    (source,) = stayers[0].fetches[0].sources
    assert (source.worker_id, source.epoch) == ("leaving", 1)


async def test_a_prefix_goes_to_the_worker_that_has_most_of_it():
    hashes = chain(8)
    async with AsyncExitStack() as stack:
        worker, (a, b) = await leaving(stack, [hashes], "a", "b")
        b.held.update(hashes[:6])
        done = await worker.leave()

    assert not a.fetches
    assert b.held == set(hashes)
    assert (done.prefixes, done.blocks) == (1, 2)


async def test_a_full_target_is_followed_by_the_next_one():
    chains = [chain(4, str(number)) for number in range(3)]
    async with AsyncExitStack() as stack:
        worker, (a, b) = await leaving(stack, chains, "a", "b")
        a.takes = lambda _wanted: 0
        done = await worker.leave()

    assert (done.prefixes, done.prefixes_left) == (3, 0)
    assert len(b.held) == 12


async def test_a_draining_target_gets_nothing_others_half_of_their_memory():
    chains = [chain(4, str(number)) for number in range(30)]
    async with AsyncExitStack() as stack:
        worker, (a, b) = await leaving(stack, chains, "a", "b")
        a.exchange.refuse_fetches()
        done = await worker.leave()

    assert not a.engine.every("fetches")
    assert len(b.held) == 48
    assert (done.prefixes, done.prefixes_left) == (12, 18)


@pytest.mark.parametrize("names", [(), ("alone",)])
async def test_prefixes_without_a_target_are_left_at_once(names):
    chains = [chain(4, str(number)) for number in range(CHAINS_AT_ONCE_MAX * 2)]
    async with AsyncExitStack() as stack:
        worker, stayers = await leaving(stack, chains, *names)
        for stayer in stayers:
            stayer.exchange.refuse_fetches()
        done = await worker.leave()

    assert (done.prefixes, done.prefixes_left) == (0, len(chains))
    assert done.seconds < S_MAX


async def test_without_hot_prefixes_no_worker_is_asked():
    async with AsyncExitStack() as stack:
        worker, (a,) = await leaving(stack, [], "a")
        done = await worker.leave()

    assert done == CopyTotals(seconds=done.seconds)
    assert not a.engine.every("fetches")


def test_evacuation_ends_at_its_deadline():
    async def main() -> CopyTotals:
        async with AsyncExitStack() as stack:
            worker, (a,) = await leaving(stack, [chain(4, "1"), chain(4, "2")], "a")
            a.engine.may_run.clear()
            done = await worker.leave(LoopClock())
            a.engine.may_run.set()
            await asyncio.sleep(0)
            return done

    done = run_in_virtual_time(main())

    assert done.seconds <= S_MAX
    assert (done.prefixes, done.prefixes_left) == (0, 2)
