"""vLLM's calls for RL trainers: pause, resume, and updates of weights in place, carried out on all workers of a model.

Paths, bodies and answers are those of one vLLM server, so that a trainer's client needs only another address. The
orchestrator passes each call to the workers; see ``services/orchestrator/weights.py``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import PurePath
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response

from services.router.http.adapter_routes import JSON, giver, order_refusal
from services.router.http.decision_routes import too_many
from services.router.http.edge import is_json
from services.router.request.client import CLIENT_SCOPE_KEY, ApiClient
from shared.bus.port import AskRefused, AskTimedOut, Bus, BusError, NoResponders
from shared.contracts.channels import DESCRIBE_WEIGHTS, ORDER_WEIGHTS
from shared.contracts.fleet_orders import (
    WEIGHTS_BYTES_MAX,
    AskWeights,
    ModelWeights,
    OrderWeights,
    PauseMode,
    WeightsAction,
)
from shared.http.errors import error_body
from shared.http.limits import BodyRefused, small_body

ORDER_S_MAX = 3600.0
"""Time limit of a call: a pause may wait for running requests."""
ASK_S_MAX = 10.0
FOLDERS = ("weight_dir", "weights_path")
"""Fields that name a folder with the new weights: of prime-rl's trainer, and of vLLM's own ``reload_weights``."""
STATUSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "All workers have carried it out."},
    400: {"description": "The call is invalid, or means several models; the message says which."},
    401: {"description": "An API key is needed, and no valid one was given."},
    403: {"description": "The key does not permit orders."},
    408: {"description": "The body did not arrive in time."},
    413: {"description": "The body is too large."},
    415: {"description": "The body is not JSON by its content type."},
    422: {"description": "Not used: invalid bodies get 400."},
    429: {"description": "The key has asked too often; Retry-After says when to try again."},
    500: {"description": "Workers could not carry it out; the message names them."},
    503: {"description": "No orchestrator carried it out in time."},
}
BODY: dict[str, Any] = {"requestBody": {"content": {JSON: {"schema": {"type": "object"}}}}}


A = TypeVar("A")


class CallRefused(Exception):
    """The message is for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class OrderAboutWeights:
    """Passes trainers' calls to the orchestrator."""

    def __init__(self, bus: Bus, *, is_local: bool) -> None:
        """``is_local``: see ``OrderAdapters``."""
        self.is_local = is_local
        self._bus = bus

    async def give(self, order: OrderWeights) -> None:
        """Returns when all workers have carried it out. Raises CallRefused."""
        done = await self._ask(self._bus.ask(ORDER_WEIGHTS, order, timeout_s=ORDER_S_MAX))
        if done.refusal:
            raise CallRefused(400, f"The order was refused: {done.refusal}.")
        if failures := [f"{one.worker_id}: {one.failure}" for one in done.changes if one.failure]:
            carried_out = len(done.changes) - len(failures)
            message = f"{carried_out} of {len(done.changes)} workers of {done.model} have carried it out."
            raise CallRefused(500, f"{message} {'; '.join(failures)}")

    async def state(self, model: str) -> ModelWeights:
        """Raises CallRefused."""
        told = await self._ask(self._bus.ask(DESCRIBE_WEIGHTS, AskWeights(), timeout_s=ASK_S_MAX))
        found = [one for one in told.models if not model or one.wanted.model == model]
        if len(found) == 1:
            return found[0]
        names = ", ".join(one.wanted.model for one in told.models) or "none"
        raise CallRefused(400, f"Name one model with `?model=`; there are workers of: {names}.")

    async def _ask(self, asking: Awaitable[A]) -> A:
        try:
            return await asking
        except NoResponders:
            raise CallRefused(503, "No orchestrator responds: it carries out orders about weights.") from None
        except (AskTimedOut, AskRefused):
            raise CallRefused(503, "The orchestrator did not carry it out in time: see its log.") from None
        except BusError:
            raise CallRefused(503, "The router cannot reach NATS. Try again shortly.") from None


Make = Callable[[dict[str, Any], Request], OrderWeights]
Body = dict[str, Any]


def _plain(action: WeightsAction) -> Make:
    return lambda _body, _request: OrderWeights(action=action)


def _pause(_body: Body, request: Request) -> OrderWeights:
    query = request.query_params
    mode, clear = query.get("mode", PauseMode.ABORT.value), query.get("clear_cache", "true").lower()
    if mode not in list(PauseMode):
        raise CallRefused(400, f"`mode` is one of {', '.join(PauseMode)}.")
    if clear not in {"true", "false", "1", "0"}:
        raise CallRefused(400, "`clear_cache` is true or false.")
    return OrderWeights(action=WeightsAction.PAUSE, mode=PauseMode(mode), clear_cache=clear in {"true", "1"})


def _init(body: Body, _request: Request) -> OrderWeights:
    return OrderWeights(action=WeightsAction.INIT, payload=_encoded(body, "init_info"))


