"""A small engine that implements the port, and a worker around it on a memory bus."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from opentelemetry.trace import NoOpTracer
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from services.worker.engines.port import (
    CURRENT_LEG,
    EngineAdapters,
    EngineFacts,
    EngineHealth,
    EngineLoad,
    EngineProfiler,
    EngineRenderer,
    EngineTokens,
    EngineWeights,
    TokenizerFiles,
)
from services.worker.service import run_worker
from services.worker.settings import Settings
from services.worker.tiny_model import CL100K
from shared.bus.leg_inbox import LegFailed, LegInbox
from shared.contracts.channels import WORKER_RECORDS
from shared.contracts.failures import Failure
from shared.contracts.ids import LegId, RequestId, RouterId, WorkerId
from shared.contracts.inference import Frame, FrameKind, LegKind, StartLeg
from shared.contracts.kv_events import KvEvent
from shared.contracts.kv_exchange import KvTransferReport, LegOrder
from shared.contracts.workers import HashScheme, WorkerPhase
from shared.runtime.clock import SystemClock
from shared.runtime.service import Service, ServiceFacts, live
from shared.runtime.settings import CommonSettings
from tests.support.fleet_builders import FINGERPRINT
from tests.support.memory_bus import MemoryBus, MemoryHub
from tests.support.pulled_legs import PulledLeg
from tests.unit.worker.kv_exchange.fakes import FakeExchange

WORKER = WorkerId("w1")
KV_TRANSFER = b'{"do_remote_prefill":true}'
WAIT_S_MAX = 30.0


class FakeEngine:
    """Answers every body with what the test told it to. ``may_run`` holds generation back until it is set."""

    def __init__(self) -> None:
        self.facts = EngineFacts(
            engine="fake",
            models=["m"],
            max_model_len=100,
            fingerprint=FINGERPRINT,
            hashing=HashScheme(block_size=32),
            kv_tokens=320,
            legs_max=2,
        )
        self.bodies: list[dict | bytes] = []
        self.panicking = Tokenizer(models.BPE())
        """Splits as Llama 3 does: long runs of spaces make the library panic."""
        self.panicking.pre_tokenizer = pre_tokenizers.Split(Regex(CL100K), behavior="isolated")
        self.step_s = 0.0
        """Time that a token takes."""
        self.may_run = asyncio.Event()
        self.may_run.set()
        self.started = asyncio.Event()
        self.aborted = asyncio.Event()
        self.events: asyncio.Queue[list[KvEvent]] = asyncio.Queue()
        self.reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.exchange: FakeExchange | None = None
        self.adapters: EngineAdapters | None = None
        self.renderer: EngineRenderer | None = None
        self.profiler: EngineProfiler | None = None
        self.health: EngineHealth | None = None
        self.weights: EngineWeights | None = None
        self.orders: list[LegOrder | None] = []
        self.salts: list[tuple[str, str]] = []
        self.transfer_report: KvTransferReport | None = None
        self.now = EngineLoad()
        self.closed = False
        self.may_close = asyncio.Event()
        self.may_close.set()
        self.listeners: list[Callable[[], None]] = []

    async def app(self, scope, receive, send) -> None:
        body = (await receive())["body"]
        self.bodies.append(body)
        leg = CURRENT_LEG.get()
        given, result = leg.input, leg.result
        self.orders.append(given.order)
        self.salts.append((given.cache_salt, given.media_salt))
        asked = json.loads(body)
        self.started.set()
        if status := asked.get("status"):
            if status >= 500 and asked.get("dies"):
                self.reason.set_result("out of memory")
            await _answer(send, status, b'{"error":{}}')
            return
        if spaces := asked.get("spaces"):
            self.panicking.encode_batch_fast([" " * spaces])
        if asked.get("crash"):
            result.cannot_resume = asked.get("cannot_resume", "")
            raise ZeroDivisionError("a bug in the server")
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        result.prompts_computing = 0 if asked.get("early") else 1
        result.completion_tokens = asked.get("begun", 0)
        result.prompt_tokens, result.cached_tokens = 7, 3 + len(given.resume or ())
        try:
            await self.may_run.wait()
        except asyncio.CancelledError:
            self.aborted.set()
            raise
        result.usage_cached_tokens = 3
        result.cannot_resume = asked.get("cannot_resume", "")
        for _ in range(asked.get("hidden", 0)):
            result.token_ids.append(0)
            result.completion_tokens += 1
            await self._step()
        for token in range(asked.get("tokens", 2)):
            await self._step()
            result.caught_up = token >= len(given.resume or ())
            if result.caught_up:
                result.token_ids.append(token)
            result.completion_tokens += 1
            await send({"type": "http.response.body", "body": b"data: %d\n\n" % token, "more_body": True})
        result.finish_reason = "" if result.cannot_resume else "length"
        result.transfer_report = self.transfer_report
        if given.kind is LegKind.PREFILL and self.exchange is None:
            result.kv_transfer = KV_TRANSFER
        result.token_ids += asked.get("untold", ())
        result.is_over = True
        for more in asked.get("more", ()):
            await send({"type": "http.response.body", "body": more.encode(), "more_body": True})
        if asked.get("dies_at_the_end"):
            result.finish_reason = ""
            self.reason.set_result("out of memory")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _step(self) -> None:
        if not self.step_s:
            return
        try:
            await asyncio.sleep(self.step_s)
        except asyncio.CancelledError:
            self.aborted.set()
            raise

    def load(self) -> EngineLoad:
        return self.now

    def on_load_changed(self, listener) -> None:
        self.listeners.append(listener)

    async def kv_events(self) -> AsyncIterator[list[KvEvent]]:
        while True:
            yield await self.events.get()

    def tokenizer_files(self) -> TokenizerFiles:
        return TokenizerFiles(
            tokenizer_json=b"{}", chat_template="{{ x }}", special_tokens={"bos_token": "<s>"}, adds_special_tokens=True
        )

    async def tokens(self, path: str, body: bytes) -> EngineTokens:
        asked = json.loads(body)
        if asked.get("hangs"):
            await asyncio.Event().wait()
        tokens = list(range(asked.get("tokens", 64)))
        return EngineTokens(tokens=tokens, hashes=[7] * (len(tokens) // 32), refusal=asked.get("refusal", ""))

    async def dead(self) -> str:
        return await asyncio.shield(self.reason)

    async def close(self, deadline_s: float) -> None:
        await self.may_close.wait()
        self.closed = True


async def _answer(send, status: int, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body, "more_body": False})


class RunningWorker:
    """A worker in this process, and the router's end of it."""

    def __init__(self, hub: MemoryHub, engine: FakeEngine, common: CommonSettings | None = None, **settings) -> None:
        self.hub = hub
        self.engine = engine
        self.settings = Settings(worker_id=WORKER, model="m", **settings)
        self.common = common or CommonSettings()
        facts = ServiceFacts(name="worker", instance=WORKER)
        self.service = Service(facts, MemoryBus(hub), SystemClock(), NoOpTracer())
        self.bus = MemoryBus(hub)
        self.inbox = LegInbox(self.bus, RouterId("r1"), leg_buffer_bytes_max=1 << 20)
        self.exit: asyncio.Task[int] | None = None
        self.ready = asyncio.Event()
        self._count = 0

    async def start_engine(self, _settings, _common, say, *, identity) -> FakeEngine:
        say("warming up")
        return self.engine

    async def main(self, service: Service) -> None:
        await run_worker(service, self.settings, self.common, self.start_engine)

    async def leg(self, kind: LegKind = LegKind.AGGREGATED, **options) -> PulledLeg:
        self._count += 1
        body = options.pop("body", {})
        fields = {"path": "/v1/completions", "deadline_s": 5.0, "router_id": RouterId("r1"), **options}
        return await PulledLeg.start(
            self.inbox,
            StartLeg(
                worker_id=WORKER,
                request_id=RequestId(f"q{self._count}"),
                leg_id=LegId(f"l{self._count}"),
                kind=kind,
                body=body if isinstance(body, bytes) else json.dumps(body).encode(),
                **fields,
            ),
        )

    async def read(self, leg: PulledLeg) -> tuple[list[Frame], Failure | None]:
        """Every frame of a leg, and how it failed if it did."""
        frames: list[Frame] = []
        async with asyncio.timeout(WAIT_S_MAX):
            while not frames or frames[-1].kind is not FrameKind.END:
                try:
                    frames += await leg.frames()
                except LegFailed as failed:
                    return frames, failed.failure
        return frames, None


