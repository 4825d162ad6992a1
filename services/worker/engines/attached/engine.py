"""A worker without an engine of its own: it is attached to an OpenAI-compatible server, which it reaches by URL.

The server may be SGLang, llama.cpp, TensorRT-LLM, a plain vLLM or a cloud. It keeps its KV to itself, so that a worker
attached to it serves whole requests, placed by load.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import NamedTuple

from services.worker.engines.attached.app import AttachedApp
from services.worker.engines.attached.health import Meter, ServerHealth
from services.worker.engines.attached.server import Server, ServerAway, ServerModel, find_model, find_paths, read_key
from services.worker.engines.port import (
    Engine,
    EngineFacts,
    EngineLoad,
    EngineRefused,
    EngineTokens,
    Identity,
    KvEventFeed,
    TokenizerFiles,
)
from services.worker.settings import Settings, root_of, sends_key_in_clear
from shared.contracts.kv_events import KvEvent
from shared.contracts.workers import Fingerprint, HashScheme
from shared.runtime.settings import CommonSettings, FollowedFile, SettingsError

log = logging.getLogger("baton.worker")

RETRY_S = 2.0
"""Pause between two attempts to find a server that is away at the start."""
KNOWS_SALTS = "vllm"
"""Only this server knows ``cache_salt``; others may refuse it."""
KEY_IN_CLEAR = "its API key travels without encryption, use https"


class Found(NamedTuple):
    """What the server has turned out to be."""

    model: ServerModel
    paths: frozenset[str]


class AttachedEngine(Engine):
    """The server keeps its KV and its adapters to itself, and renders prompts. Construct it on a running event loop."""

    def __init__(self, server: Server, found: Found, facts: EngineFacts, key: FollowedFile[str] | None) -> None:
        loop = asyncio.get_running_loop()
        self._server = server
        self.facts = facts
        self._meter = Meter()
        self.health: ServerHealth = ServerHealth(server, self._meter, found.model.name)
        salts = found.model.server == KNOWS_SALTS
        self.app = AttachedApp(server, self.health, self._meter, found.model.name, salts=salts)
        self._died: asyncio.Future[str] = loop.create_future()
        self._feed = KvEventFeed(self._died, list)
        self._tasks: list[asyncio.Task[None]] = [
            loop.create_task(self.health.follow(), name="server-health"),
            loop.create_task(self.health.follow_load(), name="server-load"),
        ]
        if key is not None:
            self._tasks.append(loop.create_task(key.follow(self._key_changed), name="server-key"))
        for task in self._tasks:
            task.add_done_callback(self._ended)

    def load(self) -> EngineLoad:
        return self._meter.load()

    def on_load_changed(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` when a request begins or ends, and when the server's own numbers change."""
        self._meter.on_changed(listener)

    def kv_events(self) -> AsyncIterator[list[KvEvent]]:
        """There are none. Raises EngineDead."""
        return self._feed.batches()

    def tokenizer_files(self) -> TokenizerFiles:
        """Raises ValueError: the server's tokenizer is not known."""
        raise ValueError("an attached server shows no tokenizer")

    async def tokens(self, path: str, body: bytes) -> EngineTokens:  # noqa: ARG002  # the port's
        return EngineTokens(refusal="an attached server shows no tokens")

    async def dead(self) -> str:
        """A server that is away may come back: only a fault of this worker's own ends it."""
        return await asyncio.shield(self._died)

    async def close(self, deadline_s: float) -> None:
        """The server itself runs on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks, timeout=deadline_s)
        await self._server.close()

    def _key_changed(self, key: str) -> None:
        self._server.key = key
        self.health.doubt()

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("%s failed", task.get_name(), exc_info=error)
        if not self._died.done():
            self._died.set_result(f"{task.get_name()} failed: {error!r}" if error else "it was closed")


async def start_engine(
    settings: Settings, _common: CommonSettings, report: Callable[[str], None], *, identity: Identity
) -> Engine:
    """Wait until the server answers, and find out what it serves. Raises EngineRefused."""
    if not settings.attach_url:
        raise EngineRefused(
            "WORKER_ATTACH_URL (compose: ATTACH_URL) is empty: set it to the URL of the server, such as http://gpu-1:30000"
        )
    root, key = root_of(settings.attach_url), None
    if settings.attach_key_file:
        read = partial(read_key, settings.attach_key_file)
        try:
            key = FollowedFile(settings.attach_key_file, read, what="the server's API key", log=log)
        except SettingsError as error:
            raise EngineRefused(str(error)) from None
    server = Server(
        root,
        key=key.value if key is not None else "",
        requests_max=settings.legs_max,
        silent_s_max=settings.attach_silent_s_max,
    )
    try:
        found = await _find(server, settings, report)
    except BaseException:
        await server.close()
        raise
    return AttachedEngine(server, found, facts_of(found, settings, identity, root), key)


async def _find(server: Server, settings: Settings, report: Callable[[str], None]) -> Found:
    """Tries for as long as the server is away: it may still load its model."""
    said = ""
    while True:
        report(f"looking for the server at {server.root}")
        try:
            model = await find_model(server, settings.attach_model, settings.named_model)
            return Found(model, await find_paths(server, report))
        except ServerAway as away:
            if str(away) != said:
                log.warning("waiting for the server at %s: %s", server.root, away)
            said = str(away)
            report(f"waiting for the server at {server.root}: {away}")
        await asyncio.sleep(RETRY_S)
        if settings.attach_key_file:
            server.key = await asyncio.to_thread(_key_now, settings.attach_key_file, server.key)


def _key_now(path: str, before: str) -> str:
    try:
        return read_key(path)
    except SettingsError:
        return before


def facts_of(found: Found, settings: Settings, identity: Identity, root: str) -> EngineFacts:
    """No other worker has its fingerprint, so that it is never one of a pair."""
    models = settings.model_names or [found.model.name]
    where = f"attached to {root}, model {found.model.name}"
    return EngineFacts(
        engine="attached",
        models=models,
        max_model_len=settings.max_model_len or found.model.max_model_len,
        fingerprint=Fingerprint(
            model=models[0],
            revision=settings.revision,
            dtype="attached",
            block_size=settings.block_tokens,
            kv_layout=f"of {identity.worker_id}",
            connector="none",
            engine_version=found.model.server or "unknown",
        ),
        hashing=HashScheme(block_size=settings.block_tokens),
        kv_tokens=0,
        legs_max=settings.legs_max,
        prefix_caching=False,
        attached=True,
        paths=found.paths,
        note=f"{where}; {KEY_IN_CLEAR}" if settings.attach_key_file and sends_key_in_clear(root) else where,
    )
