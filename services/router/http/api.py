"""The FastAPI app: the OpenAPI document, and all endpoints that are not on the hot path.

The inference routes are here for the OpenAPI document. ``Edge`` serves them before FastAPI, unless the client
spells the path differently (percent-encoding, an absolute URL).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException

from services.router.batches.batches import Batches
from services.router.decisions.decision_service import DecisionService
from services.router.http.adapter_routes import OrderAdapters, add_lora
from services.router.http.decision_routes import add_decisions
from services.router.http.file_routes import add_files
from services.router.http.response_routes import add_responses
from services.router.http.weight_routes import OrderAboutWeights, add_weights
from services.router.placement.fleet import Fleet
from services.router.placement.policy import CLASS_HEADER, TENANT_HEADER
from services.router.placement.revisions import Shares
from services.router.request.client import CLIENT_SCOPE_KEY
from services.router.request.errors import error_for, error_response, failed
from services.router.request.facts import Mode
from services.router.request.fields import (
    FETCH_MIN_TOKENS_MAX,
    PRIORITY_MAX,
    PRIORITY_MIN,
    SOURCES_MAX,
    TARGET_S_MAX,
    TARGET_S_MIN,
)
from services.router.responses.responses import Responses
from services.router.state.worker_view import WorkerView
from shared.bus.port import Bus
from shared.contracts.engine_paths import CHAT, COMPLETIONS, FORMS, GENERATE, PASSED_THROUGH, PLACED, TOKENIZER_INFO
from shared.contracts.failures import Reason
from shared.contracts.workers import Role, WorkerPhase
from shared.http.errors import HttpError, error_body
from shared.runtime.clock import Clock
from shared.runtime.service import baton_version
from shared.runtime.waiting import Waits
from shared.telemetry.prometheus import page

JSON = "application/json"
MODEL_CHARS_SHOWN = 200

ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}
ERRORS = {
    400: "The engine refused the body, with its own message; or a field of Baton's own is invalid.",
    401: "An API key is needed, and no valid one was given.",
    403: "The client may not ask for this: workers, too urgent a priority, or something its key does not permit; or, "
    "without keys, a page of another site or an unknown host name asked for it.",
    404: "No worker has ever offered this model, or none serves this endpoint.",
    405: "The method is not allowed.",
    408: "The body did not arrive in time.",
    412: "Messages and responses: less of the prompt is cached than `cache_hit_threshold` asks for.",
    413: "The body is larger than the limit; nothing was sent.",
    415: "The body is not JSON by its content type.",
    422: "The engine could not process the body.",
    429: "The tenant's queue is full, or its key has reached a rate limit; Retry-After says when to try again.",
    499: "The client left.",
    500: "A bug, or an error inside the engine.",
    501: "The engine does not serve this.",
    502: "The worker was lost and no other could take over.",
    503: "No worker is available, or the wait would be too long; Retry-After says when to try again.",
    504: "The request's deadline has passed.",
}


def _body_schema(required: list[str], properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "required": required, "properties": properties, "additionalProperties": True}
    return {"required": True, "content": {JSON: {"schema": schema}}}


WORKER = {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,128}$"}
SECONDS = {"type": "number", "minimum": TARGET_S_MIN, "maximum": TARGET_S_MAX}
BATON: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "description": "How to serve the request. A client may choose workers, sources and priority as far as the operator "
    "allows it.",
    "properties": {
        "mode": {"enum": list(Mode), "description": "Overrides the header."},
        "prefill_worker": {**WORKER, "description": "Computes the prompt."},
        "decode_worker": {
            **WORKER,
            "description": "Generates the completion; in mode aggregated it computes the prompt, too.",
        },
        "sources": {
            "type": "array",
            "maxItems": SOURCES_MAX,
            "items": WORKER,
            "description": "Workers to fetch KV from.",
        },
        "class": {"type": "string", "description": "Overrides the header."},
        "priority": {
            "type": "integer",
            "minimum": PRIORITY_MIN,
            "maximum": PRIORITY_MAX,
            "description": "Lower is more urgent. Left out: that of the class or the model.",
        },
        "ttft_s": {**SECONDS, "description": "Target for the time to first token."},
        "itl_s": {**SECONDS, "description": "Target for the time between tokens."},
        "resumes_max": {
            "type": "integer",
            "minimum": 0,
            "description": "How often the stream may be resumed at another worker when it breaks off; no more than the "
            "operator allows.",
        },
        "prefetch": {
            "type": "boolean",
            "default": False,
            "description": "Answer nothing: the worker to which this request would go now reads what other workers and "
            "stores have of its prompt's KV, because a request with this prefix will come. The response, of the type "
            "`baton.prefetch`, says what was there and what was fetched.",
        },
    },
}
CONTROL_PROPERTIES: dict[str, Any] = {
    "cache_hit_threshold": {
        "type": "number",
        "minimum": 0,
        "maximum": 1,
        "description": "Refuse, with finish_reason cache_threshold and no token (messages and responses: with status "
        "412), when a smaller share of the prompt is cached or can be fetched; 0: never. Left out: the worker's own, "
        "which messages and responses ignore. One worker serves such a request, unless x-baton-mode says otherwise: a "
        "prefill worker computes whatever is missing.",
    },
    "kv_fetch_min_tokens": {
        "type": "integer",
        "minimum": 0,
        "maximum": FETCH_MIN_TOKENS_MAX,
        "description": "Compute fewer prompt tokens than this rather than fetch their KV from another worker.",
    },
    "baton": BATON,
}
COMMON_PROPERTIES: dict[str, Any] = {
    "model": {"type": "string"},
    "stream": {"type": "boolean", "default": False},
    "max_tokens": {"type": "integer", "minimum": 1},
    "temperature": {"type": "number", "minimum": 0},
    **CONTROL_PROPERTIES,
}
COMPLETIONS_BODY = _body_schema(
    ["model", "prompt"],
    {
        **COMMON_PROPERTIES,
        "prompt": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer", "minimum": 0}}]},
    },
)
MESSAGE_SCHEMA = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {"role": {"enum": ["system", "user", "assistant"]}, "content": {"type": "string"}},
}
CHAT_BODY = _body_schema(
    ["model", "messages"], {**COMMON_PROPERTIES, "messages": {"type": "array", "minItems": 1, "items": MESSAGE_SCHEMA}}
)
GENERATE_BODY = _body_schema(
    ["token_ids", "sampling_params"],
    {
        "model": {"type": "string"},
        "token_ids": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
        "sampling_params": {"type": "object", "additionalProperties": True},
        "stream": {"type": "boolean", "default": False},
        **CONTROL_PROPERTIES,
    },
)
CONTROLLED_BODY = _body_schema([], CONTROL_PROPERTIES)
ANY_BODY = _body_schema([], {})
FORM_BODY: dict[str, Any] = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", "model"],
                "properties": {
                    "file": {"type": "string", "format": "binary"},
                    "model": {"type": "string"},
                    "stream": {"type": "boolean"},
                },
                "additionalProperties": True,
            }
        }
    },
}
MODEL_PARAMETER = {
    "name": "model",
    "in": "query",
    "required": False,
    "description": "The model whose tokenizer is asked for; any, when it is left out.",
    "schema": {"type": "string"},
}
TOKENIZER_INFO_SUMMARY = "The model's tokenizer, where engines run with --enable-tokenizer-info-endpoint"
ANSWER = "The response, whole or as a stream of events."
HEADERS = [
    {
        "name": "x-baton-mode",
        "in": "header",
        "required": False,
        "description": "How to serve the request; auto lets the router choose.",
        "schema": {"enum": list(Mode)},
    },
    {
        "name": CLASS_HEADER,
        "in": "header",
        "required": False,
        "description": "The request's class, which has targets and a priority; the operator defines the classes.",
        "schema": {"type": "string"},
    },
    {
        "name": TENANT_HEADER,
        "in": "header",
        "required": False,
        "description": "The tenant whose fair share the request uses; where API keys are needed, the key decides.",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,128}$"},
    },
    {
        "name": "x-request-id",
        "in": "header",
        "required": False,
        "description": "A name for the request, repeated in the response.",
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,128}$"},
    },
]


def _responses(path: str) -> dict[int | str, dict[str, Any]]:
    # An engine's errors for endpoints that it does not serve have its web framework's format.
    error: dict[str, Any] = ERROR_SCHEMA if path in (COMPLETIONS, CHAT) else {}
    content: dict[str, Any] = {JSON: {"schema": {}}, "text/event-stream": {}}
    responses: dict[int | str, dict[str, Any]] = {200: {"description": ANSWER, "content": content}}
    for status, text in ERRORS.items():
        responses[status] = {"description": text, "content": {JSON: {"schema": error}}}
    return responses


def make_app(  # noqa: PLR0913  # wiring
    *,
    fleet: Fleet,
    shares: Shares,
    decisions: DecisionService,
    registry: CollectorRegistry,
    bus: Bus,
    clock: Clock,
    waits: Waits,
    responses: Responses,
    batches: Batches,
    order_adapters: OrderAdapters,
    order_weights: OrderAboutWeights,
) -> FastAPI:
    """The FastAPI app for everything but the relayed paths."""
    # FastAPI's pages of documentation load scripts from another host.
    app = FastAPI(
        title="Baton",
        description="OpenAI-compatible inference over prefill and decode workers.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    _add_inference(app)
    _add_models(app, fleet, shares, clock)
    _add_state(app, fleet, bus, clock, waits)
    add_decisions(app, decisions, clock.now)
    add_responses(app, responses, clock.now)
    add_files(app, batches, clock.now)
    add_lora(app, order_adapters, clock.now)
    add_weights(app, order_weights, clock.now)
    _add_errors(app)

    @app.get("/metrics", response_class=Response, tags=["state"])
    async def metrics(request: Request) -> Response:
        """Prometheus metrics of this router; with an OpenMetrics Accept header also exemplars."""
        body, content_type = page(registry, request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    return app


def _body_of(path: str) -> dict[str, Any]:
    """The schema of a body that vLLM's server reads."""
    if path == GENERATE:
        return GENERATE_BODY
    if path in PLACED:
        return CONTROLLED_BODY
    return FORM_BODY if path in FORMS else ANY_BODY


