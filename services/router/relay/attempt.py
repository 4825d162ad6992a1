"""One request's attempts: which workers failed it, and what its client has had of a stream that may go on elsewhere."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable

from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.workers import Fingerprint

NOT_BROKEN = -1.0
CREATED = re.compile(rb'"created":(\d{1,18})')


class Had:
    """What the client has had of its stream. ``remember`` is called for every frame."""

    __slots__ = ("created", "joined", "remember", "tokens")

    def __init__(self) -> None:
        self.tokens = array("I")
        """In order: all tokens of the frames that were relayed."""
        self.remember = self.tokens.fromlist
        """Takes a frame's token ids: the array's own method, because nothing is cheaper."""
        self.joined = array("I")
        """Which of them, by index, an engine's server has heard of together with the one before."""
        self.created = 0
        """When the answer began, as its first event says; 0: it does not."""

    def join(self, joined: Iterable[int]) -> None:
        """As the frame says whose token ids are remembered next."""
        before = len(self.tokens)
        self.joined.extend([before + index for index in joined])

    def begin(self, events: bytes) -> None:
        """The first of the stream."""
        if said := CREATED.search(events):
            self.created = int(said[1])


class Attempts:
    """Of one request."""

    __slots__ = (
        "answering",
        "broke_at",
        "busy",
        "count",
        "failed",
        "had",
        "like",
        "resumed_tokens",
        "resumes",
        "resumes_max",
        "why_not",
    )

    def __init__(self, resumes_max: int, why_not: str) -> None:
        self.count = 0
        self.answering = False
        """The client has had something of the present attempt's answer."""
        self.failed: dict[WorkerId, Epoch] = {}
        """Lives of workers that failed this request."""
        self.busy: set[WorkerId] = set()
        """Workers that had no room, lately."""
        self.had = Had()
        self.resumes_max = resumes_max
        """How often the stream may go on elsewhere."""
        self.why_not = why_not
        """Why it never may, in words; empty when it may."""
        self.resumes = 0
        self.resumed_tokens = 0
        """Had by the client at all resumes, together."""
        self.like: Fingerprint | None = None
        """Of the worker that began the stream: others would go on with another model."""
        self.broke_at = NOT_BROKEN
        """When the client had something for the last time, from a break until the stream goes on."""

    def begin(self, *, resumed: bool) -> None:
        """One more."""
        self.count += 1
        self.answering = False
        if resumed:
            self.resumes += 1
            self.resumed_tokens += len(self.had.tokens)

    def left(self, attempts_max: int, *, begun: bool) -> bool:
        """Whether another one is allowed; ``begun``: the client has had some of the answer."""
        if begun:
            return not self.why_not and self.resumes < self.resumes_max
        return self.count < attempts_max
