"""Runs batches: claims those that no router runs, and those whose router is gone.

A claim is a write over the revision that was read, so that one router gets it. The router that runs a batch writes its
record every few seconds; a record that has not changed for ``LEASE_S``, as seen from here, has lost its router. So no
two clocks need to agree.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from services.router.batches.batch_run import HEARTBEAT_S, BatchRun
from services.router.batches.line_server import LineServer
from services.router.batches.store import Records, StoreFailed
from shared.bus.port import Bus, StoredValue, WrongRevision, watch_store
from shared.contracts.batches import CANCELLING, LineFault, StoredBatch
from shared.contracts.channels import BATCHES
from shared.contracts.ids import RouterId
from shared.runtime.clock import Clock

log = logging.getLogger("baton.router")

LEASE_S = 5 * HEARTBEAT_S
POLL_S = 1.0
"""Between two looks for batches without a router."""
RUNS_AT_ONCE_MAX = 4
"""Batches that this router runs at a time."""
RUNS_MAX = 128
"""Claims of one batch: each may add a segment to its files, and a batch that ends routers must not do so for ever."""
RUN_BYTES = 8
STOP_S_MAX = 5.0


@dataclass(slots=True)
class Seen:
    """A batch as it was stored last."""

    batch: StoredBatch
    revision: int
    changed_at: float


class Runner:
    """``follow`` and ``run`` are tasks of the router."""

    def __init__(
        self,
        *,
        router_id: RouterId,
        bus: Bus,
        clock: Clock,
        records: Records,
        server: LineServer,
        output_bytes_max: int,
    ) -> None:
        self._router_id = router_id
        self._bus = bus
        self._clock = clock
        self._records = records
        self._server = server
        self._output_bytes_max = output_bytes_max
        self._seen: dict[str, Seen] = {}
        """Batches that have not ended."""
        self._runs: dict[str, BatchRun] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._is_stopped = False
        bus.on_reconnect(self._on_reconnect)

    @property
    def runs(self) -> list[StoredBatch]:
        return [run.batch for run in self._runs.values()]

    async def follow(self) -> None:
        """Watch the records until cancelled."""
        async for change in watch_store(self._bus, BATCHES):
            if change is not None:
                self._on_change(change)

    async def run(self) -> None:
        """Claim and run batches until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._changed.clear()
                for seen in self._wanting():
                    if self._is_stopped or len(self._runs) >= RUNS_AT_ONCE_MAX:
                        break
                    await self._claim(seen, tasks)
                try:
                    async with asyncio.timeout(POLL_S):
                        await self._changed.wait()
                except TimeoutError:
                    pass

    async def stop(self) -> None:
        """Give all batches to other routers, and take no more."""
        self._is_stopped = True
        for run in self._runs.values():
            run.stop()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=STOP_S_MAX)

    def _on_change(self, change: StoredValue[StoredBatch]) -> None:
        batch = change.value
        if batch is None or batch.has_ended:
            self._seen.pop(change.key, None)
        else:
            self._seen[change.key] = Seen(batch, change.revision, self._clock.now())
            if batch.status == CANCELLING and change.key in self._runs:
                self._runs[change.key].cancel()
        if batch is None or not batch.run:
            self._changed.set()

    def _on_reconnect(self) -> None:
        """While the connection was down no router could renew a claim."""
        for seen in self._seen.values():
            seen.changed_at = self._clock.now()

    def _wanting(self) -> Iterator[Seen]:
        """Batches without a router: tenants with the fewest that run come first, then the oldest."""
        now = self._clock.now()
        free = [
            seen
            for key, seen in self._seen.items()
            if key not in self._runs and (not seen.batch.run or now - seen.changed_at >= LEASE_S)
        ]
        running: dict[str, int] = {}
        for seen in self._seen.values():
            if seen.batch.run and now - seen.changed_at < LEASE_S:
                running[seen.batch.tenant] = running.get(seen.batch.tenant, 0) + 1
        yield from sorted(free, key=lambda seen: (running.get(seen.batch.tenant, 0), seen.batch.created_at))

    async def _claim(self, seen: Seen, tasks: asyncio.TaskGroup) -> None:
        """Run the batch, if no other router is faster."""
        batch = seen.batch
        if batch.runs >= RUNS_MAX:
            fault = LineFault(code="too_many_interruptions", message="The batch was interrupted too often.")
            batch = msgspec.structs.replace(batch, faults=[*batch.faults, fault])
        run_id = secrets.token_hex(RUN_BYTES)
        claimed = msgspec.structs.replace(batch, router_id=self._router_id, run=run_id, runs=batch.runs + 1)
        try:
            revision = await self._records.update_batch(claimed, seen.revision)
        except WrongRevision:
            return
        except StoreFailed as error:
            log.info("cannot claim batch %s: %s", batch.id, error)
            return
        self._seen[batch.key] = Seen(claimed, revision, self._clock.now())
        run = self._runs[batch.key] = BatchRun(
            claimed,
            revision,
            records=self._records,
            server=self._server,
            clock=self._clock,
            output_bytes_max=self._output_bytes_max,
        )
        task = tasks.create_task(self._run(batch.key, run), name=f"batch {batch.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, key: str, run: BatchRun) -> None:
        try:
            await run.run()
        except Exception:
            log.exception("batch %s is interrupted by an internal error", run.batch.id)
        finally:
            del self._runs[key]
            self._changed.set()
