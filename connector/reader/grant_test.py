"""Measures how long a peer's grants take, over the bus and as a notification of NIXL: which of both comes first differs
from network to network, and looking for notifications costs some of a core.

A block that nobody has is asked for, a few times. The holder's refusal comes like any grant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256

from connector.messages import MeasureRead, PeerKey
from connector.reader.fetch import Outbox
from shared.contracts.ids import WorkerId
from shared.contracts.kv_exchange import KvGrant, LeaseKv, new_lease_id

PAIRS = 3
"""Grants that must have come both ways: the first notices are late, or lost, while engines connect to each other."""
ASKS_MAX = 10
TEST_S_MAX = 2.0
NOTICE_S_MAX = 0.1
"""Time after which a notification does not come any more, once the bus has brought the same grant."""
TESTS_MAX = 4
"""Tests at a time; further ones measure nothing."""
HOLD_S = 1.0


@dataclass(frozen=True, slots=True)
class GrantTimes:
    """Seconds from a request for blocks to its grant, the shortest; 0.0: not known. A holder on this machine uses
    neither way.
    """

    notice_s: float = 0.0
    bus_s: float = 0.0


@dataclass(slots=True)
class _Test:
    order: MeasureRead
    ends_at: float
    ask_id: str = ""
    asked_at: float = 0.0
    asks: int = 0
    pairs: int = 0
    """Grants that came both ways."""
    noticed_s: float = 0.0
    """Time of the present request's notice; 0.0: it has not come."""
    told_s: float = 0.0
    """Time at which the bus brought the present request's grant; 0.0: it has not."""
    notice_s: float = 0.0
    """Shortest ``noticed_s`` of the requests before."""
    bus_s: float = 0.0
    """Shortest ``told_s`` of the requests before."""


class GrantTests:
    """All measurements of one engine. ``reply_to``: see ``LeaseKv``; without it nothing is measured."""

    def __init__(self, reader: PeerKey, outbox: Outbox, now: Callable[[], float], reply_to: str) -> None:
        self.ended: list[tuple[MeasureRead, GrantTimes]] = []
        """The caller empties it."""
        self.under_way: list[_Test] = []
        self._reader_id = WorkerId(reader[0])
        self._outbox = outbox
        self._now = now
        self._reply_to = reply_to

    def start(self, order: MeasureRead, *, is_known: bool) -> None:
        """Begin to measure. The result is appended to ``ended``, at once if nothing can be measured."""
        if not is_known or not self._reply_to or len(self.under_way) >= TESTS_MAX:
            self.ended.append((order, GrantTimes()))
            return
        test = _Test(order, self._now() + TEST_S_MAX)
        self.under_way.append(test)
        self._ask(test)

    def on_grant(self, grant: KvGrant, *, noticed: bool) -> bool:
        """A grant came, as a notice or over the bus. Returns whether a test has asked for it."""
        test = next((one for one in self.under_way if one.ask_id == grant.ask_id), None)
        if test is None:
            return False
        took_s = self._now() - test.asked_at
        if noticed:
            test.noticed_s = took_s
        else:
            test.told_s = took_s
        if test.noticed_s and test.told_s:
            self._go_on(test)
        return True

    def on_near(self, grant: KvGrant) -> bool:
        """A grant came through this engine's socket, so its holder is on this machine. Returns whether a test has asked
        for it.
        """
        test = next((one for one in self.under_way if one.ask_id == grant.ask_id), None)
        if test is None:
            return False
        self._end(test, GrantTimes())
        return True

    def on_time(self) -> None:
        """Go on without what does not come."""
        now = self._now()
        for test in list(self.under_way):
            if now >= test.ends_at:
                self._end(test, _times(test))
            elif test.told_s and now > test.asked_at + test.told_s + NOTICE_S_MAX:
                self._go_on(test)

    def _go_on(self, test: _Test) -> None:
        test.notice_s = _shorter(test.notice_s, test.noticed_s)
        test.bus_s = _shorter(test.bus_s, test.told_s)
        test.pairs += bool(test.noticed_s and test.told_s)
        if test.pairs < PAIRS and test.asks < ASKS_MAX:
            self._ask(test)
        else:
            self._end(test, _times(test))

    def _ask(self, test: _Test) -> None:
        test.ask_id, test.asked_at, test.asks = new_lease_id(), self._now(), test.asks + 1
        test.noticed_s = test.told_s = 0.0
        self._outbox.lease_requests.append(
            LeaseKv(
                worker_id=test.order.worker_id,
                epoch=test.order.epoch,
                reader_id=self._reader_id,
                ask_id=test.ask_id,
                hashes=sha256(test.ask_id.encode()).digest(),
                hold_s=HOLD_S,
                reply_to=self._reply_to,
                listens=True,
            )
        )

    def _end(self, test: _Test, times: GrantTimes) -> None:
        self.under_way.remove(test)
        self.ended.append((test.order, times))


def _times(test: _Test) -> GrantTimes:
    """Both ways are compared only where both are known."""
    return GrantTimes(test.notice_s if test.pairs >= PAIRS else 0.0, test.bus_s)


def _shorter(known_s: float, took_s: float) -> float:
    """The shorter one of those that are known."""
    return min(known_s, took_s) if known_s and took_s else known_s or took_s
