"""A nats-server and real workers as processes, and a router's end of the bus to drive them with."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from shared.bus.leg_inbox import LegFailed, LegInbox
from shared.bus.nats_bus import connect_nats
from shared.bus.port import Bus, Envelope
from shared.contracts.channels import KV_EVENTS, KV_SNAPSHOT, LOAD, WORKER_RECORDS
from shared.contracts.failures import Failure
from shared.contracts.ids import LegId, RequestId, RouterId, WorkerId
from shared.contracts.inference import FrameKind, LegKind, LegReport, StartLeg
from shared.contracts.kv_events import AskKvSnapshot, KvEventBatch, KvSnapshot
from shared.contracts.load import LoadReport
from shared.contracts.workers import WorkerPhase, WorkerRecord
from tests.support.pulled_legs import PulledLeg

READY_S_MAX = 480.0
STOP_S_MAX = 60.0
GONE_S_MAX = 30.0


@dataclass
class WorkerProcess:
    worker_id: WorkerId
    process: subprocess.Popen
    log: Path
    started: float
    ready_s: float = 0.0
    record: WorkerRecord | None = None

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def engine_core(self) -> psutil.Process:
        return next(child for child in self.children() if "VLLM::EngineCore" in " ".join(child.cmdline()))

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        """Whatever is left, hard."""
        if self.process.poll() is None:
            with suppress(psutil.NoSuchProcess):  # It may end just now.
                for child in self.children():
                    child.kill()
            self.process.kill()
            self.process.wait()


async def gone(processes: list[psutil.Process]) -> bool:
    """Whether these processes are gone, now or soon."""
    _ended, alive = await asyncio.to_thread(psutil.wait_procs, processes, GONE_S_MAX)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def start_worker(
    nats_url: str,
    worker_id: str,
    run_dir: Path,
    *,
    environ: Mapping[str, str] | None = None,
    python: str = sys.executable,
    through: Sequence[str] = (),
    **settings: str,
) -> WorkerProcess:
    """``through``: a command that runs another one, such as on another host."""
    log = run_dir / f"{worker_id}.log"
    variables = {f"WORKER_{name.upper()}": value for name, value in settings.items()}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*through, python, "-m", "services.worker"],
            env={
                **os.environ,
                "BATON_NATS_URL": nats_url,
                "WORKER_WORKER_ID": worker_id,
                **(environ or {}),
                **variables,
            },
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    return WorkerProcess(WorkerId(worker_id), process, log, time.monotonic())


async def wait_ready(nats_url: str, workers: list[WorkerProcess]) -> None:
    """Until every worker's record says READY; fails at once with its log when one has ended."""
    bus = await connect_nats(nats_url, name="wait-ready", connect_s_max=30.0)
    try:
        worker_records = await bus.key_value_store(WORKER_RECORDS)
        async with asyncio.timeout(READY_S_MAX):
            while waiting := [worker for worker in workers if not worker.ready_s]:
                for worker in waiting:
                    assert worker.process.poll() is None, worker.log.read_text()
                    found = await worker_records.get(worker.worker_id)
                    if found and found.value and found.value.phase is WorkerPhase.READY:
                        worker.record = found.value
                        worker.ready_s = time.monotonic() - worker.started
                await asyncio.sleep(0.2)
    finally:
        await bus.close()


@contextmanager
def ready_workers(nats_url: str, *workers: WorkerProcess) -> Iterator[tuple[WorkerProcess, ...]]:
    """Started workers: the block begins when all are ready and ends them."""
    try:
        asyncio.run(wait_ready(nats_url, list(workers)))
        yield workers
    finally:
        for worker in workers:
            worker.kill()


