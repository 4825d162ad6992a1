"""The operator's default mode applies to requests that set no mode."""

from __future__ import annotations

import asyncio
import json

import pytest

from services.router.feeds.default_mode import DefaultModeFeed
from services.router.request.facts import Mode
from services.router.request.fields import read_request
from services.router.request.mode import default_mode_of, default_or_requested, requested_mode
from shared.contracts.channels import DEFAULT_MODE
from shared.contracts.control import FLEET, DefaultMode
from shared.contracts.engine_paths import CHAT
from tests.support.memory_bus import MemoryBus, MemoryHub

WAIT_S_MAX = 60.0


@pytest.mark.parametrize(
    ("body", "request_headers", "mode"),
    [
        ({}, Mode.AUTO, Mode.AGGREGATED),
        ({}, Mode.DISAGGREGATED, Mode.DISAGGREGATED),
        ({"baton": {"mode": "disaggregated"}}, Mode.AUTO, Mode.DISAGGREGATED),
        ({"baton": {"mode": "auto"}}, Mode.AUTO, Mode.AUTO),
        ({"baton": {"prefill_worker": "p1"}}, Mode.AUTO, Mode.AUTO),
    ],
)
def test_the_default_mode_applies_to_requests_without_a_mode(body, request_headers, mode):
    facts = read_request(CHAT, json.dumps({"model": "m", "messages": [{}], **body}).encode())

    assert requested_mode(facts, default_or_requested(facts, request_headers, Mode.AGGREGATED)) is mode


def test_a_cache_threshold_prevents_prefill_legs_in_every_default_mode():
    facts = read_request(CHAT, b'{"model": "m", "messages": [{}], "cache_hit_threshold": 0.5}')

    assert requested_mode(facts, default_or_requested(facts, Mode.AUTO, Mode.DISAGGREGATED)) is Mode.AGGREGATED


@pytest.mark.parametrize(
    "stored", [None, DefaultMode(), DefaultMode(mode="decode_first"), DefaultMode(mode="of tomorrow")]
)
def test_an_unknown_default_mode_means_auto(stored):
    assert default_mode_of(stored) is Mode.AUTO


async def test_routers_follow_the_stored_default_mode():
    hub = MemoryHub()
    bus, console = MemoryBus(hub), MemoryBus(hub)
    feed = DefaultModeFeed(bus)
    following = asyncio.get_running_loop().create_task(feed.follow())
    store = await console.key_value_store(DEFAULT_MODE)

    async def becomes(mode):
        async with asyncio.timeout(WAIT_S_MAX):
            while feed.mode is not mode:
                await asyncio.sleep(0)

    await store.put(DefaultMode(mode="disaggregated"))
    await becomes(Mode.DISAGGREGATED)
    await store.delete(FLEET)
    await becomes(Mode.AUTO)
    following.cancel()
    await bus.close()
    await console.close()
