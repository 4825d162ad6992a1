"""A prompt's KV on its way from one simulated engine to another, in the body's ``kv_transfer_params``."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from shared.contracts.kv_events import BLOCK_HASH_BYTES

_BLOCK = struct.Struct(f">{BLOCK_HASH_BYTES}sq")


class Handoff(msgspec.Struct, kw_only=True, frozen=True):
    """``kv_transfer_params`` as JSON, with vLLM's words where it has some."""

    do_remote_decode: bool = False
    """In a prefill leg: keep the KV for another engine."""
    do_remote_prefill: bool = False
    """In a decode leg: the KV is described here."""
    remote_engine_id: str = ""
    remote_num_tokens: int = 0
    """Prompt tokens that the blocks stand for."""
    block_size: int = 0
    size_bytes: int = 0
    """What moving all the blocks would cost."""
    blocks: bytes = b""
    """Hash and content of each full block, see ``pack_blocks``."""


def pack_blocks(hashes: Sequence[bytes], contents: Sequence[int]) -> bytes:
    """One record per block: the first 8 bytes of its hash, its content."""
    return b"".join(map(_BLOCK.pack, hashes, contents))


def offer(engine_id: str, block_size: int, bytes_per_token: int, blocks: bytes) -> Handoff:
    """What a prefill leg answers."""
    tokens = len(blocks) // _BLOCK.size * block_size
    return Handoff(
        do_remote_prefill=True,
        remote_engine_id=engine_id,
        remote_num_tokens=tokens,
        block_size=block_size,
        size_bytes=tokens * bytes_per_token,
        blocks=blocks,
    )


def matching_contents(handoff: Handoff, hashes: Sequence[bytes], block_size: int) -> list[int]:
    """The offered contents for the longest prefix of ``hashes``, the reader's own chain, that the offer matches."""
    if handoff.block_size != block_size:
        return []
    whole = len(handoff.blocks) // _BLOCK.size * _BLOCK.size
    contents: list[int] = []
    for (offered, content), wanted in zip(_BLOCK.iter_unpack(handoff.blocks[:whole]), hashes, strict=False):
        if offered != wanted[:BLOCK_HASH_BYTES]:
            break
        contents.append(content)
    return contents


def unpack_handoff(raw: bytes) -> Handoff | None:
    """From a request's JSON; None when it is not readable as one: then everything is computed here."""
    try:
        return msgspec.json.decode(raw, type=Handoff | None)
    except msgspec.DecodeError:
        return None
