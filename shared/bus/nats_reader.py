"""Reads a connection to NATS, and writes headers. Subscriptions whose function is plain are called while the bytes are
being read. All else (other subscriptions, PING, PONG, INFO, errors) is left to nats-py's own reader, which takes
several times as long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

Take = Callable[[bytes, dict[str, str], str, str], None]
"""Payload, headers, subject, reply subject."""

MSG: Final = b"MSG "
HMSG: Final = b"HMSG "
LINE_END: Final = b"\r\n"
LINE_END_BYTES: Final = 2
LINE_BYTES_MAX: Final = 1024 * 1024
"""Of a line without its end. INFO is the longest: it lists all servers."""
VERSION: Final = b"NATS/1.0"
_NO_HEADERS: Final[dict[str, str]] = {}


KNOWN_MAX: Final = 4096
"""Beginnings of lines that are remembered: one for each sender of each subscription."""


class MessageReader:
    """Takes the place of the stream reader's protocol on the socket of an established connection.

    Each subscription's messages keep their order; messages of different subscriptions may overtake one another.
    """

    def __init__(self, rest: asyncio.StreamReaderProtocol, heard: Callable[[], None]) -> None:
        """``rest`` gets what is of no subscription that is listened to. ``heard``: called for each read."""
        self._rest = rest
        self._heard = heard
        self._takes: dict[int, Take] = {}
        """By subscription id."""
        self._known: dict[bytes, tuple[Take, str]] = {}
        """The function and the subject for lines that begin like this: all of ``MSG subject id`` but the size."""
        self._held: list[bytes] = []
        """The beginning of a command whose end has not arrived."""
        self._held_bytes = 0
        self._needed = 0
        """Bytes of that command; 0: not known yet."""

    def listen(self, subscription: int, take: Take) -> None:
        """Call ``take`` for the messages of this subscription."""
        self._takes[subscription] = take

    def forget(self, subscription: int) -> None:
        """Call nothing for them any more."""
        if self._takes.pop(subscription, None) is not None:
            self._known.clear()

    def data_received(self, data: bytes) -> None:
        self._heard()
        if self._held:
            self._held.append(data)
            self._held_bytes += len(data)
            if self._held_bytes < self._needed:
                return
            data = b"".join(self._held)
            self._held.clear()
        self._read(data)

    def _read(self, data: bytes) -> None:
        at, size = 0, len(data)
        others: list[bytes] = []
        while at < size:
            line_end = data.find(LINE_END, at)
            if line_end < 0:
                if size - at > LINE_BYTES_MAX:
                    others.append(data[at:])  # nats-py ends the connection for it.
                else:
                    self._hold(data[at:], 0)
                break
            line, begin = data[at:line_end], line_end + LINE_END_BYTES
            beginning, _, last = line.rpartition(b" ")
            known = self._known.get(beginning)
            if known is not None and last.isdigit():
                end = begin + int(last) + LINE_END_BYTES
                if end > size:
                    self._hold(data[at:], end - at)
                    break
                known[0](data[begin : end - LINE_END_BYTES], _NO_HEADERS, known[1], "")
                at = end
                continue
            if not line.startswith((MSG, HMSG)):
                others.append(data[at:begin])
                at = begin
                continue
            try:
                end = begin + int(last) + LINE_END_BYTES
                if end > size:
                    self._hold(data[at:], end - at)
                    break
                if not self._take(beginning, data[begin : end - LINE_END_BYTES]):
                    others.append(data[at:end])
            except (ValueError, IndexError):  # Likewise.
                others.append(data[at:])
                break
            at = end
        if others:
            self._rest.data_received(b"".join(others))

    def _take(self, line: bytes, data: bytes) -> bool:
        """Whether a subscription that is listened to takes the message. ``line``: its first line, without the size of
        ``data``, which are headers and payload. Raises ValueError, IndexError.
        """
        words = line.split()
        is_plain = words[0] == b"MSG"
        take = self._takes.get(int(words[2]))
        if take is None:
            return False
        subject = words[1].decode()
        reply_at, header_bytes = 3, 0 if is_plain else int(words[-1])
        reply = words[reply_at].decode() if len(words) > reply_at + (not is_plain) else ""
        if is_plain and not reply:
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            self._known[line] = take, subject
        headers = _NO_HEADERS if is_plain else read_headers(data[:header_bytes])
        take(data[header_bytes:], headers, subject, reply)
        return True

    def _hold(self, data: bytes, needed: int) -> None:
        self._held.append(data)
        self._held_bytes, self._needed = len(data), needed

    def eof_received(self) -> bool | None:
        return self._rest.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._rest.connection_lost(exc)

    def pause_writing(self) -> None:
        self._rest.pause_writing()

    def resume_writing(self) -> None:
        self._rest.resume_writing()


def read_headers(raw: bytes) -> dict[str, str]:
    """Headers of a message; ``Status`` and ``Description`` are the server's (ADR-4 of NATS)."""
    first, *lines = raw.split(LINE_END)
    headers: dict[str, str] = {}
    code, _, description = first.removeprefix(VERSION).strip().partition(b" ")
    if code:
        headers["Status"] = code.decode(errors="replace")
        if description:
            headers["Description"] = description.decode(errors="replace")
    for line in lines:
        name, colon, value = line.partition(b":")
        if colon:
            headers[name.decode(errors="replace").strip()] = value.decode(errors="replace").strip()
    return headers


def header_block(headers: Mapping[str, str]) -> bytes:
    """The headers of a message that is sent. Names and values must not contain line ends."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    return f"NATS/1.0\r\n{lines}\r\n".encode()
