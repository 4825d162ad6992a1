"""Offers of KV that no worker will read: released at once, not when their leases end."""

from __future__ import annotations

from services.worker.engines.port import Identity
from services.worker.kv_exchange.worker_exchange import WorkerExchange
from services.worker.legs.body import read_offer
from shared.contracts.ids import LegId
from shared.contracts.inference import LegKind, StartLeg


class UnreadOffers:
    """Releases the offers of legs that broke off."""

    def __init__(self, exchange: WorkerExchange, identity: Identity) -> None:
        self._exchange = exchange
        self._me = identity

    def broken_off(self, start: StartLeg) -> None:
        """Release the leg's own offer, made or about to be made, or the one that it was to read."""
        if start.kind is LegKind.PREFILL and start.kv_offer:
            self.unwanted(start.leg_id)
        elif start.kind is LegKind.DECODE and (offer := read_offer(start.kv_transfer)):
            self._exchange.give_back(worker_id=offer.worker_id, epoch=offer.epoch, lease_id=offer.lease_id)

    def unwanted(self, leg_id: LegId) -> None:
        """The router does not want the ended leg's offer; the offer has the leg's id."""
        self._exchange.give_back(worker_id=self._me.worker_id, epoch=self._me.epoch, lease_id=leg_id)
