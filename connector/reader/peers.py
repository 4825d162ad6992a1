"""The workers that this engine can read from, one epoch of each."""

from __future__ import annotations

from dataclasses import dataclass

from connector.messages import Peer, PeerKey
from shared.contracts.ids import WorkerId


def key_of(peer: Peer) -> PeerKey:
    return peer.handshake.worker_id, peer.handshake.epoch


SHUNNED_MAX = 1024


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """A peer's blocks."""

    blocks: int
    device: str
    """cpu or cuda."""


class Peers:
    """Known peers, and the most that their clocks may be ahead of this one."""

    def __init__(self) -> None:
        self._ahead_s: dict[PeerKey, float] = {}
        self._memory: dict[PeerKey, PeerMemory] = {}
        self._shunned: set[PeerKey] = set()

    def know(self, peer: Peer) -> list[PeerKey] | None:
        """Add a peer; returns the earlier epochs of the worker, which are over, or None if the peer was known."""
        key = key_of(peer)
        known = key in self._ahead_s
        self._ahead_s[key] = peer.clock_ahead_s
        devices = {rank.device for rank in peer.handshake.ranks}
        self._memory[key] = PeerMemory(peer.handshake.blocks, "cuda" if devices == {"cuda"} else "cpu")
        self._shunned = {other for other in self._shunned if other[0] != key[0]}
        if known:
            return None
        return [other for other in self._ahead_s if other[0] == key[0] and other != key]

    def forget(self, key: PeerKey) -> bool:
        """Whether the peer was known."""
        self._memory.pop(key, None)
        return self._ahead_s.pop(key, None) is not None

    def newest(self, worker_id: WorkerId) -> PeerKey | None:
        """The known epoch of the worker."""
        return next((key for key in self._ahead_s if key[0] == worker_id), None)

    def memory(self, key: PeerKey) -> PeerMemory | None:
        """None for an unknown peer."""
        return self._memory.get(key)

    def clock_ahead_s(self, key: PeerKey) -> float | None:
        """Seconds; None for an unknown peer."""
        return self._ahead_s.get(key)

    def shun(self, key: PeerKey) -> None:
        """Connecting failed: no request waits for this peer until a new handshake arrives."""
        if len(self._shunned) < SHUNNED_MAX:
            self._shunned.add(key)

    def is_shunned(self, key: PeerKey) -> bool:
        """Whether connecting to the peer failed."""
        return key in self._shunned

    def unknown(self, keys: list[PeerKey]) -> list[WorkerId]:
        """Workers among ``keys`` without a handshake."""
        return [WorkerId(key[0]) for key in keys if key not in self._ahead_s]
