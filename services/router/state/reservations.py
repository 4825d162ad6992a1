"""What this router has to tell the others of what it placed, and which of the things they tell are news.

A reservation needs no end of its own: it counts until its worker's next report, which every worker that lives sends
within a second, and which knows better.
"""

from __future__ import annotations

from hashlib import blake2b

from shared.contracts.ids import Epoch, RouterId, WorkerId
from shared.contracts.reservations import ANNOUNCE_S, Reservation, Reservations

SILENT_S_MAX = 3 * ANNOUNCE_S
"""A router that was not heard for so long is gone."""
ROUTERS_MAX = 256
"""Routers that are followed; what further ones place is not known here."""
SLOT_S = 0.008
"""By then a reservation has arrived everywhere."""
SLOTS_EACH = 2
"""Instants to act at for each router: with more of them, fewer act at the same."""
SLOTS_MAX = 12
WORKERS_MAX = 4096
"""Workers in one message; what is placed on further ones is not told."""


class ReservationBook:
    """Of one router. Duplicates, losses and disorder change nothing but how much it knows."""

    def __init__(self, router_id: RouterId) -> None:
        self.alone = True
        """Nobody would listen: nothing need be noted."""
        self._router_id = router_id
        self._seq = 0
        self._lags = 0
        self._untold: dict[tuple[WorkerId, Epoch], tuple[int, int, int]] = {}
        self._others: dict[RouterId, tuple[int, float]] = {}
        """Number of the newest message, and when it came."""

    @property
    def others(self) -> int:
        """Routers heard of lately."""
        return len(self._others)

    def router_ids(self) -> list[RouterId]:
        """Who they are."""
        return list(self._others)

    def note(self, worker_id: WorkerId, epoch: Epoch, tokens: int, context_tokens: int) -> None:
        """A leg was sent, of which the others shall know."""
        key = (worker_id, epoch)
        legs, tokens_before, context_before = self._untold.get(key, (0, 0, 0))
        if legs or len(self._untold) < WORKERS_MAX:
            self._untold[key] = (legs + 1, tokens_before + tokens, context_before + context_tokens)

    def message(self) -> Reservations:
        """Everything that is not told yet; with nothing in it, a sign of life."""
        made = [
            Reservation(worker_id=worker_id, epoch=epoch, legs=legs, tokens=tokens, context_tokens=context_tokens)
            for (worker_id, epoch), (legs, tokens, context_tokens) in self._untold.items()
        ]
        self._untold = {}
        self._seq += 1
        return Reservations(router_id=self._router_id, seq=self._seq, made=made)

    def hear(self, told: Reservations, now: float) -> list[Reservation]:
        """Another router's message, or our own; answers what is news in it."""
        if told.router_id == self._router_id:
            return []
        known = self._others.get(told.router_id)
        if known is None and len(self._others) >= ROUTERS_MAX:
            return []
        if known is not None and told.seq <= known[0]:
            return []
        self._others[told.router_id] = (told.seq, now)
        self.alone = False
        return told.made

    def knows(self, router_id: RouterId) -> bool:
        """Whether that router was heard before, or is this one."""
        return router_id == self._router_id or router_id in self._others

    def lag_s(self) -> float:
        """When to act on news that all routers hear at once, such as that a worker has room: each at another time, and
        at another one each time, so that those who act later know of those who did.
        """
        if self.alone:
            return 0.0
        self._lags += 1
        slots = min(SLOTS_MAX, SLOTS_EACH * (len(self._others) + 1))
        chance = blake2b(f"{self._router_id} {self._lags}".encode(), digest_size=4).digest()
        return SLOT_S * (int.from_bytes(chance, "big") % slots)

    def forget_silent(self, now: float) -> None:
        """Routers end without a word."""
        self._others = {router_id: heard for router_id, heard in self._others.items() if now - heard[1] <= SILENT_S_MAX}
        self.alone = not self._others
        if self.alone:
            self._untold = {}
