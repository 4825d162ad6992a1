"""Rendering for routers around any engine: its bounds, and what its failures become."""

from __future__ import annotations

import asyncio

import pytest

from services.worker.engines.port import EnginePrompt
from services.worker.prompt_handlers import AT_ONCE_MAX, RenderHandler
from shared.bus.port import Envelope, NoResponders
from shared.contracts.channels import RENDER
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.inference import RenderPrompt
from shared.contracts.kv_events import block_hash64, pack_hashes
from tests.support.memory_bus import MemoryBus, MemoryHub
from tests.support.virtual_time import in_virtual_time

CHAT = "/v1/chat/completions"
FULL_HASHES = [bytes(31) + b"1", bytes(31) + b"2"]
ASK = RenderPrompt(worker_id=WorkerId("w1"), path=CHAT, body=b'{"messages":[]}', cache_salt="own")


class Renderer:
    def __init__(self, *, hangs: bool = False, error: Exception | None = None) -> None:
        self.hangs = hangs
        self.error = error
        self.running = 0
        self.asked: list[tuple[str, bytes, str, str]] = []

    async def render(self, path: str, body: bytes, *, cache_salt: str, media_salt: str) -> EnginePrompt:
        self.asked.append((path, body, cache_salt, media_salt))
        self.running += 1
        try:
            if self.hangs:
                await asyncio.Event().wait()
            if self.error is not None:
                raise self.error
            return EnginePrompt(tokens=70, hashes=FULL_HASHES, media_end=40)
        finally:
            self.running -= 1


async def opened(hub: MemoryHub, renderer: Renderer | None) -> MemoryBus:
    """The router's end."""
    await RenderHandler(renderer, WorkerId("w1"), Epoch(3), MemoryBus(hub)).open()
    return MemoryBus(hub)


async def test_a_router_gets_the_engines_prompt():
    renderer = Renderer()
    bus = await opened(MemoryHub(), renderer)

    found = await bus.ask(RENDER, ASK, timeout_s=5.0)

    assert (found.tokens, found.hashes, found.media_end, found.epoch, found.refusal) == (
        70,
        pack_hashes(map(block_hash64, FULL_HASHES)),
        40,
        3,
        "",
    )
    assert renderer.asked == [(CHAT, b'{"messages":[],"cache_salt":"own"}', "own", "own")]


async def test_an_engine_without_media_is_not_asked():
    bus = await opened(MemoryHub(), None)

    with pytest.raises(NoResponders):
        await bus.ask(RENDER, ASK, timeout_s=5.0)


async def test_a_failure_of_the_engines_server_is_a_refusal():
    bus = await opened(MemoryHub(), Renderer(error=ZeroDivisionError("a bug")))

    assert (await bus.ask(RENDER, ASK, timeout_s=5.0)).refusal == "ZeroDivisionError: a bug"


@in_virtual_time
async def test_an_engine_that_hangs_keeps_no_place():
    renderer = Renderer(hangs=True)
    handler = RenderHandler(renderer, WorkerId("w1"), Epoch(1), MemoryBus(MemoryHub()))

    found = await asyncio.gather(*(handler.render(ASK, Envelope({}, 0)) for _ in range(AT_ONCE_MAX + 3)))

    assert {one.refusal for one in found} == {"not done within 1 s"}
    assert renderer.running == 0
    renderer.hangs = False
    assert (await handler.render(ASK, Envelope({}, 0))).tokens == 70