def _add_inference(app: FastAPI) -> None:
    async def relayed(request: Request) -> Response:
        return _error(request, 400, "The path must be spelled as in the OpenAPI document.")

    others = [path for path in (*PLACED, *PASSED_THROUGH) if path not in (COMPLETIONS, CHAT)]
    posts = (
        (COMPLETIONS, COMPLETIONS_BODY, "Complete a prompt"),
        (CHAT, CHAT_BODY, "Continue a conversation"),
        *((path, _body_of(path), f"Served by vLLM's server: {path}") for path in others),
    )
    routes: tuple[tuple[str, str, dict[str, Any], str], ...] = (
        *(("POST", path, {"requestBody": body, "parameters": HEADERS}, summary) for path, body, summary in posts),
        ("GET", TOKENIZER_INFO, {"parameters": [MODEL_PARAMETER, *HEADERS]}, TOKENIZER_INFO_SUMMARY),
    )
    for method, path, extra, summary in routes:
        app.add_api_route(
            path,
            relayed,
            methods=[method],
            summary=summary,
            tags=["inference"],
            operation_id=path.strip("/").replace("/", "_"),
            response_class=Response,
            responses=_responses(path),
            openapi_extra=extra,
        )


def _add_models(app: FastAPI, fleet: Fleet, shares: Shares, clock: Clock) -> None:
    created = int(time.time())

    @app.get("/v1/models", tags=["inference"])
    async def models(request: Request) -> Response:
        """The models and LoRA adapters that ready workers offer, with their revisions and each revision's share of
        conversations. ``parent`` is the model that an adapter adapts.
        """
        return Response(msgspec.json.encode({"object": "list", "data": offered_to(request)}), media_type=JSON)

    @app.get("/v1/models/{model:path}", tags=["inference"], responses={404: {"description": "No such model."}})
    async def model(model: str, request: Request) -> Response:
        """One entry of the list of models; the name may contain slashes."""
        found = next((one for one in offered_to(request) if one["id"] == model), None)
        if found is None:
            refusal = failed(Reason.MODEL_UNKNOWN, f"No worker offers the model {model[:MODEL_CHARS_SHOWN]!r}.")
            return error_response(refusal)
        return Response(msgspec.json.encode(found), media_type=JSON)

    def offered_to(request: Request) -> list[dict[str, Any]]:
        allowed = request.scope[CLIENT_SCOPE_KEY].key.models
        data = list_models(fleet, shares, clock.now(), created)
        return [one for one in data if not allowed or allowed & {one["id"], fleet.cluster.primary_name(one["id"])}]