def _update(body: Body, _request: Request) -> OrderWeights:
    """A part of an update that has begun; or a folder, which is a whole one."""
    info = body.get("update_info")
    for told in (body, info if isinstance(info, dict) else {}):
        for name in FOLDERS:
            if isinstance(path := told.get(name), str):
                version = _text(body, "weight_version") or PurePath(path).name
                return OrderWeights(action=WeightsAction.LOAD, path=path, version=version)
    return OrderWeights(action=WeightsAction.UPDATE, payload=_encoded(body, "update_info"))


def _finish(body: Body, _request: Request) -> OrderWeights:
    return OrderWeights(action=WeightsAction.FINISH, version=_text(body, "weight_version"))


CALLS: dict[str, tuple[Make, dict[str, Any], str]] = {
    "/pause": (_pause, {"status": "paused"}, "Schedule nothing; `mode`: abort, wait or keep"),
    "/resume": (_plain(WeightsAction.RESUME), {"status": "resumed"}, "Go on after a pause"),
    "/init_weight_transfer_engine": (_init, {"message": "Weight transfer initialized"}, "Connect to a trainer"),
    "/shutdown_weight_transfer_engine": (
        _plain(WeightsAction.SHUTDOWN),
        {"message": "Weight transfer shut down"},
        "Part from the trainer",
    ),
    "/start_weight_update": (_plain(WeightsAction.START), {"message": "Weight update started"}, "Begin an update"),
    "/update_weights": (_update, {"message": "Weights updated"}, "Receive a part, or load a folder"),
    "/finish_weight_update": (_finish, {"message": "Weight update finished"}, "The weights are complete"),
}
"""Paths, each with what is ordered, the answer, and a summary."""


def add_weights(app: FastAPI, orders: OrderAboutWeights, now: Callable[[], float]) -> None:
    for path, (make, answer, summary) in CALLS.items():
        app.add_api_route(
            path,
            _call(make, answer, orders, now),
            methods=["POST"],
            tags=["orders"],
            summary=summary,
            operation_id=path.strip("/"),
            responses=STATUSES,
            openapi_extra=BODY,
        )

    def asks(path: str, answer: Callable[[ModelWeights], dict[str, Any]], summary: str) -> None:
        app.add_api_route(
            path,
            _question(answer, orders, now),
            methods=["GET"],
            tags=["orders"],
            summary=summary,
            operation_id=path.strip("/"),
            responses=STATUSES,
        )

    asks("/is_paused", lambda one: {"is_paused": one.wanted.paused}, "Whether the model's workers are paused")
    asks("/weight_info", lambda one: {"weight_version": one.wanted.version or "default"}, "The newest weights' name")
    asks("/get_world_size", lambda one: {"world_size": one.ranks}, "Ranks of all workers of the model")


def _call(
    make: Make, answer: dict[str, Any], orders: OrderAboutWeights, now: Callable[[], float]
) -> Callable[[Request], Awaitable[Response]]:
    async def call(request: Request) -> Response:
        client: ApiClient = request.scope[CLIENT_SCOPE_KEY]
        if (refused := _refused(client, orders, now())) is not None:
            return refused
        if not is_json(request.headers.get("content-type", JSON)):
            return _error(415, "Send JSON, with the header `Content-Type: application/json`.")
        try:
            raw = await small_body(request, WEIGHTS_BYTES_MAX)
            body = msgspec.json.decode(raw or b"{}", type=dict[str, Any])
            order = make(body, request)
            model = request.query_params.get("model", "") or _text(body, "model")
            await orders.give(msgspec.structs.replace(order, model=model, by=giver(client)))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as wrong:
            return _error(400, f"That is not an order: {wrong}.")
        except (BodyRefused, CallRefused) as refusal:
            return _error(refusal.status, str(refusal))
        return Response(msgspec.json.encode(answer), media_type=JSON)

    return call


def _question(
    answer: Callable[[ModelWeights], dict[str, Any]], orders: OrderAboutWeights, now: Callable[[], float]
) -> Callable[[Request], Awaitable[Response]]:
    async def question(request: Request) -> Response:
        client: ApiClient = request.scope[CLIENT_SCOPE_KEY]
        if (refused := _refused(client, orders, now())) is not None:
            return refused
        try:
            found = await orders.state(request.query_params.get("model", ""))
        except CallRefused as refusal:
            return _error(refusal.status, str(refusal))
        return Response(msgspec.json.encode(answer(found)), media_type=JSON)

    return question


def _refused(client: ApiClient, orders: OrderAboutWeights, at: float) -> Response | None:
    """Before the body is read."""
    if why := order_refusal(client, is_local=orders.is_local):
        return _error(403, why)
    return too_many(client, at)


def _encoded(body: Body, name: str) -> bytes:
    """Raises CallRefused."""
    if name not in body:
        raise CallRefused(400, f"`{name}` is missing.")
    return msgspec.json.encode(body[name])


def _text(body: Body, name: str) -> str:
    """Raises CallRefused."""
    value = body.get(name)
    if value is None or isinstance(value, str):
        return value or ""
    raise CallRefused(400, f"`{name}` must be a text.")


def _error(status: int, message: str) -> Response:
    return Response(error_body(status, message), status, media_type=JSON)
