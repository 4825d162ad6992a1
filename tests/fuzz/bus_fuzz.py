"""So many payloads of each message type, through the decoding and the handlers of every service that hears it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from shared.bus.memory_bus import MemoryBus
from shared.bus.port import AskRefused
from shared.bus.receiver import Reply
from shared.contracts.channels import CHANNELS, AskChannel, Channel
from tests.contracts.examples import example
from tests.fuzz.bus_world import BusWorld, everybody
from tests.fuzz.mutation import Mutator
from tests.fuzz.watch import OBJECTS_GROWN_MAX, Watch, memory_bytes, objects
from tests.virtual_time import run_in_virtual_time

BATCH = 50
PAUSE_S = 0.05
"""Virtual, after each batch: what the services do by themselves happens in it."""
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


async def fuzz_channel(here: BusWorld, name: str, channel: Channel[Any], count: int, seed: int) -> Campaign:
    """``count`` payloads on one channel."""
    campaign, mutator = Campaign(f"{name} {channel.message.__name__}"), Mutator(channel.message, seed)
    decoder = msgspec.msgpack.Decoder(channel.message)
    while campaign.sent < count:
        here.keep_flights()
        ids = here.ids()
        for _ in range(min(BATCH, count - campaign.sent)):
            payload, tree = mutator.payload(ids)
            campaign.sent += 1
            campaign.heard += here.say(channel, payload, tree)
            campaign.read += is_read(decoder, payload)
        await asyncio.sleep(PAUSE_S)
        if campaign.sent // BATCH % SHOWN_EVERY == 0:
            await here.show()
    return campaign


async def fuzz_answers(here: BusWorld, name: str, channel: AskChannel[Any, Any], count: int, seed: int) -> Campaign:
    """``count`` answers to one ask."""
    campaign, bus = Campaign(f"{name} -> {channel.answer.__name__}"), MemoryBus(here.hub)
    elsewhere = AskChannel(f"fuzz.{channel.subject}", channel.message, channel.delivery, (), (), answer=channel.answer)
    here.hub.join(Stranger(bus, elsewhere, Mutator(channel.answer, seed)))  # type: ignore[arg-type]
    ask = example(channel.message)
    while campaign.sent < count:
        for _ in range(min(BATCH, count - campaign.sent)):
            campaign.sent += 1
            campaign.heard += 1
            try:
                await bus.ask(elsewhere, ask, timeout_s=1.0)
                campaign.read += 1
            except AskRefused:
                pass
        await asyncio.sleep(PAUSE_S)
    await bus.close()
    return campaign


def is_read(decoder: msgspec.msgpack.Decoder[Any], payload: bytes) -> bool:
    try:
        decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


async def fuzz(state_dir: Path, count: int, seed: int, progress: Progress, only: str = "") -> list[Campaign]:
    """All channels, one behind the other, on one set of services."""
    campaigns = []
    async with everybody(state_dir) as here:
        for name, channel in CHANNELS.items():
            if only and only not in name:
                continue
            runs = [fuzz_channel]
            if isinstance(channel, AskChannel):
                runs.append(fuzz_answers)
            for run in runs:
                with Watch() as watch:
                    before, bytes_before = objects(), memory_bytes()
                    campaign = await run(here, name, channel, count, seed)
                    await here.rest()
                    campaign.objects_grown, campaign.bytes_grown = objects() - before, memory_bytes() - bytes_before
                campaign.findings = watch.findings + here.bugs()
                if here.world.router.relay.flights:
                    campaign.findings.append("requests are left over")
                if campaign.objects_grown > OBJECTS_GROWN_MAX:
                    campaign.findings.append(f"{campaign.objects_grown} more objects than before")
                campaigns.append(campaign)
                progress(campaign.name, campaign.sent)
                if here.bugs():
                    return campaigns
        await here.leave()
    return campaigns


def fuzz_bus(state_dir: Path, count: int, seed: int, progress: Progress, only: str = "") -> list[Campaign]:
    """In virtual time."""
    return run_in_virtual_time(fuzz(state_dir, count, seed, progress, only))