def _add_state(app: FastAPI, fleet: Fleet, bus: Bus, clock: Clock, waits: Waits) -> None:
    @app.get("/", tags=["state"])
    async def root() -> Response:
        """What answers here, for people and for probes that ask no other path."""
        return Response(msgspec.json.encode({"service": "Baton router", "api": "/openapi.json"}), media_type=JSON)

    @app.get("/version", tags=["state"])
    async def version() -> Response:
        """The version of the router, and those of the engines of ready workers."""
        views = [view for view in fleet.cluster.workers.values() if fleet.offered(view, clock.now())]
        engines = sorted({view.record.fingerprint.engine_version for view in views})
        return Response(msgspec.json.encode({"version": baton_version(), "engines": engines}), media_type=JSON)

    @app.post("/ping", tags=["state"], operation_id="post_ping", responses={503: {"description": "As ``/health``."}})
    @app.get("/ping", tags=["state"], responses={503: {"description": "As ``/health``."}})
    @app.get("/health", tags=["state"], responses={503: {"description": "Starting; says what it waits for."}})
    async def health() -> Response:
        """The process is alive and has found what it needs to start."""
        body = {"status": "unhealthy", "reason": waits.text} if waits.text else {"status": "healthy"}
        return Response(msgspec.json.encode(body), 503 if waits.text else 200, media_type=JSON)

    @app.get("/ready", tags=["state"], responses={503: {"description": "Not ready; says why."}})
    async def ready() -> Response:
        """NATS is connected and at least one worker is ready."""
        why = "" if fleet.ready(clock.now()) else waits.text or "no worker is ready"
        if not bus.connected:
            why = "NATS is not connected"
        body = {"status": "ready"} if not why else {"status": "not ready", "reason": why}
        return Response(msgspec.json.encode(body), 503 if why else 200, media_type=JSON)

    @app.get("/healthcheck", tags=["state"], responses={503: {"description": "Not ready; says why."}})
    async def healthcheck() -> Response:
        """As ``/ready``, in the form of vLLM's proxies. A worker of both roles counts as both."""
        now, silent_s_max = clock.now(), fleet.policy.silent_s_max
        roles = [view.record.role for view in fleet.cluster.workers.values() if view.fit(now, silent_s_max)]
        is_ready = fleet.ready(now) and bus.connected
        body = {
            "status": "ok" if is_ready else "not ready",
            "prefill_instances": sum(role is not Role.DECODE for role in roles),
            "decode_instances": sum(role is not Role.PREFILL for role in roles),
        }
        return Response(msgspec.json.encode(body), 200 if is_ready else 503, media_type=JSON)


