"""The HTTP edge of the hot path: raw ASGI in front of FastAPI, no middleware, no models, bounds first."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Awaitable, Callable

from services.router.core.request import CHAT, COMPLETIONS
from services.router.exchange import BodyTooLarge, BodyTooSlow, ClientGone, Exchange, Receive, Scope, Send
from services.router.http_answers import HttpError, error_body, failed
from services.router.ledger import Ledger
from services.router.relay import Relay
from services.router.settings import Settings
from shared.contracts.failures import Reason

PASSED_THROUGH = (
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/score",
    "/rerank",
    "/pooling",
    "/classify",
    "/tokenize",
    "/detokenize",
)
"""Other endpoints of vLLM's server, served by one worker as they are."""
RELAYED = frozenset((COMPLETIONS, CHAT, *PASSED_THROUGH))

UPLOAD_DISCARDED_FACTOR = 4
"""A body announced as up to so many times the limit is read and thrown away, so that the client reads its 413 instead
of a broken connection.
"""

BAD_MODE = "x-baton-mode must be auto, aggregated or disaggregated."

AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class Edge:
    """Serves the relayed paths itself; everything else is ``app``'s."""

    def __init__(self, settings: Settings, relay: Relay, ledger: Ledger) -> None:
        self._settings = settings
        self._relay = relay
        self._ledger = ledger
        self.app: AsgiApp | None = None
        prefix, numbers = secrets.token_hex(6), itertools.count(1)
        self._new_id = lambda: f"{prefix}-{next(numbers)}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in RELAYED:
            await self.relay(scope, receive, send)
        elif self.app is not None:
            await self.app(scope, receive, send)

    async def relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One inference request."""
        exchange = Exchange(scope, receive, send, self._new_id)
        settings = self._settings
        if exchange.mode is None:
            await self._refuse(exchange, HttpError(400, error_body(400, BAD_MODE), None, "bad_request"))
            return
        if len(self._relay.flights) >= settings.requests_at_once_max:
            await self._refuse(exchange, failed(Reason.WORKER_BUSY, "The router is full. Try again shortly."))
            return
        try:
            await exchange.read(settings.body_bytes_max, settings.body_s_max)
        except BodyTooLarge:
            message = f"The body is larger than {settings.body_bytes_max} bytes."
            discarded = 0 <= exchange.length <= UPLOAD_DISCARDED_FACTOR * settings.body_bytes_max
            await self._refuse(exchange, failed(Reason.TOO_LARGE, message), close=not discarded)
        except BodyTooSlow:
            message = f"The body did not come within {settings.body_s_max} s."
            await self._refuse(exchange, HttpError(408, error_body(408, message), None, "body_slow"), close=True)
        except ClientGone:
            pass
        else:
            await self._relay.serve(exchange)

    async def _refuse(self, exchange: Exchange, error: HttpError, *, close: bool = False) -> None:
        self._ledger.refused(error.status, error.reason)
        await exchange.refuse(error, close=close)
