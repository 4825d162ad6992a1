"""The server that a worker is attached to, over HTTP. It is not trusted: what it sends is bounded, redirects are not
followed, and nothing that contains the operator's key is passed on.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import httpx

from services.worker.engines.attached.events import BadAnswer
from shared.contracts.engine_paths import MESSAGES
from shared.deadline import within
from shared.runtime.settings import SettingsError

log = logging.getLogger("baton.worker")

CONNECT_S_MAX = 5.0
KEY_BYTES_MAX = 8192
KEY_CHARS_MIN = 8
"""A shorter key would be found by chance in answers, which are then withheld."""
SPARE_CONNECTIONS = 4
"""For probes and metrics, beside the requests."""
ANTHROPIC_VERSION = "2023-06-01"
"""Their servers refuse messages without this header, which the worker does not get from the client."""


class ServerAway(Exception):
    """The server does not answer; the message says how, without secrets and addresses."""


class Response(NamedTuple):
    """A small response, whole."""

    status: int
    body: bytes


def read_key(path: str) -> str:
    """The API key in a file, without white space around it. Raises SettingsError."""
    try:
        with Path(path).open("rb") as file:
            raw = file.read(KEY_BYTES_MAX + 1)
    except OSError as error:
        raise SettingsError(f"WORKER_ATTACH_KEY_FILE: {path} cannot be read: {error.strerror or error}") from None
    key = raw.decode("latin-1").strip()
    is_printable = key.isascii() and key.isprintable() and " " not in key
    if not is_printable or len(key) < KEY_CHARS_MIN or len(raw) > KEY_BYTES_MAX:
        raise SettingsError(
            f"WORKER_ATTACH_KEY_FILE: {path} must contain one API key of {KEY_CHARS_MIN} to {KEY_BYTES_MAX} printable "
            "ASCII characters, and nothing else"
        )
    return key


class Server:
    """A client of one server. ``close`` ends its connections."""

    def __init__(self, root: str, *, key: str, requests_max: int, silent_s_max: float) -> None:
        """``root``: see ``address.root_of``; ``key`` may be empty; ``silent_s_max``: longest pause within an answer."""
        self.root = root
        self.key = key
        timeout = httpx.Timeout(silent_s_max, connect=CONNECT_S_MAX, pool=CONNECT_S_MAX)
        most = requests_max + SPARE_CONNECTIONS
        self._client = httpx.AsyncClient(
            timeout=timeout,
            limits=httpx.Limits(max_connections=most, max_keepalive_connections=most),
            verify=ssl.create_default_context(),
            follow_redirects=False,
            trust_env=False,  # No proxies, and no passwords of a .netrc.
        )
        self._silent_s_max = silent_s_max

    def has_key(self, data: bytes) -> bool:
        """Whether the server repeats the operator's key here."""
        return bool(self.key) and self.key.encode() in data

    @asynccontextmanager
    async def post(self, path: str, body: bytes) -> AsyncIterator[httpx.Response]:
        """The response's head; its body is read with ``pieces``. Leaving closes the connection unless all was read.
        Raises ServerAway.
        """
        request = self._client.build_request(
            "POST", self.root + path, content=body, headers=self._headers(path, body=True)
        )
        try:
            response = await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise self._away(error) from None
        try:
            yield response
        finally:
            await response.aclose()

    async def pieces(self, response: httpx.Response) -> AsyncIterator[bytes]:
        """The body as it comes. Raises ServerAway, BadAnswer."""
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise BadAnswer("it sent a compressed answer, which it was not asked for")
        try:
            async for piece in response.aiter_raw():
                yield piece
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise self._away(error) from None

    async def whole(self, response: httpx.Response, bytes_max: int) -> bytes:
        """The body, whole. Raises ServerAway, and BadAnswer when it is larger."""
        body = bytearray()
        async for piece in self.pieces(response):
            body += piece
            if len(body) > bytes_max:
                raise BadAnswer(f"it sent more than {bytes_max} bytes")
        return bytes(body)

    async def ask(self, method: str, path: str, *, bytes_max: int, s_max: float, body: bytes | None = None) -> Response:
        """A small request of the worker's own. Raises ServerAway, BadAnswer."""
        try:
            return await within(s_max, self._ask(method, path, bytes_max, body), name=f"ask {path}")
        except TimeoutError:
            raise ServerAway(f"it did not answer {path} within {s_max:g} s") from None

    async def _ask(self, method: str, path: str, bytes_max: int, body: bytes | None) -> Response:
        headers = self._headers(path, body=body is not None)
        request = self._client.build_request(method, self.root + path, content=body, headers=headers)
        try:
            response = await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise self._away(error) from None
        try:
            return Response(response.status_code, await self.whole(response, bytes_max))
        finally:
            await response.aclose()

    async def close(self) -> None:
        await self._client.aclose()

    def _headers(self, path: str, *, body: bool) -> dict[str, str]:
        headers = {"accept-encoding": "identity", "user-agent": "baton"}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        if path.startswith(MESSAGES):
            headers["anthropic-version"] = ANTHROPIC_VERSION
            headers |= {"x-api-key": self.key} if self.key else {}
        return {**headers, "content-type": "application/json"} if body else headers

    def _away(self, error: Exception) -> ServerAway:
        """In our words: a library's message may have addresses and headers."""
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ServerAway("it accepts no connection")
        if isinstance(error, httpx.ReadTimeout):
            return ServerAway(f"it was silent for {self._silent_s_max:g} s")
        log.debug("the connection to the server failed: %r", error)
        return ServerAway("it broke the connection")
