"""Places for asks of workers: tenants take turns, and a place is never lost."""

from __future__ import annotations

import asyncio

import pytest

from services.router.tokenize.fair_slots import FairSlots
from services.router.tokenize.turns import NoTurn


class Users:
    """Each stays in its place until it is sent away."""

    def __init__(self, count: int, **bounds: int) -> None:
        self.slots = FairSlots(count, **({"waiting_max": 8, "tenant_waiting_max": 4} | bounds))
        self.inside: list[str] = []
        self.left: dict[str, asyncio.Event] = {}

    def begin(self, tenant: str, name: str) -> asyncio.Task[None]:
        self.left[name] = asyncio.Event()
        return asyncio.create_task(self._stay(tenant, name))

    async def _stay(self, tenant: str, name: str) -> None:
        async with self.slots.slot(tenant):
            self.inside.append(name)
            await self.left[name].wait()

    async def leave(self, name: str) -> None:
        self.left[name].set()
        await settle()


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


async def test_tenants_take_turns():
    users = Users(1)
    for number in range(3):
        users.begin("many", f"many {number}")
    users.begin("few", "few")
    await settle()

    for name in ("many 0", "many 1", "few"):
        await users.leave(name)

    assert users.inside == ["many 0", "many 1", "few", "many 2"]
    await users.leave("many 2")


async def test_those_who_wait_are_bounded():
    users = Users(1, waiting_max=3, tenant_waiting_max=2)
    waiting = [users.begin("a", f"a {number}") for number in range(3)]
    await settle()

    with pytest.raises(NoTurn):
        await users.begin("a", "too many of a")
    waiting.append(users.begin("b", "b"))
    await settle()
    with pytest.raises(NoTurn):
        await users.begin("c", "too many of all")

    for one in waiting:
        one.cancel()
    await settle()


async def test_a_place_given_to_one_who_leaves_goes_to_the_next():
    users = Users(1)
    first, second, third = (users.begin("a", name) for name in ("first", "second", "third"))
    await settle()

    users.left["first"].set()
    await first
    second.cancel()
    await settle()

    assert users.inside[-1] == "third"
    third.cancel()
    await settle()
    last = users.begin("b", "last")
    await settle()
    assert users.inside[-1] == "last"
    last.cancel()
