"""A simulated worker: an engine, its network link, and its reports."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec

from replay.engine import Engine, Job, Listener
from replay.offers import Offers
from replay.profile import Profile
from services.worker.engines.simulated.core.groups import hash_scheme
from services.worker.engines.simulated.core.settings import TransferLink
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_events import KvEvent, KvEventBatch, pack_hashes
from shared.contracts.load import LOAD_HZ_MAX, EngineSpeed, LoadReport
from shared.contracts.message import WIRE_VERSION
from shared.contracts.workers import Fingerprint, Role, WorkerPhase, WorkerRecord
from shared.engine_speed.learner import SAMPLE_S_MIN, SpeedLearner

MODEL = "replayed"
LEGS_MAX = 1_000_000
"""Workers never report that they are full: the policies are compared by how they distribute load."""
PERIOD_S = 1.0 / LOAD_HZ_MAX
HOST_WORKERS = 8
"""Workers of one host."""
CLOCK_S = 1e-6
"""More than the rounding of an instant."""


class SimWorker:
    """One worker of the fleet."""

    def __init__(
        self, number: int, role: Role, profile: Profile, listener: Listener, *, offset_s: float, has_store: bool = False
    ) -> None:
        self.record = record_of(number, role, profile)
        self.engine = Engine(profile, listener)
        self.offers = Offers(self.engine) if has_store else None
        self.scheduled_at = math.inf
        """Time at which the world wakes the engine."""
        self.legs = 0
        self.link = TransferLink(profile)
        to_host = replace(profile, transfer_bytes_per_s=profile.host_bytes_per_s)
        self.host_link = TransferLink(to_host)
        self._out_link = TransferLink(to_host)
        """The other direction: to host memory."""
        self._tick_offset_s = offset_s
        self._totals = Totals()
        self._learner = SpeedLearner()
        self._observed_s = 0.0
        """Seconds of the engine's steps that the learner has seen."""
        self.learns = True
        self._past: Callable[[], LoadReport] | None = None
        """``_state`` as of the newest tick before the last change."""
        self._past_tick = self._told_tick = -1
        self._seq = 0
        self.due_at = -math.inf
        """Time before which no unread report was sent."""

    @property
    def worker_id(self) -> WorkerId:
        return self.record.worker_id

    def changes(self, now: float) -> None:
        """Call before any change: saves the report of the last tick."""
        tick = self._tick(now)
        if tick > self._past_tick:
            self._past, self._past_tick = self._state(), tick

    def report(self, sent_by: float) -> tuple[LoadReport, float] | None:
        """The newest unread load report sent by ``sent_by``, and when it was sent."""
        tick = self._tick(sent_by)
        if tick <= self._told_tick:
            return None
        self._told_tick = tick
        self.due_at = (tick + 1) * PERIOD_S + self._tick_offset_s - CLOCK_S
        state = self._past if self._past_tick >= tick and self._past is not None else self._state()
        return state(), tick * PERIOD_S + self._tick_offset_s

    def kv_events(self) -> KvEventBatch | None:
        """KV events since the last call."""
        changes = self.engine.pool.take_changes()
        if not changes:
            return None
        self._seq += 1
        events = [
            KvEvent(kind=change.kind, hashes=pack_hashes(change.names), parent=change.parent, tier=change.tier)
            for change in changes
        ]
        return KvEventBatch(worker_id=self.worker_id, epoch=self.record.epoch, seq=self._seq, events=events)

    @property
    def speed(self) -> EngineSpeed | None:
        """What it publishes of its engine."""
        return self._learner.speed

    def prompt_finished(self, job: Job) -> None:
        """Count a computed prompt."""
        self._totals.add(job)

    def book(self, tokens: int, kept: int, now: float) -> float:
        """Queue the KV of ``tokens``, and ``kept`` blocks of windows or states, on the link; returns when it has
        arrived.
        """
        return self.link.book(self._bytes(tokens, kept), now)[1]

    def _bytes(self, tokens: int, kept: int) -> int:
        profile = self.engine.profile
        return (tokens + kept * profile.block_tokens) * profile.kv_bytes_per_token

    def load(self, tokens: int, now: float) -> float:
        """Queue the KV of ``tokens`` to be loaded from host memory; returns when it has arrived."""
        return self.host_link.book(tokens * self.engine.profile.kv_bytes_per_token, now)[1]

    def copy_out(self, tokens: int, now: float) -> float:
        """Queue the KV of ``tokens`` to be copied to host memory; returns when it has arrived."""
        return self._out_link.book(tokens * self.engine.profile.kv_bytes_per_token, now)[1]

    def load_now(self) -> LoadReport:
        """Load report as of now."""
        return msgspec.structs.replace(self._state()(), steps=self.engine.speeds.totals())

    def _state(self) -> Callable[[], LoadReport]:
        """Make the load report of this moment, when called; many are never read. It lacks the step totals, which no
        router reads.
        """
        engine, totals, pool, record = self.engine, self._totals, self.engine.pool, self.record
        speeds = engine.speeds
        if self.learns and speeds.busy_s - self._observed_s >= SAMPLE_S_MIN:
            self._observed_s = speeds.busy_s
            self._learner.observe(speeds.totals(), speeds.prompts.prompt_totals())
        return partial(
            LoadReport,
            worker_id=record.worker_id,
            epoch=record.epoch,
            role=record.role,
            phase=record.phase,
            running=len(engine.running),
            waiting=engine.queued,
            waiting_tokens=engine.waiting_tokens,
            legs=self.legs,
            kv_tokens_used=(pool.blocks - pool.free) * engine.profile.block_tokens,
            kv_tokens_total=pool.blocks * engine.profile.block_tokens,
            prompt_tokens_total=totals.prompt,
            computed_tokens_total=totals.prompt - totals.cached - totals.received,
            cached_tokens_total=totals.cached,
            received_tokens_total=totals.received,
            received_bytes_total=self._bytes(totals.received, totals.received_kept),
            received_seconds_total=totals.received_s,
            prefill_tokens_per_s=speeds.prompts.prefill_tokens_per_s,
            decode_s_per_token=speeds.decode_s_per_token,
            speed=self.speed,
        )

    def _tick(self, now: float) -> int:
        return math.floor((now - self._tick_offset_s) / PERIOD_S)


