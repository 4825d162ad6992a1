"""How fast each worker is, as the router assumes it for placement.

A worker publishes its engine's speed (``LoadReport.speed``). The router itself measures what no engine step contains,
from single requests: reading KV from another worker, and the transit between router and engine. What a worker has not
published or shown is taken from the workers of its fingerprint.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from services.router.state.cluster_view import ClusterView
from services.router.state.worker_speed import TOKEN_BYTES, UNKNOWN_SIZES, KvSizes, WorkerSpeed, sizes_of
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.inference import LegReport
from shared.contracts.kv_exchange import KvRead
from shared.contracts.load import EngineSpeed, WorkerLoad
from shared.contracts.workers import KV_SPEED_MAX, WorkerRecord
from shared.engine_speed.learner import filled_in, is_valid, settled_only
from shared.engine_speed.steps import StepTimeModel
from shared.engine_speed.unit_costs import SECONDS_MAX, SECONDS_MIN, Prior, UnitCosts

FINGERPRINTS_MAX: Final = 256
"""Fingerprints remembered; beyond that, those without a worker are forgotten."""
DEFAULT_SPEED: Final = WorkerSpeed()
TRANSFER_BYTE_S: Final = DEFAULT_SPEED.transfer_token_s / TOKEN_BYTES
"""Seconds for a byte that is read, until one has been measured."""
ALIKE_TOGETHER: Final = 0.25
ALIKE_APART: Final = 0.02
"""Variances between workers of one fingerprint: one may well be half again as fast as another."""
SETTLED_READS: Final = 50
LATER_READS: Final = 4
"""After ``SETTLED_READS``, one of this many reads is learned from, which costs less, while what was learned from last
fitted the estimate.
"""
PEERS_SHARE: Final = 8
"""Reads of a settled worker, one of which teaches the peers' estimate as well."""
TRANSIT_S_MIN: Final = 1e-5
"""Clock differences can make a transit negative."""
MEDIAN_STEP_MIN: Final = 0.05
UNUSED_SWEEPS_MAX: Final = 10
"""Sweeps without a new leg after which what legs have shown of a worker no longer counts."""


Engines = tuple[EngineSpeed | None, EngineSpeed | None]
"""The speed of an engine, and that of its peers."""


class RunningMedian:
    """Median of a duration, which follows slowly, at first quickly."""

    __slots__ = ("_samples", "seconds")

    def __init__(self, seconds: float) -> None:
        self._samples = 0
        self.seconds = seconds

    def learn(self, seconds: float) -> None:
        """Move towards the sample, and never beyond it."""
        if not SECONDS_MIN <= seconds <= SECONDS_MAX:
            return
        factor = 1.0 + max(1.0 / (1.0 + self._samples), MEDIAN_STEP_MIN)
        self._samples += 1
        if seconds > self.seconds:
            self.seconds = min(self.seconds * factor, seconds)
        else:
            self.seconds = max(self.seconds / factor, seconds)

    def forget(self, seconds: float) -> None:
        """Start again, from this."""
        self._samples = 0
        self.seconds = seconds


def transfer_prior(byte_s: float) -> Prior:
    """Seconds until a request for KV is answered, and for each byte that is read. They are learned apart: a read that
    followed its source had no request, and a slow link says nothing of the answer.
    """
    return Prior([DEFAULT_SPEED.transfer_base_s, byte_s], [0, 1], together=3.0, apart=1.0)


TRANSFER_PRIOR: Final = transfer_prior(TRANSFER_BYTE_S)


