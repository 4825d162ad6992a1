"""What a worker says to its engine's exchange, and what that says back: the two ends of one engine, not the wire.

Into the engine: an ``EngineCall``, msgpack, as a utility call, so that an idle engine answers without a step. Out of
it: ``EngineNotification``, as the call's result, and pushed after a step in which there was some.
"""

from __future__ import annotations

import math

import msgspec

from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_exchange import FetchedKv, FetchKv, KvGrant, KvLedgerState, LeaseKv, ReleaseKv
from shared.contracts.kv_handshake import KvHandshake
from shared.contracts.message import Message


class Peer(Message, frozen=True, kw_only=True):
    """Another worker whose blocks may be read."""

    handshake: KvHandshake
    clock_ahead_s: float
    """The most that its clock may be ahead of ours."""


class PeerGone(Message, frozen=True, kw_only=True):
    """That life of the worker is over: forget its memory, fail what is being read from it."""

    worker_id: WorkerId
    epoch: Epoch


class StartFetch(Message, frozen=True, kw_only=True):
    """Have these blocks; the answer's notifications names the same ``fetch_id``."""

    fetch_id: str
    fetch: FetchKv


class Chain(Message, frozen=True, kw_only=True):
    """A prefix that an engine holds, as those see it who may want a copy."""

    hashes: bytes
    """Full hashes of its blocks from the first on (see ``kv_exchange.pack_full_hashes``)."""
    uses: int = 1
    """Requests that began with it, lately."""
    idle_s: float = 0.0
    """Since the last of them."""


class EngineCall(Message, frozen=True, kw_only=True):
    """Everything that a worker may ask of its engine's exchange; done in the order of the fields."""

    describe: bool = False
    """Answer with ``EngineNotification.handshake``."""
    peers: list[Peer] = msgspec.field(default_factory=list)
    """New, or known with a fresher clock."""
    gone: list[PeerGone] = msgspec.field(default_factory=list)
    releases: list[ReleaseKv] = msgspec.field(default_factory=list)
    leases: list[LeaseKv] = msgspec.field(default_factory=list)
    """Asked by other workers."""
    grants: list[KvGrant] = msgspec.field(default_factory=list)
    """Given to this engine."""
    fetches: list[StartFetch] = msgspec.field(default_factory=list)
    chains_max: int = 0
    """Answer with ``EngineNotification.chains``: so many at most."""
    chains_uses_min: int = 1
    """Only those that so many requests used."""
    chains_idle_s_max: float = math.inf
    """Only those whose last use is no longer ago."""
    release_all: bool = False
    """Before the engine ends: unpin everything, grant nothing more."""


class PeerConnected(Message, frozen=True, kw_only=True):
    """The engine can read from that worker, or ``failure`` says why not."""

    worker_id: WorkerId
    epoch: Epoch
    seconds: float = 0.0
    failure: str = ""


class FetchEnded(Message, frozen=True, kw_only=True):
    """A StartFetch is over."""

    fetch_id: str
    result: FetchedKv


class EngineNotification(Message, frozen=True, kw_only=True):
    """Everything that an engine's exchange has to say. Empty lists are the rule."""

    handshake: KvHandshake | None = None
    unknown_peers: list[WorkerId] = msgspec.field(default_factory=list)
    """Workers that requests name as sources and that are not connected: their handshake, please."""
    leases: list[LeaseKv] = msgspec.field(default_factory=list)
    """To be asked of other workers."""
    grants: list[KvGrant] = msgspec.field(default_factory=list)
    """To be told to readers."""
    releases: list[ReleaseKv] = msgspec.field(default_factory=list)
    connected: list[PeerConnected] = msgspec.field(default_factory=list)
    fetched: list[FetchEnded] = msgspec.field(default_factory=list)
    chains: list[Chain] = msgspec.field(default_factory=list)
    """Those that are used most, the hottest first; no chain is the beginning of another one here."""
    state: KvLedgerState | None = None
    """With all notifications: the ledger after it."""
