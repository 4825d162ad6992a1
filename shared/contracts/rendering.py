"""Prompts that a worker renders for a router, because only its engine knows how."""

from __future__ import annotations

from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.message import Message

RENDERED_BODY_BYTES_MAX = 8 * 1024 * 1024
"""Larger bodies are not rendered for routers: their requests are placed by load alone."""
RENDER_S_MAX = 1.0
"""Until the router has the result, waiting for earlier prompts included."""


class RenderPrompt(Message, frozen=True, kw_only=True):
    """Router -> worker: asks how its engine would read this request. Nothing is computed."""

    worker_id: WorkerId
    path: str
    body: bytes
    """The client's; likewise the salts, as in ``StartLeg``."""
    cache_salt: str = ""
    media_salt: str = ""


class RenderedPrompt(Message, frozen=True, kw_only=True):
    """Worker -> router: the prompt as the engine would get it."""

    worker_id: WorkerId
    epoch: Epoch
    tokens: int = 0
    """Of the prompt, placeholders of media included."""
    hashes: bytes = b""
    """Of its full blocks, packed (see ``kv_events.pack_hashes``)."""
    media_end: int = 0
    """Index after the last token that stands for a medium; 0: there is none."""
    refusal: str = ""
    """Why there is no result; empty when there is."""
