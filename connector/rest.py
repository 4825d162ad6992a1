"""An engine that only waits for other workers rests: it wakes when something comes, not a thousand times a second."""

from __future__ import annotations

from typing import Any

REST_S_MAX = 0.01
"""Deadlines, and whatever else vLLM waits for beside us, are looked at that often."""


class Rest:
    """Between two steps of an engine none of whose requests can go on."""

    def __init__(self) -> None:
        self._inbox: Any = None
        self._stirred = True

    def in_front_of(self, core: Any) -> None:
        """Requests, aborts and calls come to the engine through this queue; resting, it waits for the next one."""
        self._inbox = getattr(core, "input_queue", None)

    def stir(self) -> None:
        """Something has changed: the next step may find something to do."""
        self._stirred = True

    def stepped(self, scheduled_tokens: int) -> None:
        """The scheduler has looked at everything that came until now."""
        self._stirred = scheduled_tokens > 0

    def take(self) -> None:
        """Rest, unless something has changed since the last step."""
        inbox = self._inbox
        if self._stirred or inbox is None:
            return
        with inbox.not_empty:
            if not inbox.queue:
                inbox.not_empty.wait(REST_S_MAX)
