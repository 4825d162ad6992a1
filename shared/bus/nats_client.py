"""nats-py's client with a short cut for plain functions: no queue, no task switch, half the time per message."""

from __future__ import annotations

from collections.abc import Callable

from nats.aio.client import Client

Direct = Callable[[bytes, dict[str, str], str, str], None]
"""Payload, headers, subject, reply subject."""

_NO_HEADERS: dict[str, str] = {}


class DirectClient(Client):
    """Calls a subscription's function while the message is being read. Made for nats-py 2.16, which is pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.direct: dict[int, Direct] = {}
        """Functions by subscription id."""

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        take = self.direct.get(sid)
        if take is None:
            await super()._process_msg(sid, subject, reply, data, headers)
        elif headers:
            take(data, await self._process_headers(headers) or _NO_HEADERS, subject.decode(), reply.decode())
        else:
            take(data, _NO_HEADERS, subject.decode(), reply.decode())