def _add_errors(app: FastAPI) -> None:
    """Give FastAPI's own errors the format that clients of the path read."""

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return _error(request, error.status_code, str(error.detail), error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        wrong = [f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in error.errors()]
        return _error(request, 400, "; ".join(wrong))


def _error(request: Request, status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    error = error_for(request.scope["path"], HttpError(status, error_body(status, message)))
    return Response(error.body, status, headers=headers, media_type=JSON)


def list_models(fleet: Fleet, shares: Shares, now: float, created: int) -> list[dict[str, Any]]:
    """OpenAI's model objects of all models, and then all adapters, that workers offer which are ready, or sleep."""
    offered = [view for view in fleet.cluster.workers.values() if fleet.offered(view, now)]
    offering: dict[str, list[WorkerView]] = {}
    for view in offered:
        for model in view.record.models:
            offering.setdefault(model, []).append(view)
    models = [_model(name, views, shares, created) for name, views in offering.items()]
    adapting: dict[str, list[WorkerView]] = {}
    for view in offered:
        for name in view.adapters.keys() - offering.keys():
            adapting.setdefault(name, []).append(view)
    return models + [_adapter(name, adapting[name], shares, created) for name in sorted(adapting)]


def _adapter(name: str, views: list[WorkerView], shares: Shares, created: int) -> dict[str, Any]:
    """An adapter, with the digests of its files: of more than one while workers change from one version to the next."""
    workers: dict[str, dict[str, int]] = {}
    for view in views:
        roles = workers.setdefault(view.digest_of(name), {})
        roles[view.record.role.value] = roles.get(view.record.role.value, 0) + 1
    return {
        **_model(name, views, shares, created),
        "root": name,
        "parent": views[-1].record.model,
        "files": [{"sha256": digest, "workers": roles} for digest, roles in workers.items()],
    }


def _model(name: str, views: list[WorkerView], shares: Shares, created: int) -> dict[str, Any]:
    awake = [view for view in views if view.record.phase is not WorkerPhase.ASLEEP]
    record = (awake or views)[-1].record
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "baton",
        "root": record.fingerprint.model,
        "parent": None,
        "max_model_len": record.max_model_len or None,
        "permission": [],
        "asleep": not awake,
        "revisions": _revisions(name, awake, shares),
    }


def _revisions(name: str, views: list[WorkerView], shares: Shares) -> list[dict[str, Any]]:
    """Revisions, that of the oldest worker first."""
    workers: dict[str, dict[str, int]] = {}
    for view in views:
        roles = workers.setdefault(view.record.fingerprint.revision, {})
        roles[view.record.role.value] = roles.get(view.record.role.value, 0) + 1
    return [
        {"revision": revision, "share": shares.share(name, revision), "workers": roles}
        for revision, roles in workers.items()
    ]
