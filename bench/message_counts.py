"""How many messages of each kind pass a nats-server, counted by a subscriber to all subjects with a raw socket."""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from types import TracebackType
from typing import Self

from bench.nats_floor import connect
from shared.contracts.channels import CHANNELS, PLACEHOLDER

READ_BYTES = 1 << 20
LINE_END = b"\r\n"
ALL_SUBJECTS = ">"
KINDS = {
    "StartLeg": "START_LEG",
    "lease": "KV_LEASE",
    "grant": "KV_GRANT",
    "release": "KV_RELEASE",
    "frames": "FRAMES",
    "KV events": "KV_EVENTS",
    "load reports": "LOAD",
    "finished requests": "REQUESTS_FINISHED",
}
"""Channels by what a page calls them."""
OTHERS, BYTES = "others", "bytes"
PATTERNS = {
    name: re.compile(PLACEHOLDER.sub(r"[^.]+", CHANNELS[channel].subject.replace(".", r"\.")) + "$")
    for name, channel in KINDS.items()
}


def kind_of(subject: str) -> str:
    """One of ``KINDS``, or ``OTHERS``."""
    return next((name for name, pattern in PATTERNS.items() if pattern.match(subject)), OTHERS)


class MessageCounts:
    """Counts in a thread on these cores: ``with MessageCounts(url, cores) as counts``."""

    def __init__(self, url: str, cores: set[int]) -> None:
        self._connection = connect(url, ALL_SUBJECTS)
        self._connection.settimeout(None)
        self._cores = cores
        self._counted: Counter[str] = Counter()
        self._kinds: dict[str, str] = {}
        """By subject: a fleet has few."""
        self._thread = threading.Thread(target=self._read, name="message-counts", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.shutdown(2)
        self._thread.join()
        self._connection.close()

    def snapshot(self) -> Counter[str]:
        """Messages so far by kind, and ``BYTES`` of them all."""
        return Counter(self._counted)

    def _read(self) -> None:
        os.sched_setaffinity(0, self._cores)  # Of this thread.
        left = b""
        while data := self._connection.recv(READ_BYTES):
            left = self._take(left + data)

    def _take(self, data: bytes) -> bytes:
        """Count the whole messages; returns what follows them."""
        at = 0
        while (end := data.find(LINE_END, at)) >= 0:
            words = data[at:end].split()
            after = end + len(LINE_END)
            if words and words[0] == b"PING":
                self._connection.sendall(b"PONG\r\n")
            elif words and words[0] in (b"MSG", b"HMSG"):
                size = int(words[-1])
                after += size + len(LINE_END)
                if after > len(data):
                    break
                self._count(words[1].decode(), size)
            at = after
        return data[at:]

    def _count(self, subject: str, size: int) -> None:
        kind = self._kinds.get(subject) or self._kinds.setdefault(subject, kind_of(subject))
        self._counted[kind] += 1
        self._counted[BYTES] += size
