"""``POST /v1/load_lora_adapter`` and ``/v1/unload_lora_adapter``: orders about LoRA adapters, in vLLM's form.

They are the orders of ``baton lora``: the orchestrator carries them out on all workers of the model, logs them, and
repeats them on workers that start later.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response

from services.router.http.decision_routes import too_many
from services.router.http.edge import is_json
from services.router.request.client import ANYONE, CLIENT_SCOPE_KEY, ApiClient
from services.router.state.cluster_view import ClusterView
from shared.bus.port import AskRefused, AskTimedOut, Bus, BusError, NoResponders
from shared.contracts.api_keys import Permission
from shared.contracts.channels import ORDER_ADAPTER
from shared.contracts.fleet_orders import AdapterAction, AdapterOrdered, OrderAdapter
from shared.http.errors import error_body
from shared.http.limits import BodyRefused, small_body
from shared.text import fleet_text

JSON = "application/json"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
ORDER_S_MAX = 600.0
"""Seconds for all workers to load an adapter."""
DIGEST_CHARS = 8
"""Length of the part of a key's SHA-256 that names the key in the orchestrator's log."""
NOT_TO_ORDER = "This needs a key with the permission admin."
NO_KEYS = "Orders need an API key with the permission admin, or a router that only this machine can reach."
STATUSES: dict[int | str, dict[str, Any]] = {
    200: {"description": "All workers have carried out the order.", "content": {"text/plain": {}}},
    400: {"description": "The body is invalid, or workers could not carry out the order; the message says which."},
    401: {"description": "An API key is needed, and no valid one was given."},
    403: {"description": "The key does not permit orders."},
    404: {"description": "No worker has loaded the adapter."},
    408: {"description": "The body did not arrive in time."},
    413: {"description": "The body is too large."},
    415: {"description": "The body is not JSON by its content type."},
    422: {"description": "Not used: invalid bodies get 400."},
    429: {"description": "The key has asked too often; Retry-After says when to try again."},
    503: {"description": "No orchestrator carried out the order in time."},
}


class LoadBody(msgspec.Struct, frozen=True):
    """VLLM's fields, and the model that the adapter is for, where there are several."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: bool = False
    model: str = ""


class UnloadBody(msgspec.Struct, frozen=True):
    """See ``LoadBody``."""

    lora_name: str
    lora_int_id: int | None = None
    """As in vLLM, not used."""
    model: str = ""


def _schema(*required: str, **flags: dict[str, Any]) -> dict[str, Any]:
    texts = {name: {"type": "string"} for name in (*required, "model")}
    schema = {"type": "object", "required": list(required), "properties": {**texts, **flags}}
    return {"requestBody": {"required": True, "content": {JSON: {"schema": schema}}}}


LOAD_SCHEMA = _schema("lora_name", "lora_path", load_inplace={"type": "boolean"})
UNLOAD_SCHEMA = _schema("lora_name")
AnyBody = TypeVar("AnyBody", LoadBody, UnloadBody)


def order_refusal(client: ApiClient, *, is_local: bool) -> str:
    """Why this client may give no orders; empty when it may. ``is_local``: see ``OrderAdapters``."""
    if client is ANYONE:
        return "" if is_local else NO_KEYS
    return "" if client.key.may(Permission.ADMIN) else NOT_TO_ORDER


