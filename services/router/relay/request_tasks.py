"""The tasks of requests that have to wait for something: each runs with its request's trace in its log lines."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import copy_context
from typing import Any

from services.router.request.context import RequestContext
from shared.telemetry.log import TRACE_ID


class RequestTasks:
    """``close`` cancels those that have not ended."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, context: RequestContext, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run ``work``. Its exceptions are its own business, or of a callback that the caller adds to the task."""
        variables = copy_context()
        variables.run(TRACE_ID.set, context.trace_id())
        task = self._loop.create_task(work, name=name, context=variables)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Cancel what still runs, and wait for its end."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
