"""Slots of lines: who gets the next one, and that none is lost."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.batches.slots import GAP_CHECK_S, Slot, Slots
from tests.support.examples import examples
from tests.support.virtual_time import in_virtual_time, run_in_virtual_time

N = 8


def slots_of(most: int = N, running_max: int | None = None) -> Slots:
    return Slots(most, lambda: most if running_max is None else running_max)


async def take_all(slots: Slots, tenant: str, count: int) -> tuple[list[Slot], list[asyncio.Task[bool]]]:
    """So many lines of a tenant want slots."""
    wanted = [slots.slot(tenant) for _ in range(count)]
    waiting = [asyncio.ensure_future(slot.take(asyncio.Event())) for slot in wanted]
    await asyncio.sleep(0.01)
    return wanted, waiting


def held(slots: list[Slot]) -> int:
    return sum(slot.is_held for slot in slots)


@in_virtual_time
async def test_a_tenant_alone_has_all_slots_and_another_gets_half_as_many_at_once():
    slots = slots_of()
    many, waits = await take_all(slots, "many", 3 * N)
    assert held(many) == N
    few, more = await take_all(slots, "few", N)
    assert (held(many), held(few)) == (N, N // 2)
    for slot in [one for one in many if one.is_held]:
        slot.give_back()
    assert (held(many), held(few)) == (N // 2, N // 2)
    for wait in (*waits, *more):
        wait.cancel()


@in_virtual_time
async def test_a_free_slot_goes_to_the_tenant_that_holds_the_fewest():
    slots = slots_of(3)
    (first, *_), waits = await take_all(slots, "many", 9)
    _, more = await take_all(slots, "few", 3)
    late, last = await take_all(slots, "late", 1)
    assert held(late) == 0
    first.give_back()
    assert held(late) == 1
    for wait in (*waits, *more, *last):
        wait.cancel()


@in_virtual_time
async def test_a_line_that_is_cancelled_or_stopped_while_it_waits_takes_no_slot_with_it():
    slots, stopping = slots_of(1), asyncio.Event()
    (first,), _ = await take_all(slots, "a", 1)
    cancelled, stopped = slots.slot("a"), slots.slot("a")
    one = asyncio.ensure_future(cancelled.take(asyncio.Event()))
    other = asyncio.ensure_future(stopped.take(stopping))
    await asyncio.sleep(0.01)
    first.give_back()  # The next one holds it now, and does not know it yet.
    one.cancel()
    stopping.set()
    await asyncio.gather(one, other, return_exceptions=True)
    assert other.result() is False
    assert (slots.held_by("a"), cancelled.is_held, stopped.is_held) == (0, False, False)
    assert await slots.slot("a").take(asyncio.Event())


@in_virtual_time
async def test_lines_that_wait_for_a_gap_are_served_when_there_is_one():
    gap = 0
    slots = Slots(N, lambda: gap)
    lines, _ = await take_all(slots, "a", 3)
    assert held(lines) == 0
    gap = 2
    await asyncio.sleep(2 * GAP_CHECK_S)
    assert held(lines) == 2
    lines[0].answered()  # Its result is not stored yet, but it burdens no engine any more.
    assert held(lines) == 3


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["take", "answered", "give_back", "cancel"]))))
def test_whatever_happens_slots_are_bounded_counted_and_never_idle(steps: list[tuple[str, str]]):
    async def run() -> None:
        slots = slots_of(3)
        wanted: dict[Slot, asyncio.Task[bool]] = {}
        for tenant, step in steps:
            of_tenant = [slot for slot in wanted if slot.tenant == tenant]
            if step == "take":
                slot = slots.slot(tenant)
                wanted[slot] = asyncio.ensure_future(slot.take(asyncio.Event()))
            elif of_tenant and step == "cancel":
                slot = next((one for one in of_tenant if not one.is_held), of_tenant[0])
                wanted.pop(slot).cancel()
                await asyncio.sleep(0)
                slot.give_back()
            elif of_tenant and of_tenant[0].is_held:
                getattr(of_tenant[0], step)()
                if step == "give_back":
                    del wanted[of_tenant[0]]
            await asyncio.sleep(0)
            holding = [slot for slot in wanted if slot.is_held]
            assert len(holding) <= 4
            assert len(holding) >= min(3, len(wanted))
            assert all(slots.held_by(one) == sum(slot.tenant == one for slot in holding) for one in "abc")
        for wait in wanted.values():
            wait.cancel()

    run_in_virtual_time(run())
