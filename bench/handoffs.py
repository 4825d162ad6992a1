"""Whether the KV of a run's requests moved: what routers report of each request that has ended, read from the bus.

A prompt that both engines have cached, or that is shorter than a block, is served by two legs and moves nothing: a run of
such requests says nothing of handoffs.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from bench.peer_checks import RunFailed
from shared.bus.nats_bus import connect_nats
from shared.bus.port import Bus, Envelope
from shared.contracts.channels import REQUESTS_FINISHED
from shared.contracts.inference import RequestFinished, RequestsFinished

REPORTED_S_MAX = 10.0
"""Until routers have reported all requests of a run."""
POLL_S = 0.02
CONNECT_S_MAX = 30.0
DISAGGREGATED = "disaggregated"


@dataclass(frozen=True)
class Moved:
    """The KV that a run's requests moved from their prefill to their decode workers."""

    requests: int
    handoffs: int
    """Requests of which some moved."""
    bytes: int

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.requests + other.requests, self.handoffs + other.handoffs, self.bytes + other.bytes)

    @property
    def said(self) -> str:
        return f"{self.handoffs} of {self.requests}, {self.bytes / 1e6:.0f} MB"


def moved_bytes(request: RequestFinished) -> int:
    """From the prefill worker to the decode worker."""
    return sum(
        move.bytes
        for move in request.kv_moves
        if (move.source_id, move.reader_id) == (request.prefill_worker, request.decode_worker)
    )


def moved(finished: Sequence[RequestFinished]) -> Moved:
    """Of these requests."""
    sizes = [moved_bytes(one) for one in finished]
    return Moved(len(finished), sum(size > 0 for size in sizes), sum(sizes))


def check_moved(finished: Sequence[RequestFinished], requests: int) -> Moved:
    """Each of ``requests`` requests was reported, disaggregated, and moved KV. Raises RunFailed."""
    if len(finished) != requests:
        raise RunFailed(f"routers reported {len(finished)} requests, not {requests}")
    still = [one for one in finished if one.mode != DISAGGREGATED or not moved_bytes(one)]
    if still:
        first = still[0]
        raise RunFailed(
            f"{len(still)} of {requests} requests moved no KV from a prefill to a decode worker. The first one was"
            f" {first.mode or 'not placed'}, of {first.prompt_tokens} tokens, of which {first.cached_tokens} were cached:"
            " such a run says nothing of handoffs. Send prompts that no engine has, of more than a block"
        )
    return moved(finished)


class Handoffs:
    """Keeps what routers report."""

    def __init__(self) -> None:
        self.finished: list[RequestFinished] = []

    async def open(self, bus: Bus) -> None:
        await bus.subscribe(REQUESTS_FINISHED, self._on_finished)

    def _on_finished(self, report: RequestsFinished, _envelope: Envelope) -> None:
        self.finished += report.requests

    async def reported(self, since: int, requests: int) -> list[RequestFinished]:
        """The requests after the first ``since`` ones, when there are so many, or after a while."""
        until = time.monotonic() + REPORTED_S_MAX
        while len(self.finished) - since < requests and time.monotonic() < until:
            await asyncio.sleep(POLL_S)
        return self.finished[since:]

    async def check(self, since: int, requests: int) -> Moved:
        """``check_moved`` of them. Raises RunFailed."""
        return check_moved(await self.reported(since, requests), requests)


class HandoffTap:
    """``Handoffs`` in a thread on these cores: ``with HandoffTap(url, cores) as tap``."""

    def __init__(self, url: str, cores: set[int]) -> None:
        self._url = url
        self._cores = cores
        self._handoffs = Handoffs()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="handoffs", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(2 * CONNECT_S_MAX)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._bus.close(), self._loop).result(CONNECT_S_MAX)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self) -> None:
        os.sched_setaffinity(0, self._cores)  # Of this thread.
        self._bus = await connect_nats(self._url, name="bench-handoffs", connect_s_max=CONNECT_S_MAX)
        await self._handoffs.open(self._bus)

    @property
    def seen(self) -> int:
        """Requests reported so far."""
        return len(self._handoffs.finished)

    def reported(self, since: int, requests: int) -> list[RequestFinished]:
        """See ``Handoffs.reported``."""
        waiting = self._handoffs.reported(since, requests)
        return asyncio.run_coroutine_threadsafe(waiting, self._loop).result(2 * REPORTED_S_MAX)
