"""Passes a leg's request on to the server, and its answer back: an ASGI app, like the server of an engine."""

from __future__ import annotations

import asyncio
import math
import time
from email.utils import parsedate_to_datetime

import httpx
import msgspec

from services.worker.engines.asgi_answers import Receive, Send, part, respond, start
from services.worker.engines.attached.bodies import AnswerReader, BadAnswer, EventCutter, ServerBody, server_body
from services.worker.engines.attached.health import Meter, MeteredRequest, ServerHealth
from services.worker.engines.attached.server import REFUSES_KEY, Server, ServerAway
from services.worker.engines.port import CURRENT_LEG, Leg, LegFailed, LegInput, LegResult, Scope
from shared.contracts.engine_paths import CHAT, COMPLETIONS
from shared.contracts.failures import Failure, Reason
from shared.contracts.inference import LegKind
from shared.deadline import end

ANSWER_BYTES_MAX = 64 << 20
"""Maximum size of an answer that is no stream."""
ERROR_BYTES_MAX = 64 << 10
RETRY_AFTER_S = 1.0
"""Pause when a busy server does not say for how long."""
RETRY_AFTER_S_MAX = 60.0
EVENT_STREAM = "text/event-stream"
OK, BAD_REQUEST, TOO_MANY, SERVER_ERROR, UNAVAILABLE = 200, 400, 429, 500, 503
GONE = frozenset({502, 504})
"""Statuses of a proxy whose server is away."""
WITHHELD = "The server of this model refused the request; what it said is withheld."
NO_TOKENS = "the server that this worker is attached to takes no tokens to continue after"


