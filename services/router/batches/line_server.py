"""Serves a line of a batch as a request of its own, through the path of clients' requests and after all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from services.router.admission.admission_queue import AdmissionQueue
from services.router.auth.authenticator import Authenticator
from services.router.batches.lines import Line, Request, Result, answered, unanswered
from services.router.batches.slots import Slot, Slots
from services.router.request.client import ApiClient
from services.router.request.context import RequestContext
from services.router.request.errors import BUG, failed
from services.router.request.head import Head
from services.router.request.http_request import HttpRequest, NoConnection, Upload, UploadTotals
from services.router.settings import Settings
from shared.contracts.batches import COMPLETED, FAILED, StoredBatch
from shared.contracts.failures import Reason
from shared.http.errors import HttpError
from shared.runtime.clock import Clock

log = logging.getLogger("baton.router")

BESIDE_SHARE: Final = 4
"""While other requests are served, only a quarter of the lines are: each more makes the others' streams slower."""
ATTEMPTS_MAX: Final = 3
"""Attempts to serve a line whose worker is lost, or takes too long."""
AGAIN_S_MIN: Final = 1.0
AGAIN_S_MAX: Final = 30.0
LIMITED: Final = 429
LATER: Final = frozenset({LIMITED, 503})
"""Statuses that say that it may be served later: there is no limit to these attempts but the batch's time."""
PERHAPS: Final = frozenset({408, 500, 502, 504})


class Answer(NamedTuple):
    status: int
    body: bytes
    retry_after_s: float


class LineRequest(HttpRequest):
    """A request whose answer stays here."""

    __slots__ = ("_pieces", "_retry_after_s", "answered")

    def __init__(self, head: Head, upload: Upload) -> None:
        super().__init__(NoConnection(), head, upload, http11=True, keep_alive=True)
        self.is_current = True
        self.answered: Answer | None = None
        self._pieces: list[bytes] = []
        self._retry_after_s = 0.0

    def answer(self, status: int, headers: bytes, body: bytes) -> None:
        del headers
        self.begun = self.ended = True
        self.upload.over()
        self.answered = Answer(status, body, self._retry_after_s)

    def refuse(self, error: HttpError, more: object = ()) -> None:
        del more
        self._retry_after_s = error.retry_after_s or 0.0
        self.answer(error.status, b"", error.body)

    def begin(self, status: int, headers: bytes) -> None:
        del status, headers
        self.begun = True

    def send(self, data: bytes) -> None:
        self._pieces.append(data)

    def end(self, data: bytes = b"") -> None:
        self.answer(200, b"", b"".join([*self._pieces, data]))

    def abort(self) -> None:
        self.client_left()


class LineServer:
    """Shared by all batches that this router runs."""

    def __init__(
        self,
        *,
        settings: Settings,
        clock: Clock,
        queue: AdmissionQueue,
        in_flight: set[RequestContext],
        totals: Callable[[], UploadTotals],
        authenticator: Authenticator,
        serve: Callable[[HttpRequest], Awaitable[None]],
    ) -> None:
        """``in_flight``: all requests of this router. ``serve``: serves a complete request."""
        self._settings = settings
        self._clock = clock
        self._queue = queue
        self._in_flight = in_flight
        self._totals = totals
        self._authenticator = authenticator
        self._serve = serve
        self._lines_running = 0
        self.counts: dict[str, int] = {COMPLETED: 0, FAILED: 0}
        """Lines whose result is stored, for metrics."""
        self.slots = Slots(settings.batch_lines_at_once, self._running_max, self._may_begin)
        """Held while a line is served, and until its result is stored."""

    def owner(self, batch: StoredBatch) -> ApiClient | None:
        """Whose requests the lines are; None: the key is revoked."""
        return self._authenticator.owner(batch.api_key)

    async def serve(
        self, batch: StoredBatch, line: Line, request: Request, stopping: asyncio.Event, slot: Slot
    ) -> Result | None:
        """The line's result; ``slot``, which is held, is still held then. It is given back while the line waits: its
        key may have reached a limit for days. None: ``stopping`` was set before there was a result.
        """
        attempts = 0
        while slot.is_held or await slot.take(stopping):
            client = self.owner(batch)
            if client is None:
                return unanswered(line.number, batch.id, request.custom_id, "api_key_revoked", "The key is revoked.")
            request_id = f"{batch.id}-{line.number + 1}"
            answer = await self._ask(batch, client, request_id, bytes(request.body), stopping)
            if answer is None:
                break
            attempts += answer.status in PERHAPS
            if answer.status not in LATER and (answer.status not in PERHAPS or attempts >= ATTEMPTS_MAX):
                slot.answered()
                return answered(line.number, batch.id, request.custom_id, request_id, answer.status, answer.body)
            slot.is_limited = answer.status == LIMITED
            slot.give_back()
            if await is_set(stopping, again_s(answer)):
                break
            slot.is_limited = False
        slot.give_back()
        return None

    def _running_max(self) -> int:
        """How many lines may be served now; none while requests of clients wait."""
        if self._queue.clients_waiting or self._totals().bytes_held > self._settings.bodies_bytes_max:
            return 0
        most = self._settings.batch_lines_at_once
        others = len(self._in_flight) - self._lines_running
        return max(1, most // BESIDE_SHARE) if others > 0 else most

    def _may_begin(self, tenant: str) -> bool:
        """Engines that take no more of a tenant's lines now take none of its next one."""
        return not self._queue.lines_waiting.get(tenant)

    async def _ask(
        self, batch: StoredBatch, client: ApiClient, request_id: str, body: bytes, stopping: asyncio.Event
    ) -> Answer | None:
        """One attempt. None: it was ended by ``stopping``."""
        if (refusal := self._authenticator.request(client)) is not None:
            return Answer(refusal.status, refusal.body, refusal.retry_after_s or 0.0)
        head = Head(batch.endpoint, [(b"x-request-id", request_id.encode())], lambda: request_id)
        head.client, head.is_batch, head.length = client, True, len(body)
        upload = Upload(self._clock.now(), self._totals())
        upload.add(body)
        upload.complete = True
        request = LineRequest(head, upload)
        self._lines_running += 1
        leaving = asyncio.create_task(leave_when(stopping, request), name=f"stop {request_id}")
        try:
            await self._serve(request)
        except Exception:
            log.exception("a line of a batch failed with an internal error")
            if request.answered is None:
                request.refuse(failed(Reason.INTERNAL, BUG))
        finally:
            self._lines_running -= 1
            leaving.cancel()
            upload.over()
        return None if request.left else request.answered


def again_s(answer: Answer) -> float:
    """Seconds until a line is tried again. A key that has used its budget is told no time."""
    wait_s = answer.retry_after_s or (AGAIN_S_MAX if answer.status == LIMITED else AGAIN_S_MIN)
    return min(max(wait_s, AGAIN_S_MIN), AGAIN_S_MAX)


async def leave_when(stopping: asyncio.Event, request: HttpRequest) -> None:
    """End the request when the event is set."""
    await stopping.wait()
    request.client_left()


async def is_set(event: asyncio.Event, within_s: float) -> bool:
    """Whether the event was set within that many seconds."""
    try:
        async with asyncio.timeout(within_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
