"""Messages to this connection: replies to its asks, and the server's notices that a subject has no subscriber."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shared.bus.port import NoResponders
from shared.bus.receiver import Reply
from shared.contracts.permissions import REPLIES

REFUSED_HEADER = "Baton-Refused"
"""Marks a reply that is a ``Failure``."""
TOKEN_BYTES = 16
_STATUS_HEADER = "Status"
_NO_RESPONDERS = "503"


def is_reply_subject(subject: str) -> bool:
    """Whether a reply may go there. Who asks chooses it, and must not choose what only the replier may publish to."""
    return subject.startswith("_INBOX.")


class Inbox:
    """Reply subjects below one prefix: ``a.{token}`` for asks, ``u.{key}`` for messages published with a key.

    Many parties may publish below ``a``, so the token is known only to those that receive the ask. Nobody may publish
    below ``u``: what arrives there is from the server.
    """

    def __init__(self, prefix: str, unreachable: Callable[[str], None]) -> None:
        self.subject = f"{prefix}.>"
        self.token = prefix.rpartition(".")[2]
        """Unique to this connection."""
        self._prefix = prefix
        self._unreachable = unreachable
        self._asks: dict[str, tuple[str, asyncio.Future[Reply]]] = {}

    def for_key(self, key: str) -> str:
        """Reply subject on which the server reports that the message with this key has no subscriber."""
        return f"{self._prefix}.u.{key}"

    @contextmanager
    def expect(self, subject: str) -> Iterator[tuple[str, asyncio.Future[Reply]]]:
        """A reply subject for an ask on ``subject``, and the future of the reply or of NoResponders."""
        token = secrets.token_hex(TOKEN_BYTES)
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._asks[token] = (subject, future)
        try:
            yield f"{self._prefix}.{REPLIES}.{token}", future
        finally:
            del self._asks[token]
            future.cancel()

    def fail_all(self, error: Callable[[], Exception]) -> None:
        """Fail every open ask."""
        for _, asked in self._asks.values():
            if not asked.done():
                asked.set_exception(error())

    def on_message(self, payload: bytes, headers: dict[str, str], subject: str, _reply: str) -> None:
        """Takes every message below the prefix."""
        kind, _, name = subject[len(self._prefix) + 1 :].partition(".")
        no_responders = not payload and headers.get(_STATUS_HEADER) == _NO_RESPONDERS
        if kind == "u" and no_responders:
            self._unreachable(name)
        if kind != REPLIES or name not in self._asks:
            return
        asked_on, asked = self._asks[name]
        if asked.done():
            return
        if no_responders:
            asked.set_exception(NoResponders(f"{asked_on} has no subscriber"))
        else:
            asked.set_result((payload, REFUSED_HEADER in headers))
