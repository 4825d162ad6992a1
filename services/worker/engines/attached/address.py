"""The address of a server that workers are attached to."""

from __future__ import annotations

from urllib.parse import urlsplit

API = "/v1"
LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})


def root_of(url: str) -> str:
    """The URL without a path ``/v1`` at its end, to which an API's paths are added. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("write it as http://HOST:PORT or https://HOST/PATH")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("it must have no user, password, query or fragment: a key belongs in a file")
    if parts.port == 0:
        raise ValueError("0 is no port")
    path = parts.path.rstrip("/").removesuffix(API)
    return f"{parts.scheme}://{parts.netloc}{path}"


def sends_key_in_clear(root: str) -> bool:
    """Whether a key would leave this machine without encryption."""
    parts = urlsplit(root)
    return parts.scheme == "http" and parts.hostname not in LOCAL_HOSTS
