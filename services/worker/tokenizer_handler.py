"""Gives routers the engine's tokenizer, and the engine's own tokens of probe prompts."""

from __future__ import annotations

import asyncio
import logging

from services.worker.engines.port import Engine, EngineTokens
from services.worker.legs.guard import refusal_of
from shared.bus.port import Bus, Envelope
from shared.contracts.channels import TOKENIZER, TOKENS
from shared.contracts.control import AskTokenizer, AskTokens, ProbePrompt, PromptTokens, TokenizerAsset, TokensFound
from shared.contracts.ids import Epoch, WorkerId
from shared.contracts.kv_events import pack_hashes

log = logging.getLogger("baton.worker")

PROMPTS_MAX = 16
"""In one ask; further ones are refused."""
BODY_BYTES_MAX = 256 * 1024
"""Of one prompt: probes must not hold up the engine's server."""
TOKENS_S_MAX = 5.0
"""For all prompts of one ask, without the wait for earlier asks."""


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
        """Handler of TOKENIZER."""
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
        """Handler of TOKENS."""
        async with self._tokenizing:
            until = asyncio.get_running_loop().time() + TOKENS_S_MAX
            found = [await self._tokens_of(prompt, until) for prompt in ask.prompts[:PROMPTS_MAX]]
        found += [_refused(f"more than {PROMPTS_MAX} prompts")] * (len(ask.prompts) - len(found))
        return TokensFound(worker_id=self._worker_id, epoch=self._epoch, prompts=found)

    async def _tokens_of(self, prompt: ProbePrompt, until: float) -> PromptTokens:
        if len(prompt.body) > BODY_BYTES_MAX:
            return _refused(f"the body is larger than {BODY_BYTES_MAX} bytes")
        if refused := refusal_of(prompt.body):
            return _refused(refused.decode())
        try:
            async with asyncio.timeout_at(until):
                tokenized: EngineTokens = await self._engine.tokens(prompt.path, prompt.body)
        except TimeoutError:
            return _refused(f"not done within {TOKENS_S_MAX:g} s")
        except Exception as error:  # The engine's server failed on a prompt that belongs to no client.
            log.exception("a probe of the tokenizer failed")
            return _refused(f"{type(error).__name__}: {error}")
        return PromptTokens(tokens=tokenized.tokens, hashes=pack_hashes(tokenized.hashes), refusal=tokenized.refusal)


def _refused(why: str) -> PromptTokens:
    return PromptTokens(tokens=[], hashes=b"", refusal=why)
