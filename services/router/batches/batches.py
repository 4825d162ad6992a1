"""Clients' batches: made, listed and cancelled by their tenant only, and run by any router.

A router claims batches that no router runs, and those whose router is gone. A claim is a write over the revision that
was read, so that one router gets it. The router that runs a batch writes its record every few seconds; a record that
has not changed for ``LEASE_S``, as seen from here, has lost its router. So no two clocks need to agree.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec

from services.router.batches.batch_run import HEARTBEAT_S, BatchRun
from services.router.batches.files import PURPOSE, FileRefused, Files, new_id
from services.router.batches.line_server import LineServer
from services.router.batches.lines import ENDPOINTS
from services.router.batches.store import Records, StoreFailed
from services.router.request.client import ApiClient
from shared.bus.port import Bus, StoredValue, WrongRevision, watch_store
from shared.contracts.batches import (
    BATCH_ID,
    CANCELLING,
    IN_PROGRESS,
    VALIDATING,
    BatchUsage,
    LineFault,
    StoredBatch,
    record_key,
)
from shared.contracts.channels import BATCHES
from shared.contracts.ids import RouterId
from shared.runtime.clock import Clock

log = logging.getLogger("baton.router")

LEASE_S = 5 * HEARTBEAT_S
POLL_S = 1.0
"""Interval at which batches without a router are looked for."""
RUNS_AT_ONCE_MAX, TENANT_RUNS_MAX = 16, 4
"""Batches that this router runs at a time, and those of one tenant."""
RUNS_RESERVED = 4
"""The last runs of a router are for tenants without any, at this router and at others."""
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
        self._gave_way: dict[str, float] = {}
        """When batches that have not ended gave way to others at this router."""
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
                await self._claim_all(tasks)
                self._make_way()
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
            self._gave_way.pop(change.key, None)
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

    async def _claim_all(self, tasks: asyncio.TaskGroup) -> None:
        """Claim as many batches as this router may run."""
        tried: set[str] = set()
        while not self._is_stopped and (seen := self._next(tried)) is not None:
            tried.add(seen.batch.key)
            if not await self._claim(seen, tasks):
                return

    def _next(self, tried: set[str]) -> Seen | None:
        """A batch without a router that this one may run: of a tenant with the fewest that run, the oldest. Those that
        have given way come last.
        """
        free_runs = RUNS_AT_ONCE_MAX - len(self._runs)
        if free_runs <= 0:
            return None
        running, here = self._running(), Counter(run.batch.tenant for run in self._runs.values())

        def may_run(seen: Seen) -> bool:
            tenant = seen.batch.tenant
            if seen.batch.status == CANCELLING:  # It only has to end.
                return True
            return here[tenant] < TENANT_RUNS_MAX and (free_runs > RUNS_RESERVED or not running[tenant])

        free = (
            seen
            for key, seen in self._seen.items()
            if key not in self._runs and key not in tried and not self._is_run(seen) and may_run(seen)
        )
        return min(
            free,
            key=lambda one: (running[one.batch.tenant], self._gave_way.get(one.batch.key, 0.0), one.batch.created_at),
            default=None,
        )

    def _running(self) -> Counter[str]:
        """Batches by tenant that routers run now, all routers together."""
        return Counter(seen.batch.tenant for seen in self._seen.values() if self._is_run(seen))

    def _is_run(self, seen: Seen) -> bool:
        return bool(seen.batch.run) and self._clock.now() - seen.changed_at < LEASE_S

    def _make_way(self) -> None:
        """Where tenants without a run wait and all runs are taken, have one end whose lines only wait."""
        if self._is_stopped or len(self._runs) < RUNS_AT_ONCE_MAX:
            return
        running = self._running()
        if all(running[seen.batch.tenant] for seen in self._seen.values()):
            return
        stuck = [run for run in self._runs.values() if run.is_stuck]
        if stuck:
            run = min(stuck, key=lambda one: one.stuck_since)
            self._gave_way[run.batch.key] = self._clock.now()
            run.give_way()

    async def _claim(self, seen: Seen, tasks: asyncio.TaskGroup) -> bool:
        """Run the batch, if no other router is faster. False: records cannot be written now."""
        batch = seen.batch
        if batch.runs >= RUNS_MAX:
            fault = LineFault(code="too_many_interruptions", message="The batch was interrupted too often.")
            batch = msgspec.structs.replace(batch, faults=[*batch.faults, fault])
        run_id = secrets.token_hex(RUN_BYTES)
        claimed = msgspec.structs.replace(batch, router_id=self._router_id, run=run_id, runs=batch.runs + 1)
        try:
            revision = await self._records.update_batch(claimed, seen.revision)
        except WrongRevision:
            return True
        except StoreFailed as error:
            log.info("cannot claim batch %s: %s", batch.id, error)
            return False
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
        return True

    async def _run(self, key: str, run: BatchRun) -> None:
        try:
            await run.run()
        except Exception:
            log.exception("batch %s is interrupted by an internal error", run.batch.id)
        finally:
            del self._runs[key]
            self._changed.set()


WINDOW = re.compile(r"([1-9][0-9]{0,2})([hd])")
HOUR_S = 3600
WINDOW_S_MAX = 7 * 24 * HOUR_S
"""Results that were stored first must not expire before the batch ends."""
METADATA_MAX, NAME_CHARS_MAX, VALUE_CHARS_MAX = 16, 64, 512
UNFINISHED_MAX = 100
"""Batches of one tenant that have not ended."""
BATCHES_MAX = 1000
"""Batches of one tenant. A further one makes routers forget the one that ended first; its files stay."""
CANCELS_MAX = 10
"""Attempts, while the batch's router writes its record too."""


