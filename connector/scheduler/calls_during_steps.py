"""Answers the worker's calls while the engine computes a step.

EngineCore handles calls between steps only, and a step with much prefill takes longer than a reader waits for a grant.
vLLM's scheduler touches no block while the model computes, though: between the end of ``schedule`` and the beginning of
``update_from_output`` the thread that receives requests may carry out a call by itself, under the scheduler's lock.
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
"""In EngineCore's input queue."""


class CallsDuringSteps:
    """One per engine. The scheduler holds ``lock`` wherever it uses blocks."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._core: Any = None
        self._enqueue: Callable[[Item], None]
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
