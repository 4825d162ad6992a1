"""Reads a connection to NATS, and writes headers. Subscriptions whose function is plain are called while the bytes are
being read. All else (other subscriptions, PING, PONG, INFO, errors) is left to nats-py's own reader, which takes
several times as long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

Take = Callable[[bytes, dict[str, str], str], None]
"""Payload, headers, subject. Nobody who is called while the bytes are being read replies."""

MESSAGES: Final = (b"MSG ", b"HMSG ")
HMSG: Final = b"HMSG"
MSG_WORDS: Final = (3, 4)
"""``MSG subject subscription [reply]``, and then the bytes; HMSG has the headers' bytes before them."""
LINE_END: Final = b"\r\n"
LINE_END_BYTES: Final = 2
LINE_BYTES_MAX: Final = 1024 * 1024
"""Maximum length of a line. INFO is the longest: it lists all servers."""
VERSION: Final = b"NATS/1.0"
KNOWN_MAX: Final = 4096
"""Beginnings of lines that are remembered: mostly one for each sender of each subscription. A plain dict is cleared
when it is full: compiled code reads it without a call, unlike ``Bounded``."""
_NO_HEADERS: Final[dict[str, str]] = {}


class MessageReader:
    """Takes the place of the stream reader's protocol on the socket of an established connection.

    Each subscription's messages keep their order; messages of different subscriptions may overtake one another.
    """

    def __init__(self, rest: asyncio.StreamReaderProtocol, heard: Callable[[], None]) -> None:
        """``rest`` gets what is of no subscription that is listened to. ``heard``: called for each read."""
        self._rest = rest
        self._heard = heard
        self._takes: dict[bytes, Take] = {}
        """Handlers by subscription id, as it stands in a line."""
        self._known: dict[bytes, tuple[Take | None, str, int]] = {}
        """What ``_read_line`` has found, by line."""
        self._held: list[bytes] = []
        """The beginning of a command whose end has not arrived."""
        self._held_bytes = 0
        self._needed = 0
        """Bytes of that command; 0: not known yet."""

    def listen(self, subscription: int, take: Take) -> None:
        """Call ``take`` for the messages of this subscription."""
        self._takes[b"%d" % subscription] = take
        self._known.clear()

    def forget(self, subscription: int) -> None:
        """Call nothing for them any more."""
        self._takes.pop(b"%d" % subscription, None)
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
            begin = line_end + LINE_END_BYTES
            line, _, size_digits = data[at:line_end].rpartition(b" ")
            known = self._known.get(line)
            if known is None:
                if not line.startswith(MESSAGES):
                    others.append(data[at:begin])
                    at = begin
                    continue
                known = self._read_line(line)
            if known is None or not size_digits.isdigit():
                others.append(data[at:])  # It does so for this, too.
                break
            take, subject, header_bytes = known
            last = begin + int(size_digits)
            end = last + LINE_END_BYTES
            if end > size:
                self._hold(data[at:], end - at)
                break
            if take is None:
                others.append(data[at:end])
            elif header_bytes:
                payload = min(last, begin + header_bytes)
                take(data[payload:last], read_headers(data[begin:payload]), subject)
            else:
                take(data[begin:last], _NO_HEADERS, subject)
            at = end
        if others:
            self._rest.data_received(b"".join(others))

    def _read_line(self, line: bytes) -> tuple[Take | None, str, int] | None:
        """Who takes a message with this first line, which lacks its size (None: nats-py does), its subject, and the
        bytes of its headers. Returns None for a line that no server sends.
        """
        words = line.split()
        has_headers = words[0] == HMSG
        if len(words) - has_headers not in MSG_WORDS or (has_headers and not words[-1].isdigit()):
            return None
        if len(self._known) >= KNOWN_MAX:
            self._known.clear()
        header_bytes = int(words[-1]) if has_headers else 0
        known = self._takes.get(words[2]), words[1].decode(errors="replace"), header_bytes
        self._known[line] = known
        return known

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
