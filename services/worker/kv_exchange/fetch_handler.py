"""Fetches by command: prefetch, replicate, evacuate."""

from __future__ import annotations

import asyncio
import uuid

from connector.messages import EngineCall, FetchEnded, StartFetch
from services.worker.kv_exchange.engine_calls import EngineCalls
from shared.bus.port import AskRefused, Envelope
from shared.contracts.failures import Failure, Reason
from shared.contracts.kv_exchange import FULL_HASH_BYTES, LEASE_BLOCKS_MAX, FetchedKv, FetchKv

FETCHES_AT_ONCE_MAX = 32
FETCH_S_MAX = 300.0
OVERTIME_S = 2.0
"""After a fetch's deadline, for the engine's notification to arrive."""


class FetchHandler:
    """Answers KV_FETCH."""

    def __init__(self, calls: EngineCalls) -> None:
        self.is_closed = False
        """The worker drains, so fetched blocks would be lost."""
        self._calls = calls
        self._under_way: dict[str, asyncio.Future[FetchedKv]] = {}

    async def answer(self, fetch: FetchKv, _envelope: Envelope) -> FetchedKv:
        """Handler of KV_FETCH. Raises AskRefused."""
        if refusal := self._refusal(fetch):
            raise AskRefused(refusal)
        fetch_id = uuid.uuid4().hex
        done: asyncio.Future[FetchedKv] = asyncio.get_running_loop().create_future()
        self._under_way[fetch_id] = done
        self._calls.add(EngineCall(fetches=[StartFetch(fetch_id=fetch_id, fetch=fetch)]))
        try:
            async with asyncio.timeout(fetch.deadline_s + OVERTIME_S):
                return await done
        except TimeoutError:
            return FetchedKv(failure=f"the engine had not finished after {fetch.deadline_s:g} s")
        finally:
            del self._under_way[fetch_id]

    def ended(self, ends: list[FetchEnded]) -> None:
        """The engine has ended these fetches."""
        for end in ends:
            done = self._under_way.get(end.fetch_id)
            if done is not None and not done.done():
                done.set_result(end.result)

    def _refusal(self, fetch: FetchKv) -> Failure | None:
        if self.is_closed:
            return Failure(reason=Reason.WORKER_DRAINING, message="this worker drains")
        if len(self._under_way) >= FETCHES_AT_ONCE_MAX or self._calls.full:
            return Failure(reason=Reason.WORKER_BUSY, message=f"{len(self._under_way)} fetches are under way already")
        blocks, rest = divmod(len(fetch.hashes), FULL_HASH_BYTES)
        if rest or not 0 < blocks <= LEASE_BLOCKS_MAX:
            message = f"{len(fetch.hashes)} bytes are not 1 to {LEASE_BLOCKS_MAX} hashes of {FULL_HASH_BYTES} bytes"
            return Failure(reason=Reason.BAD_MESSAGE, message=message)
        if not 0.0 < fetch.deadline_s <= FETCH_S_MAX:
            return Failure(
                reason=Reason.BAD_MESSAGE, message=f"the deadline must be above 0 and at most {FETCH_S_MAX:g} s"
            )
        return None
