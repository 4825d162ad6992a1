"""So many payloads of each message type, through the decoding and the handlers of every service that hears it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from shared.bus.port import AskRefused
from shared.bus.receiver import Reply
from shared.contracts.channels import CHANNELS, AskChannel, Channel
from tests.contracts.examples import example
from tests.nightly.fuzz.bus_world import BusWorld, everybody
from tests.nightly.fuzz.mutation import Mutator
from tests.nightly.fuzz.watch import OBJECTS_GROWN_MAX, Watch, memory_bytes, objects
from tests.support.memory_bus import MemoryBus
from tests.support.virtual_time import run_in_virtual_time

BATCH = 50
PAUSE_S = 0.05
"""Virtual, after each batch: what the services do by themselves happens in it."""
RESTED_FROM = 1000
"""Inputs of a kind from which on it is worth while to wait after each kind until all has been forgotten."""
TOLD_EVERY = 1000
SHOWN_EVERY = 20
"""Batches between two looks at everything that can be looked at."""

Progress = Callable[[str, int], None]


@dataclass
class Campaign:
    """What came of one message type."""

    name: str
    sent: int = 0
    heard: int = 0
    """Handed to somebody who listens; each of several counts."""
    read: int = 0
    """Could be read as what they should be."""
    objects_grown: int = 0
    bytes_grown: int = 0
    findings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """How much of what."""

    count: int
    """Of each kind."""
    seed: int = 1
    only: tuple[str, ...] = ("",)
    """Parts of channels' names."""
    progress: Progress = lambda _name, _sent: None

    def tell(self, campaign: Campaign) -> None:
        """Now and then."""
        if campaign.sent % TOLD_EVERY == 0:
            self.progress(campaign.name, campaign.sent)


class Stranger:
    """Answers every ask on its channel with what a mutator makes."""

    def __init__(self, bus: MemoryBus, channel: AskChannel[Any, Any], mutator: Mutator) -> None:
        self.bus = bus
        self.filter = channel.filter()
        self._mutator = mutator

    def offer(self, _payload: bytes, _headers: Any, _subject: str, answer: asyncio.Future[Reply] | None) -> None:
        """As a subscription takes it."""
        if answer is not None:
            answer.set_result((self._mutator.payload({})[0], False))


async def fuzz_channel(here: BusWorld, name: str, channel: Channel[Any], plan: Plan) -> Campaign:
    """So many payloads on one channel."""
    campaign, mutator = Campaign(f"{name} {channel.message.__name__}"), Mutator(channel.message, plan.seed)
    decoder = msgspec.msgpack.Decoder(channel.message)
    while campaign.sent < plan.count:
        here.keep_in_flight()
        ids = here.ids()
        for _ in range(min(BATCH, plan.count - campaign.sent)):
            payload, tree = mutator.payload(ids)
            campaign.sent += 1
            campaign.heard += here.say(channel, payload, tree)
            campaign.read += is_read(decoder, payload)
        await asyncio.sleep(PAUSE_S)
        plan.tell(campaign)
        if campaign.sent // BATCH % SHOWN_EVERY == 0:
            await here.show()
    return campaign


async def fuzz_answers(here: BusWorld, name: str, channel: AskChannel[Any, Any], plan: Plan) -> Campaign:
    campaign, bus = Campaign(f"{name} -> {channel.answer.__name__}"), MemoryBus(here.hub)
    elsewhere = AskChannel(f"fuzz.{channel.subject}", channel.message, channel.delivery, (), (), answer=channel.answer)
    here.hub.join(Stranger(bus, elsewhere, Mutator(channel.answer, plan.seed)))  # type: ignore[arg-type]
    ask = example(channel.message)
    while campaign.sent < plan.count:
        for _ in range(min(BATCH, plan.count - campaign.sent)):
            campaign.sent += 1
            campaign.heard += 1
            try:
                await bus.ask(elsewhere, ask, timeout_s=1.0)
                campaign.read += 1
            except AskRefused:
                pass
        await asyncio.sleep(PAUSE_S)
        plan.tell(campaign)
    await bus.close()
    return campaign


def is_read(decoder: msgspec.msgpack.Decoder[Any], payload: bytes) -> bool:
    try:
        decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


async def fuzz(state_dir: Path, plan: Plan) -> list[Campaign]:
    """All channels, one behind the other, on one set of services."""
    campaigns: list[Campaign] = []
    async with everybody(state_dir) as here:
        for name, channel in CHANNELS.items():
            if not any(part in name for part in plan.only):
                continue
            runs = [fuzz_channel(here, name, channel, plan)]
            if isinstance(channel, AskChannel):
                runs.append(fuzz_answers(here, name, channel, plan))
            for run in runs:
                campaigns.append(await measured(here, run, rests=plan.count >= RESTED_FROM))
                plan.progress(campaigns[-1].name, campaigns[-1].sent)
        if campaigns:
            await here.settle()
            campaigns[-1].findings += left_over(here)
        await here.leave()
    return campaigns


async def measured(here: BusWorld, run: Coroutine[Any, Any, Campaign], *, rests: bool) -> Campaign:
    """A campaign, and what it has left behind; with what only time removes, unless it ``rests``."""
    with Watch() as watch:
        before, bytes_before = objects() if rests else 0, memory_bytes()
        campaign = await run
        if rests:
            await here.settle()
            campaign.objects_grown = objects() - before
        campaign.bytes_grown = memory_bytes() - bytes_before
    campaign.findings = watch.findings + here.bugs()
    if rests:
        campaign.findings += left_over(here)
    if campaign.objects_grown > OBJECTS_GROWN_MAX:
        campaign.findings.append(f"{campaign.objects_grown} more objects than before")
    return campaign


def left_over(here: BusWorld) -> list[str]:
    """When all clients have gone and time has passed."""
    router = here.world.router
    held = {
        "requests": len(router.relay.in_flight),
        "legs": len(router.inbox._legs),
        "bytes of bodies": router.edge.upload_totals.bytes_held,
    }
    return [f"{count} {what} are left over" for what, count in held.items() if count]


def fuzz_bus(state_dir: Path, plan: Plan) -> list[Campaign]:
    """In virtual time."""
    return run_in_virtual_time(fuzz(state_dir, plan))
