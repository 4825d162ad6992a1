"""What routers ask an engine about prompts: its tokenizer, its tokens of probes, and prompts as it renders them."""

from __future__ import annotations

import asyncio
import logging

from services.worker.engines.port import Engine, EnginePrompt, EngineRenderer, EngineTokens
from services.worker.legs.body import HANDOFF_PATHS, goes_on_alone, own_body, read_fields, salted
from services.worker.legs.guard import refusal, refusal_of
from shared.bus.port import Bus, Envelope
from shared.contracts.channels import RENDER, TOKENIZER, TOKENS
from shared.contracts.control import AskTokenizer, AskTokens, ProbePrompt, PromptTokens, TokenizerAsset, TokensFound
from shared.contracts.engine_paths import RESPONSES
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.inference import (
    RENDER_S_MAX,
    RENDERED_BODY_BYTES_MAX,
    LegKind,
    PrefetchKv,
    RenderedPrompt,
    RenderPrompt,
)
from shared.contracts.kv_events import block_hash64, pack_hashes
from shared.third_party import CONTAINED

log = logging.getLogger("baton.worker")

PROMPTS_MAX = 16
"""Prompts in one request; a request with more is refused."""
BODY_BYTES_MAX = 256 * 1024
"""Maximum size of one prompt: probes must not hold up the engine's server."""
TOKENS_S_MAX = 5.0
"""Time limit for all prompts of one request, without the wait for earlier ones."""


AT_ONCE_MAX = 2
"""Prompts rendered at a time. The engine's server processes the media of legs in the same thread, one by one."""
WAITING_MAX = 8
"""Further prompts that wait; more are refused, and their requests placed by load."""
REFUSAL_CHARS_MAX = 500


class TokenizerHandler:
    """Reads the tokenizer once, at the first ask. Tokenizes one ask at a time."""

    def __init__(self, engine: Engine, worker_id: WorkerId, epoch: Epoch, bus: Bus) -> None:
        self._engine = engine
        self._worker_id = worker_id
        self._epoch = epoch
        self._bus = bus
        self._asset: TokenizerAsset | None = None
        self._reading = asyncio.Lock()
        self._tokenizing = asyncio.Lock()

    async def open(self) -> None:
        """Answer asks from now on; the engine runs."""
        await self._bus.answer(TOKENIZER, self.answer, worker_id=self._worker_id)
        await self._bus.answer(TOKENS, self.tokens, worker_id=self._worker_id)

    async def answer(self, _ask: AskTokenizer, _envelope: Envelope) -> TokenizerAsset:
        async with self._reading:
            if self._asset is None:
                files = await asyncio.to_thread(self._engine.tokenizer_files)
                self._asset = TokenizerAsset(
                    worker_id=self._worker_id,
                    epoch=self._epoch,
                    tokenizer_json=files.tokenizer_json,
                    chat_template=files.chat_template,
                    special_tokens=files.special_tokens,
                    adds_special_tokens=files.adds_special_tokens,
                    note=files.note,
                )
            return self._asset

    async def tokens(self, ask: AskTokens, _envelope: Envelope) -> TokensFound:
        async with self._tokenizing:
            until = asyncio.get_running_loop().time() + TOKENS_S_MAX
            found = [await self._tokens_of(prompt, until) for prompt in ask.prompts[:PROMPTS_MAX]]
        found += [_refused(f"more than {PROMPTS_MAX} prompts")] * (len(ask.prompts) - len(found))
        return TokensFound(worker_id=self._worker_id, epoch=self._epoch, prompts=found)

    async def _tokens_of(self, prompt: ProbePrompt, until: float) -> PromptTokens:
        if len(prompt.body) > BODY_BYTES_MAX:
            return _refused(f"the body is larger than {BODY_BYTES_MAX} bytes")
        if refused := refusal_of(prompt.body, prompt.path):
            return _refused(refused.decode())
        try:
            async with asyncio.timeout_at(until):
                with CONTAINED:
                    tokenized: EngineTokens = await self._engine.tokens(prompt.path, prompt.body)
        except TimeoutError:
            return _refused(f"not done within {TOKENS_S_MAX:g} s")
        except Exception as error:  # The engine's server failed on a prompt that belongs to no client.
            log.exception("a probe of the tokenizer failed")
            return _refused(f"{type(error).__name__}: {error}")
        return PromptTokens(tokens=tokenized.tokens, hashes=pack_hashes(tokenized.hashes), refusal=tokenized.refusal)