class SpeedOf:
    """The speed of one life of a worker, or what its ``peers`` share: all workers of a fingerprint."""

    __slots__ = (
        "_by_engine",
        "_byte_s",
        "_engines",
        "_estimate",
        "_learned",
        "_peers",
        "_prior",
        "_published",
        "_reads",
        "_sizes",
        "_transfers",
        "_transit",
        "engine",
    )

    def __init__(self, peers: SpeedOf | None = None) -> None:
        self.engine: EngineSpeed | None = None
        """Speed that the worker published last; for peers, that any of them did. Phases that are forgotten have no
        samples."""
        self._published: EngineSpeed | None = None
        """Speed that was published, with what is forgotten: it is no news when it comes again."""
        self._peers = peers
        self._reads = 0
        self._sizes = UNKNOWN_SIZES
        self._byte_s = TRANSFER_BYTE_S
        self._prior = TRANSFER_PRIOR
        self._transfers = UnitCosts(TRANSFER_PRIOR)
        self._engines: Engines | None = None
        self._by_engine = DEFAULT_SPEED
        """Made from ``_engines``, without transfers."""
        self._learned: tuple[UnitCosts, int] | None = None
        """Transfers, and their number of samples."""
        self._estimate = DEFAULT_SPEED
        """The best estimate: ``_by_engine`` with what ``_learned`` says."""
        self._transit: RunningMedian = RunningMedian(peers._transit.seconds if peers else DEFAULT_SPEED.transit_s)

    def describe(self, sizes: KvSizes, byte_s: float) -> None:
        """What the worker reads of others, and how long a byte took in its self-tests."""
        if sizes != self._sizes:
            self._sizes, self._learned = sizes, None
        if byte_s != self._byte_s:
            self._byte_s, self._prior = byte_s, transfer_prior(byte_s)
            if not self._transfers.samples:
                self._transfers = UnitCosts(self._prior)

    def published(self, engine: EngineSpeed) -> bool:
        """The worker has reported its engine's speed; returns whether it is news."""
        if engine == self._published or not is_valid(engine):
            return False
        self.engine = self._published = engine
        if self._peers is not None:
            self._peers.engine = filled_in(engine, self._peers.engine)
        return True

    def transfer_took(self, tokens: int, seconds: float, *, requested: bool = True) -> bool:
        """KV came from another worker; ``requested``: includes the lease request. False if not learned from."""
        return self._read_took(float(self._sizes.of(tokens)) if tokens > 0 else 0.0, seconds, float(requested))

    def _read_took(self, size: float, seconds: float, requests: float) -> bool:
        self._reads += 1
        own, peers = self._transfers, self._peers
        is_young = own.samples < SETTLED_READS or not own.settled
        # One of several, not their sum: one outlier would spoil the sum.
        if size <= 0.0 or (not is_young and self._reads % LATER_READS):
            return False
        if peers is not None:
            if not own.samples and peers._transfers.samples:
                self._transfers = own = peers._transfers.like(ALIKE_TOGETHER, ALIKE_APART)
            if is_young or own.samples % PEERS_SHARE == 0:
                peers._read_took(size, seconds, requests)
        return own.learn([requests, size], seconds)

    def transit_took(self, seconds: float) -> None:
        """A leg's first token took so much longer to the router than the engine had for it."""
        self._transit.learn(max(seconds, TRANSIT_S_MIN))
        if self._peers is not None:
            self._peers.transit_took(seconds)

    def forget(self) -> None:
        """Assume the transit of its peers again, and of the rest what only a few samples have shown of this worker."""
        if self._peers is None:
            return
        self._transit.forget(self._peers.transit_s)
        if self._transfers.samples < SETTLED_READS:
            self._transfers = UnitCosts(self._prior)
        if self.engine is not None:
            self.engine = settled_only(self.engine)

    @property
    def transit_s(self) -> float:
        """The best estimate of the transit, which each leg changes."""
        return self._transit.seconds

    def now(self) -> WorkerSpeed:
        """The best estimate. Its transit is that of the time when anything else changed last."""
        peers = self._peers
        is_own = self._transfers.samples or peers is None or not peers._transfers.samples
        transfers = self._transfers if is_own or peers is None else peers._transfers
        engines = (self.engine, peers.engine if peers is not None else None)
        if engines != self._engines:
            self._engines, self._by_engine = engines, _estimate(filled_in(*engines))
            self._learned = None
        learned = (transfers, transfers.samples)
        if learned != self._learned:  # Most requests whose KV moved have taught that alone.
            self._learned = learned
            base_s, byte_s = transfers.values()
            self._estimate = msgspec.structs.replace(
                self._by_engine,
                transfer_base_s=base_s + byte_s * self._sizes.boundary,
                transfer_token_s=byte_s * self._sizes.token,
                transit_s=self.transit_s,
            )
        return self._estimate


def _estimate(engine: EngineSpeed | None) -> WorkerSpeed:
    if engine is None:
        return DEFAULT_SPEED
    return WorkerSpeed(
        **StepTimeModel.of(engine)._asdict(),
        pairs_per_token=engine.pairs_per_token,
        prompts_measured=float(engine.prefill_samples > 0.0),
    )


class Life:
    """One life of a worker."""

    received_tokens = 0
    received_s = 0.0
    written: WorkerSpeed | None = None
    """The estimate that the cluster view has."""
    unused_sweeps = 0
    """Number of sweeps since a leg has shown the worker's transit."""

    def __init__(self, epoch: Epoch, fingerprint: str, speed: SpeedOf) -> None:
        self.epoch = epoch
        self.fingerprint = fingerprint
        self.speed = speed


