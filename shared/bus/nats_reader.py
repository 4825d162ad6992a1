"""Reads a connection to NATS, and writes headers. Subscriptions whose function is plain are called while the bytes are
being read. All else (other subscriptions, PING, PONG, INFO, errors) is left to nats-py's own reader, which takes
several times as long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

Take = Callable[[bytes, dict[str, str], str, str], None]
"""Payload, headers, subject, reply subject."""

MSG, HMSG = b"MSG ", b"HMSG "
LINE_END = b"\r\n"
LINE_END_BYTES = 2
LINE_BYTES_MAX = 1024 * 1024
"""Of a line without its end. INFO is the longest: it lists all servers."""
VERSION = b"NATS/1.0"
_NO_HEADERS: dict[str, str] = {}


class MessageReader(asyncio.Protocol):
    """Takes the place of the stream reader's protocol on the socket of an established connection.

    Each subscription's messages keep their order; messages of different subscriptions may overtake one another.
    """

    def __init__(self, takes: dict[int, Take], rest: asyncio.StreamReaderProtocol, heard: Callable[[], None]) -> None:
        """``takes``: functions by subscription id. ``rest`` gets what they do not. ``heard``: called for each read."""
        self._takes = takes
        self._rest = rest
        self._heard = heard
        self._held: list[bytes] = []
        """The beginning of a command whose end has not arrived."""
        self._held_bytes = 0
        self._needed = 0
        """Bytes of that command; 0: not known yet."""

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
        takes, at, size = self._takes, 0, len(data)
        others: list[bytes] = []
        while at < size:
            line_end = data.find(LINE_END, at)
            if line_end < 0:
                if size - at > LINE_BYTES_MAX:
                    others.append(data[at:])  # nats-py ends the connection for it.
                else:
                    self._hold(data[at:], 0)
                break
            is_plain = data.startswith(MSG, at)
            if not is_plain and not data.startswith(HMSG, at):
                others.append(data[at : line_end + LINE_END_BYTES])
                at = line_end + LINE_END_BYTES
                continue
            words = data[at:line_end].split()
            begin = line_end + LINE_END_BYTES
            try:
                subscription, payload_end = int(words[2]), begin + int(words[-1])
                payload = begin if is_plain else begin + int(words[-2])
            except (ValueError, IndexError):  # Likewise.
                others.append(data[at:])
                break
            end = payload_end + LINE_END_BYTES
            if end > size:
                self._hold(data[at:], end - at)
                break
            take = takes.get(subscription)
            if take is None:
                others.append(data[at:end])
            else:
                headers = _NO_HEADERS if is_plain else read_headers(data[begin:payload])
                has_reply = len(words) > (4 if is_plain else 5)
                take(data[payload:payload_end], headers, words[1].decode(), words[3].decode() if has_reply else "")
            at = end
        if others:
            self._rest.data_received(b"".join(others))

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
