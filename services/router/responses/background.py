"""Responses that a router makes without a client: they run here, and every router can ask whether they still do."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from services.router.request.errors import BUG
from services.router.request.http_request import HttpRequest
from services.router.responses.history import CANCELLED, FAILED, StoredResponse, ended, with_fields
from services.router.responses.inner_request import InnerRequest
from services.router.responses.response_store import NotKept, ResponseStore
from shared.bus.port import Bus, BusError, Envelope, NoResponders, Subscription
from shared.contracts.channels import RESPONSE_RUNS
from shared.contracts.ids import RouterId
from shared.contracts.routers import AskResponse, ResponseRuns
from shared.http.errors import ErrorResponse

log = logging.getLogger("baton.router")

TENANT_MAX = 64
"""Responses of one tenant that a router makes in the background at a time."""
ASK_S_MAX = 5.0
END_S_MAX = 4.0
"""Time limit for a cancelled response to end."""
WRITES_MAX = 5
WRITE_AGAIN_S = 2.0
STOPPED = "The router was stopped before the response was complete."
UNANSWERED = "The response was not completed in time."
OK = 200

_error = msgspec.json.Decoder(ErrorResponse)


class Run:
    """A response that is being made. ``begun``: its object, as it is stored now."""

    def __init__(self, tenant: str, inner: InnerRequest, entry: StoredResponse) -> None:
        self.tenant = tenant
        self.inner = inner
        self.entry = entry
        self.task: asyncio.Task[None] | None = None
        self.ends_with = ""
        """The status with which it was ended; empty while it runs."""

    def end(self, status: str) -> None:
        """Stop it wherever it runs."""
        if not self.ends_with:
            self.ends_with = status
            self.inner.client_left()

    async def done(self, s_max: float) -> None:
        """Wait for its end, at most so long."""
        if self.task is not None:
            await asyncio.wait([self.task], timeout=s_max)

    def result(self, response_id: str) -> bytes:
        """The response object at its end."""
        begun, whole = self.entry.response, self.inner.whole
        if self.ends_with:
            return ended(begun, self.ends_with, "" if self.ends_with == CANCELLED else STOPPED)
        if whole is None:
            return ended(begun, FAILED, UNANSWERED)
        if whole.status != OK:
            return ended(begun, FAILED, _message(whole.body))
        previous = told_previous(begun)
        said = with_fields(whole.body, id=response_id, background=True, store=True, previous_response_id=previous)
        return said or ended(begun, FAILED, BUG)


class Background:
    """The responses that this router makes in the background, and the questions of others about them."""

    def __init__(
        self, router_id: RouterId, bus: Bus, store: ResponseStore, relay: Callable[[HttpRequest], Awaitable[None]]
    ) -> None:
        self._router_id = router_id
        self._bus = bus
        self._store = store
        self._relay = relay
        self._runs: dict[str, Run] = {}
        self._subscription: Subscription | None = None

    async def open(self) -> None:
        """Questions are answered when it returns."""
        self._subscription = await self._bus.answer(RESPONSE_RUNS, self._on_ask, router_id=self._router_id)

    def is_full(self, tenant: str) -> bool:
        """Whether the tenant may begin no further one here."""
        return sum(run.tenant == tenant for run in self._runs.values()) >= TENANT_MAX

    async def begin(self, key: str, response_id: str, run: Run) -> None:
        """Make the response, once it is stored that this router does. Raises NotKept."""
        self._runs[key] = run
        try:
            await self._store.put(run.tenant, key, run.entry)
        except BaseException:
            del self._runs[key]
            raise
        run.task = asyncio.create_task(self._run(key, response_id, run), name=f"response {response_id}")

    async def runs(self, router_id: str, key: str, *, cancel: bool = False) -> bool:
        """Whether that router still makes the response; if it cannot be asked now, it does. ``cancel``: it is to end
        first.
        """
        if router_id == self._router_id:
            return await self._is_running(key, cancel=cancel)
        ask = AskResponse(router_id=RouterId(router_id), key=key, cancel=cancel)
        try:
            return (await self._bus.ask(RESPONSE_RUNS, ask, timeout_s=ASK_S_MAX)).runs
        except NoResponders:
            return False
        except BusError as error:
            log.info("router %s did not reply about a response that it makes: %s", router_id, error)
            return True

    async def drain(self, s_max: float) -> None:
        """Let what runs end, at most so long."""
        if tasks := [run.task for run in self._runs.values() if run.task is not None]:
            await asyncio.wait(tasks, timeout=s_max)

    async def close(self) -> None:
        """End what still runs; its clients see that it failed."""
        runs = list(self._runs.values())
        for run in runs:
            run.end(FAILED)
        await asyncio.gather(*(run.done(END_S_MAX) for run in runs))
        if self._subscription is not None:
            await self._subscription.close()

    async def _run(self, key: str, response_id: str, run: Run) -> None:
        try:
            await self._relay(run.inner)
            result = run.result(response_id)
        except Exception:
            log.exception("a response in the background failed with an internal error")
            result = ended(run.entry.response, FAILED, BUG)
        finally:
            run.inner.upload.over()
        try:
            await self._put(key, StoredResponse(response=msgspec.Raw(result), items=run.entry.items), run)
        finally:
            del self._runs[key]

    async def _put(self, key: str, entry: StoredResponse, run: Run) -> None:
        """Store how it ended. If that fails for good, a later request for it finds it lost."""
        for left in reversed(range(WRITES_MAX)):
            try:
                await self._store.put(run.tenant, key, entry)
            except NotKept as error:
                if not left:
                    log.warning("a response that was made in the background cannot be stored: %s", error)
                    return
                if not error.passes:
                    entry = StoredResponse(
                        response=msgspec.Raw(ended(run.entry.response, FAILED, str(error))), items=[]
                    )
                    continue
                await asyncio.sleep(WRITE_AGAIN_S)
            else:
                return

    async def _on_ask(self, ask: AskResponse, _envelope: Envelope) -> ResponseRuns:
        return ResponseRuns(router_id=self._router_id, runs=await self._is_running(ask.key, cancel=ask.cancel))

    async def _is_running(self, key: str, *, cancel: bool) -> bool:
        run = self._runs.get(key)
        if run is not None and cancel:
            run.end(CANCELLED)
            await run.done(END_S_MAX)
        return key in self._runs


def told_previous(response: msgspec.Raw) -> str | None:
    """What the response object says that it continues."""
    fields = msgspec.json.decode(response, type=dict[str, msgspec.Raw])
    return msgspec.json.decode(fields.get("previous_response_id", msgspec.Raw(b"null")), type=str | None)


def _message(body: bytes) -> str:
    try:
        return _error.decode(body).error.message
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "The engine refused the request."
