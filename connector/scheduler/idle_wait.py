"""An engine that only waits for other workers rests: it wakes when something comes, not a thousand times a second."""

from __future__ import annotations

from typing import Any

REST_S_MAX = 0.01
"""Deadlines, and whatever else vLLM waits for beside us, are looked at that often."""
READ_REST_S_MAX = 0.03
"""While bytes move, if their end rings. Each look is a step, and takes a millisecond or two of the core that copies."""


class IdleWait:
    """Between two steps of an engine none of whose requests can go on."""

    def __init__(self) -> None:
        self.hears_reads = False
        """Whoever reads is in this process and rings."""
        self._inbox: Any = None
        self._stirred = True

    def in_front_of(self, core: Any) -> None:
        """Requests, aborts and calls come to the engine through this queue; resting, it waits for the next one."""
        self._inbox = getattr(core, "input_queue", None)

    @property
    def can_be_rung(self) -> bool:
        """Whether there is a queue to rest at."""
        return self._inbox is not None

    def stir(self) -> None:
        """Something has changed: the next step may find something to do."""
        self._stirred = True

    def ring(self) -> None:
        """Something has changed: from another thread, and it ends a rest."""
        inbox = self._inbox
        if inbox is not None:
            with inbox.not_empty:
                self._stirred = True
                inbox.not_empty.notify_all()

    def stepped(self, scheduled_tokens: int) -> None:
        """The scheduler has looked at everything that came until now."""
        self._stirred = scheduled_tokens > 0

    def take(self, s_max: float = REST_S_MAX) -> None:
        """IdleWait, unless something has changed since the last step. At most so long."""
        inbox = self._inbox
        if self._stirred or inbox is None:
            return
        with inbox.not_empty:
            if not (inbox.queue or self._stirred):
                inbox.not_empty.wait(s_max)