class WorkerSpeeds:
    """Estimates of all workers. Writes each new one into the cluster view."""

    def __init__(self, cluster: ClusterView) -> None:
        self._cluster = cluster
        self._workers: dict[WorkerId, Life] = {}
        self._peers: dict[str, SpeedOf] = {}
        """Speeds of peers by fingerprint, which outlive their workers."""

    def joined(self, record: WorkerRecord) -> None:
        """The registry has a record of the worker, the first or a renewed one."""
        fingerprint = record.fingerprint.key()
        life = self._workers.get(record.worker_id)
        if life is not None and life.epoch > record.epoch:
            return
        if life is None or (life.epoch, life.fingerprint) != (record.epoch, fingerprint):
            if fingerprint not in self._peers:
                self._forget_peers()
                self._peers[fingerprint] = SpeedOf()
            life = Life(record.epoch, fingerprint, SpeedOf(self._peers[fingerprint]))
            self._workers[record.worker_id] = life
        life.speed.describe(sizes_of(record), _tested_byte_s(record))
        life.written = None
        self._write(record.worker_id, life)

    def gone(self, worker_id: WorkerId) -> None:
        """The worker will not come back in this life."""
        self._workers.pop(worker_id, None)

    def load(self, load: WorkerLoad) -> None:
        """A load report has come."""
        life = self._workers.get(load.worker_id)
        if life is None or life.epoch != load.epoch:
            return
        # A worker that has published nothing is assumed to be as its peers are now.
        is_new = load.speed is None or life.speed.published(load.speed)
        if load.exchange is None and load.received_tokens_total > life.received_tokens:
            tokens, seconds = load.received_tokens_total, load.received_seconds_total
            is_new |= life.speed.transfer_took(
                tokens - life.received_tokens, seconds - life.received_s, requested=False
            )
            life.received_tokens, life.received_s = tokens, seconds
        if is_new:
            self._write(load.worker_id, life)

    def leg_ended(
        self, worker_id: WorkerId, epoch: Epoch | None, report: LegReport | None, first_token_s: float | None
    ) -> None:
        """A leg has ended well; ``first_token_s``: from its start to its first token at the router, if any."""
        life = self._workers.get(worker_id)
        if report is None or life is None or life.epoch != epoch:
            return
        for read in report.kv.reads if report.kv is not None else ():
            _learn_read(life.speed, read)
        was_measured = report.prefill_s > 0.0 or (report.kv is not None and report.kv.first_token_received)
        if first_token_s is not None and first_token_s > 0.0 and was_measured:
            life.speed.transit_took(first_token_s - report.queue_s - report.prefill_s)
            life.unused_sweeps = 0
        self._write(worker_id, life)

    def sweep(self) -> None:
        """Assume of workers that have got no leg for long what their peers have shown. One that is thought to be
        slow gets none and cannot show that it is fast again: a slow moment must not keep it idle for ever.
        """
        left = 1 + len(self._workers) // UNUSED_SWEEPS_MAX  # All of a large fleet at once would stop the event loop.
        for worker_id, life in self._workers.items():
            life.unused_sweeps += 1
            if life.unused_sweeps > UNUSED_SWEEPS_MAX and left:
                left -= 1
                life.unused_sweeps = 0
                life.speed.forget()
                self._write(worker_id, life)

    def all(self) -> dict[WorkerId, WorkerSpeed]:
        """The speed of every worker, as it is assumed now."""
        return {
            worker_id: msgspec.structs.replace(life.speed.now(), transit_s=life.speed.transit_s)
            for worker_id, life in self._workers.items()
        }

    def _write(self, worker_id: WorkerId, life: Life) -> None:
        speed = life.speed.now()
        if speed is not life.written:
            life.written = speed
            self._cluster.set_speed(worker_id, speed)
        self._cluster.set_transit(worker_id, life.speed.transit_s)

    def _forget_peers(self) -> None:
        if len(self._peers) >= FINGERPRINTS_MAX:
            alive = {life.fingerprint for life in self._workers.values()}
            self._peers = {key: speed for key, speed in self._peers.items() if key in alive}


def _tested_byte_s(record: WorkerRecord) -> float:
    """What a byte took in the worker's self-tests, in the middle of its sources."""
    speeds = sorted([float(one.bytes_per_s) for one in record.kv_reads if 0 < one.bytes_per_s <= KV_SPEED_MAX])
    return 1.0 / speeds[len(speeds) // 2] if speeds else TRANSFER_BYTE_S


def _learn_read(speed: SpeedOf, read: KvRead) -> None:
    """A reader that followed its source waited for what was still being computed: only the reading counts."""
    if read.tokens <= 0 or read.failure or not read.ended_at:
        return
    if read.followed:
        speed.transfer_took(read.tokens, read.read_s, requested=False)
        return
    began_at = read.requested_at or read.granted_at
    if math.isfinite(began_at):
        speed.transfer_took(read.tokens, read.ended_at - began_at, requested=bool(read.requested_at))
