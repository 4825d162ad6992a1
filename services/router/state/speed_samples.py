"""Which measurement says what of which worker: load reports and the reports of legs become what their learners know."""

from __future__ import annotations

import math

from services.router.state.engine_speed import EngineSpeed
from services.router.state.speed_learner import Learner
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.inference import LegReport
from shared.contracts.kv_exchange import KvRead
from shared.contracts.load import LoadReport
from shared.contracts.workers import WorkerRecord

FAMILIES_MAX = 256
"""Fingerprints remembered; beyond that, those without a worker are forgotten."""


class Measured:
    """One life of a worker."""

    __slots__ = ("epoch", "family", "learner", "received_s", "received_tokens", "shown")

    def __init__(self, epoch: Epoch, family: str, learner: Learner) -> None:
        self.epoch = epoch
        self.family = family
        """Its fingerprint in one string."""
        self.learner = learner
        self.received_tokens = 0
        self.received_s = 0.0
        self.shown: EngineSpeed | None = None
        """What was answered last."""


class Measurements:
    """Of all workers. What is asked is answered with a worker's coefficients if they are new, or None."""

    def __init__(self) -> None:
        self.workers: dict[WorkerId, Measured] = {}
        self._families: dict[str, Learner] = {}

    def joined(self, record: WorkerRecord) -> EngineSpeed | None:
        """The registry tells of a worker: what its like have measured is assumed of it."""
        family = record.fingerprint.key()
        measured = self.workers.get(record.worker_id)
        if measured is not None and measured.epoch > record.epoch:
            return None
        if measured is None or (measured.epoch, measured.family) != (record.epoch, family):
            if family not in self._families:
                self._forget_families()
                self._families[family] = Learner()
            measured = Measured(record.epoch, family, Learner(self._families[family]))
            self.workers[record.worker_id] = measured
        measured.shown = measured.learner.coefficients()
        return measured.shown

    def known(self) -> dict[WorkerId, EngineSpeed]:
        """Of every worker."""
        return {worker_id: measured.learner.coefficients() for worker_id, measured in self.workers.items()}

    def gone(self, worker_id: WorkerId) -> None:
        """It will not come back in this life. What it taught about its like stays."""
        self.workers.pop(worker_id, None)

    def load(self, load: LoadReport) -> EngineSpeed | None:
        """A worker reports. One that measured nothing itself hears what its like measured meanwhile."""
        measured = self.workers.get(load.worker_id)
        if measured is None or measured.epoch != load.epoch:
            return None
        learner = measured.learner
        learned = load.steps is not None and learner.told(load.steps)
        if load.exchange is None and load.received_tokens_total > measured.received_tokens:
            tokens, seconds = load.received_tokens_total, load.received_seconds_total
            learned |= learner.transfer_took(
                tokens - measured.received_tokens, seconds - measured.received_s, asked=False
            )
            measured.received_tokens, measured.received_s = tokens, seconds
        return _news(measured) if learned or not learner.steps.is_own else None

    def leg(
        self, worker_id: WorkerId, epoch: Epoch, report: LegReport, first_token_s: float | None
    ) -> EngineSpeed | None:
        """A leg has ended well; ``first_token_s``: from its start to its first token here, if that was seen."""
        measured = self.workers.get(worker_id)
        if measured is None or measured.epoch != epoch:
            return None
        learned = False
        for read in report.kv.reads if report.kv is not None else ():
            learned |= _learn_read(measured.learner, read)
        if first_token_s is not None and first_token_s > 0.0 < report.prefill_s:
            measured.learner.way_took(first_token_s - report.queue_s - report.prefill_s)
        return _news(measured) if learned else None

    def _forget_families(self) -> None:
        if len(self._families) >= FAMILIES_MAX:
            alive = {measured.family for measured in self.workers.values()}
            self._families = {key: learner for key, learner in self._families.items() if key in alive}


def _news(measured: Measured) -> EngineSpeed | None:
    known = measured.learner.coefficients()
    if known == measured.shown:
        return None
    measured.shown = known
    return known


def _learn_read(learner: Learner, read: KvRead) -> bool:
    """A source that was followed made its reader wait for what was still computed: only the reading counts."""
    if read.tokens <= 0 or read.failure or not read.ended_at:
        return False
    if read.followed:
        return learner.transfer_took(read.tokens, read.read_s, asked=False)
    asked = bool(read.asked_at)
    began_at = read.asked_at or read.granted_at
    return math.isfinite(began_at) and learner.transfer_took(read.tokens, read.ended_at - began_at, asked=asked)
