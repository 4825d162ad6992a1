"""One router's run of one batch: from where an earlier run was interrupted, to its end or the next interruption.

A result counts when the record says so: first its bytes are stored, then the record with the new sizes of output and
errors and the lines that are done. What a router has not committed when it dies is computed again by the next one, and
is not in the output.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from enum import StrEnum
from typing import NamedTuple, TypeVar

import msgspec

from services.router.batches.line_server import LineServer, is_set
from services.router.batches.lines import (
    BadLine,
    Line,
    LineReader,
    Request,
    Result,
    Validation,
    read_request,
    unanswered,
)
from services.router.batches.slots import Slot
from services.router.batches.store import ClaimLost, Records, SegmentWriter, StoreFailed, read
from shared.bus.outage import Outage
from shared.bus.port import WrongRevision
from shared.contracts.batches import (
    CANCELLED,
    CANCELLING,
    COMPLETED,
    EXPIRED,
    FAILED,
    FILE_S_MAX,
    FINALIZING,
    IN_PROGRESS,
    VALIDATING,
    BatchProgress,
    BatchUsage,
    LineFault,
    Segment,
    StoredBatch,
    StoredFile,
    record_key,
)
from shared.runtime.clock import Clock

log = logging.getLogger("baton.router")

T = TypeVar("T")

AHEAD_MAX = 512
"""Maximum of lines that are served, or done, after one that is not done yet."""
BEGUN_BYTES_MAX = 8 * 1024 * 1024
"""No line begins while those that have no stored result are larger together, or their results are."""
GROUP_S = 0.02
"""Results that come within this time are stored together."""
HEARTBEAT_S = 3.0
"""A run writes its record at least so often, or another router takes the batch over."""
AGAIN_S = 1.0
STUCK_S, STUCK_WITH_RESULTS_S = 60.0, 3600.0
"""A run that gets no results for so long lets a batch of a tenant without a run go first. It waits longer when it has
stored some: each such run adds a segment to the batch's files.
"""
LATE_MESSAGE = "This request could not be executed before the completion window expired."
OUTPUT_PURPOSE = "batch_output"


class Halt(StrEnum):
    """Why no further line is served."""

    STOPPED = "stopped"
    """The router stops, or has lost the batch."""
    CANCELLED = "cancelled"
    LATE = "late"
    FAILED = "failed"


class Stopped(Exception):
    """The run ends here; another router continues."""


class Finished(NamedTuple):
    """A result that is not committed yet."""

    result: Result
    slot: Slot | None
    """Counts as begun until the result is stored. None: the line has not begun."""


class BatchRun:
    """``stop`` ends it early; the batch can be taken over then."""

    def __init__(
        self,
        batch: StoredBatch,
        revision: int,
        *,
        records: Records,
        server: LineServer,
        clock: Clock,
        output_bytes_max: int,
    ) -> None:
        """``batch`` is claimed by this run, with this revision."""
        self.batch = batch
        self._revision = revision
        self._records = records
        self._server = server
        self._clock = clock
        self._output_bytes_max = output_bytes_max
        self._written_at = self._progressed_at = clock.now()
        self._is_giving_way = False
        self._halted: Halt | None = None
        self._outage = Outage(log)
        self._stopping = asyncio.Event()
        """No further line begins, and those that run are ended."""
        self._output, self._errors = SegmentWriter(records.bus), SegmentWriter(records.bus)
        self._before = batch.progress
        self._finished: list[Finished] = []
        self._arrived = asyncio.Event()
        """There are results, or there will be no more."""
        self._done: set[int] = set(batch.progress.ahead)
        self._ends: dict[int, int] = {}
        """Offsets of the lines that follow those which were read and are not before ``progress.line``, by the read
        line's number."""
        self._moved = asyncio.Event()
        """``progress.line`` has changed."""
        self._running = 0
        self._begun: dict[Slot, int] = {}
        """Slots of the lines without a stored result, and the bytes of each line, or of its result."""
        self._feeding: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Let another router go on, soon."""
        self._halt(Halt.STOPPED)

    def cancel(self) -> None:
        """The client does not want it any more; the record says so."""
        if self.batch.status in (VALIDATING, IN_PROGRESS):
            self._become(CANCELLING)
            self._halt(Halt.CANCELLED)

    @property
    def is_stuck(self) -> bool:
        """Whether its lines have waited for long: their key is at its limits, or engines do not take them."""
        stuck_s = STUCK_WITH_RESULTS_S if self._has_results else STUCK_S
        is_waiting = bool(self._begun) and not any(slot.is_held for slot in self._begun)
        return is_waiting and self._clock.now() - self._progressed_at >= stuck_s

    @property
    def _has_results(self) -> bool:
        return self._output.segment.size + self._errors.segment.size > 0

    @property
    def stuck_since(self) -> float:
        return self._progressed_at

    def give_way(self) -> None:
        """Let a batch of another tenant run first."""
        self._is_giving_way = True
        self._halt(Halt.STOPPED)

    async def run(self) -> None:
        """Run until the batch has ended, the run is stopped, or another router has the batch."""
        try:
            if self.batch.status == VALIDATING and not self.batch.faults:
                await self._validate()
            if self.batch.status == IN_PROGRESS and not self.batch.faults:
                await self._serve_lines()
            await self._end()
        except ClaimLost:
            log.info("batch %s is run by another router", self.batch.id)
        except Stopped:
            await self._release()

    async def _release(self) -> None:
        # A run without results has added nothing to the files: it need not count.
        runs = self.batch.runs - (self._is_giving_way and not self._has_results)
        free = msgspec.structs.replace(self.batch, router_id="", run="", runs=runs)
        try:
            await self._records.update_batch(free, self._revision)
        except (StoreFailed, WrongRevision) as error:  # Then it is taken over a little later.
            log.info("batch %s cannot be given to another router at once: %s", self.batch.id, error)

    async def _validate(self) -> None:
        """Look at every line before the first is served."""
        validation = Validation(self.batch.endpoint)
        try:
            async with aclosing(self._read(0, 0)) as lines:
                async for line in lines:
                    validation.add(line)
                    await self._beat()
                    if validation.is_over or self._halted is not None:
                        break
            validation.close()
        except BadLine as bad:
            validation.faults.append(_fault(bad))
        if self._halted is Halt.STOPPED:
            raise Stopped
        if self._halted is None and validation.faults:
            self._fail(*validation.faults)
        elif self._halted is None:
            self.batch = msgspec.structs.replace(self.batch, total=validation.total, model=validation.model)
            self._become(IN_PROGRESS)
            await self._commit()

    async def _beat(self) -> None:
        """Renew the claim, and look at the time."""
        if self._is_late() and self._halted is None:
            self._halt(Halt.LATE)
        if self._clock.now() - self._written_at >= HEARTBEAT_S:
            await self._commit()

    async def _serve_lines(self) -> None:
        """Serve all lines that are not done, and commit their results."""
        ended: Stopped | ClaimLost | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                feeding = self._feeding = tasks.create_task(self._feed(tasks), name=f"feed {self.batch.id}")
                feeding.add_done_callback(lambda _task: self._arrived.set())
                try:
                    await self._commit_all(feeding)
                except (Stopped, ClaimLost) as error:
                    ended = error
                    self._halt(Halt.STOPPED)
        finally:
            self._give_back(self._finished)
        if ended is not None:
            raise ended

    async def _commit_all(self, feeding: asyncio.Task[None]) -> None:
        while self._running or self._finished or not feeding.done():
            await self._results()
            await self._beat()
            await self._commit_results()
        if self._halted is Halt.STOPPED:
            raise Stopped

    async def _results(self) -> None:
        """Wait for results, at most until a heartbeat is due."""
        await is_set(self._arrived, HEARTBEAT_S)
        self._arrived.clear()
        if self._finished and self._halted is None:
            await asyncio.sleep(GROUP_S)

    async def _feed(self, tasks: asyncio.TaskGroup) -> None:
        """Begin one line after the other."""
        progress = self.batch.progress
        try:
            async with aclosing(self._read(progress.line, progress.offset)) as lines:
                async for line in lines:
                    while line.number - self.batch.progress.line >= AHEAD_MAX or self._is_full:
                        self._moved.clear()
                        await self._moved.wait()
                    self._ends[line.number] = line.end
                    if line.is_blank:
                        self._done.add(line.number)
                    elif line.number not in self._done:
                        await self._begin(line, tasks)
        except BadLine as bad:
            self._fail(_fault(bad))

    @property
    def _is_full(self) -> bool:
        """Whether no further line may begin now: it would only be one more to wait for the limits of the same key."""
        begun = self._begun
        if len(begun) >= self._server.slots.most or sum(begun.values()) >= BEGUN_BYTES_MAX:
            return True
        return self._halted is None and any(slot.is_limited for slot in begun)

    async def _begin(self, line: Line, tasks: asyncio.TaskGroup) -> None:
        """Begin a line when there is room for it beside those of other batches."""
        request = read_request(line.text, self.batch.endpoint)
        slot = self._server.slots.slot(self.batch.tenant)
        if not await slot.take(self._stopping):
            self._late(line, request, None)
            return
        self._running += 1
        self._begun[slot] = len(line.text)
        tasks.create_task(self._serve(line, request, slot), name=f"line {self.batch.id}-{line.number}")

    async def _serve(self, line: Line, request: Request, slot: Slot) -> None:
        result = None
        try:
            result = await self._server.serve(self.batch, line, request, self._stopping, slot)
        finally:
            self._running -= 1
            self._arrived.set()
            if result is not None:
                self._finished.append(Finished(result, slot))
                self._begun[slot] = len(result.text)
            elif not self._late(line, request, slot):
                self._end_line(slot)

    def _late(self, line: Line, request: Request, slot: Slot | None) -> bool:
        """Tell the client that the line was not served in time; False: it will be served later, or never."""
        if self._halted is not Halt.LATE:
            return False
        result = unanswered(line.number, self.batch.id, request.custom_id, "batch_expired", LATE_MESSAGE)
        self._finished.append(Finished(result, slot))
        self._arrived.set()
        return True

    async def _commit_results(self) -> None:
        """Store the results that are there, then the record that counts them."""
        finished, self._finished = self._finished, []
        try:
            for writer, is_output in ((self._output, True), (self._errors, False)):
                for one in finished:
                    if one.result.is_output == is_output:
                        writer.add(one.result.text)
                await self._retried(writer.store)
            self._done.update(one.result.number for one in finished)
            completed = sum(one.result.is_output for one in finished)
            usage = sum((one.result.usage for one in finished), self.batch.progress.usage)
            progress = self._progress(completed, len(finished) - completed, usage)
            self.batch = msgspec.structs.replace(self.batch, progress=progress)
            if finished:
                await self._commit()
                self._progressed_at = self._clock.now()
                self._server.counts[COMPLETED] += completed
                self._server.counts[FAILED] += len(finished) - completed
        finally:
            self._give_back(finished)
        self._moved.set()
        if self._output.segment.size + self._errors.segment.size > self._output_bytes_max and self._halted is None:
            self._fail(
                LineFault(code="output_too_large", message="The results are larger than a tenant's files may be.")
            )

    def _progress(self, completed: int, failed: int, usage: BatchUsage) -> BatchProgress:
        progress = self.batch.progress
        line, offset = progress.line, progress.offset
        while line in self._done and line in self._ends:
            self._done.remove(line)
            offset = self._ends.pop(line)
            line += 1
        return BatchProgress(
            line=line,
            offset=offset,
            ahead=sorted(self._done),
            completed=progress.completed + completed,
            failed=progress.failed + failed,
            output=_joined(self._before.output, self._output.segment),
            errors=_joined(self._before.errors, self._errors.segment),
            usage=usage,
        )

    def _give_back(self, finished: Sequence[Finished]) -> None:
        for one in finished:
            if one.slot is not None:
                self._end_line(one.slot)

    def _end_line(self, slot: Slot) -> None:
        slot.give_back()
        self._begun.pop(slot, None)

    async def _end(self) -> None:
        """Make files of what was written, and record how the batch ended."""
        status = {Halt.LATE: EXPIRED, Halt.FAILED: FAILED, Halt.CANCELLED: CANCELLED, None: COMPLETED}.get(self._halted)
        if self.batch.status == CANCELLING:
            status = CANCELLED
        elif self.batch.faults:
            status = FAILED
        if status is None:
            raise Stopped
        if status == COMPLETED and self.batch.status != FINALIZING:
            self._become(FINALIZING)
            await self._commit()
            if self.batch.status == CANCELLING:
                status = CANCELLED
        progress = self.batch.progress
        self.batch = msgspec.structs.replace(
            self.batch,
            output_file_id=await self._make_file("output", progress.output),
            error_file_id=await self._make_file("error", progress.errors),
        )
        self._become(status)
        await self._commit()

    async def _make_file(self, kind: str, segments: list[Segment]) -> str:
        """Make the file if there is anything in it; its id is the same each time."""
        if not segments:
            return ""
        batch, now = self.batch, self._clock.wall_ms() // 1000
        file_id = f"file-{hashlib.sha256(f'{batch.key} {kind}'.encode()).hexdigest()[:32]}"
        file = StoredFile(
            key=record_key(batch.tenant, file_id),
            id=file_id,
            filename=f"{batch.id}_{kind}.jsonl",
            purpose=OUTPUT_PURPOSE,
            created_at=now,
            expires_at=batch.created_at + FILE_S_MAX,
            segments=segments,
        )
        await self._retried(lambda: self._records.put_file(file))
        return file_id

    async def _read(self, number: int, offset: int) -> AsyncGenerator[Line, None]:
        """The lines from this one on, which begins at ``offset``. Raises BadLine if the input cannot be read."""
        reader = LineReader(number, offset)
        while True:
            try:
                async with aclosing(read(self._records.bus, self.batch.input, offset)) as pieces:
                    async for piece in pieces:
                        offset += len(piece)
                        for line in reader.feed(piece):
                            yield line
                break
            except StoreFailed as error:
                if not error.passes:
                    raise BadLine("input_file_lost", f"The input cannot be read: {error}.") from error
                await self._wait_again(error)
        for line in reader.close():
            yield line

    async def _commit(self) -> None:
        """Write the record. Raises ClaimLost, Stopped."""

        async def write() -> tuple[StoredBatch, int]:
            return await self._records.commit(self.batch, self._revision)

        self.batch, self._revision = await self._retried(write)
        self._written_at = self._clock.now()
        if self.batch.status == CANCELLING:
            self._halt(Halt.CANCELLED)

    async def _retried(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of ``work``, which is tried until it succeeds. Raises Stopped if the run is stopped before."""
        while True:
            try:
                done = await work()
            except StoreFailed as error:
                await self._wait_again(error)
            else:
                self._outage.over()
                return done

    async def _wait_again(self, error: StoreFailed) -> None:
        if self._halted is Halt.STOPPED:
            raise Stopped from error
        self._outage.failed(f"batch {self.batch.id} waits for NATS", error)
        await asyncio.sleep(AGAIN_S)

    def _halt(self, why: Halt) -> None:
        if self._halted is None or why is Halt.STOPPED:
            self._halted = why
        self._stopping.set()
        self._arrived.set()
        if self._feeding is not None and self._halted is not Halt.LATE:
            self._feeding.cancel()

    def _fail(self, *faults: LineFault) -> None:
        self.batch = msgspec.structs.replace(self.batch, faults=[*self.batch.faults, *faults])
        self._halt(Halt.FAILED)

    def _become(self, status: str) -> None:
        now = self._clock.wall_ms() // 1000
        self.batch = msgspec.structs.replace(self.batch, status=status, times={**self.batch.times, status: now})

    def _is_late(self) -> bool:
        return self._clock.wall_ms() >= self.batch.expires_at * 1000


def _fault(bad: BadLine) -> LineFault:
    return LineFault(code=bad.code, message=str(bad), param=bad.param)


def _joined(before: list[Segment], own: Segment) -> list[Segment]:
    return [*before, own] if own.size else before