class OrderRefused(Exception):
    """The order was not carried out; the message is for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class OrderAdapters:
    """Passes orders of operators to the orchestrator."""

    def __init__(self, bus: Bus, cluster: ClusterView, *, is_local: bool) -> None:
        """``is_local``: only clients on this machine can connect; they need no key where none is configured."""
        self._bus = bus
        self._cluster = cluster
        self._is_local = is_local

    def refusal(self, client: ApiClient) -> str:
        """Why this client may give no orders; empty when it may."""
        return order_refusal(client, is_local=self._is_local)

    async def load(self, body: LoadBody, by: str) -> str:
        """A sentence about the order that was carried out. Raises OrderRefused."""
        if body.is_3d_lora_weight:
            raise OrderRefused(400, "`is_3d_lora_weight` is not supported.")
        if not body.load_inplace and self._is_loaded(body.lora_name):
            message = "has already been loaded. To load it in place, set `load_inplace` to true."
            raise OrderRefused(400, f"The lora adapter '{body.lora_name}' {message}")
        order = OrderAdapter(
            action=AdapterAction.LOAD, name=body.lora_name, path=body.lora_path, model=body.model, by=by
        )
        await self._give(order)
        return f"Success: LoRA adapter '{body.lora_name}' added successfully."

    async def unload(self, body: UnloadBody, by: str) -> str:
        """A sentence about the order that was carried out. Raises OrderRefused."""
        was_loaded = self._is_loaded(body.lora_name)
        order = OrderAdapter(action=AdapterAction.UNLOAD, name=body.lora_name, model=body.model, by=by)
        try:
            await self._give(order)
        except OrderRefused as refused:
            if refused.status == 400 and not was_loaded:
                raise OrderRefused(404, f"The lora adapter '{body.lora_name}' cannot be found.") from None
            raise
        return f"Success: LoRA adapter '{body.lora_name}' removed successfully."

    def _is_loaded(self, name: str) -> bool:
        return any(name in view.adapters for view in self._cluster.workers.values())

    async def _give(self, order: OrderAdapter) -> AdapterOrdered:
        try:
            done = await self._bus.ask(ORDER_ADAPTER, order, timeout_s=ORDER_S_MAX)
        except NoResponders:
            message = "No orchestrator responds: it carries out orders about adapters."
            raise OrderRefused(503, message) from None
        except (AskTimedOut, AskRefused):
            raise OrderRefused(503, "The orchestrator did not carry out the order in time: see its log.") from None
        except BusError:
            raise OrderRefused(503, "The router cannot reach NATS. Try again shortly.") from None
        if done.refusal or any(change.failure for change in done.changes):
            raise OrderRefused(400, f"{fleet_text.adapter_ordered(done)}.")
        return done


def add_lora(app: FastAPI, orders: OrderAdapters, now: Callable[[], float]) -> None:
    @app.post(LOAD, tags=["orders"], responses=STATUSES, openapi_extra=LOAD_SCHEMA)
    async def load_lora_adapter(request: Request) -> Response:
        """Load a LoRA adapter on all workers of its model: ``lora_path`` is a folder below their WORKER_LORA_DIR."""
        return await carried_out(request, LoadBody, orders, orders.load, now())

    @app.post(UNLOAD, tags=["orders"], responses=STATUSES, openapi_extra=UNLOAD_SCHEMA)
    async def unload_lora_adapter(request: Request) -> Response:
        """Unload a LoRA adapter from all workers. Running requests finish; further ones get 404."""
        return await carried_out(request, UnloadBody, orders, orders.unload, now())


async def carried_out(
    request: Request,
    kind: type[AnyBody],
    orders: OrderAdapters,
    order: Callable[[AnyBody, str], Awaitable[str]],
    now: float,
) -> Response:
    """Check the client before its body is read, then give the order."""
    client: ApiClient = request.scope[CLIENT_SCOPE_KEY]
    if why := orders.refusal(client):
        return _error(403, why)
    if (refused := too_many(client, now)) is not None:
        return refused
    if not is_json(request.headers.get("content-type", JSON)):
        return _error(415, "Send JSON, with the header `Content-Type: application/json`.")
    try:
        body = msgspec.json.decode(await small_body(request), type=kind)
        return Response(await order(body, giver(client)), media_type="text/plain")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as wrong:
        return _error(400, f"That is not an order: {wrong}.")
    except (BodyRefused, OrderRefused) as refusal:
        return _error(refusal.status, str(refusal))


def giver(client: ApiClient) -> str:
    """The client that gives the order, for the orchestrator's log."""
    if client is ANYONE:
        return "a client of a router without keys"
    return f"tenant {client.key.tenant}, API key {client.key.sha256[:DIGEST_CHARS]}"


def _error(status: int, message: str) -> Response:
    return Response(error_body(status, message), status, media_type=JSON)
