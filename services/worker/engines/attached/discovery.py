"""What a server is: its model, and which endpoints it has."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from services.worker.engines.attached.events import BadAnswer
from services.worker.engines.attached.server import Server, ServerAway
from services.worker.engines.port import EngineRefused
from shared.contracts.engine_paths import FORMS, INVOCATIONS, PLACED, SERVED, TOKENIZER_INFO

log = logging.getLogger("baton.worker")

ASK_S_MAX = 10.0
LIST_BYTES_MAX = 4 << 20
"""Of a list of models, or of a description of a server's endpoints."""
ERROR_BYTES_MAX = 1 << 20
MODELS_SHOWN_MAX = 8
NAME_CHARS_MAX = 256
MODELS, OPENAPI = "/v1/models", "/openapi.json"
FORWARDED = SERVED - FORMS - {INVOCATIONS, TOKENIZER_INFO}
"""Endpoints with a JSON body, which names the model."""
NOT_THERE = frozenset({404, 405, 501})
REFUSES_KEY = frozenset({401, 403})
NO_REQUEST = b"[]"
"""A body that every endpoint refuses: nothing is computed."""


class ServerModel(msgspec.Struct, frozen=True):
    """The model that the server computes with."""

    name: str
    """In requests to the server."""
    max_model_len: int = 0
    """0: it has not said."""
    server: str = ""
    """What it calls itself, such as ``vllm``."""


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
