"""The workers as this router sees them: who they are, how busy they say they are, and what we have sent them since."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.load import LoadReport
from shared.contracts.workers import Role, WorkerPhase, WorkerRecord


@dataclass(slots=True)
class Speeds:
    """What the workers of one fingerprint measured last: assumed of a like worker that has measured nothing yet.

    Were some constant assumed instead, a worker that joins would look slow and never get what it could measure.
    """

    prefill_tokens_per_s: float = 0.0
    decode_s_per_token: float = 0.0

    def learn(self, load: LoadReport) -> None:
        """One of them reports."""
        self.prefill_tokens_per_s = load.prefill_tokens_per_s or self.prefill_tokens_per_s
        self.decode_s_per_token = load.decode_s_per_token or self.decode_s_per_token


@dataclass(slots=True)
class WorkerView:
    """One worker. Loads are stale by up to a report's period, so our own legs since the last report are added."""

    record: WorkerRecord
    pairs_with: str
    """The fingerprint in one string: KV moves only between equal ones."""
    heard_at: float
    like: Speeds
    """Shared with the workers that it pairs with."""
    load: LoadReport | None = None
    lost: bool = False
    registered: bool = True
    own_legs: int = 0
    """Legs of this router that run there now."""
    own_tokens: int = 0
    """Prompt tokens that those legs still have to compute, as predicted."""
    fresh_legs: int = 0
    """Legs started there since the last load report."""
    fresh_tokens: int = 0
    picked_at_turn: int = 0

    @property
    def legs(self) -> int:
        """Legs it serves, as far as can be known."""
        reported = self.load.legs if self.load is not None else 0
        return max(reported + self.fresh_legs, self.own_legs)

    @property
    def running(self) -> int:
        """Requests in its batch or about to be."""
        reported = self.load.running + self.load.waiting if self.load is not None else 0
        return max(reported + self.fresh_legs, self.own_legs)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens before a new one in its queue."""
        reported = self.load.waiting_tokens if self.load is not None else 0
        return max(reported + self.fresh_tokens, self.own_tokens)

    def fit(self, now: float, silent_s_max: float) -> bool:
        """Whether new legs may be placed there."""
        phase = self.load.phase if self.load is not None else self.record.phase
        return (
            phase is WorkerPhase.READY
            and self.record.phase is WorkerPhase.READY
            and not self.lost
            and now - self.heard_at <= silent_s_max
        )


class ClusterView:
    """All workers, and the models that anybody has ever offered."""

    def __init__(self) -> None:
        self.workers: dict[WorkerId, WorkerView] = {}
        self.models_known: dict[str, None] = {}
        self.speeds: dict[str, Speeds] = {}
        """By fingerprint."""
        self.turn = 0
        """Counts placements, to take turns between equals."""

    def record(self, record: WorkerRecord, now: float) -> None:
        """The registry tells of a worker. A new epoch begins with an empty view."""
        self.models_known.update(dict.fromkeys(record.models))
        view = self.workers.get(record.worker_id)
        pairs_with = record.fingerprint.key()
        like = self.speeds.setdefault(pairs_with, Speeds())
        if view is None or record.epoch > view.record.epoch:
            view = WorkerView(record, pairs_with, now, like)
            self.workers[record.worker_id] = view
        elif record.epoch == view.record.epoch:
            view.record = record
            view.pairs_with, view.like = pairs_with, like  # a worker that starts does not know its own yet
            view.registered = True
            view.heard_at = max(view.heard_at, now)

    def unregister(self, worker_id: WorkerId) -> None:
        """The registry entry vanished. A worker that still speaks is believed: the registry may be ill, not it."""
        view = self.workers.get(worker_id)
        if view is not None:
            view.registered = False

    def report(self, load: LoadReport, now: float) -> None:
        """A worker speaks. One that was thought lost and speaks again is back."""
        view = self.workers.get(load.worker_id)
        if view is None or load.epoch != view.record.epoch:
            return
        view.load = load
        view.like.learn(load)
        view.heard_at = now
        view.lost = False
        view.fresh_legs = view.fresh_tokens = 0
        if view.record.role is not load.role:
            view.record = _with_role(view.record, load.role)

    def lose(self, worker_id: WorkerId, epoch: Epoch) -> None:
        """The orchestrator says that this life is over."""
        view = self.workers.get(worker_id)
        if view is not None and view.record.epoch <= epoch:
            view.lost = True

    def sweep(self, now: float, silent_s_max: float) -> list[WorkerRecord]:
        """Forget those that are neither registered nor heard; answers who they were."""
        gone = [
            view.record
            for view in self.workers.values()
            if not view.registered and (view.lost or now - view.heard_at > silent_s_max)
        ]
        for record in gone:
            del self.workers[record.worker_id]
        if gone:
            self.speeds = {view.pairs_with: view.like for view in self.workers.values()}
        return gone

    def offering(self, model: str) -> Iterable[WorkerView]:
        """Workers of a model; of any model when ``model`` is empty."""
        if not model:
            return self.workers.values()
        return [view for view in self.workers.values() if model in view.record.models]

    def picked(self, *views: WorkerView) -> None:
        """Remember whose turn it was."""
        self.turn += 1
        for view in views:
            view.picked_at_turn = self.turn

    def leg_started(self, worker_id: WorkerId, tokens: int) -> None:
        """We sent a leg that must compute ``tokens`` prompt tokens."""
        view = self.workers.get(worker_id)
        if view is not None:
            view.own_legs += 1
            view.fresh_legs += 1
            view.own_tokens += tokens
            view.fresh_tokens += tokens

    def prompt_computed(self, worker_id: WorkerId, tokens: int) -> None:
        """A leg of ours got past its prompt."""
        view = self.workers.get(worker_id)
        if view is not None:
            view.own_tokens = max(0, view.own_tokens - tokens)

    def leg_ended(self, worker_id: WorkerId) -> None:
        """A leg of ours is over, well or not."""
        view = self.workers.get(worker_id)
        if view is not None and view.own_legs:
            view.own_legs -= 1
            view.fresh_legs = max(0, view.fresh_legs - 1)


def _with_role(record: WorkerRecord, role: Role) -> WorkerRecord:
    values = {name: getattr(record, name) for name in record.__struct_fields__}
    return WorkerRecord(**{**values, "role": role})