class AttachedApp:
    """Serves the POST endpoints that the server has."""

    def __init__(self, server: Server, health: ServerHealth, meter: Meter, model: str, *, salts: bool) -> None:
        """``model``: its name at the server; ``salts``: see ``server_body``."""
        self._server = server
        self._health = health
        self._meter = meter
        self._model = model
        self._salts = salts
        self._busy_until = 0.0
        """Instant before which the server has asked not to be asked again."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. A disconnect ends the server's work on it. Raises LegFailed."""
        body = (await receive()).get("body", b"")
        serving = asyncio.create_task(self._serve(scope["path"], body, send), name="attached-request")
        leaving = asyncio.create_task(_until_left(receive), name="attached-client")
        try:
            await asyncio.wait([serving, leaving], return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
        finally:
            await end([serving, leaving])  # httpx may swallow a cancellation.

    async def _serve(self, path: str, body: bytes, send: Send) -> None:
        leg = CURRENT_LEG.get() or Leg(LegInput())
        if leg.input.resume is not None or leg.input.kind is not LegKind.AGGREGATED:
            leg.result.cannot_resume = NO_TOKENS
            await respond(send, SERVER_ERROR, _error(NO_TOKENS, SERVER_ERROR))
            return
        asked = server_body(path, body, self._model, salts=self._salts)
        if asked is None:
            await respond(send, BAD_REQUEST, _error("The body is not a JSON object.", BAD_REQUEST))
            return
        if (wait_s := self._busy_until - time.monotonic()) > 0.0:
            raise LegFailed(_busy(wait_s))
        try:
            with self._meter.request(leg.input.expected_tokens, len(asked.body)) as request:
                await self._forward(_Forwarded(path, asked, leg.result, request, send))
        except (ServerAway, BadAnswer) as error:
            self._health.doubt()
            message = f"The server of this model failed: {error}"
            raise LegFailed(Failure(reason=Reason.SERVER_LOST, message=message)) from None

    async def _forward(self, leg: _Forwarded) -> None:
        key = self._server.key
        async with self._server.post(leg.path, leg.asked.body) as response:
            if response.status_code != OK:
                await self._refused(leg, response, key)
            elif _content_type(response) == EVENT_STREAM:
                await self._stream(leg, response)
            else:
                body = await self._server.whole(response, ANSWER_BYTES_MAX)
                self._check(body)
                answer = leg.reader.whole(body)
                leg.done(time.monotonic())
                await respond(leg.send, OK, answer)

    async def _stream(self, leg: _Forwarded, response: httpx.Response) -> None:
        await leg.send(start(OK, EVENT_STREAM))
        cutter = EventCutter()
        async for piece in self._server.pieces(response):
            for event in cutter.add(piece):
                self._check(event)
                await leg.event(event)
        if not (leg.reader.is_complete or (leg.path in (COMPLETIONS, CHAT) and leg.reader.finish_reason)):
            raise ServerAway("its stream ended before the answer did")
        leg.done(time.monotonic())
        await leg.send(part(b"", more=False))

    async def _refused(self, leg: _Forwarded, response: httpx.Response, key: str) -> None:
        """Another status than 200. Raises LegFailed where another worker may serve the request."""
        status = response.status_code
        if status in REFUSES_KEY:
            self._health.refused_key(key)
            raise ServerAway("it refuses the API key of its worker")
        if status in (TOO_MANY, UNAVAILABLE):
            wait_s = retry_after_s(response.headers.get("retry-after", ""), time.time())
            if wait_s is not None:
                self._busy_until = max(self._busy_until, time.monotonic() + wait_s)
            raise LegFailed(_busy(RETRY_AFTER_S if wait_s is None else wait_s))
        if status in GONE or status < BAD_REQUEST:
            raise ServerAway(f"it answered with status {status}")
        leg.request.is_done = True
        try:
            body = await self._server.whole(response, ERROR_BYTES_MAX)
            is_fit = isinstance(msgspec.json.decode(body), dict) and not self._server.has_key(body)
        except (BadAnswer, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            body, is_fit = b"", False
        await respond(leg.send, status, body if is_fit else _error(WITHHELD, status))

    def _check(self, data: bytes) -> None:
        if self._server.has_key(data):
            raise BadAnswer("it sent the API key of its worker, which is withheld")


class _Forwarded:
    def __init__(self, path: str, asked: ServerBody, result: LegResult, request: MeteredRequest, send: Send) -> None:
        self.path = path
        self.asked = asked
        self.request = request
        self.send = send
        self.reader = AnswerReader(path, asked.model, hides_usage=asked.hides_usage)
        self._result = result
        self._began = time.monotonic()

    async def event(self, event: bytes) -> None:
        shown = self.reader.event(event)
        if self.reader.events > self.request.tokens:
            self._note_first_token()
            self.request.progress()
        if shown:
            await self.send(part(shown))
            await self._result.shown()

    def _note_first_token(self) -> None:
        """The server's queue, if it has one, counts as its work on the prompt."""
        if not self._result.first_token_at:
            self._result.first_token_at = now = time.monotonic()
            self._result.prefill_s = now - self._began

    def done(self, now: float) -> None:
        """The answer has come to its end: report what the server counted, or what can be guessed of it."""
        usage, result, request = self.reader.usage, self._result, self.request
        if not self.asked.stream:
            request.progress(max(1, usage.completion))
        usage.completion = usage.completion if usage.completion >= 0 else request.tokens
        usage.prompt = usage.prompt if usage.prompt >= 0 else request.prompt_tokens
        request.usage, request.is_done = usage, True
        result.first_token_at = result.first_token_at or now
        result.prompt_tokens = max(0, usage.prompt)
        result.cached_tokens = max(0, usage.cached)
        result.completion_tokens = usage.completion
        result.finish_reason = self.reader.finish_reason or "stop"


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def retry_after_s(value: str, unix_s: float) -> float | None:
    """The seconds of a ``Retry-After`` (a number or a date), bounded; None if it cannot be read."""
    try:
        seconds = float(value) if value.strip()[:1].isdigit() else parsedate_to_datetime(value).timestamp() - unix_s
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(seconds, 0.0), RETRY_AFTER_S_MAX) if math.isfinite(seconds) else None


def _busy(wait_s: float) -> Failure:
    message = "The server of this model takes no more requests now."
    return Failure(reason=Reason.WORKER_BUSY, message=message, retry_after_s=wait_s)


def _content_type(response: httpx.Response) -> str:
    return response.headers.get("content-type", "").partition(";")[0].strip().lower()


def _error(message: str, status: int) -> bytes:
    kind = "BadRequestError" if status < SERVER_ERROR else "InternalServerError"
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})
