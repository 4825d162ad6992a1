"""Orders about the engine's weights, and whether they are those that its model's workers shall have.

A worker with others does not serve: it is PROBING, and its registry entry says why. The orchestrator keeps which
weights those are, also for workers that start later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from services.worker.engines.port import EngineDead, EngineWeights, WeightsRefused
from services.worker.lifecycle.registration import WorkerStatus
from shared.bus.port import Bus, Envelope, watch_store
from shared.contracts.channels import CHANGE_WEIGHTS, WANTED_WEIGHTS
from shared.contracts.fleet_orders import (
    PATH_CHARS_MAX,
    ChangeWeights,
    PauseMode,
    WantedWeights,
    WeightsAction,
    WeightsChanged,
    weights_key,
)
from shared.contracts.workers import WorkerPhase
from shared.runtime.clock import Clock

log = logging.getLogger("baton.worker")

WANTED_S_MAX = 5.0
"""Time limit for the first read of what is wanted. Without it the worker serves: an orchestrator of an earlier release
keeps no weights.
"""
CHECKPOINTS = ("*.safetensors", "*.bin", "*.pt")
NO_WEIGHTS = (
    "this engine's weights cannot be changed in place: it takes a vLLM engine with "
    "WORKER_CONNECTOR=baton, in no data parallel group"
)
_payload = msgspec.json.Decoder(Any)


class WeightsHandler:
    """Answers CHANGE_WEIGHTS. An ``EngineHealth``: its fault is that the weights are not those that are wanted."""

    def __init__(  # wiring
        self,
        bus: Bus,
        clock: Clock,
        status: WorkerStatus,
        weights: EngineWeights | None,
        weights_dir: str,
        on_named: Callable[[str], None],
    ) -> None:
        """``on_named`` gets ``Fingerprint.weights`` when the engine has others."""
        self._bus = bus
        self._clock = clock
        self._status = status
        self._weights = weights
        self._weights_dir = weights_dir
        self._on_named = on_named
        self._changing = asyncio.Lock()
        self._has_begun = False
        """An update from a trainer has begun, and is not finished."""
        self._broken = ""
        """Why the weights are neither the old nor the new ones."""
        self._ruined = asyncio.Event()
        self._wanted: WantedWeights | None = None
        self._first_read = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []

    @property
    def fault(self) -> str:
        """Why the worker does not serve; empty while it may."""
        if self._broken:
            return f"its weights are incomplete ({self._broken}): it restarts"
        wanted, has = self._wanted, self._status.record.fingerprint.weights
        if wanted is None or wanted.weights == has:
            return ""
        how = "they will be loaded" if wanted.path else "a trainer sent them: send them again, or remove this worker"
        return f"its weights are {has or 'those of its start'}, those of {wanted.model} are {wanted.weights}: {how}"

    def on_changed(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    async def open(self) -> None:
        await self._bus.answer(CHANGE_WEIGHTS, self._change, worker_id=self._status.record.worker_id)

    async def follow(self) -> None:
        """Follow what is wanted, until cancelled."""
        key = weights_key(self._status.record.model)
        async for entry in watch_store(self._bus, WANTED_WEIGHTS):
            if entry is None:
                self._first_read.set()
            elif entry.key == key:
                self._wanted = entry.value
            self._notify()

    async def end_when_ruined(self) -> None:
        """Raises EngineDead when weights could not be written: vLLM keeps what it has read of them, and then fails to
        load others, too. The restarted worker is told to load those that are wanted.
        """
        await self._ruined.wait()
        raise EngineDead(f"its weights are incomplete: {self._broken}")

    async def settle(self) -> None:
        """Before the worker serves for the first time: what is wanted is known, and the engine is paused if its model
        is. Raises EngineDead.
        """
        try:
            async with asyncio.timeout(WANTED_S_MAX):
                await self._first_read.wait()
        except TimeoutError:
            log.warning("it is not known which weights are wanted; the worker serves with those of its start")
        if self._weights is None or self._wanted is None or not self._wanted.paused or self._weights.paused:
            return
        async with self._changing:
            await self._weights.pause(PauseMode.KEEP, clear_cache=False)

    async def _change(self, order: ChangeWeights, _envelope: Envelope) -> WeightsChanged:
        began, failure = self._clock.now(), ""
        async with self._changing:
            try:
                await self._carry_out(order)
            except (WeightsRefused, EngineDead) as error:
                failure = str(error)
        self._notify()
        action = order.action.value
        log.info("ordered to %s the weights %s: %s", action, order.version or order.path, failure or "done")
        if failure and self._broken:
            self._ruined.set()
        record = self._status.record
        return WeightsChanged(
            worker_id=record.worker_id,
            epoch=record.epoch,
            weights=record.fingerprint.weights,
            seconds=self._clock.now() - began,
            failure=failure,
            broken=bool(self._broken),
        )

    async def _carry_out(self, order: ChangeWeights) -> None:
        """Raises WeightsRefused, EngineDead."""
        weights = self._weights
        if weights is None:
            raise WeightsRefused(NO_WEIGHTS)
        if self._status.phase is WorkerPhase.DRAINING:
            raise WeightsRefused("it is draining")
        match order.action:
            case WeightsAction.PAUSE:
                await weights.pause(order.mode, clear_cache=order.clear_cache)
            case WeightsAction.RESUME:
                await weights.resume()
            case WeightsAction.LOAD:
                folder = await asyncio.to_thread(checkpoint_within, self._weights_dir, order.path)
                await self._write(weights, weights.load(folder))
                await self._name(weights, order)
            case WeightsAction.START:
                await weights.transfer(WeightsAction.START, {})
                self._has_begun = True
                await weights.begin()
            case WeightsAction.UPDATE:
                if not self._has_begun:
                    raise WeightsRefused("no update has begun: call start_weight_update first")
                await self._receive(weights, WeightsAction.UPDATE, _read(order.payload))
            case WeightsAction.FINISH:
                if not self._has_begun:
                    raise WeightsRefused("no update has begun: call start_weight_update first")
                await self._receive(weights, WeightsAction.FINISH, {})
                await self._name(weights, order)
            case _:
                await weights.transfer(order.action, _read(order.payload))

    async def _write(self, weights: EngineWeights, load: Any) -> None:
        """Raises WeightsRefused, after which the weights are incomplete."""
        await weights.begin()
        self._broken = "they are being loaded"
        try:
            await load
        except WeightsRefused as refused:
            self._broken = str(refused)
            raise
        self._broken = ""

    async def _receive(self, weights: EngineWeights, action: WeightsAction, payload: dict[str, Any]) -> None:
        try:
            await weights.transfer(action, payload)
        except WeightsRefused as refused:
            self._broken = str(refused)
            self._has_begun = False
            raise

    async def _name(self, weights: EngineWeights, order: ChangeWeights) -> None:
        self._has_begun = False
        self._broken = ""
        named = await weights.name(order.weights, order.version)
        if self._wanted is not None:  # What is wanted is stored when all workers have replied.
            self._wanted = msgspec.structs.replace(self._wanted, weights=order.weights)
        await self._status.weights_changed(named)
        self._on_named(order.weights)

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()


def checkpoint_within(weights_dir: str, path: str) -> Path:
    """The folder ``path``, absolute or relative to ``weights_dir``, which must lie in that directory when all symbolic
    links are followed, and so must its files. Raises WeightsRefused.
    """
    if not weights_dir:
        raise WeightsRefused("it loads no weights in place: start it with WORKER_WEIGHTS_DIR, a folder of checkpoints")
    if not path or len(path) > PATH_CHARS_MAX or "\0" in path:
        raise WeightsRefused("a path is needed: a folder, relative to WORKER_WEIGHTS_DIR")
    base = Path(weights_dir).resolve()
    try:
        folder = (base / path).resolve(strict=True)
        files = [file for pattern in CHECKPOINTS for file in folder.glob(pattern)]
        outside = [file.name for file in files if not file.resolve(strict=True).is_relative_to(base)]
    except (OSError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise WeightsRefused(f"{path} cannot be read in WORKER_WEIGHTS_DIR: {why}") from None
    if not folder.is_relative_to(base) or not folder.is_dir() or outside:
        raise WeightsRefused(f"{path} is not in WORKER_WEIGHTS_DIR, the only place that weights are loaded from")
    if not files:
        raise WeightsRefused(f"{path} has no weights: {', '.join(CHECKPOINTS)}")
    return folder


def _read(payload: bytes) -> dict[str, Any]:
    """Raises WeightsRefused."""
    try:
        value = _payload.decode(payload or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WeightsRefused(f"what the trainer says cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise WeightsRefused("what the trainer says is no object")
    return value
