"""The request that is relayed in the place of a client's whose response is kept: same head, another body.

It passes a stream on as it arrives, but the last event, and a whole response, stay here: the router keeps the response
before the client sees its end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import msgspec

from services.router.request.errors import EVENT_END
from services.router.request.http_request import HttpRequest, NoConnection
from services.router.responses.history import fields_of, with_fields
from shared.http.errors import Header, HttpError

LIFE: Final = re.compile(
    rb"event: response\.(created|queued|in_progress|completed|incomplete|failed)\r?\ndata: ?(\{.*\})"
)
"""An event that contains the response object. In other events a line cannot begin like this: JSON has no line ends."""
LAST: Final = (b"completed", b"incomplete", b"failed")


class Answer(NamedTuple):
    """A whole response."""

    status: int
    headers: bytes
    body: bytes


class InnerRequest(HttpRequest):
    """``client``: whose request it is; None: it runs in the background."""

    __slots__ = ("_begun_event", "_client", "_for_client", "before", "last", "rest", "whole")

    def __init__(
        self, like: HttpRequest, body: bytes, for_client: Callable[[bytes], bytes], client: HttpRequest | None
    ) -> None:
        """``for_client`` makes the response object that the client gets from the engine's."""
        upload = like.upload.replaced(body)
        super().__init__(NoConnection(), like.head, upload, http11=like.head.http11, keep_alive=True)
        self.is_current = True
        self._client = client
        self._for_client = for_client
        self._begun_event = b""
        """The beginning of an event whose end has not arrived yet."""
        self.whole: Answer | None = None
        """The response, if it is no stream."""
        self.last = b""
        """A stream's last event."""
        self.before = b""
        self.rest = b""
        """What the client still has to get before and after that event, when the stream has ended."""

    def client_left(self) -> None:
        if self._client is not None:
            self.slow = self._client.slow
        super().client_left()

    def answer(self, status: int, headers: bytes, body: bytes) -> None:
        self.begun = self.ended = True
        self.upload.over()
        self.whole = Answer(status, headers, body)

    def refuse(self, error: HttpError, more: Iterable[Header] = ()) -> None:
        if error.closes:
            self.close_after()
        super().refuse(error, more)

    def begin(self, status: int, headers: bytes) -> None:
        self.begun = True
        if self._client is not None:
            self._client.begin(status, headers)

    def ping(self, headers: bytes) -> None:
        if self._client is not None:
            self._client.ping(headers)

    def is_blocked(self) -> bool:
        return self._client is not None and self._client.is_blocked()

    async def drained(self) -> None:
        if self._client is not None:
            await self._client.drained()

    def send(self, data: bytes) -> None:
        if (passed := self._passed(data)) and self._client is not None:
            self._client.send(passed)

    def end(self, data: bytes = b"") -> None:
        """What the client still has to get is in ``before``, ``last`` and ``rest``."""
        self.before = self._passed(data) + self._begun_event
        self.ended = True
        self.upload.over()

    def close_after(self) -> None:
        if self._client is not None:
            self._client.close_after()

    def abort(self) -> None:
        if self._client is not None:
            self._client.abort()
        else:
            self.client_left()

    def _passed(self, data: bytes) -> bytes:
        """The events of which all is there, up to the last event of the response."""
        if self.last:
            self.rest += data
            return b""
        whole, end, self._begun_event = (self._begun_event + data).rpartition(EVENT_END)
        if LIFE.search(whole) is None:
            return whole + end
        passed, events = [], whole.split(EVENT_END)
        for number, event in enumerate(events):
            found = LIFE.match(event)
            if found is not None and found[1] in LAST:
                self.last = event
                self.rest = b"".join([one + EVENT_END for one in events[number + 1 :]]) + self._begun_event
                self._begun_event = b""
                break
            passed.append((with_response(event, self._for_client) if found is not None else event) + EVENT_END)
        return b"".join(passed)


def response_in(event: bytes) -> bytes:
    """The response object in an event of a stream; empty if there is none."""
    found = LIFE.match(event)
    fields = fields_of(found[2]) if found is not None else None
    return bytes(fields.get("response", b"")) if fields is not None else b""


def with_response(event: bytes, for_client: Callable[[bytes], bytes]) -> bytes:
    """The event with another response object."""
    found, response = LIFE.match(event), response_in(event)
    if found is None or not response:
        return event
    changed = with_fields(found[2], response=msgspec.Raw(for_client(response)))
    return event[: found.start(2)] + changed + event[found.end(2) :] if changed is not None else event