@dataclass
class Answer:
    """All of a leg."""

    status: int = 0
    body: bytes = b""
    token_ids: list[int] = field(default_factory=list)
    report: LegReport = field(default_factory=LegReport)
    failure: Failure | None = None

    def json(self) -> dict:
        return json.loads(self.body)

    def events(self) -> list[dict]:
        """Of a streamed answer."""
        lines = self.body.decode().split("\n\n")
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]

    def text(self) -> str:
        if self.body.startswith(b"data:"):
            return "".join(choice["text"] for event in self.events() for choice in event["choices"])
        return self.json()["choices"][0]["text"]


def handoff(prefilled: LegReport) -> bytes:
    """What the decode leg is given: the prefill leg's offer, or what vLLM's own connector wants told."""
    offer = prefilled.kv.offer if prefilled.kv else None
    return msgspec.msgpack.encode(offer) if offer else prefilled.kv_transfer


class Router:
    """A router's end of the bus."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.router_id = RouterId(f"test-{uuid.uuid4().hex[:8]}")
        self.inbox = LegInbox(bus, self.router_id, leg_buffer_bytes_max=64 << 20)
        self.kv: dict[str, list[KvEventBatch]] = {}
        self.loads: dict[str, LoadReport] = {}
        self._reported = asyncio.Event()

    async def open(self) -> None:
        await self.inbox.open()
        await self.bus.subscribe(KV_EVENTS, self._on_kv)
        await self.bus.subscribe(LOAD, self._on_load)

    def _on_kv(self, batch: KvEventBatch, _envelope: Envelope) -> None:
        self.kv.setdefault(batch.worker_id, []).append(batch)

    def _on_load(self, report: LoadReport, _envelope: Envelope) -> None:
        self.loads[report.worker_id] = report
        self._reported.set()

    async def load_where(self, worker: WorkerProcess, condition, s_max: float = 60.0) -> LoadReport:
        """The worker's first load report from now on for which ``condition`` holds."""
        last = self.loads.get(worker.worker_id)
        async with asyncio.timeout(s_max):
            while True:
                self._reported.clear()
                await self._reported.wait()
                report = self.loads.get(worker.worker_id)
                if report is not None and report is not last and condition(report):
                    return report

    async def snapshot(self, worker: WorkerProcess) -> KvSnapshot:
        assert worker.record is not None
        ask = AskKvSnapshot(worker_id=worker.worker_id, epoch=worker.record.epoch)
        return await self.bus.ask(KV_SNAPSHOT, ask, timeout_s=30.0)

    async def start(self, worker: WorkerProcess, kind: LegKind, body: dict | bytes, headers=None, **options):
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = {
            "leg_id": LegId(uuid.uuid4().hex),
            "path": "/v1/completions",
            "deadline_s": 60.0,
            "request_id": RequestId(uuid.uuid4().hex),
            **options,
        }
        return await PulledLeg.start(
            self.inbox,
            StartLeg(worker_id=worker.worker_id, router_id=self.router_id, kind=kind, body=raw, **fields),
            headers,
        )

    async def leg(self, worker: WorkerProcess, kind: LegKind, body: dict | bytes, **options) -> Answer:
        """Start a leg and read it to its end."""
        leg = await self.start(worker, kind, body, **options)
        answer = Answer()
        while True:
            try:
                frames = await leg.frames()
            except LegFailed as failed:
                answer.failure = failed.failure
                return answer
            for frame in frames:
                answer.status = frame.status or answer.status
                answer.body += frame.data
                answer.token_ids += frame.token_ids
                if frame.kind is FrameKind.END:
                    answer.report = frame.report or LegReport()
                    return answer

    async def handed_over(self, prefill: WorkerProcess, decode: WorkerProcess, body: dict, **options):
        """Prefill there, decode here, as a router does; both answers."""
        first = await self.leg(prefill, LegKind.PREFILL, body, **options)
        assert first.status == 200, first.body
        second = await self.leg(
            decode,
            LegKind.DECODE,
            body,
            kv_transfer=handoff(first.report),
            prefill_cached_tokens=first.report.cached_tokens,
            **options,
        )
        return first, second
