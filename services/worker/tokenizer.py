"""The engine's tokenizer, for any router that asks."""

from __future__ import annotations

import asyncio

from services.worker.engines.port import Engine
from shared.bus.port import Envelope
from shared.contracts.control import AskTokenizer, TokenizerAsset
from shared.contracts.ids import Epoch, WorkerId


class TokenizerDesk:
    """Reads the tokenizer once, at the first ask."""

    def __init__(self, engine: Engine, worker_id: WorkerId, epoch: Epoch) -> None:
        self._engine = engine
        self._worker_id = worker_id
        self._epoch = epoch
        self._asset: TokenizerAsset | None = None
        self._reading = asyncio.Lock()

    async def answer(self, _ask: AskTokenizer, _envelope: Envelope) -> TokenizerAsset:
        """Answerer of TOKENIZER."""
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
