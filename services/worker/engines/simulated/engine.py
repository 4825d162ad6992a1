"""The simulated engine: implements the engine port with the pure core, driven by the event loop's clock."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

from services.worker.engines.adapters import LoadedAdapters
from services.worker.engines.backends import check_backend
from services.worker.engines.port import (
    Engine,
    EngineDead,
    EngineLoad,
    EngineTokens,
    Identity,
    KvEventFeed,
    TokenizerFiles,
)
from services.worker.engines.simulated.app import SimulatedApp
from services.worker.engines.simulated.core.batch import RequestParams, Sequence
from services.worker.engines.simulated.core.engine_core import EngineCore
from services.worker.engines.simulated.core.settings import SimulationSettings, tokens_max
from services.worker.engines.simulated.jobs import JobMaker, SimulatedRenderer, engine_tokens
from services.worker.engines.simulated.kv_exchange import POLL_S, SimulatedExchange, nixl_package_of, open_mover
from services.worker.engines.simulated.model import (
    SimulatedAdapters,
    SimulatedModel,
    SimulatedTokenizer,
    adapters_of,
    facts_of,
    find_model,
    models_response,
)
from services.worker.engines.simulated.responses import Choice
from services.worker.settings import Settings
from shared.contracts.kv_events import KvEvent
from shared.runtime.settings import CommonSettings

log = logging.getLogger("baton.worker")


async def start_engine(
    settings: Settings, common: CommonSettings, report: Callable[[str], None], *, identity: Identity
) -> Engine:
    """Start the engine of a worker. Raises ValueError for settings that cannot work."""
    report("loading the tokenizer")
    directory, revision = await asyncio.to_thread(find_model, settings, Path(common.cache_dir))
    model = SimulatedModel(directory=directory, names=settings.model_names, revision=settings.revision or revision)
    simulation = simulation_settings(settings, identity.epoch)
    if simulation.transfer == "nixl":
        await check_backend(nixl_package_of("nixl"), settings.kv_backend)
    return await open_simulated_engine(simulation, model, legs_max=settings.legs_max)


async def open_simulated_engine(
    settings: SimulationSettings, model: SimulatedModel, *, legs_max: int = 256
) -> SimulatedEngine:
    tokenizer = await asyncio.to_thread(SimulatedTokenizer, model.directory)
    return SimulatedEngine(settings, model, tokenizer, legs_max)


def simulation_settings(settings: Settings, epoch: int = 0) -> SimulationSettings:
    """The simulation's settings from a worker's. 0 means the default, reduced where it does not fit."""
    profile = settings.profile
    if profile.transfer == "auto":
        profile = replace(profile, transfer="nixl" if find_spec("nixl") else "tcp")
    defaults = SimulationSettings()
    block_bytes = settings.block_tokens * profile.kv_bytes_per_token
    kv_blocks = (
        settings.kv_cache_bytes // block_bytes if settings.kv_cache_bytes and block_bytes else defaults.kv_blocks
    )
    return SimulationSettings(
        **asdict(profile),
        worker_id=settings.worker_id,
        epoch=epoch,
        host=settings.kv_address,
        kv_backend=settings.kv_backend,
        kv_lease_s=settings.kv_lease_s,
        block_size=settings.block_tokens,
        kv_blocks=kv_blocks,
        max_model_len=settings.max_model_len
        or max(1, min(defaults.max_model_len, tokens_max(profile.groups, kv_blocks, settings.block_tokens))),
        max_num_seqs=settings.legs_max,
    )


class SimulatedEngine(Engine):
    """Construct it on a running event loop."""

    def __init__(
        self, settings: SimulationSettings, model: SimulatedModel, tokenizer: SimulatedTokenizer, legs_max: int
    ) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self._core = EngineCore(settings, tokenizer.model)
        self._tokenizer = tokenizer
        self.facts = facts_of(settings, model, legs_max)
        mover = open_mover(self._core, self.facts.fingerprint.key(), time.monotonic)
        mover.wake_on_results(self._wake_up_from_thread)
        self.exchange: SimulatedExchange = SimulatedExchange(self._core, mover, time.monotonic, self._wake_up)
        adapters = SimulatedAdapters()
        self.adapters = LoadedAdapters(adapters, model.names, Path(tempfile.gettempdir()))
        self._jobs = JobMaker(tokenizer, model.names, settings.max_model_len, adapters.by_name)
        self.renderer = SimulatedRenderer(self._jobs, tokenizer, settings.block_size)
        self.app = SimulatedApp(
            self, tokenizer, self._jobs, lambda: models_response(model.names, settings.max_model_len, adapters.by_name)
        )
        self._load_listeners: list[Callable[[], None]] = []
        self._wake: asyncio.Future[None] = loop.create_future()
        self._died: asyncio.Future[str] = loop.create_future()
        self._feed = KvEventFeed(self._died, self._core.cache.whole_as_events)
        self._running = loop.create_task(self._run(), name="simulated-engine")
        self._running.add_done_callback(self._ended)

    def load(self) -> EngineLoad:
        batch, cache, measures = self._core.batch, self._core.cache, self._core.measures
        return EngineLoad(
            running=len(batch.running),
            waiting=batch.queued,
            waiting_tokens=self._core.waiting_tokens(),
            kv_tokens_used=(cache.blocks - cache.free) * self._core.settings.block_size,
            prompt_tokens_total=measures.prompt_tokens,
            computed_tokens_total=measures.computed_tokens,
            cached_tokens_total=measures.cached_tokens,
            received_tokens_total=measures.received_tokens,
            received_bytes_total=measures.received_bytes,
            received_seconds_total=measures.received_s,
            generation_tokens_total=measures.generated_tokens,
            preemptions_total=batch.preemptions,
            prefill_tokens_per_s=measures.steps.prefill_tokens_per_s,
            decode_s_per_token=measures.decode_s_per_token,
            steps=measures.steps.totals(),
            prompt_steps=measures.steps.prompt_totals(),
            adapters_running=adapters_of(batch.running),
            adapters_waiting=adapters_of(batch.not_running()),
        )

    def on_load_changed(self, listener: Callable[[], None]) -> None:
        self._load_listeners.append(listener)

    def kv_events(self) -> AsyncIterator[list[KvEvent]]:
        """All changes of the prefix cache since the start. Raises EngineDead."""
        return self._feed.batches()

    def tokenizer_files(self) -> TokenizerFiles:
        return self._tokenizer.files()

    async def tokens(self, path: str, body: bytes) -> EngineTokens:
        return await engine_tokens(self._jobs, self._tokenizer, self.facts.hashing.block_size, path, body)

    async def dead(self) -> str:
        return await asyncio.shield(self._died)

    async def close(self, deadline_s: float) -> None:
        self._running.cancel()
        await asyncio.wait([self._running], timeout=deadline_s)
        await asyncio.to_thread(self.exchange.close)

    def submit(self, choice: Choice, params: RequestParams) -> Sequence:
        """Start a completion; its tokens arrive in the choice's inbox. Raises EngineDead."""
        if self._died.done():
            raise EngineDead(self._died.result())
        sequence = self._core.add(choice, choice.prompt + choice.token_ids, params, time.monotonic())
        if not self._core.stepping():
            self._wake_up()
        self._tell_load()
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """Stop generating; does nothing for a sequence that has finished."""
        if sequence.finish_reason:
            return
        self._core.abort(sequence)
        if not self._core.stepping():
            self._wake_up()
        self._tell_load()

    async def _run(self) -> None:
        core = self._core
        while True:
            now = time.monotonic()
            for sequence, token in core.advance(now):
                choice: Choice = sequence.owner
                choice.inbox.put(choice, token, sequence.finish_reason)
            has_moved = self.exchange.poll()
            self._feed.tell(self._core.cache.take_events())
            self._tell_load()
            wakes_at = now if has_moved else core.wakes_at()
            if self.exchange.moving:
                wakes_at = min(now + POLL_S, now + POLL_S if wakes_at is None else wakes_at)
            if wakes_at is not None and wakes_at <= now:
                await asyncio.sleep(0)  # Let the request tasks take these tokens before the next step.
            else:
                await self._sleep(None if wakes_at is None else wakes_at - now)

    async def _sleep(self, seconds: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._wake = loop.create_future()
        timer = None if seconds is None else loop.call_later(seconds, self._wake_up)
        try:
            await self._wake
        finally:
            if timer is not None:
                timer.cancel()

    def _wake_up(self) -> None:
        if not self._wake.done():
            self._wake.set_result(None)

    def _wake_up_from_thread(self) -> None:
        with suppress(RuntimeError):  # The loop is closed.
            self._loop.call_soon_threadsafe(self._wake_up)

    def _tell_load(self) -> None:
        for listener in self._load_listeners:
            listener()

    def _ended(self, running: asyncio.Task[None]) -> None:
        error = None if running.cancelled() else running.exception()
        reason = "the engine was closed" if error is None else f"the simulation failed: {error!r}"
        if error is not None:
            log.error(reason, exc_info=error)
        self._died.set_result(reason)
        for sequence in self._core.batch.unfinished():
            sequence.owner.inbox.fail(reason)
