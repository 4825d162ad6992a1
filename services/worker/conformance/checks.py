"""What a store must do, checked over the bus and NIXL alone, whatever it is written in.

Each check returns why the store fails it, or an empty text. They run in this order, each once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from connector.layout.bounds import why_out_of_bounds
from connector.layout.tensors import why_not
from connector.transfer.agent import TransferFailed
from services.worker.conformance.reference import CHAIN_MAX, Reference, chain, granted_blocks, held_of
from shared.bus.port import BusError
from shared.contracts.kv_exchange import KvGrant, is_sound_grant

SHORT = 8
"""Blocks of a prompt that any store has room for."""
FILLINGS = 1.5
"""Other content that is inserted while some is leased, by the blocks that the store has."""
LEASE_S = 2.0
LOAD_S = 0.3
"""Pause before a prompt is asked for again."""
SETTLED_S_MAX = 10.0
"""Time within which a store reports what it holds."""
FIRST, OTHER = chain("first", SHORT), chain("other", SHORT)


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    must: str
    """What the store must do."""
    why_not: Callable[[Reference], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    failure: str
    """Empty: the store passed."""


async def describes(ref: Reference) -> str:
    theirs = ref.handshake
    if theirs.worker_id != ref.store or theirs.epoch < 1:
        return f"its handshake is that of {theirs.worker_id} in epoch {theirs.epoch}"
    return why_out_of_bounds(theirs) or why_not(ref.own, theirs)


async def grants_nothing_unknown(ref: Reference) -> str:
    grant = await ref.lease(chain("unknown", SHORT))
    if granted_blocks(grant) or grant.reason is None:
        return f"it grants {len(granted_blocks(grant))} blocks of a prompt that it never saw, reason {grant.reason}"
    return ""


async def inserts(ref: Reference) -> str:
    for blocks in (FIRST, OTHER):
        fetched = await ref.insert(blocks)
        if (fetched.held, fetched.fetched) != (0, SHORT):
            return f"of {SHORT} new blocks it fetched {fetched.fetched} ({fetched.failure or 'no failure'})"
    again = await ref.insert(FIRST)
    if (again.held, again.fetched) != (SHORT, 0):
        return f"the second time it had {again.held} and fetched {again.fetched}, not {SHORT} and 0"
    return ""


async def looks_up(ref: Reference) -> str:
    known = await ref.look_up()
    found = [held_of(names, known) for names in (FIRST, OTHER, chain("unknown", SHORT))]
    return "" if found == [SHORT, SHORT, 0] else f"its snapshot has {found} blocks of prompts with {SHORT}, {SHORT}, 0"


async def lends_the_longest_prefix(ref: Reference) -> str:
    for names, wanted in ((FIRST, SHORT), (FIRST[:3], 3), ([*FIRST, *chain("unknown", 2)], SHORT)):
        grant = await ref.lease(names)
        granted = len(granted_blocks(grant))
        if not is_sound_grant(grant) or grant.epoch != ref.handshake.epoch:
            return "its grant contradicts itself, or is of another epoch"
        if granted != wanted or grant.last_hash != names[wanted - 1]:
            return f"it granted {granted} of the {wanted} blocks that it has of a prompt of {len(names)}"
        if (grant.reason is None) != (wanted == len(names)):
            return f"it granted {granted} of {len(names)} blocks with the reason {grant.reason}"
        await ref.release(grant)
    grant = await ref.lease([*chain("unknown", 1), *FIRST])
    return "it grants blocks whose beginning it lacks" if granted_blocks(grant) else ""


async def lends_the_right_bytes(ref: Reference) -> str:
    for names in (FIRST, OTHER):
        grant = await ref.lease(names)
        if wrong := await ref.wrong(names, grant):
            return f"blocks {wrong} of {len(names)} have other bytes than were inserted"
        await ref.release(grant)
    return ""


async def keeps_what_is_leased(ref: Reference) -> str:
    hold_s = 4 * ref.answer_s_max + ref.handshake.blocks / 100
    grant = await ref.lease(FIRST, hold_s=hold_s)
    ends_s = grant.until_s - grant.clock_s
    async with asyncio.timeout(max(ends_s - 1.0, 1.0)):
        for names in fillings(ref.handshake.blocks):
            await ref.insert(names)
    if wrong := await ref.wrong(FIRST, grant):
        return f"blocks {wrong} of {SHORT} changed while they were leased and other content was inserted"
    again = await ref.lease(FIRST)
    if granted_blocks(again)[:SHORT] != granted_blocks(grant):
        return "what is leased was dropped, or moved, while other content was inserted"
    await ref.release(grant)
    await ref.release(again)
    return ""


def fillings(blocks: int) -> Iterator[list[bytes]]:
    for number in range(int(blocks * FILLINGS) // CHAIN_MAX + 1):
        yield chain(f"filling {number}", CHAIN_MAX)


async def tells_what_it_dropped(ref: Reference) -> str:
    """What it says that it has it grants with the right bytes; what it does not say it does not grant."""
    for names in (FIRST, OTHER, *fillings(ref.handshake.blocks)):
        grant, held = await granted_and_told(ref, names)
        granted = len(granted_blocks(grant))
        if not agree(granted, held):
            return f"it granted {granted} blocks of a prompt of which its snapshot has {held}"
        if wrong := await ref.wrong(names, grant):
            return f"blocks {wrong} of {granted} have other bytes than were inserted"
        await ref.release(grant)
    return ""


async def granted_and_told(ref: Reference, names: list[bytes]) -> tuple[KvGrant, int]:
    """A lease, and the blocks that the snapshot has. A store may take a while to load what is not in its memory."""
    loop = asyncio.get_running_loop()
    ends_at = loop.time() + ref.answer_s_max
    while True:
        held = held_of(names, await ref.look_up())
        grant = await ref.lease(names)
        if agree(len(granted_blocks(grant)), held) or loop.time() > ends_at:
            return grant, held
        await ref.release(grant)
        await asyncio.sleep(LOAD_S)


def agree(granted: int, held: int) -> bool:
    return granted <= held and bool(granted) == bool(held)


async def ends_leases(ref: Reference) -> str:
    """Those that were released, and those that expire."""
    if not await ref.until(lambda load: load.exchange is not None and not load.exchange.leases, SETTLED_S_MAX):
        return "it still has leases after all were released"
    await ref.insert(FIRST)
    grant = await ref.lease(FIRST, hold_s=LEASE_S)
    if not 0.0 < grant.until_s - grant.clock_s <= LEASE_S + 0.1:
        return f"a lease of {LEASE_S:g} s was granted for {grant.until_s - grant.clock_s:g} s"
    if not await ref.until(lambda load: load.exchange is not None and load.exchange.leases, SETTLED_S_MAX):
        return "its load reports do not tell of a lease"
    if not await ref.until(
        lambda load: load.exchange is not None and not load.exchange.pinned_blocks, LEASE_S + SETTLED_S_MAX
    ):
        return "a lease that nobody released has not ended when it was over"
    return ""


async def outlives_nonsense(ref: Reference) -> str:
    await ref.send_malformed()
    await ref.insert(FIRST)
    fine = await ref.lease(FIRST)
    await ref.release(fine)
    return "" if len(granted_blocks(fine)) == SHORT else "after requests without sense it grants nothing"


CHECKS = (
    Check("describe", "describe its memory in a handshake that fits its partner's", describes),
    Check("unknown", "grant nothing that it does not have, within the time limit", grants_nothing_unknown),
    Check("insert", "fetch blocks from a worker, and no block twice", inserts),
    Check("look up", "name what it has in its snapshot", looks_up),
    Check("lease", "grant the longest prefix that it has", lends_the_longest_prefix),
    Check("bytes", "grant the bytes that were inserted", lends_the_right_bytes),
    Check("keep", "keep leased blocks while new content drops others", keeps_what_is_leased),
    Check("drop", "name what it dropped, and grant the rest", tells_what_it_dropped),
    Check("end", "end leases that are released or over", ends_leases),
    Check("nonsense", "outlive requests without sense", outlives_nonsense),
)


async def run(ref: Reference) -> list[Result]:
    """All checks. A store that does not answer fails."""
    results = []
    for check in CHECKS:
        try:
            failure = await check.why_not(ref)
        except TimeoutError:
            failure = f"it did not answer within {ref.answer_s_max:g} s"
        except BusError as error:
            failure = f"it did not answer: {type(error).__name__} {error}"
        except TransferFailed as error:
            failure = f"its memory cannot be read: {error}"
        results.append(Result(check.name, failure))
    return results
