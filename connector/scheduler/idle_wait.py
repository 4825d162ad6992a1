"""Lets an engine that only waits for other workers sleep between steps.

EngineCore has no such wait: while a request waits for remote KV it steps without a pause, about 1,000 times a second,
and on a CPU takes a core from the thread that copies.
"""

from __future__ import annotations

from typing import Any

IDLE_WAIT_S_MAX = 0.01
"""Deadlines, and other things that vLLM waits for, are checked this often."""
READ_WAIT_S_MAX = 0.03
"""While reads are under way, if their end wakes the engine. Each check is a step, which takes 1 to 2 ms of the core
that copies; without this, empty steps took a third of it.
"""


class IdleWait:
    """The wait between two steps of an engine of which no request can proceed.

    It waits on EngineCore's input queue, so that a new request, abort or call ends the wait.
    """

    def __init__(self) -> None:
        self.wakes_on_reads = False
        """The worker role is in this process and calls ``wake`` when a read ends."""
        self._inbox: Any = None
        self._changed = True

    def attach_to(self, core: Any) -> None:
        """Find the queue through which requests, aborts and calls reach the engine."""
        self._inbox = getattr(core, "input_queue", None)

    @property
    def is_attached(self) -> bool:
        """Whether the engine has such a queue."""
        return self._inbox is not None

    def note_change(self) -> None:
        """The next step may find work: do not wait before it."""
        self._changed = True

    def wake(self) -> None:
        """Like ``note_change``, from any thread; also ends a wait under way."""
        inbox = self._inbox
        if inbox is not None:
            with inbox.not_empty:
                self._changed = True
                inbox.not_empty.notify_all()

    def note_step(self, scheduled_tokens: int) -> None:
        """The scheduler has handled all changes so far."""
        self._changed = scheduled_tokens > 0

    def wait(self, s_max: float = IDLE_WAIT_S_MAX) -> None:
        """Wait for at most ``s_max``; return at once if something changed since the last step."""
        inbox = self._inbox
        if self._changed or inbox is None:
            return
        with inbox.not_empty:
            if not (inbox.queue or self._changed):
                inbox.not_empty.wait(s_max)
