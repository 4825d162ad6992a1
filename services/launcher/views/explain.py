"""`baton explain`: finds a decision, over HTTP of any router or over NATS, and says why when there is none."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from services.launcher.system.machine import API_KEY_VARIABLE, key_headers
from services.launcher.views.fleet import open_bus
from shared.bus.port import AskTimedOut, Envelope, NoResponders
from shared.contracts.channels import DECISION, SERVICE_STATUS
from shared.contracts.control import ServiceStatus
from shared.contracts.decisions import AskDecision, DecisionRecord
from shared.contracts.ids import DecisionId, RouterId, is_subject_token

T = TypeVar("T")

LATEST = "latest"
DECISION_ID = re.compile(r"-d[0-9]+$")
"""How the id of a decision ends; before that comes its router's."""
HTTP_S_MAX = 10.0
ASK_S_MAX = 3.0
ROUTER_HEARD_S_MAX = 5.0
"""Each router says every two seconds where it is."""


class NotExplained(Exception):
    """There is nothing to show; the words say why and what to do."""


class Listed(msgspec.Struct):
    """What ``GET /v1/decisions`` answers."""

    decisions: list[DecisionRecord]


@dataclass(frozen=True)
class Question:
    """Which decision: by its id (or ``latest``), or the last one for a request."""

    decision_id: str = LATEST
    request_id: str = ""


def question_of(named: str, request_id: str) -> Question:
    """What the user wants to know: one name may be a decision's or a request's."""
    if request_id:
        return Question(request_id=request_id)
    return Question(named) if named == LATEST or DECISION_ID.search(named) else Question(request_id=named)


async def ask_router(url: str, question: Question) -> DecisionRecord:
    """Over HTTP. Raises NotExplained."""
    base = url.rstrip("/").removesuffix("/v1")
    try:
        async with httpx.AsyncClient(
            base_url=base, timeout=HTTP_S_MAX, headers=key_headers(), trust_env=False
        ) as client:
            wanted = question.decision_id
            if question.request_id:
                params: dict[str, str | int] = {"request_id": question.request_id, "limit": 1}
                listed = read(await client.get("/v1/decisions", params=params), Listed, base).decisions
                if not listed:
                    raise NotExplained(f"No router remembers a request {question.request_id}. {REQUEST_HINT}")
                wanted = listed[0].decision_id
            return read(await client.get(f"/v1/decisions/{quote(wanted, safe='')}"), DecisionRecord, base)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise NotExplained(f"{url} is no address of a router, such as http://127.0.0.1:8000: {error}") from error
    except httpx.TransportError as error:
        raise NotExplained(f"No router answers at {base} ({error or type(error).__name__}).") from error


KEY_HINT = f"Set {API_KEY_VARIABLE} to one with the permission admin."
REQUEST_HINT = "Its id is in the header x-request-id of the answer; the oldest are forgotten (ROUTER_DECISIONS_MAX)."


async def ask_over_nats(nats_url: str, question: Question) -> DecisionRecord:
    """Of the router that made it; where the question does not say which one that was, of any router over HTTP. Raises
    NotExplained, BusError.
    """
    if question.request_id or question.decision_id == LATEST:
        return await ask_router(await any_router(nats_url), question)
    router_id = DECISION_ID.sub("", question.decision_id)
    if not is_subject_token(router_id):
        raise NotExplained(f"{question.decision_id} is no decision's id: those are in the header x-baton-decision.")
    ask = AskDecision(router_id=RouterId(router_id), decision_id=DecisionId(question.decision_id))
    async with open_bus(nats_url) as bus:
        try:
            found = (await bus.ask(DECISION, ask, timeout_s=ASK_S_MAX)).decision
        except (NoResponders, AskTimedOut) as error:
            words = f"Router {router_id}, which would have made that decision, does not answer: it has ended, perhaps."
            raise NotExplained(words) from error
    if found is None:
        raise NotExplained(f"Router {router_id} has forgotten it: it keeps the newest only (ROUTER_DECISIONS_MAX).")
    return found


async def any_router(nats_url: str) -> str:
    """Where a router listens for HTTP. Raises NotExplained, BusError."""
    heard: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def take(status: ServiceStatus, _envelope: Envelope) -> None:
        if status.url and not heard.done():
            heard.set_result(status.url)

    async with open_bus(nats_url) as bus:
        await bus.subscribe(SERVICE_STATUS, take, service="router")
        try:
            return await asyncio.wait_for(heard, ROUTER_HEARD_S_MAX)
        except TimeoutError as error:
            raise NotExplained(f"No router of {nats_url} was heard within {ROUTER_HEARD_S_MAX:g} s.") from error


def read(answer: httpx.Response, kind: type[T], base: str) -> T:
    """The answer as what it should be. Raises NotExplained with the router's own words."""
    try:
        if answer.status_code == httpx.codes.OK:
            return msgspec.json.decode(answer.content, type=kind)
        error = msgspec.json.decode(answer.content, type=dict[str, dict[str, Any]])
        hint = f" {KEY_HINT}" if answer.status_code == httpx.codes.UNAUTHORIZED else ""
        raise NotExplained(str(error["error"]["message"]) + hint)
    except (msgspec.DecodeError, msgspec.ValidationError, LookupError) as error:
        raise NotExplained(f"What answers at {base} is no router of Baton ({answer.status_code}).") from error
