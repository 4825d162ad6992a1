"""A worker with scripted responses to real legs, over any bus."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from shared.bus.frame_sender import FrameSender, LegFrames
from shared.bus.port import Bus, Envelope
from shared.contracts.channels import CANCEL_LEG, KV_SNAPSHOT, LOAD, RENDER, START_LEG, TOKENIZER, WORKER_RECORDS
from shared.contracts.control import AskTokenizer, TokenizerAsset
from shared.contracts.ids import Epoch, LegId, WorkerId
from shared.contracts.inference import CancelLeg, LegKind, LegReport, RenderedPrompt, RenderPrompt, StartLeg
from shared.contracts.kv_events import AskKvSnapshot, KvSnapshot
from shared.contracts.workers import Fingerprint, LoraAdapter, Role, WorkerPhase, WorkerRecord
from tests.support.fleet_builders import load, record

Script = Callable[["FakeWorker", StartLeg, LegFrames], Awaitable[None] | None]
Render = Callable[["FakeWorker", RenderPrompt], Awaitable[RenderedPrompt]]

JSON = "application/json"
SSE = "text/event-stream"
WHOLE_RESPONSE = b'{"id":"cmpl-1","choices":[{"text":"five tokens of an answer"}]}'
EVENTS = tuple(b'data: {"choices":[{"text":"%d"}]}\n\n' % number for number in range(3))
DONE = b"data: [DONE]\n\n"


class WantsStream(msgspec.Struct):
    stream: bool = False


def wants_stream(start: StartLeg) -> bool:
    return msgspec.json.decode(start.body, type=WantsStream).stream


def serve_leg(worker: FakeWorker, start: StartLeg, frames: LegFrames) -> None:
    """Respond as a healthy engine does."""
    if start.kind is LegKind.PREFILL:
        frames.head(200, JSON)
        frames.end(
            LegReport(prompt_tokens=9, cached_tokens=4, kv_transfer=b'{"from":"%b"}' % worker.worker_id.encode())
        )
        return
    report = LegReport(prompt_tokens=9, cached_tokens=start.prefill_cached_tokens, completion_tokens=3)
    if wants_stream(start):
        frames.head(200, SSE)
        for event in EVENTS:
            frames.data(event, [1])
        frames.data(DONE)
    else:
        frames.head(200, JSON)
        frames.data(WHOLE_RESPONSE)
    frames.end(report)


class FakeWorker:
    """``script`` is called for each leg; it may be replaced at any time."""

    channel = WORKER_RECORDS

    def __init__(
        self,
        bus: Bus,
        worker_id: str,
        role: Role = Role.BOTH,
        *,
        epoch: int = 1,
        script: Script = serve_leg,
        asset: TokenizerAsset | None = None,
        connector: str = "none",
        revision: str = "r",
        render: Render | None = None,
        paths: tuple[str, ...] = (),
        models: tuple[str, ...] = ("m",),
        adapters: tuple[LoraAdapter, ...] = (),
        ranks: int = 1,
        attached: bool = False,
        threshold: float = 0.0,
    ) -> None:
        """``threshold``: its default of the cache hit threshold, as its record has it."""
        self.bus = bus
        self.worker_id = WorkerId(worker_id)
        self.role = role
        self.epoch = Epoch(epoch)
        self.script = script
        self.connector = connector
        self.revision = revision
        self.render = render
        self.paths = paths
        self.models = models
        self.adapters = adapters
        self.ranks = ranks
        self.attached = attached
        self.threshold = threshold
        self.rendered: list[RenderPrompt] = []
        self.started: list[StartLeg] = []
        self.headers: list[dict[str, str]] = []
        self.cancelled: list[LegId] = []
        self.asset = asset or TokenizerAsset(worker_id=self.worker_id, epoch=self.epoch, note="none in this test")
        self.held: bytes = b""
        self.alive = True
        self.unfrozen = asyncio.Event()
        """Cleared: its process is stopped, but still connected to NATS, as after SIGSTOP."""
        self.unfrozen.set()
        self.seq = 0
        self.frames: dict[LegId, LegFrames] = {}
        self._sender = FrameSender(bus, self.worker_id, self.epoch)
        self._tasks: set[asyncio.Future[None]] = set()
        self._subscriptions: list[Any] = []

    def record(self, phase: WorkerPhase = WorkerPhase.READY) -> WorkerRecord:
        of_it = {"connector": self.connector, "revision": self.revision}
        made = record(self.worker_id, phase, self.epoch, self.role, self.models, adapters=self.adapters, **of_it)
        if self.attached:
            made = msgspec.structs.replace(
                made, attached=True, prefix_caching=False, fingerprint=self._fingerprint(made)
            )
        made = msgspec.structs.replace(made, cache_hit_threshold=self.threshold)
        return msgspec.structs.replace(made, renders=self.render is not None, paths=list(self.paths), ranks=self.ranks)

    def _fingerprint(self, made: WorkerRecord) -> Fingerprint:
        return msgspec.structs.replace(made.fingerprint, dtype="attached", kv_layout=f"of {self.worker_id}")

    async def join(self) -> None:
        """Subscribe, then register."""
        ids = {"worker_id": self.worker_id}
        self._subscriptions = [
            await self.bus.subscribe(START_LEG, self._on_start, **ids),
            await self.bus.subscribe(CANCEL_LEG, self._on_cancel, **ids),
            await self.bus.answer(TOKENIZER, self._on_tokenizer, **ids),
            await self.bus.answer(RENDER, self._on_render, **ids),
            await self.bus.answer(KV_SNAPSHOT, self._on_snapshot, **ids, epoch=str(self.epoch)),
        ]
        await (await self.bus.key_value_store(WORKER_RECORDS)).put(self.record())

    async def report(self, **numbers: Any) -> None:
        await self.unfrozen.wait()
        await self.bus.publish(LOAD, load(self.worker_id, self.epoch, role=self.role, **numbers))

    async def vanish(self) -> None:
        """Stop listening without deregistering."""
        self.alive = False
        for subscription in self._subscriptions:
            await subscription.close()

    def _on_start(self, start: StartLeg, envelope: Envelope) -> None:
        self.started.append(start)
        self.headers.append(dict(envelope.headers))
        frames = self.frames[start.leg_id] = self._sender.leg(start)
        working = self._thawed(start, frames) if not self.unfrozen.is_set() else self.script(self, start, frames)
        if working is not None:
            task = asyncio.ensure_future(working)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _thawed(self, start: StartLeg, frames: LegFrames) -> None:
        await self.unfrozen.wait()
        working = self.script(self, start, frames)
        if working is not None:
            await working

    def _on_cancel(self, cancel: CancelLeg, _envelope: Envelope) -> None:
        self.cancelled.append(cancel.leg_id)
        if cancel.leg_id in self.frames:
            self.frames[cancel.leg_id].abandon()

    async def _on_tokenizer(self, _ask: AskTokenizer, _envelope: Envelope) -> TokenizerAsset:
        return self.asset

    async def _on_render(self, ask: RenderPrompt, _envelope: Envelope) -> RenderedPrompt:
        assert self.render is not None
        self.rendered.append(ask)
        return await self.render(self, ask)

    async def _on_snapshot(self, _ask: AskKvSnapshot, _envelope: Envelope) -> KvSnapshot:
        return KvSnapshot(worker_id=self.worker_id, epoch=self.epoch, seq=self.seq, hashes=self.held)