def _refused(why: str) -> PromptTokens:
    return PromptTokens(tokens=[], hashes=b"", refusal=why)


class RenderHandler:
    """``open`` does nothing for an engine without a renderer. ``s_max``: for one prompt, its wait included."""

    def __init__(
        self, renderer: EngineRenderer | None, worker_id: WorkerId, epoch: Epoch, bus: Bus, s_max: float = RENDER_S_MAX
    ) -> None:
        self._renderer = renderer
        self._worker_id = worker_id
        self._epoch = epoch
        self._bus = bus
        self._s_max = s_max
        self._slots = asyncio.Semaphore(AT_ONCE_MAX)
        self._count = 0

    @property
    def renders(self) -> bool:
        return self._renderer is not None

    async def open(self) -> None:
        if self._renderer is not None:
            await self._bus.answer(RENDER, self.render, worker_id=self._worker_id)

    async def render(self, ask: RenderPrompt, _envelope: Envelope) -> RenderedPrompt:
        prompt = await self.prompt_of(ask)
        return RenderedPrompt(
            worker_id=self._worker_id,
            epoch=self._epoch,
            tokens=prompt.tokens,
            hashes=pack_hashes(map(block_hash64, prompt.hashes)),
            media_end=prompt.media_end,
            refusal=prompt.refusal,
        )

    async def prompt_of(self, ask: RenderPrompt | PrefetchKv) -> EnginePrompt:
        """The prompt with its full hashes, or why there is none. Never raises."""
        if len(ask.body) > RENDERED_BODY_BYTES_MAX:
            return _not_rendered(f"the body is larger than {RENDERED_BODY_BYTES_MAX} bytes")
        if self._count >= AT_ONCE_MAX + WAITING_MAX:
            return _not_rendered("too many prompts wait to be rendered")
        self._count += 1
        try:
            async with asyncio.timeout(self._s_max), self._slots:
                with CONTAINED:
                    return await self._prompt(ask)
        except TimeoutError:
            return _not_rendered(f"not done within {self._s_max:g} s")
        except Exception as error:  # The engine's server failed on this prompt alone.
            log.info("a prompt cannot be rendered for a router: %s: %s", type(error).__name__, error)
            return _not_rendered(f"{type(error).__name__}: {error}")
        finally:
            self._count -= 1

    async def _prompt(self, ask: RenderPrompt | PrefetchKv) -> EnginePrompt:
        """Under the same checks, and with the same changes of the body, as a leg."""
        if refused := await refusal(ask.body, ask.path):
            return EnginePrompt(refusal=refused.decode())
        body = own_body(ask.path, salted(ask.body, ask.cache_salt), LegKind.AGGREGATED, moves_kv=False).body
        if body is None or self._renderer is None or ask.path not in HANDOFF_PATHS:
            return EnginePrompt(refusal="nothing to render")
        if ask.path == RESPONSES and goes_on_alone(read_fields(body) or {}):
            return EnginePrompt(refusal="the server does more than to ask its engine once")
        media_salt = ask.media_salt or ask.cache_salt
        return await self._renderer.render(ask.path, body, cache_salt=ask.cache_salt, media_salt=media_salt)


def _not_rendered(why: str) -> EnginePrompt:
    return EnginePrompt(refusal=why[:REFUSAL_CHARS_MAX])
