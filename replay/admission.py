"""The router's own admission in virtual time, as ``waiting_room`` does it: who waits, who is next, who is refused."""

from __future__ import annotations

from collections.abc import Callable

from replay.legs import Flight
from services.router.admission.admission import Admission
from services.router.admission.policy import AdmissionPolicy
from services.router.admission.queues import QueueEntry
from services.router.placement.placement import Placement, PlacementRequest, Rejection
from services.router.state.fleet import Fleet

TURN_S_MIN = 0.02
"""Between two turns. A router rests so long after one that has looked at all it may: turns get a share of its time."""

At = Callable[..., None]


class Authenticator:
    """``decided`` is called with each verdict, at once or later."""

    def __init__(self, fleet: Fleet, policy: AdmissionPolicy, at: At, decided: Callable[..., None]) -> None:
        self._admission = Admission(policy, fleet.place)
        self._at = at
        self._decided = decided
        self._flights: dict[QueueEntry, Flight] = {}
        self._tickets: dict[int, QueueEntry] = {}
        """By flight: of those that were placed."""
        self._turn_at = float("inf")

    @property
    def waiting(self) -> bool:
        """Whether anybody does."""
        return bool(self._flights)

    def offer(self, flight: Flight, need: PlacementRequest, now: float) -> None:
        """A request comes."""
        ticket = QueueEntry(need, now)
        verdict = self._admission.offer(ticket, now)
        if verdict is None:
            self._flights[ticket] = flight
            self._wake_at(now, self._admission.wakes_at(now))
        else:
            self._settle(now, flight, ticket, verdict)

    def ring(self, now: float) -> None:
        """Something has changed that may let one begin."""
        if self._flights:
            self._wake_at(now, now)

    def ended(self, flight: Flight) -> None:
        """A request that was placed is over."""
        ticket = self._tickets.pop(flight.number)
        request = flight.request
        computed = request.input_tokens - flight.cached_tokens - flight.fetched_tokens
        self._admission.ended(ticket, max(0, computed), request.output_tokens)

    def turn(self, now: float) -> None:
        """Expects that everything that has arrived by now is known."""
        for ticket, verdict in self._admission.turn(now):
            self._settle(now, self._flights.pop(ticket), ticket, verdict)
        if self._flights:
            self._wake_at(now, self._admission.wakes_at(now))

    def due(self, now: float) -> bool:
        """Whether this is the turn that was asked for last."""
        if self._turn_at != now:
            return False
        self._turn_at = float("inf")
        return True

    def _settle(self, now: float, flight: Flight, ticket: QueueEntry, verdict: Placement | Rejection) -> None:
        if isinstance(verdict, Placement):
            self._tickets[flight.number] = ticket
        self._decided(now, flight, verdict)

    def _wake_at(self, now: float, at: float | None) -> None:
        if at is not None and max(at, now + TURN_S_MIN) < self._turn_at:
            self._turn_at = max(at, now + TURN_S_MIN)
            self._at(self._turn_at)
