"""The router's admission in virtual time: the same pure code that ``AdmissionQueue`` drives in a router."""

from __future__ import annotations

from collections.abc import Callable

from replay.legs import ReplayedRequest
from services.router.admission.admission import Admission, AdmissionPolicy
from services.router.admission.queues import QueueEntry
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from services.router.state.fleet import Fleet

PASS_S_MIN = 0.02
"""Between two scheduling passes: a router limits passes to a share of its time."""

At = Callable[..., None]


class VirtualAdmission:
    """Calls ``decided`` with each placement or rejection, at once or later."""

    def __init__(self, fleet: Fleet, policy: AdmissionPolicy, at: At, decided: Callable[..., None]) -> None:
        self._admission = Admission(policy, fleet.place)
        self._at = at
        self._decided = decided
        self._waiting_requests: dict[QueueEntry, ReplayedRequest] = {}
        self._placed_entries: dict[int, QueueEntry] = {}
        """Entries of placed requests, by request number."""
        self._pass_at = float("inf")

    @property
    def waiting(self) -> bool:
        """Whether requests wait."""
        return bool(self._waiting_requests)

    def offer(self, replayed: ReplayedRequest, wanted: PlacementRequest, now: float) -> None:
        """Offer an arriving request."""
        entry = QueueEntry(wanted, now)
        outcome = self._admission.offer(entry, now)
        if outcome is None:
            self._waiting_requests[entry] = replayed
            self._wake_at(now, self._admission.wakes_at(now))
        else:
            self._settle(now, replayed, entry, outcome)

    def schedule_pass(self, now: float) -> None:
        """Schedule a pass, because something changed."""
        if self._waiting_requests:
            self._wake_at(now, now)

    def ended(self, replayed: ReplayedRequest) -> None:
        """A placed request has ended."""
        entry = self._placed_entries.pop(replayed.number)
        request = replayed.request
        computed = request.input_tokens - replayed.cached_tokens - replayed.fetched_tokens
        self._admission.ended(entry, max(0, computed), request.output_tokens)

    def run_pass(self, now: float) -> None:
        """Run a scheduling pass. All reports that have arrived by ``now`` must have been applied."""
        for entry, outcome in self._admission.schedule(now):
            self._settle(now, self._waiting_requests.pop(entry), entry, outcome)
        if self._waiting_requests:
            self._wake_at(now, self._admission.wakes_at(now))

    def due(self, now: float) -> bool:
        """Whether this is the pass that was scheduled last."""
        if self._pass_at != now:
            return False
        self._pass_at = float("inf")
        return True

    def _settle(self, now: float, replayed: ReplayedRequest, entry: QueueEntry, outcome: Placement | Rejection) -> None:
        if isinstance(outcome, Placement):
            self._placed_entries[replayed.number] = entry
        self._decided(now, replayed, outcome)

    def _wake_at(self, now: float, at: float | None) -> None:
        if at is not None and max(at, now + PASS_S_MIN) < self._pass_at:
            self._pass_at = max(at, now + PASS_S_MIN)
            self._at(self._pass_at)
