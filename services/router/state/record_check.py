"""What a router refuses of a worker's record: a worker's own key lets it write anything there."""

from __future__ import annotations

from typing import Final

from shared.contracts.workers import ADAPTERS_MAX, WITHOUT_ENGINE, HashScheme, WorkerRecord

COUNT_MAX: Final = 1 << 40
"""Greatest number of tokens, blocks, requests or bytes in a record."""
BLOCK_TOKENS_MAX: Final = 1 << 20
ITEMS_MAX: Final = 256
"""Most names, paths or speeds in a record."""
NAME_CHARS_MAX: Final = 512
TEXT_CHARS_MAX: Final = 4096


def record_fault(record: WorkerRecord) -> str:
    """Why the record cannot be a worker's; empty where it can."""
    of, hashing = record.fingerprint, record.hashing
    if not record.models and record.phase not in WITHOUT_ENGINE:
        return "it names no model"
    counts = {
        "epoch": record.epoch,
        "max_model_len": record.max_model_len,
        "kv_tokens": record.kv_tokens,
        "kv_token_bytes": record.kv_token_bytes,
        "kv_boundary_bytes": record.kv_boundary_bytes,
        "legs_max": record.legs_max,
        "adapters_at_once_max": record.adapters_at_once_max,
        "pid": record.pid,
        "cache_hit_threshold": record.cache_hit_threshold,
    }
    most_of = {"epoch": COUNT_MAX << 10, "cache_hit_threshold": 1}
    for name, count in counts.items():
        if not 0 <= count <= most_of.get(name, COUNT_MAX):
            return f"its {name} is {count}"
    for name, count, most in (
        ("step_tokens_max", record.step_tokens_max, COUNT_MAX),
        ("ranks", record.ranks, ITEMS_MAX),
        ("block size", hashing.block_size, BLOCK_TOKENS_MAX),
        ("fingerprint's block size", of.block_size, BLOCK_TOKENS_MAX),
    ):
        if not 1 <= count <= most:
            return f"its {name} is {count}"
    lengths = {"models": len(record.models), "paths": len(record.paths), "kv_reads": len(record.kv_reads)}
    lengths["listens"] = len(record.listens or [])
    for name, length in lengths.items():
        if length > ITEMS_MAX:
            return f"it has {length} {name}"
    if len(record.adapters) > ADAPTERS_MAX:
        return f"it has {len(record.adapters)} adapters"
    names = [*record.models, *record.paths, *(name for one in record.adapters for name in (one.name, one.digest))]
    if not all(0 < len(name) <= NAME_CHARS_MAX for name in names):
        return f"a name in it is empty, or longer than {NAME_CHARS_MAX} characters"
    texts = [record.engine, record.host, record.note, hashing.algorithm, hashing.seed, of.key()]
    texts += [one.hashed_as for one in record.adapters] + (record.listens or [])
    texts += [one.way for one in record.kv_reads]
    if any(len(text) > TEXT_CHARS_MAX for text in texts):
        return f"a text in it is longer than {TEXT_CHARS_MAX} characters"
    return _boundaries_fault(hashing)


def _boundaries_fault(hashing: HashScheme) -> str:
    size = hashing.block_size
    names = {
        "index block": hashing.index_block,
        "alignment": hashing.alignment,
        "window": hashing.window_block,
        "full attention beyond a boundary": hashing.full_beyond,
        "window beyond a boundary": hashing.window_beyond,
        "end of a cached prefix that is not used": hashing.dropped,
    }
    for name, tokens in names.items():
        if not 0 <= tokens <= BLOCK_TOKENS_MAX or tokens % size:
            return f"its {name} is {tokens}, with hashes of {size} tokens"
    window = hashing.window_stride * size
    if hashing.align % window or hashing.window_beyond % window or not 1 <= hashing.window_blocks <= BLOCK_TOKENS_MAX:
        return f"its window is of {hashing.window_blocks} blocks of {hashing.window_block}, at {hashing.align} tokens"
    if not hashing.boundaries and hashing.index_block > size:
        return f"its index block is {hashing.index_block}, with hashes of {size} tokens and no boundaries"
    return ""