@asynccontextmanager
async def running_worker(
    exchange: FakeExchange | None = None,
    adapters: EngineAdapters | None = None,
    paths: frozenset[str] = frozenset(),
    weights: EngineWeights | None = None,
    hub: MemoryHub | None = None,
    phase: WorkerPhase = WorkerPhase.READY,
    **settings,
) -> AsyncIterator[RunningWorker]:
    """A worker that is ready, or in another ``phase``, its engine with or without an exchange; it is stopped at the end
    if it still runs.
    """
    worker = RunningWorker(hub or MemoryHub(), FakeEngine(), **settings)
    worker.engine.exchange, worker.engine.adapters = exchange, adapters
    worker.engine.facts = replace(worker.engine.facts, paths=paths)
    if weights is not None:
        worker.engine.weights = weights
        worker.engine.facts = replace(worker.engine.facts, engine="vllm")
    await worker.inbox.open()
    worker.exit = asyncio.create_task(live(worker.service, worker.main, drain_s_max=WAIT_S_MAX))
    records = await worker.bus.key_value_store(WORKER_RECORDS)
    async with asyncio.timeout(WAIT_S_MAX):
        async for change in records.watch():
            if change and change.value and change.value.phase is phase:
                break
    try:
        yield worker
    finally:
        worker.service.stopping.set()
        worker.engine.may_run.set()
        await asyncio.wait([worker.exit], timeout=WAIT_S_MAX)
        await worker.inbox.close()
        await worker.bus.close()
