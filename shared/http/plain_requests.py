"""Reads a whole request from one read, in the form in which nearly all clients send theirs: the full parser, with a
call for each header, takes several times as long.

Only what can be read in one way is read here: one of the known request lines, headers without surprising bytes, and a
body of exactly the announced length. Everything else, valid or not, is left to the full parser. A property test holds
what is read here against that parser.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from shared.http.errors import Header

HEAD_END: Final = b"\r\n\r\n"
HEAD_END_BYTES: Final = 4
HEAD_BYTES_MAX: Final = 16 * 1024
LINES_MAX: Final = 64
LENGTH_DIGITS_MAX: Final = 12
HEADER: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+): ?([!-~\x80-\xff](?:[\t -~\x80-\xff]*[!-~\x80-\xff])?)")
KEEPS_OPEN: Final = b"keep-alive"
UNREAD: Final = frozenset({
    b"expect", b"http2-settings", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade",
})  # fmt: skip
"""Headers that change how a request or its body is read."""
SECRET: Final = frozenset({b"authorization", b"cookie", b"proxy-authorization", b"x-api-key", b"api-key"})
"""Headers that are not kept in memory."""
LINES_KNOWN_MAX: Final = 2048
"""Header lines that are remembered. A plain dict is cleared when it is full: compiled code reads it without a call,
unlike ``Bounded``."""
LINE_KNOWN_BYTES_MAX: Final = 256


class PlainRequests:
    """Requests of one server. ``read`` returns what a connection needs of a request."""

    def __init__(self, paths: Mapping[bytes, str]) -> None:
        """``paths``: those of POST requests that are read here."""
        self._paths = {b"POST %b HTTP/1.1" % path: name for path, name in paths.items()}
        self._known: dict[bytes, Header] = {}
        """Header lines that clients have sent, which they send again and again."""

    def read(self, data: bytes) -> tuple[str, list[Header], bytes] | None:
        """Path, headers and body of the request that ``data`` is; None: the full parser must read it."""
        head_end = data.find(HEAD_END, 0, HEAD_BYTES_MAX)
        if head_end < 0:
            return None
        lines = data[:head_end].split(b"\r\n")
        path = self._paths.get(lines[0])
        if path is None or len(lines) > LINES_MAX:
            return None
        headers: list[Header] = []
        length = -1
        for line in lines[1:]:
            header = self._known.get(line)
            if header is None:
                header = self._header(line)
                if header is None:
                    return None
                if header[0] == b"content-length":
                    if length >= 0 or not header[1].isdigit() or len(header[1]) > LENGTH_DIGITS_MAX:
                        return None
                    length = int(header[1])
            headers.append(header)
        body = data[head_end + HEAD_END_BYTES :]
        return (path, headers, body) if len(body) == length else None

    def _header(self, line: bytes) -> Header | None:
        found = HEADER.fullmatch(line)
        if found is None:
            return None
        name, value = found[1].lower(), found[2]
        if name in UNREAD or (name == b"connection" and value.lower() != KEEPS_OPEN):
            return None
        if name != b"content-length" and name not in SECRET and len(line) <= LINE_KNOWN_BYTES_MAX:
            if len(self._known) >= LINES_KNOWN_MAX:
                self._known.clear()
            self._known[line] = name, value
        return name, value
