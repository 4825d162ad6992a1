"""Faults as data: what breaks, when and for how long, drawn from a seed; and which outcomes each permits for a
request.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

CALM_S = 2.0
"""Nothing breaks before load is on."""


class Kind(StrEnum):
    """What is done to a process, or to its connection to NATS; and what operators do, which may cost no request."""

    KILL = "kill"
    """SIGKILL; started again after ``for_s``."""
    FORGET = "forget"
    """Killed, and its storage is gone."""
    FREEZE = "freeze"
    """SIGSTOP for ``for_s``."""
    CUT = "cut"
    """Its connection is closed, and refused for ``for_s``."""
    LOSE = "lose"
    """A share of its messages never arrives, for ``for_s``."""
    DELAY = "delay"
    """Its messages arrive late, for ``for_s``."""
    SHAPE = "shape"
    """Its link is slow: so many bytes a second, each late, for ``for_s``."""
    VANISH = "vanish"
    """Its connection is half open: nothing arrives any more in either direction, and nobody is told. For ``for_s`` new
    connections are the same.
    """
    EXHAUST = "exhaust"
    """Idle clients use up its file descriptors, for ``for_s``."""
    RESTART = "restart"
    """SIGTERM; started again ``for_s`` after its end."""
    DRAIN = "drain"
    """``baton drain``; started again ``for_s`` after its end."""
    REVOKE = "revoke"
    """An API key is taken out of the file for ``for_s``."""
    ROLE = "role"
    """``baton role``, and back after ``for_s``."""


class Part(StrEnum):
    """What a process is."""

    WORKER = "worker"
    ROUTER = "router"
    ORCHESTRATOR = "orchestrator"
    COLLECTOR = "collector"
    NATS = "nats"
    KEY = "key"
    """An API key of clients."""
    NODE = "nats node"
    """One server of a cluster of NATS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One row of a schedule."""

    at_s: float
    kind: Kind
    part: Part
    target: str
    for_s: float

    @property
    def over_s(self) -> float:
        return self.at_s + self.for_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kind of fault in a menu."""

    kind: Kind
    part: Part
    cards: int
    """How often it comes while the whole menu comes once."""
    least_s: float
    most_s: float


MENU = (
    Row(kind=Kind.KILL, part=Part.WORKER, cards=4, least_s=0.0, most_s=2.0),
    Row(kind=Kind.FREEZE, part=Part.WORKER, cards=2, least_s=0.2, most_s=6.0),
    Row(kind=Kind.CUT, part=Part.WORKER, cards=1, least_s=0.2, most_s=5.0),
    Row(kind=Kind.LOSE, part=Part.WORKER, cards=1, least_s=1.0, most_s=3.0),
    Row(kind=Kind.DELAY, part=Part.WORKER, cards=1, least_s=1.0, most_s=3.0),
    Row(kind=Kind.KILL, part=Part.ROUTER, cards=2, least_s=0.0, most_s=2.0),
    Row(kind=Kind.FREEZE, part=Part.ROUTER, cards=1, least_s=0.2, most_s=3.0),
    Row(kind=Kind.CUT, part=Part.ROUTER, cards=1, least_s=0.2, most_s=2.0),
    Row(kind=Kind.LOSE, part=Part.ROUTER, cards=1, least_s=1.0, most_s=3.0),
    Row(kind=Kind.DELAY, part=Part.ROUTER, cards=1, least_s=1.0, most_s=3.0),
    Row(kind=Kind.KILL, part=Part.ORCHESTRATOR, cards=1, least_s=0.0, most_s=3.0),
    Row(kind=Kind.FREEZE, part=Part.ORCHESTRATOR, cards=1, least_s=1.0, most_s=8.0),
    Row(kind=Kind.KILL, part=Part.COLLECTOR, cards=1, least_s=0.0, most_s=2.0),
    Row(kind=Kind.KILL, part=Part.NATS, cards=1, least_s=0.0, most_s=2.0),
    Row(kind=Kind.FORGET, part=Part.NATS, cards=1, least_s=0.0, most_s=2.0),
    Row(kind=Kind.FREEZE, part=Part.NATS, cards=1, least_s=0.2, most_s=3.0),
    Row(kind=Kind.KILL, part=Part.NODE, cards=2, least_s=0.0, most_s=3.0),
    Row(kind=Kind.REVOKE, part=Part.KEY, cards=1, least_s=8.0, most_s=10.0),
    Row(kind=Kind.RESTART, part=Part.ROUTER, cards=2, least_s=0.0, most_s=1.0),
    Row(kind=Kind.RESTART, part=Part.WORKER, cards=1, least_s=0.0, most_s=1.0),
    Row(kind=Kind.RESTART, part=Part.ORCHESTRATOR, cards=1, least_s=0.0, most_s=1.0),
    Row(kind=Kind.DRAIN, part=Part.WORKER, cards=1, least_s=0.0, most_s=1.0),
    Row(kind=Kind.ROLE, part=Part.WORKER, cards=2, least_s=0.5, most_s=4.0),
    Row(kind=Kind.FREEZE, part=Part.WORKER, cards=1, least_s=8.0, most_s=20.0),
    Row(kind=Kind.FREEZE, part=Part.ROUTER, cards=1, least_s=4.0, most_s=12.0),
    Row(kind=Kind.VANISH, part=Part.WORKER, cards=1, least_s=1.0, most_s=8.0),
    Row(kind=Kind.VANISH, part=Part.ROUTER, cards=1, least_s=1.0, most_s=4.0),
    Row(kind=Kind.SHAPE, part=Part.WORKER, cards=1, least_s=2.0, most_s=6.0),
    Row(kind=Kind.SHAPE, part=Part.ROUTER, cards=1, least_s=2.0, most_s=6.0),
    Row(kind=Kind.EXHAUST, part=Part.ROUTER, cards=1, least_s=1.0, most_s=5.0),
)
WORKERS_ONLY = tuple(row for row in MENU if row.part is Part.WORKER and row.kind in (Kind.KILL, Kind.FREEZE))
"""What may cost no request at all, as long as capacity remains."""
OF_LINES = frozenset({Kind.CUT, Kind.LOSE, Kind.DELAY, Kind.SHAPE, Kind.VANISH})
"""What is done to a connection."""
STORE = "store"
"""The role of workers that nobody needs."""
MOVABLE = frozenset({"prefill", "decode"})
"""Roles that are changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """Who may be hit."""

    names: dict[Part, tuple[str, ...]]
    roles: dict[str, str]
    """Of each worker: of each role somebody is always left."""
    proxied: frozenset[str]
    """Whose messages can be lost, delayed or cut off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rhythm:
    """How many faults there are."""

    seconds: float
    """Of the run; all faults are over ``calm_after_s`` before its end."""
    every_s: float
    """In the mean, from one fault to the next."""
    calm_after_s: float = 3.0
    down_share_max: float = 0.34
    """Of the workers of a role, how many may be hit at a time."""
    recovers_s: float = 4.0
    """After its fault a process is left alone for so long; until then it counts as hit."""


