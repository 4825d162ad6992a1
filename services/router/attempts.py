"""One request's attempts: which workers failed it, and what its client has had of a stream that may go on elsewhere."""

from __future__ import annotations

from array import array

from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.inference import pack_tokens
from shared.contracts.workers import Fingerprint

NOT_BROKEN = -1.0


class Attempts:
    """``remember`` is called for every frame of every stream."""

    __slots__ = (
        "answering",
        "broke_at",
        "busy",
        "count",
        "failed",
        "like",
        "remember",
        "resumed_tokens",
        "resumes",
        "resumes_max",
        "tokens",
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
        self.tokens = array("I")
        """What the client has had, in order: all tokens of the frames that were relayed."""
        self.remember = self.tokens.fromlist
        """Takes a frame's token ids: the array's own method, because nothing is cheaper."""
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
            self.resumed_tokens += len(self.tokens)

    def left(self, attempts_max: int, *, begun: bool) -> bool:
        """Whether another one is allowed; ``begun``: the client has had some of the answer."""
        if begun:
            return not self.why_not and self.resumes < self.resumes_max
        return self.count < attempts_max

    def packed(self) -> bytes:
        """What the client has had, as a leg is told of it."""
        return pack_tokens(self.tokens)
