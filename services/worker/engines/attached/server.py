"""The server that a worker is attached to, over HTTP. It is not trusted: what it sends is bounded, redirects are not
followed, and nothing that contains the operator's key is passed on. It is asked for its model and its endpoints.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec

from services.worker.engines.attached.bodies import BadAnswer
from services.worker.engines.port import EngineRefused
from shared.contracts.engine_paths import FORMS, GENERATE, INVOCATIONS, MESSAGES, PLACED, SERVED, TOKENIZER_INFO
from shared.deadline import within
from shared.runtime.settings import SettingsError

log = logging.getLogger("baton.worker")

CONNECT_S_MAX = 5.0
DECODED = frozenset({"identity", "gzip", "deflate"})
"""Content encodings that httpx reads without a further library."""
ENCODING_CHARS_SHOWN = 40
KEY_BYTES_MAX = 8192
KEY_CHARS_MIN = 8
"""A shorter key would be found by chance in answers, which are then withheld."""
SPARE_CONNECTIONS = 4
"""For probes and metrics, beside the requests."""
ANTHROPIC_VERSION = "2023-06-01"
"""Header without which Anthropic's servers refuse messages. The worker does not get it from the client."""


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
        """``root``: see ``root_of``; ``key`` may be empty; ``silent_s_max``: longest pause within an answer."""
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
        encodings = response.headers.get_list("content-encoding", split_commas=True)
        if unknown := [one for one in encodings if one.strip().lower() not in DECODED]:
            raise BadAnswer(f"it sent an answer that is encoded as {unknown[0][:ENCODING_CHARS_SHOWN]!r}")
        try:  # Some proxies compress though they were asked not to.
            async for piece in response.aiter_bytes():
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


ASK_S_MAX = 10.0
LIST_BYTES_MAX = 4 << 20
"""Maximum size of a list of models, or of a description of a server's endpoints."""
ERROR_BYTES_MAX = 1 << 20
MODELS_SHOWN_MAX = 8
NAME_CHARS_MAX = 256
MODELS, OPENAPI = "/v1/models", "/openapi.json"
FORWARDED = SERVED - FORMS - {GENERATE, INVOCATIONS, TOKENIZER_INFO}
"""Endpoints with a JSON body, which names the model. Token ids are those of an engine that Baton knows."""
NOT_THERE = frozenset({404, 405, 501})
REFUSES_KEY = frozenset({401, 403})
NO_REQUEST = b"[]"
"""A body that every endpoint refuses: nothing is computed."""


class ServerModel(msgspec.Struct, frozen=True):
    """The model that the server computes with."""

    name: str
    """Model name in requests to the server."""
    max_model_len: int = 0
    """Maximum context in tokens; 0: unknown."""
    server: str = ""
    """Name of the server's software, such as ``vllm``."""


class _Listed(msgspec.Struct):
    id: str
    max_model_len: Any = None
    owned_by: Any = None
    meta: Any = None


class _List(msgspec.Struct):
    data: list[_Listed]


class _OpenApi(msgspec.Struct):
    paths: dict[str, msgspec.Raw]


async def find_model(server: Server, wanted: str, served_as: str) -> ServerModel:
    """``wanted``: the operator's name for it at the server; empty: the one that is served under ``served_as``, or the
    only one. Raises EngineRefused when it is not there, ServerAway while that is not known.
    """
    listed = await list_models(server)
    if listed is None:
        if wanted or served_as:
            return ServerModel(wanted or served_as)
        raise EngineRefused(f"The server lists no models at {MODELS}: name its model in WORKER_ATTACH_MODEL.")
    by_name = {one.id: one for one in listed}
    name = wanted or (served_as if served_as in by_name or len(by_name) != 1 else next(iter(by_name)))
    if name in by_name:
        return _model(by_name[name])
    there = ", ".join(repr(one[:NAME_CHARS_MAX]) for one in list(by_name)[:MODELS_SHOWN_MAX]) or "none"
    what = f"has no model {name!r}" if name else "has several models"
    raise EngineRefused(
        f"The server {what}; it lists {there}. Name one in WORKER_ATTACH_MODEL (--attach URL=MODEL; compose: "
        "ATTACH_MODEL)."
    )


async def list_models(server: Server) -> list[_Listed] | None:
    """None if the server has no such list. Raises ServerAway."""
    try:
        status, body = await server.ask("GET", MODELS, bytes_max=LIST_BYTES_MAX, s_max=ASK_S_MAX)
        if status in REFUSES_KEY:
            raise ServerAway(f"it refuses the API key of this worker ({status})")
        if status in NOT_THERE:
            return None
        if status != 200:
            raise ServerAway(f"it answers {MODELS} with status {status}")
        return msgspec.json.decode(body, type=_List).data
    except (BadAnswer, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ServerAway(f"its list of models cannot be read: {error}") from None


def _model(one: _Listed) -> ServerModel:
    meta = one.meta if isinstance(one.meta, dict) else {}
    lengths = (one.max_model_len, meta.get("n_ctx"), meta.get("n_ctx_train"))
    length = next((each for each in lengths if isinstance(each, int) and 0 < each < 1 << 31), 0)
    return ServerModel(one.id, length, one.owned_by[:NAME_CHARS_MAX] if isinstance(one.owned_by, str) else "")


async def find_paths(server: Server, report: Callable[[str], None]) -> frozenset[str]:
    """Endpoints that the server has, of those that a worker passes on: as its description says, or else as it answers
    a body that is no request. Raises ServerAway, and EngineRefused when there are none.
    """
    try:
        status, body = await server.ask("GET", OPENAPI, bytes_max=LIST_BYTES_MAX, s_max=ASK_S_MAX)
        described = msgspec.json.decode(body, type=_OpenApi).paths if status == 200 else {}
    except (BadAnswer, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        described = {}
    paths = FORWARDED & described.keys()
    if not paths & set(PLACED):
        report("asking which endpoints the server has")
        paths = frozenset([path for path in sorted(FORWARDED) if await _is_there(server, path)])
    if not paths:
        raise EngineRefused("The server has none of the endpoints that Baton passes on: is it an OpenAI API?")
    return paths


async def _is_there(server: Server, path: str) -> bool:
    try:
        found = await server.ask("POST", path, bytes_max=ERROR_BYTES_MAX, s_max=ASK_S_MAX, body=NO_REQUEST)
    except BadAnswer:
        return False
    return found.status not in NOT_THERE
