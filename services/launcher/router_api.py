"""A router's HTTP API as commands use it: every error is CommandFailed, with a message for the user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeVar

import httpx
import msgspec

from services.launcher.bus_client import CommandFailed
from shared.http.errors import ErrorResponse

T = TypeVar("T")


def base_of(url: str) -> str:
    """The address of a router, of which clients also have the one that ends with ``/v1``."""
    return url.rstrip("/").removesuffix("/v1")


@contextmanager
def reaching(base: str) -> Iterator[None]:
    """Requests to the router at this address. Raises CommandFailed if there is none."""
    try:
        yield
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise CommandFailed(f"{base} is not the URL of a router, such as http://127.0.0.1:8000: {error}") from error
    except httpx.TransportError as error:
        raise CommandFailed(f"No router responds at {base} ({error or type(error).__name__}).") from error


def decoded(response: httpx.Response, kind: type[T], base: str, key_hint: str) -> T:
    """What the router answers. Raises CommandFailed as ``refuse`` does."""
    if response.status_code != httpx.codes.OK:
        refuse(response, base, key_hint)
    try:
        return msgspec.json.decode(response.content, type=kind)
    except msgspec.DecodeError as error:
        raise CommandFailed(f"The server at {base} is not a Baton router: {error}") from error


def refuse(response: httpx.Response, base: str, key_hint: str) -> NoReturn:
    """Raises CommandFailed with the router's message. ``key_hint``: which API key is needed."""
    try:
        message = msgspec.json.decode(response.content, type=ErrorResponse).error.message
    except msgspec.DecodeError:
        message = f"The server at {base} is not a Baton router (status {response.status_code})."
    hint = f" {key_hint}" if response.status_code == httpx.codes.UNAUTHORIZED else ""
    raise CommandFailed(message + hint)
