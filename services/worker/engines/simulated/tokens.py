"""A request's tokens and blocks as the simulated engine sees them, without serving it."""

from __future__ import annotations

from services.worker.engines.port import EngineTokens, LegRecord
from services.worker.engines.simulated.core.block_hashes import BlockHasher
from services.worker.engines.simulated.jobs import JobMaker
from services.worker.engines.simulated.requests import ApiError
from services.worker.engines.simulated.tokenizer import SimulatedTokenizer
from shared.contracts.inference import LegKind
from shared.contracts.kv_events import block_hash64

CHAT = "/v1/chat/completions"


async def engine_tokens(
    jobs: JobMaker, tokenizer: SimulatedTokenizer, block_size: int, path: str, body: bytes
) -> EngineTokens:
    """By the same parts that make a request's sequence of a body and name its blocks."""
    record = LegRecord(kind=LegKind.AGGREGATED, request_id="", trace_headers={})
    try:
        job = await (jobs.chat if path == CHAT else jobs.completion)(body, record)
    except ApiError as error:
        return EngineTokens(refusal=str(error))
    tokens = job.choices[0].prompt
    hashes: list[bytes] = []
    BlockHasher(block_size, tokenizer.model.size).extend(hashes, tokens, job.wish.cache_salt)
    return EngineTokens(tokens=tokens, hashes=[block_hash64(full) for full in hashes])