def schedule(seed: int, cast: Cast, rhythm: Rhythm, menu: Sequence[Row] = MENU) -> list[Fault]:
    """Equal arguments give equal faults."""
    chance = random.Random(seed)
    faults: list[Fault] = []
    deck: list[Row] = []
    last_s = rhythm.seconds - rhythm.calm_after_s
    at_s = CALM_S
    while at_s < last_s:
        if not deck:
            deck = chance.sample([row for row in menu for _ in range(row.cards)], sum(row.cards for row in menu))
        busy = [fault for fault in faults if fault.over_s + rhythm.recovers_s > at_s]
        row = next((row for row in deck if _targets(row, cast, rhythm, busy)), None)
        if row is not None:
            deck.remove(row)
            for_s = min(chance.uniform(row.least_s, row.most_s), last_s - at_s)
            target = chance.choice(_targets(row, cast, rhythm, busy))
            faults.append(Fault(at_s=at_s, kind=row.kind, part=row.part, target=target, for_s=for_s))
        at_s += chance.uniform(0.5, 1.5) * rhythm.every_s
    return faults


def _targets(row: Row, cast: Cast, rhythm: Rhythm, busy: Iterable[Fault]) -> list[str]:
    """Who can be hit now without everybody of a kind being hit at the same time."""
    hit = {fault.target for fault in busy}
    names = [name for name in cast.names.get(row.part, ()) if name not in hit]
    if row.kind in OF_LINES:
        names = [name for name in names if name in cast.proxied]
    if row.kind is Kind.ROLE:
        names = [name for name in names if cast.roles[name] in MOVABLE]
    if row.part is Part.WORKER:
        return [name for name in names if _may_fall(name, cast, rhythm, hit)]
    if row.part in (Part.NATS, Part.NODE):
        return [] if hit & {*cast.names[Part.NATS], *cast.names.get(Part.NODE, ())} else names
    some_left = row.part in (Part.COLLECTOR, Part.KEY) or not hit & set(cast.names[row.part])
    return names if some_left else []


def _may_fall(name: str, cast: Cast, rhythm: Rhythm, hit: set[str]) -> bool:
    if cast.roles[name] == STORE:
        return True
    peers = [peer for peer, role in cast.roles.items() if role == cast.roles[name]]
    down = len(hit & set(peers)) + 1
    return down < len(peers) and down <= max(1.0, rhythm.down_share_max * len(peers))
