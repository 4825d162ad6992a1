"""An engine that only waits for other workers rests: it wakes when something comes, not a thousand times a second."""

from __future__ import annotations

from typing import Any

IDLE_WAIT_S_MAX = 0.01
"""Deadlines, and whatever else vLLM waits for beside us, are looked at that often."""
READ_WAIT_S_MAX = 0.03
"""While bytes move, if their end rings. Each look is a step, and takes a millisecond or two of the core that copies."""


class IdleWait:
    """Between two steps of an engine none of whose requests can go on."""

    def __init__(self) -> None:
        self.wakes_on_reads = False
        """Whoever reads is in this process and rings."""
        self._inbox: Any = None
        self._changed = True

    def attach_to(self, core: Any) -> None:
        """Requests, aborts and calls come to the engine through this queue; resting, it waits for the next one."""
        self._inbox = getattr(core, "input_queue", None)

    @property
    def is_attached(self) -> bool:
        """Whether there is a queue to rest at."""
        return self._inbox is not None

    def note_change(self) -> None:
        """Something has changed: the next step may find something to do."""
        self._changed = True

    def wake(self) -> None:
        """Something has changed: from another thread, and it ends a rest."""
        inbox = self._inbox
        if inbox is not None:
            with inbox.not_empty:
                self._changed = True
                inbox.not_empty.notify_all()

    def note_step(self, scheduled_tokens: int) -> None:
        """The scheduler has looked at everything that came until now."""
        self._changed = scheduled_tokens > 0

    def wait(self, s_max: float = IDLE_WAIT_S_MAX) -> None:
        """IdleWait, unless something has changed since the last step. At most so long."""
        inbox = self._inbox
        if self._changed or inbox is None:
            return
        with inbox.not_empty:
            if not (inbox.queue or self._changed):
                inbox.not_empty.wait(s_max)