class _Wanted(msgspec.Struct, kw_only=True):
    input_file_id: Any = None
    endpoint: Any = None
    completion_window: Any = None
    metadata: Any = None


class Batches:
    """Files and batches. Methods raise StoreFailed; those that a client asks for something also FileRefused."""

    def __init__(self, router_id: RouterId, bus: Bus, clock: Clock, lines: LineServer, files_bytes_max: int) -> None:
        """``files_bytes_max``: of one tenant; 0: no files and no batches."""
        self.enabled = files_bytes_max > 0
        self._clock = clock
        self._records = Records(bus)
        self.files = Files(self._records, clock, files_bytes_max)
        self.lines = lines
        self.runner = Runner(
            router_id=router_id,
            bus=bus,
            clock=clock,
            records=self._records,
            server=lines,
            output_bytes_max=files_bytes_max,
        )

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Run batches, and remove expired files."""
        tasks.create_task(self.runner.follow(), name="follow-batches")
        tasks.create_task(self.runner.run(), name="run-batches")
        tasks.create_task(self.files.sweep(), name="sweep-files")

    async def create(self, client: ApiClient, body: bytes) -> StoredBatch:
        """Make a batch as the body wants it."""
        tenant = client.key.tenant
        wanted = read_wanted(body)
        file = await self.files.find(tenant, wanted.input_file_id)
        if file is None:
            raise FileRefused(
                404, f"No such File object: {wanted.input_file_id[:64]}", "file_not_found", "input_file_id"
            )
        if file.purpose != PURPOSE:
            message = f"The purpose of the input file must be {PURPOSE}; it is {file.purpose}."
            raise FileRefused(400, message, "invalid_purpose", "input_file_id")
        now_ms = self._clock.wall_ms()
        now, batch_id = now_ms // 1000, new_id("batch_", now_ms)
        expires_at = now + window_s(wanted.completion_window)
        if file.expires_at < expires_at:
            message = "The file expires before the batch's completion window ends. Upload it again."
            raise FileRefused(400, message, "file_expires", "input_file_id")
        batch = StoredBatch(
            key=record_key(tenant, batch_id),
            id=batch_id,
            tenant=tenant,
            api_key=client.key.sha256,
            endpoint=wanted.endpoint,
            input_file_id=file.id,
            input=file.segments,
            completion_window=wanted.completion_window,
            metadata=wanted.metadata,
            status=VALIDATING,
            created_at=now,
            expires_at=expires_at,
        )
        async with self._records.counting(tenant):
            await self._add(batch)
        return batch

    async def _add(self, batch: StoredBatch) -> None:
        batches = await self._records.batches(batch.tenant)
        if sum(not one.has_ended for one in batches) >= UNFINISHED_MAX:
            message = f"{UNFINISHED_MAX} batches of this tenant have not ended. Try again when some have."
            raise FileRefused(429, message, "too_many_batches")
        ended = sorted((one for one in batches if one.has_ended), key=lambda one: (one.created_at, one.id))
        for one in ended[: max(0, len(batches) + 1 - BATCHES_MAX)]:
            await self._records.delete_batch(one.key)
        await self._records.create_batch(batch)

    async def find(self, tenant: str, batch_id: str) -> StoredBatch | None:
        """The tenant's batch; None: it has none of this id."""
        if not BATCH_ID.fullmatch(batch_id):
            return None
        stored = await self._records.batch(record_key(tenant, batch_id))
        return stored.value if stored is not None else None

    async def of_tenant(self, tenant: str) -> list[StoredBatch]:
        """The tenant's batches, the newest first."""
        batches = await self._records.batches(tenant)
        return sorted(batches, key=lambda batch: (batch.created_at, batch.id), reverse=True)

    async def cancel(self, tenant: str, batch_id: str) -> StoredBatch | None:
        """Have the batch end soon; None: there is none of this id."""
        for _ in range(CANCELS_MAX):
            known = BATCH_ID.fullmatch(batch_id) is not None
            stored = await self._records.batch(record_key(tenant, batch_id)) if known else None
            if stored is None or stored.value is None:
                return None
            batch = stored.value
            if batch.status == CANCELLING:
                return batch
            if batch.status not in (VALIDATING, IN_PROGRESS):
                message = f"Cannot cancel a batch with status '{batch.status}'."
                raise FileRefused(409, message, "batch_not_running", "batch_id")
            times = {**batch.times, CANCELLING: self._clock.wall_ms() // 1000}
            batch = msgspec.structs.replace(batch, status=CANCELLING, times=times)
            try:
                await self._records.update_batch(batch, stored.revision)
            except WrongRevision:
                continue
            return batch
        raise StoreFailed("the batch is being written; try again")


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A batch as its client asks for it."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None


def read_wanted(body: bytes) -> Wanted:
    """Raises FileRefused."""
    try:
        fields = msgspec.json.decode(body, type=_Wanted)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise _bad("The body must be a JSON object.") from None
    if not isinstance(fields.input_file_id, str) or not fields.input_file_id:
        raise _bad("input_file_id must be the id of a file.", "input_file_id")
    if fields.endpoint not in ENDPOINTS:
        raise _bad(f"endpoint must be one of {', '.join(ENDPOINTS)}.", "endpoint")
    if not isinstance(fields.completion_window, str) or not window_s(fields.completion_window):
        raise _bad(
            "completion_window must be 24h, or another number of hours (h) or days (d) up to 7d.", "completion_window"
        )
    return Wanted(
        input_file_id=fields.input_file_id,
        endpoint=fields.endpoint,
        completion_window=fields.completion_window,
        metadata=_metadata(fields.metadata),
    )


def _metadata(given: Any) -> dict[str, str] | None:
    if given is None:
        return None
    if not isinstance(given, dict) or len(given) > METADATA_MAX or not all(map(_is_pair, given.items())):
        message = (
            f"metadata must be an object of at most {METADATA_MAX} names of up to {NAME_CHARS_MAX} characters, with "
            f"strings of up to {VALUE_CHARS_MAX} characters."
        )
        raise _bad(message, "metadata")
    return given


def _is_pair(pair: tuple[str, Any]) -> bool:
    name, value = pair
    return isinstance(value, str) and len(name) <= NAME_CHARS_MAX and len(value) <= VALUE_CHARS_MAX


def window_s(text: str) -> int:
    """A completion window in seconds; 0 if it is none."""
    match = WINDOW.fullmatch(text)
    seconds = int(match[1]) * HOUR_S * (24 if match[2] == "d" else 1) if match is not None else 0
    return seconds if seconds <= WINDOW_S_MAX else 0


def _bad(message: str, param: str | None = None) -> FileRefused:
    return FileRefused(400, message, "invalid_request", param)


def batch_object(batch: StoredBatch) -> dict[str, Any]:
    """As OpenAI's."""
    faults = {"object": "list", "data": [_fault(one) for one in batch.faults]} if batch.faults else None
    done = batch.progress
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": faults,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "model": batch.model or None,
        "status": batch.status,
        "output_file_id": batch.output_file_id or None,
        "error_file_id": batch.error_file_id or None,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **{f"{status}_at": batch.times.get(status) for status in TIMES},
        "request_counts": {"total": batch.total, "completed": done.completed, "failed": done.failed},
        "usage": _usage(done.usage),
        "metadata": batch.metadata,
    }


TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def _usage(usage: BatchUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }


def _fault(fault: LineFault) -> dict[str, Any]:
    return {"code": fault.code, "message": fault.message, "line": fault.line, "param": fault.param}
