"""The reservations that this router has to publish, and which of the received ones are new.

A reservation does not expire by itself: it counts until its worker's next load report, which is more accurate and
comes within a second from every live worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from services.router.state.quarantine import Life
from shared.contracts.ids import Epoch, RouterId, WorkerId
from shared.contracts.routers import ANNOUNCE_S, Quarantined, Reservation, Reservations, WorkerLife

SILENT_S_MAX: Final = 3 * ANNOUNCE_S
"""A router that was silent for longer is gone."""
ROUTERS_MAX: Final = 256
"""Routers whose reservations are followed; those of further routers are ignored."""
SLOT_S: Final = 0.008
"""Time in which a reservation reaches all routers."""
SLOTS_EACH: Final = 2
"""Time slots for each router: with more slots, fewer routers act in the same one."""
SLOTS_MAX: Final = 12
QUARANTINED_MAX: Final = 64
"""Quarantined requests in one message; further ones are not published."""
WORKERS_MAX: Final = 4096
"""Workers in one message; placements on further ones are not published."""


class ReservationBook:
    """Duplicate, lost and reordered messages make it less accurate, and do no other harm."""

    def __init__(self, router_id: RouterId) -> None:
        self.alone = True
        """No other router is alive: reservations need not be noted."""
        self.router_id = router_id
        self._seq = 0
        self._lags = 0
        self._unpublished: dict[tuple[WorkerId, Epoch], tuple[int, int, int]] = {}
        self._quarantined: list[Quarantined] = []
        self._others: dict[RouterId, tuple[int, float]] = {}
        """Number of the newest message, and when it came."""

    @property
    def others(self) -> int:
        """Number of other live routers."""
        return len(self._others)

    def router_ids(self) -> list[RouterId]:
        return list(self._others)

    def note(self, worker_id: WorkerId, epoch: Epoch, tokens: int, context_tokens: int, legs: int = 1) -> None:
        """A leg was sent: publish it. It counts as ``legs``, one for each sequence."""
        key = (worker_id, epoch)
        legs_before, tokens_before, context_before = self._unpublished.get(key, (0, 0, 0))
        if legs_before or len(self._unpublished) < WORKERS_MAX:
            self._unpublished[key] = (legs_before + legs, tokens_before + tokens, context_before + context_tokens)

    def note_quarantined(self, digest: bytes, for_s: float, lives: Sequence[Life]) -> None:
        """Publish with the next message that this request is refused, unless one of these workers reports again."""
        if not self.alone and len(self._quarantined) < QUARANTINED_MAX:
            silent = [WorkerLife(worker_id=worker_id, epoch=epoch) for worker_id, epoch in lives]
            self._quarantined.append(Quarantined(digest=digest, for_s=for_s, silent=silent))

    def message(self) -> Reservations:
        """All reservations that are not published yet; without any, a heartbeat."""
        made = [
            Reservation(worker_id=worker_id, epoch=epoch, legs=legs, tokens=tokens, context_tokens=context_tokens)
            for (worker_id, epoch), (legs, tokens, context_tokens) in self._unpublished.items()
        ]
        self._unpublished = {}
        quarantined, self._quarantined = self._quarantined, []
        self._seq += 1
        return Reservations(router_id=self.router_id, seq=self._seq, made=made, quarantined=quarantined)

    def hear(self, message: Reservations, now: float) -> list[Reservation]:
        """Any router's message, this one's included; returns the reservations that are new."""
        if message.router_id == self.router_id:
            return []
        known = self._others.get(message.router_id)
        if known is None and len(self._others) >= ROUTERS_MAX:
            return []
        if known is not None and message.seq <= known[0]:
            return []
        self._others[message.router_id] = (message.seq, now)
        self.alone = False
        return message.made

    def knows(self, router_id: RouterId) -> bool:
        """Whether that router was heard before, or is this one."""
        return router_id == self.router_id or router_id in self._others

    def lag_s(self) -> float:
        """A delay before acting on a message that all routers receive at once, such as a load report. Each router draws
        a new time slot each time, so that routers that act later know the reservations of those that acted before.
        """
        if self.alone:
            return 0.0
        self._lags += 1
        slots = min(SLOTS_MAX, SLOTS_EACH * (len(self._others) + 1))
        chance = blake2b(f"{self.router_id} {self._lags}".encode(), digest_size=4).digest()
        return SLOT_S * (int.from_bytes(chance, "big") % slots)

    def forget_silent(self, now: float) -> None:
        """A router may end without a message."""
        self._others = {router_id: heard for router_id, heard in self._others.items() if now - heard[1] <= SILENT_S_MAX}
        self.alone = not self._others
        if self.alone:
            self._unpublished = {}
