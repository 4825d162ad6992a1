"""Prompts as vLLM's engine would get them: rendered by vLLM's own server and processor, hashed by vLLM.

The text that its server renders from one chat is bounded. vLLM checks the length of a prompt after its template has
been rendered, and its time limit abandons the thread that renders, which goes on. A variable that a template repeats
for each message becomes gigabytes before either helps.
"""

from __future__ import annotations

import asyncio
from contextvars import copy_context
from functools import partial
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.worker.engines.port import CURRENT_LEG, AsgiApp, EnginePrompt, LegRecord
from services.worker.engines.vllm.tokenizer import FIRST_HASH_KNOWN, REFUSAL_CHARS_MAX, hashes_of
from services.worker.legs.asgi_call import ask_app
from shared.contracts.inference import LegKind
from shared.contracts.request_body import joined, prompt_chars_max

REQUEST_ID = "render"


def bound_rendering(max_model_len: int) -> None:
    """From now on no template of this process makes more than ``prompt_chars_max``. Call before the first request.

    ``concat`` is how an environment of jinja2 joins the pieces of a template or macro (its ``NativeEnvironment``
    replaces it, too). Transformers makes the environments itself, so it is set for their class.
    """
    bounded = partial(joined, chars_max=prompt_chars_max(max_model_len))
    ImmutableSandboxedEnvironment.concat = staticmethod(bounded)


class VllmRenderer:
    """See ``engines.port.EngineRenderer``. Media are read and processed in vLLM's threads, like those of legs."""

    def __init__(self, app: AsgiApp, cache_config: Any) -> None:
        self._app = app
        self._cache_config = cache_config

    async def render(self, path: str, body: bytes, *, cache_salt: str, media_salt: str) -> EnginePrompt:
        """See the port. The server is called as for a leg, up to the point where it would ask its engine."""
        request: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        record = LegRecord(
            kind=LegKind.AGGREGATED,
            request_id=REQUEST_ID,
            trace_headers={},
            path=path,
            cache_salt=cache_salt,
            media_salt=media_salt,
            rendered=request,
        )
        context = copy_context()
        context.run(CURRENT_LEG.set, record)
        answering = asyncio.create_task(ask_app(self._app, path, body), name="render-prompt", context=context)
        try:
            await asyncio.wait([request, answering], return_when=asyncio.FIRST_COMPLETED)
            if not request.done():
                status, answer = answering.result()
                return EnginePrompt(refusal=f"{status}: {answer[:REFUSAL_CHARS_MAX].decode(errors='replace')}")
            return await asyncio.to_thread(prompt_of, request.result(), self._cache_config)
        finally:
            request.cancel()
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)


def prompt_of(request: Any, cache_config: Any) -> EnginePrompt:
    """``request``: an EngineCoreRequest."""
    if cache_config.prefix_caching_hash_algo not in FIRST_HASH_KNOWN:
        return EnginePrompt(refusal=f"hashes of {cache_config.prefix_caching_hash_algo} depend on a random first hash")
    if request.prompt_token_ids is None:
        return EnginePrompt(refusal="the prompt is not made of tokens")
    positions = [feature.mm_position for feature in request.mm_features or ()]
    return EnginePrompt(
        tokens=len(request.prompt_token_ids),
        hashes=hashes_of(request, cache_config),
        media_end=max((one.offset + one.length for one in positions), default=0),
    )
