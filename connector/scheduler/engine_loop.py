"""What Baton adds to the loop of vLLM's EngineCore: calls are answered during a step, and an idle engine sleeps.

EngineCore handles calls between steps only, and a step with much prefill takes longer than a reader waits for a grant.
vLLM's scheduler touches no block while the model computes, though: between the end of ``schedule`` and the beginning of
``update_from_output`` the thread that receives requests may carry out a call by itself, under the scheduler's lock.

EngineCore also has no wait for remote KV: while a request waits for it, it steps without a pause, about 1,000 times a
second, and on a CPU takes a core from the thread that copies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from vllm.v1.engine import EngineCoreRequestType

METHOD = "kv_exchange"
"""The utility method of the calls."""
_UTILITY = EngineCoreRequestType.UTILITY

Item = tuple[EngineCoreRequestType, Any]
"""Item of EngineCore's input queue."""


class CallsDuringSteps:
    """One per engine. The scheduler holds ``lock`` wherever it uses blocks."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._core: Any = None
        self._enqueue: Callable[[Item], None]
        self._dummy_batch: Callable[[], None]
        self._is_computing = False

    def attach_to(self, core: Any) -> None:
        """From now on the thread that receives requests hands calls to this object first. Does nothing without such a
        thread, and the second time.
        """
        inbox = getattr(core, "input_queue", None)
        if self._core is None and inbox is not None:
            self._core = core
            self._enqueue = inbox.put_nowait
            inbox.put_nowait = self._receive
            self._dummy_batch = core.execute_dummy_batch
            core.execute_dummy_batch = self._compute_dummy_batch

    def begin(self) -> None:
        """The scheduler has made a step; the model computes it next. Call with ``lock`` held."""
        if self._core is None:
            return
        for item in self._take_waiting():
            self._core._handle_client_request(*item)
        self._is_computing = True

    def end(self) -> None:
        """The scheduler uses blocks again. Call with ``lock`` held."""
        self._is_computing = False

    def _compute_dummy_batch(self) -> None:
        """An engine of a data parallel group computes nothing while others do. Their step may be a long one."""
        with self.lock:
            self.begin()
        try:
            self._dummy_batch()
        finally:
            with self.lock:
                self.end()

    def _receive(self, item: Item) -> None:
        """Calls keep their order among themselves, and may overtake requests and aborts."""
        if not (self._is_computing and _is_call(item) and self._carry_out(item)):
            self._enqueue(item)

    def _carry_out(self, item: Item) -> bool:
        """Whether it could be done now."""
        with self.lock:
            if not self._is_computing or self._has_waiting():
                return False
            self._core._handle_client_request(*item)
            return True

    def _has_waiting(self) -> bool:
        inbox = self._core.input_queue
        with inbox.mutex:
            return any(map(_is_call, inbox.queue))

    def _take_waiting(self) -> list[Item]:
        """The calls that came while the scheduler worked."""
        inbox = self._core.input_queue
        if not inbox.queue:
            return []
        with inbox.mutex:
            items = list(inbox.queue)
            inbox.queue.clear()
            inbox.queue.extend(item for item in items if not _is_call(item))
        return [item for item in items if _is_call(item)]


def _is_call(item: Item) -> bool:
    """Utility requests are (client, call id, method, arguments)."""
    kind, request = item
    return kind is _UTILITY and request[2] == METHOD


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
        self._steps_computing = 0

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

    def begin_step(self) -> None:
        """The scheduler handles all changes so far."""
        self._changed = False

    def note_step(self, scheduled_tokens: int) -> None:
        """The scheduler has made a step of so many tokens."""
        if scheduled_tokens:
            self._changed = True
            self._steps_computing += 1

    def note_output(self, scheduled_tokens: int) -> None:
        """The scheduler gets the output of a step of so many tokens."""
        if scheduled_tokens:
            self._steps_computing -= 1

    @property
    def is_computing(self) -> bool:
        """Whether the output of a step with tokens is outstanding: EngineCore must go on and take it."""
        return self._steps_computing > 0

    @property
    def has_only_changed(self) -> bool:
        """Whether a wait has ended by a change that the scheduler finds by itself; EngineCore has nothing to take."""
        return self._changed and self._inbox is not None and not self._inbox.queue

    def wait(self, s_max: float = IDLE_WAIT_S_MAX) -> None:
        """Wait for at most ``s_max``; return at once if something changed since the last step."""
        inbox = self._inbox
        if self._changed or inbox is None:
            return
        with inbox.not_empty:
            if not (inbox.queue or self._changed):
                inbox.not_empty.wait(s_max)
