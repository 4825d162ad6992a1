"""What the routes of FastAPI share that clients use with the permission to have requests served."""

from __future__ import annotations

from fastapi import Response

from services.router.auth.api_keys import Permission
from services.router.auth.authenticator import NOT_FOR_INFERENCE, limited
from services.router.auth.client import ANYONE, ApiClient
from shared.http.errors import HttpError


def refusal_of(client: ApiClient, now: float) -> HttpError | None:
    """Why the client gets no answer, whatever it asks for. Counts the request."""
    if client is ANYONE:
        return None
    if not client.key.may(Permission.INFER):
        return NOT_FOR_INFERENCE
    over = client.rate_limit.request(now)
    return limited(over, client, now) if over is not None else None


def error_response(error: HttpError) -> Response:
    """The error, as FastAPI sends it."""
    headers = {name.decode(): value.decode("latin-1") for name, value in error.headers()}
    return Response(error.body, error.status, headers)
