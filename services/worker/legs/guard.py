"""Refuses bodies that would cost the engine's server more than they may, whichever way they came.

That server reads any JSON into objects, and lets ``chat_template_kwargs`` replace special tokens, with which a template
makes far more text than it was sent, or arguments of the tokenizer, such as a length to pad to.
"""

from __future__ import annotations

import asyncio

import msgspec

from services.worker.engines.port import EngineFacts
from shared.contracts.request_body import body_fault, reserved_in, reserved_message

HINTS = (b"chat_template_kwargs", b"\\u")
"""A body without either sets no variable of the template, not even with escapes in its name."""
AT_ONCE_BYTES = 256 * 1024
"""Examined on the event loop, in a millisecond at most."""


async def refusal(body: bytes) -> bytes:
    """The body of the 400 response; empty when the engine's server may have the request."""
    if len(body) <= AT_ONCE_BYTES:
        return refusal_of(body)
    return await asyncio.to_thread(refusal_of, body)


def refusal_of(body: bytes) -> bytes:
    """See ``refusal``."""
    if too_costly := body_fault(body):
        return _error(f"The body {too_costly}.", None)
    if any(hint in body for hint in HINTS) and (name := reserved_in(body)):
        return _error(reserved_message(name), "chat_template_kwargs")
    return b""


def serves(facts: EngineFacts, path: str) -> bool:
    """Whether the engine's server has this path, as far as that is known."""
    return not facts.paths or path in facts.paths


def not_served(facts: EngineFacts, path: str) -> bytes:
    """The body of the 404 response."""
    message = f"The engine of {facts.models[0]} does not serve {path}; it serves {', '.join(sorted(facts.paths))}."
    error = {"message": message, "type": "NotFoundError", "param": None, "code": 404}
    return msgspec.json.encode({"error": error})


def _error(message: str, param: str | None) -> bytes:
    error = {"message": message, "type": "BadRequestError", "param": param, "code": 400}
    return msgspec.json.encode({"error": error})
