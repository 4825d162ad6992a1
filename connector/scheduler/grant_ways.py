"""Which way a grant takes to its reader.

An engine on the same machine gets it through a socket (``grant_socket``), and then nothing goes over the bus. Between
machines a grant goes over the bus, through both workers; and besides as a notification of NIXL, from engine to engine,
if the reader looks for these: a *notice*. Nobody says whether a notice arrives, so it only comes ahead of what the bus
brings anyway. Both have the same number, and a reader takes each number once, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from shared.contracts.kv_exchange import KvGrant, LeaseKv


@dataclass(slots=True)
class _Way:
    path: str
    """The reader's socket; empty: none, or it has failed once. Later grants do not take it, so that none overtakes
    another."""
    listens: bool
    numbered: int = 0
    """Grants that were sent both other ways."""


class GrantWays:
    """``send_directly`` takes a socket's path, and returns whether the grant is in the reader's queue. ``reply_to`` is
    the path of this engine's own socket, if it has one.
    """

    def __init__(
        self, send_directly: Callable[[str, KvGrant], bool] = lambda _path, _grant: False, reply_to: str = ""
    ) -> None:
        self.reply_to = reply_to
        self._send_directly = send_directly
        self._ways: dict[str, _Way] = {}
        """Ways of leases that may get more grants, by ask id. They are followed, and the holder bounds their number."""
        self._notices: list[KvGrant] = []

    def note(self, ask: LeaseKv) -> None:
        """A request is about to be granted."""
        if ask.reply_to or ask.listens:
            self._ways[ask.ask_id] = _Way(ask.reply_to, ask.listens)

    def forget(self, ask_ids: Iterable[str]) -> None:
        """These get no more grants, or get them over the bus."""
        for ask_id in ask_ids:
            self._ways.pop(ask_id, None)

    def send(self, grant: KvGrant) -> KvGrant | None:
        """What takes the bus; None: the grant is in the reader's queue."""
        way = self._ways.get(grant.ask_id)
        if way is None:
            return grant
        if grant.final:
            del self._ways[grant.ask_id]
        if way.path:
            if self._send_directly(way.path, grant):
                return None
            way.path = ""
        if not way.listens:
            self._ways.pop(grant.ask_id, None)
            return grant
        numbered = replace(grant, number=way.numbered)
        way.numbered += 1
        self._notices.append(numbered)
        return numbered

    def take_notices(self) -> list[KvGrant]:
        """Grants to send as notices, too, since the last call."""
        notices, self._notices = self._notices, []
        return notices
