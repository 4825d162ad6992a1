"""Clients' batches: made, listed and cancelled by their tenant only, and run by any router."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec

from services.router.auth.client import ApiClient
from services.router.batches.files import PURPOSE, FileRefused, Files, new_id
from services.router.batches.line_server import LineServer
from services.router.batches.lines import ENDPOINTS
from services.router.batches.runner import Runner
from services.router.batches.store import Records, StoreFailed
from shared.bus.port import Bus, WrongRevision
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
from shared.contracts.ids import RouterId
from shared.runtime.clock import Clock

WINDOW = re.compile(r"([1-9][0-9]{0,2})([hd])")
HOUR_S = 3600
WINDOW_S_MAX = 7 * 24 * HOUR_S
"""Results that were stored first must not expire before the batch ends."""
METADATA_MAX, NAME_CHARS_MAX, VALUE_CHARS_MAX = 16, 64, 512
UNFINISHED_MAX = 100
"""Batches of one tenant that have not ended."""
BATCHES_MAX = 1000
"""Of one tenant. A further one makes routers forget the one that ended first; its files stay."""
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
        batches = await self._records.batches(tenant)
        if sum(not batch.has_ended for batch in batches) >= UNFINISHED_MAX:
            message = f"{UNFINISHED_MAX} batches of this tenant have not ended. Try again when some have."
            raise FileRefused(429, message, "too_many_batches")
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
        ended = sorted((one for one in batches if one.has_ended), key=lambda one: (one.created_at, one.id))
        for one in ended[: max(0, len(batches) + 1 - BATCHES_MAX)]:
            await self._records.delete_batch(one.key)
        await self._records.create_batch(batch)
        return batch

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