class Totals:
    """Prompt tokens by the source of their KV."""

    def __init__(self) -> None:
        self.prompt = 0
        self.cached = 0
        self.received = 0
        self.received_kept = 0
        """Blocks of windows or states."""
        self.received_s = 0.0

    def add(self, job: Job) -> None:
        """Add a computed prompt."""
        self.prompt += job.prompt_tokens
        self.cached += job.cached_tokens + job.loaded_tokens
        self.received += job.received_tokens
        self.received_kept += job.received_kept
        self.received_s += job.received_s


def record_of(number: int, role: Role, profile: Profile) -> WorkerRecord:
    """Registry record of a worker."""
    name = "worker" if role is Role.BOTH else role.value
    return WorkerRecord(
        worker_id=WorkerId(f"{name}-{number:04d}"),
        epoch=Epoch(1),
        role=role,
        phase=WorkerPhase.READY,
        engine="simulated",
        models=[MODEL],
        max_model_len=profile.kv_blocks // profile.data_ranks * profile.block_tokens,
        fingerprint=Fingerprint(
            model=MODEL,
            revision="1",
            dtype="bfloat16",
            block_size=profile.block_tokens,
            kv_layout="NHD",
            connector="baton",
            engine_version="replay",
        ),
        hashing=hash_scheme(profile.groups, profile.block_tokens),
        kv_tokens=profile.kv_blocks * profile.block_tokens,
        legs_max=LEGS_MAX,
        host=f"host-{number // HOST_WORKERS}",
        pid=number,
        wire_version=WIRE_VERSION,
        ranks=profile.batches,
        step_tokens_max=profile.prompt_tokens_max,
        kv_token_bytes=profile.kv_bytes_per_token,
        kv_boundary_bytes=profile.boundary_bytes,
    )
