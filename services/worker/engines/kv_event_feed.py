"""A queue of KV events, from a simulated engine or a store to their publisher."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from services.worker.engines.port import EngineDead
from shared.contracts.kv_events import KvEvent

KV_EVENTS_MAX = 10_000
"""Events queued for the consumer; one that is further behind gets the whole cache again."""


class KvEventFeed:
    """Of an engine that has ``died`` when that future is done. Must be made on a running event loop."""

    def __init__(self, died: asyncio.Future[str], whole_as_events: Callable[[], list[KvEvent]]) -> None:
        self._died = died
        self._whole_as_events = whole_as_events
        self._events: list[KvEvent] = []
        self._arrived = asyncio.Event()
        died.add_done_callback(lambda _died: self._arrived.set())

    def tell(self, events: Sequence[KvEvent]) -> None:
        """Queue new events, which ``whole_as_events`` already includes."""
        if not events:
            return
        self._events += events
        if len(self._events) > KV_EVENTS_MAX:
            self._events = self._whole_as_events()
        self._arrived.set()

    async def batches(self) -> AsyncIterator[list[KvEvent]]:
        """All that came since the last batch, from the first event on. Raises EngineDead."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            if self._died.done():
                raise EngineDead(self._died.result())
            events, self._events = self._events, []
            yield events
