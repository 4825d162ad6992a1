"""The workers that this engine can read from."""

from __future__ import annotations

from connector.messages import Peer
from connector.orders import PeerKey
from shared.contracts.ids import WorkerId


def key_of(peer: Peer) -> PeerKey:
    """Which life of which worker."""
    return peer.handshake.worker_id, peer.handshake.epoch


SHUNNED_MAX = 1024


class Peers:
    """Known peers, one life of each worker, and how far their clocks may be ahead of ours."""

    def __init__(self) -> None:
        self._ahead_s: dict[PeerKey, float] = {}
        self._shunned: set[PeerKey] = set()

    def know(self, peer: Peer) -> list[PeerKey] | None:
        """Take in a handshake; answers the earlier lives that it ends, or None when the peer was known already."""
        key = key_of(peer)
        known = key in self._ahead_s
        self._ahead_s[key] = peer.clock_ahead_s
        self._shunned = {other for other in self._shunned if other[0] != key[0]}
        if known:
            return None
        return [other for other in self._ahead_s if other[0] == key[0] and other != key]

    def forget(self, key: PeerKey) -> bool:
        """Whether it was known."""
        return self._ahead_s.pop(key, None) is not None

    def clock_ahead_s(self, key: PeerKey) -> float | None:
        """The most that its clock is ahead of ours; None: unknown."""
        return self._ahead_s.get(key)

    def shun(self, key: PeerKey) -> None:
        """It cannot be connected: nobody is to wait for it, until it is known anew."""
        if len(self._shunned) < SHUNNED_MAX:
            self._shunned.add(key)

    def is_shunned(self, key: PeerKey) -> bool:
        """Whether connecting to it failed."""
        return key in self._shunned

    def unknown(self, keys: list[PeerKey]) -> list[WorkerId]:
        """Workers among ``keys`` that are not known."""
        return [WorkerId(key[0]) for key in keys if key not in self._ahead_s]
